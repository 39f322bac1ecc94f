"""Heads of any kind are found in their work_dir by every command that names none."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.bench import BenchConfig, checkpoint_folder
from eval.pareto import ParetoConfig
from models.checkpoint import save_heads
from models.drafters.options import DrafterOptions
from models.heads import HEAD_KINDS, HeadOptions, build_head
from models.target.model import TargetOptions
from models.target.tiny import make_tiny_target
from rl.diversed import DiversedConfig, heads_folder
from train.heads.folder import find_heads

MODEL = TargetOptions(name="tiny", source="random")
COMMANDS: dict[str, Callable[[str, str], Path | None]] = {
    "eval.bench": lambda work_dir, name: checkpoint_folder(BenchConfig(MODEL, work_dir, checkpoint=name)),
    "eval.pareto": lambda work_dir, name: ParetoConfig(MODEL, work_dir, checkpoint=name).heads_folder,
    "rl.diversed": lambda work_dir, name: heads_folder(DiversedConfig(MODEL, work_dir, checkpoint=name)),
}


def save(folder: Path, kind: str = "mtp", is_trained: bool = True) -> Path:
    own = {"own_output_head": True} if kind == "eagle3" else {}
    save_heads(folder, build_head(make_tiny_target(), HeadOptions(kind, 2, **own)))
    if is_trained:
        (folder / "manifest.json").write_text("{}")
    return folder


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_heads_of_every_kind(kind: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    for name, other in (("draft", {"model_type": "llama"}), ("diversed", {"kind": "ensemble"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(other))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "config.json").write_text("no JSON")
    folder = save(tmp_path / kind, kind)
    save(tmp_path / "published", "medusa", is_trained=False)  # an export of some heads is no other choice
    assert COMMANDS[command](str(tmp_path), "") == folder
    assert COMMANDS[command](str(tmp_path), "elsewhere") == Path("elsewhere")


def error_of(work: Callable[[], Any]) -> str:
    with pytest.raises(ValueError, match=r".") as told:
        work()
    assert "\n" not in str(told.value)
    return str(told.value)


@pytest.mark.parametrize("command", COMMANDS)
def test_none_and_several_are_told_in_one_line(command: str, tmp_path: Path) -> None:
    find = COMMANDS[command]
    assert "holds no finished draft heads; train them" in error_of(lambda: find(str(tmp_path), ""))
    one, two = save(tmp_path / "eagle3", "eagle3"), save(tmp_path / "mtp")
    message = error_of(lambda: find(str(tmp_path), ""))
    assert f"holds several draft heads: {one}, {two}; say which with checkpoint={one}" in message


def test_a_folder_without_training_is_taken_where_there_is_no_other(tmp_path: Path) -> None:
    folder = save(tmp_path / "mine", is_trained=False)
    assert find_heads("", str(tmp_path)) == folder


def test_a_drafter_without_heads_asks_for_none(tmp_path: Path) -> None:
    config = ParetoConfig(MODEL, str(tmp_path))
    assert replace(config, drafter=DrafterOptions("ngram")).heads_folder is None
