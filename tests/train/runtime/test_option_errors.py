"""Mistakes on a command line, over all commands: one line that says what to write instead, and code 2.

The quoted form that a line offers is given to Hydra, and to a real shell, and comes back as what was meant.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from scripts import export, generate
from train.mtp import MTPConfig
from train.runtime.option_errors import OptionError, option_error, quoted

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = ("train.mtp", "train.draft", "train.sft", "train.regenerate", "rl.diversed", "eval.bench", "eval.pareto",
            "eval.verification_cost")  # fmt: skip
# Options of every command; the first words of a case are followed by what its line must say.
MISTAKES: dict[str, tuple[list[str], str]] = {
    "no model": ([], r"no target model is chosen; add \+model=NAME with NAME one of gemma"),
    "a plus forgotten": (["model=tiny"], r"model is chosen with a plus: \+model=NAME"),
    "an unknown model": (["+model=gpt9"], r"\+model=gpt9: there is no conf/model/gpt9\.yaml; choose one of gemma"),
    "no name of a model": (["+model="], r"\+model=: there is no conf/model/\.yaml; choose one of gemma"),
    "letters": (["+model=tiny", "work_dir=결과"], r"""cannot be read: .*quoted for Hydra: "work_dir='결과'"$"""),
    "a blank": (["+model=tiny", "work_dir=my", "runs", "here"], r"""'runs' is.* both: "work_dir='my runs here'"$"""),
    "a list and blanks": (["+model=tiny", "model.max_memory=[a,", "b]"], r"""shell: "model\.max_memory=\[a, b\]"$"""),
    "a comma": (["+model=tiny", "work_dir=a,b"], r"""several values; .*quote it: "work_dir='a,b'", for a list"""),
    "a sign": (["+model=tiny", "work_dir=a=b"], r"""quoted for Hydra: "work_dir='a=b'"$"""),
    "a tilde": (["+model=tiny", "work_dir=~/runs"], r"""quoted for Hydra: "work_dir='~/runs'"$"""),
    "brackets": (["+model=tiny", "work_dir=run(1)x"], r"""quoted for Hydra: "work_dir='run\(1\)x'"$"""),
    "one quote": (["+model=tiny", "work_dir='a"], r"quoted for Hydra: '"),
    "two lines": (["+model=tiny", "work_dir=a\nb:)"], r"'work_dir=a b:\)' has a line break"),
    "no interpolation": (["+model=tiny", "work_dir=${x"], r"quoted for Hydra: '"),
    "an unknown one": (["+model=tiny", "model.label=${nowhere}"], r"bad option model\.label: .*'nowhere' not found"),
    "no such variable": (["+model=tiny", "model.label=${oc.env:NOWHERE_X}"], r"bad option model\.label: .*NOWHERE_X"),
    "a word": (["+model=tiny", "now"], r"'now' is no option: options are written NAME=VALUE"),
    "no name": (["+model=tiny", "=x"], r"there is no option ''|'=x' is no option"),
    "an unknown key": (["+model=tiny", "modle=x"], r"there is no option 'modle'; did you mean model"),
    "an unknown inner key": (["+model=tiny", "model.dytpe=x"], r"no option 'model\.dytpe'; did you mean model\.d"),
    "a stray plus": (["+model=tiny", "+nope=1"], r"bad option nope: .*'nope'"),
    "a stray inner plus": (["+model=tiny", "+model.nope=1"], r"bad option model\.nope: .*'nope'"),
    "a wrong type": (["+model=tiny", "model.seed=much"], r"bad option: .*model\.seed=much; .*'much'.* to Integer"),
    "a list for one": (["+model=tiny", "model.seed=[1,2]"], r"bad option"),
    "one for a list": (["+model=tiny", "model.max_memory=3"], r"bad option"),
    "twice": (["+model=tiny", "+model=llama"], r"bad option: .*model"),
    "what is not there": (["+model=tiny", "~nope"], r"bad option: .*'nope' does not exist"),
    "no such config": (["--config-name", "zork"], r"Cannot find primary config 'zork'"),
    "no such folder": (["--config-dir", "/zork"], r"bad option: .*'/zork' not found"),
    "a flag alone": (["+model=tiny", "--resolve"], r"--resolve flag can only be used"),
    "one of several": (["+model=tiny,gpt9", "--multirun"], r"\+model=gpt9: there is no conf/model/gpt9\.yaml"),
    "Hydra's own": (["+model=tiny", "hydra.nope=1"], r"there is no option 'hydra\.nope'"),
}  # fmt: skip


def run_in_process(command: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """The code that a command ends with."""
    module = importlib.import_module(command)
    monkeypatch.setattr(sys, "argv", [command, *words])
    if hasattr(module, "load_target"):
        monkeypatch.setattr(module, "load_target", None)
    try:
        module.main()
    except SystemExit as stop:
        return stop.code
    finally:
        GlobalHydra.instance().clear()
    return 0


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hydra writes where it stands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    yield
    assert "HYDRA_FULL_ERROR" not in os.environ
    assert "FORETOKEN_FULL_ERROR" not in os.environ


@pytest.mark.parametrize("case", MISTAKES)
@pytest.mark.parametrize("command", COMMANDS)
def test_mistakes(command: str, case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In every command the same."""
    words, message = MISTAKES[case]
    assert run_in_process(command, words, monkeypatch) == 2
    printed, told = capsys.readouterr()
    lines = told.splitlines()
    assert len(lines) == 1, told
    assert re.search(f"^error: .*(?:{message})", lines[0]), told
    assert "Traceback" not in printed + told


@pytest.mark.parametrize("case", ["an unknown key", "letters", "a stray plus"])
def test_the_traceback_is_there_for_who_asks(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """HYDRA_FULL_ERROR=1, as before."""
    with monkeypatch.context() as patched:
        patched.setenv("HYDRA_FULL_ERROR", "1")
        with pytest.raises(Exception, match=r"LexerNoViableAlt|nope|modle"):
            run_in_process("train.mtp", MISTAKES[case][0], patched)


def test_a_command_sees_what_its_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it starts does: Hydra's setting is for Hydra alone. What a command raises is not an option's mistake."""
    seen = []

    def fail(*arguments: object) -> None:
        seen.append(os.environ.get("HYDRA_FULL_ERROR"))
        raise RuntimeError("of its own")

    monkeypatch.setattr("train.regenerate.load_prompts", fail)
    monkeypatch.setattr("train.regenerate.load_target", fail)
    monkeypatch.setattr(sys, "argv", ["x", "+model=tiny"])
    module = importlib.import_module("train.regenerate")
    with pytest.raises(RuntimeError, match="of its own"):
        module.main()
    assert seen == [""]


# The quoted form


def parse(word: str) -> Override:
    return OverridesParser.create().parse_override(word)


PRINTABLE = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=20)


@settings(deadline=None, max_examples=200)
@given(value=PRINTABLE | st.text(st.sampled_from("ab '\"\\$,={}[]()~#:!`한 \t*&|;<>?"), min_size=1, max_size=12))
@example(value="C:\\runs\\")
@example(value="it's \\' \\")
@example(value="\\\\${x} ${y")
@example(value="null")
@example(value="1_000")
def test_quoted_is_what_was_meant(value: str) -> None:
    """Through a shell's words, Hydra's grammar and OmegaConf's interpolations."""
    form = quoted(f"data.path={value}")
    assert form is not None
    (word,) = shlex.split(form)
    override = parse(word)
    assert override.key_or_group == "data.path"
    found = OmegaConf.create({"path": override.value()}).path
    assert found == value
    assert isinstance(found, str)


VALUES = [
    "my file",
    "결과 하나",
    "a,b=c",
    "it's",
    '"x"',
    "$HOME",
    "`x`",
    "!x",
    "\\",
    "a\\'b",
    "~/x",
    "*",
    "${x",
    "a\tb",
]


def test_quoted_through_a_shell() -> None:
    """bash, as it is pasted; `history -s` shows that `!` is left alone, too."""
    forms = " ".join(str(quoted(f"work_dir={value}")) for value in VALUES)
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {forms}"], capture_output=True, check=True)
    words = done.stdout.decode().split("\0")[:-1]
    assert [OmegaConf.create({"x": parse(word).value()}).x for word in words] == VALUES


@pytest.mark.parametrize("word", ["=x", "a b=x", "한=x", "-x=y", "'a'=b"])
def test_no_form_for_what_is_no_option(word: str) -> None:
    assert quoted(word) is None
    assert quoted("data.path=a\nb") is None


def test_the_line_can_be_pasted(tmp_path: Path) -> None:
    """A folder that has everything, as a user types it; what is offered then works."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = [sys.executable, "-m", "train.regenerate", "+model=tiny"]
    typed = ["work_dir=내", "결과", "(1),", "a=b"]
    failed = subprocess.run([*start, *typed], capture_output=True, text=True, check=False, env=environment)
    assert failed.returncode == 2
    (line,) = failed.stderr.splitlines()
    offered = re.search(r"(\"work_dir=.*\"|'work_dir=.*')$", line)
    assert offered, line
    command = f"{shlex.join(start)} {offered[1]} --cfg job"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, env=environment)
    assert OmegaConf.create(done.stdout).work_dir == "내 결과 (1),"


# Words of other kinds


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("two\nlines"), "two lines"),
        (OSError(13, "Permission denied", "/x"), "[Errno 13] Permission denied: '/x'"),
        (ConfigCompositionException("a\nb\nSee https://x\nc"), "bad option: a b; `--cfg job`"),
    ],
)
def test_other_errors_of_hydras_frame(error: Exception, message: str) -> None:
    told = option_error(error, [], MTPConfig)
    assert isinstance(told, OptionError)
    assert str(told).startswith(message)


@pytest.mark.parametrize("option", ["--verifier", "--length", "--drafter"])
@pytest.mark.parametrize("word", ["foo", "=1", "x: 3", "x=[1", "x={", "x=${y", "x=${y}", 'x="', "x.y=1", "nope=1"])
def test_words_of_scripts_generate(option: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = {"--verifier": "static", "--length": "adaptive", "--drafter": "ngram"}[option]
    words = ["--target", "tiny", "--prompt", "x", option, name, word]
    assert generate.main(words if option == "--drafter" else [*words, "--drafter", "ngram"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {option}")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("eval.theory.__main__", ["--seed", "x"]),
        ("eval.theory.__main__", ["--seed", "9" * 30]),
        ("eval.theory.__main__", ["--models", "1"]),
        ("eval.theory.__main__", ["work_dir=x"]),
        ("scripts.generate", ["--zork"]),
        ("scripts.export", ["x", "y", "--to", "zork"]),
    ],
)
def test_words_of_argparse(module: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Its usage, and one line."""
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(module).main(words)
    assert stop.value.code == 2
    assert re.match(r"python -m \S+: error: ", capsys.readouterr().err.splitlines()[-1])


def test_scripts_document_takes_no_words() -> None:
    command = [sys.executable, "-m", "scripts.document", "docs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "unrecognized arguments: docs" in done.stderr


def test_a_checkpoint_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "내 결과, a=b"
    assert export.main([str(folder), "out", "--to", "vllm"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(folder) in line
