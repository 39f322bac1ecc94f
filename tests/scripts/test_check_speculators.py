"""The parts of the check against the speculators package that need it not: our side, the comparison, its errors."""

import ast
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoint import save_heads
from models.export.eagle3_served import read_speculators
from models.heads import HeadOptions, build_head
from models.target.model import Target, TargetOptions, load_target
from models.target.tiny import make_tiny_target
from scripts.peers import check_speculators
from scripts.peers.check_speculators import ASKED, EXPORTED, OURS, TEXT_TOKENS, THEIRS, main

SCRIPT = Path(check_speculators.__file__)
STEPS = 2


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with our side done: a soft-capped target, a head over a part of its vocabulary."""
    folder = tmp_path_factory.mktemp("work")
    target = make_tiny_target(family="gemma2")
    target.model.save_pretrained(folder / "model")
    target.tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    head = build_head(target, HeadOptions("eagle3", STEPS, own_output_head=True), torch.arange(3, 120, 2))
    save_heads(folder / "heads", head)
    words = ["ours", str(folder), "--checkpoint", str(folder / "heads"), "--target", str(folder / "model")]
    assert main(words) == 0
    return folder


def load(folder: Path) -> Target:
    return load_target(TargetOptions(str(folder / "model"), dtype="float32"))


def test_ours_asks_for_what_it_answers(work: Path) -> None:
    """The reader's forward, which is not our head's, gives the same logits for the streams and tokens written down."""
    asked, ours = load_file(work / ASKED), load_file(work / OURS)["logits"]
    assert ours.shape == (STEPS, 2, TEXT_TOKENS, 59)
    served = read_speculators(work / EXPORTED).on(load(work))
    for row, place in ((0, 5), (1, 20), (1, TEXT_TOKENS - 3)):
        text = slice(place + 1)
        drafted = asked["next_ids"][row, place + 1 : place + STEPS]
        logits = served.logits(asked["streams"][row, text], asked["next_ids"][row, text], drafted)
        torch.testing.assert_close(logits[:, 3:120:2], ours[:, row, place], atol=1e-4, rtol=0)


def test_the_verifier_is_a_folder(work: Path) -> None:
    """The package reads its config and weights, and the hub is out of reach."""
    config = json.loads((work / EXPORTED / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str((work / "model").resolve())


def compare(work: Path, folder: Path, theirs: torch.Tensor) -> int:
    save_file({"logits": load_file(work / OURS)["logits"]}, folder / OURS)
    save_file({"logits": theirs}, folder / THEIRS)
    (folder / "theirs.json").write_text(json.dumps({"class": "Eagle3DraftModel"}))
    return main(["compare", str(folder)])


def test_agreement(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within rounding, wherever a token follows; behind the text's end anything goes."""
    ours = load_file(work / OURS)["logits"]
    close = ours + 5e-6 * ours.abs().max()
    close[1, :, TEXT_TOKENS - 2 :] = 7.0
    assert compare(work, tmp_path, close) == 0
    assert "step 2: relative gap 5." in capsys.readouterr().out
    for wrong in (ours * 1.001, ours.flip(0), torch.full_like(ours, torch.nan)):
        assert compare(work, tmp_path, wrong) == 1
        assert "error: the package computes something else" in capsys.readouterr().err
    assert compare(work, tmp_path, ours[:1]) == 1
    assert "logits of ours are (2, 2, 48, 59), of theirs (1, 2, 48, 59)" in capsys.readouterr().err


def test_ours_needs_an_eagle3_checkpoint(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ours", str(tmp_path)])
    assert "ours needs --checkpoint" in capsys.readouterr().err
    save_heads(tmp_path / "heads", build_head(load(work), HeadOptions("mtp", 2)))
    with pytest.raises(ValueError, match=r"holds mtp heads; give the folder of `train\.mtp heads=eagle3`"):
        main(["ours", str(tmp_path), "--checkpoint", str(tmp_path / "heads"), "--target", str(work / "model")])


def test_the_packages_side_needs_nothing_of_ours() -> None:
    """Its environment has not this project."""
    tree = ast.parse(SCRIPT.read_text())
    named = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in named} <= sys.stdlib_module_names
    (theirs,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "give_theirs")
    found = {node.module for node in ast.walk(theirs) if isinstance(node, ast.ImportFrom)}
    assert found == {"speculators", "safetensors.torch"}
