"""Tab completion in bash, asked as bash asks: by the function that the command's own script defines."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from train import mtp
from train.runtime.presets import CONF, preset_names
from train.runtime.tab_completion import INSTALL, UNINSTALL, script_for


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["-sc", "install=bash"], INSTALL),
        (["--shell_completion", "install=bash"], INSTALL),
        (["-sc", "uninstall=bash"], UNINSTALL),
        (["-sc", "query=bash"], None),
        (["-sc", "install=fish"], None),
        (["install=bash"], None),
        (["+model=tiny"], None),
        ([], None),
    ],
)
def test_which_words_ask_for_it(words: list[str], script: str | None) -> None:
    assert script_for(words) == script


def test_the_command_prints_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "-sc", "install=bash"])
    mtp.main()
    assert capsys.readouterr().out == INSTALL + "\n"


def ask(python: Path, *lines: str) -> list[list[str]]:
    """What bash would offer for each of these lines, with the cursor at its end. python: the folder it is found in."""
    call = "COMP_POINT=${#COMP_LINE}; _foretoken_complete; echo ${COMPREPLY[*]}"
    script = [
        "COMP_WORDBREAKS=' =:'",  # as an interactive bash has them
        INSTALL,
        'echo "<$COMP_WORDBREAKS>"',
        *(f"COMP_LINE={line!r}; {call}" for line in lines),
        "complete -p python python3",
        UNINSTALL,
        "! complete -p python 2>/dev/null",
    ]
    path = os.pathsep.join([str(python), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(CONF.parent)}
    words = ["bash", "-c", "\n".join(script)]
    done = subprocess.run(words, env=environment, cwd=CONF.parent, capture_output=True, text=True, check=True)
    left, *replies, one, other = done.stdout.splitlines()
    assert left == "< :>"  # heads=medusa is one word
    assert "_foretoken_complete python" in one
    assert "_foretoken_complete python3" in other
    return [reply.split() for reply in replies]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_other_lines_are_left_to_bash(tmp_path: Path) -> None:
    """No command of this project, or not yet a word to complete: nothing is started. Ours is asked what fits."""
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/sh\necho "$COMP_LINE / $*" >>"$0.asked"\necho a=1 a=2 b=3\n')
    stand_in.chmod(0o755)
    others = (
        "python -m http.server 80",
        "python x.py a",
        "python -m train.mtp",
        "python -c 1",
        "python -m train.x/y a",
    )
    assert ask(tmp_path, *others) == [[]] * len(others)
    assert not (tmp_path / "python.asked").exists()
    assert ask(tmp_path, "python -m train.mtp x=1 a=", "python -m eval.bench ") == [
        ["a=1", "a=2"],
        ["a=1", "a=2", "b=3"],
    ]
    assert (tmp_path / "python.asked").read_text().splitlines() == [
        "python train.mtp x=1 a= / -m train.mtp -sc query=bash",
        "python eval.bench  / -m eval.bench -sc query=bash",
    ]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_completion() -> None:
    """Groups, files of a group behind `=`, and options of any depth."""
    models, heads, options = ask(
        Path(sys.executable).parent,
        "python -m train.mtp +model=",
        "python -m train.mtp +model=tiny heads=",
        "python -m train.mtp answers.te",
    )
    assert models == [f"+model={name}" for name in preset_names("model")]
    assert heads == [f"heads={name}" for name in preset_names("heads")]
    assert options == ["answers.temperature="]
