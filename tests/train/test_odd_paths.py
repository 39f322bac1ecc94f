"""Paths with blanks, commas, `=` and letters beyond a-z, given as the commands ask for it, work from end to end."""

import json
import shlex
from pathlib import Path

import pytest

from models.checkpoint import read_config
from models.target.tiny import make_tiny_target
from tests.docs.running import SMALL, in_folder, run_module
from train.runtime.option_errors import quoted

NAMES = ("내 결과 하나", "a=b, (c) 'd' $HOME #1 [x] ~")
LOCAL_MODEL = "모델 하나, v=1"


def word(option: str, value: object) -> str:
    """What arrives of a pasted word."""
    form = quoted(f"{option}={value}")
    assert form is not None
    (found,) = shlex.split(form)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_regenerate_train_and_bench(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """work_dir, a file of prompts, and the target's own folder."""
    target = make_tiny_target()
    target.model.save_pretrained(tmp_path / LOCAL_MODEL)
    target.tokenizer.save_pretrained(tmp_path / LOCAL_MODEL)
    prompts = tmp_path / f"{name} prompts.jsonl"
    lines = [json.dumps({"prompt": f"{number} + {number} 는?"}, ensure_ascii=False) for number in range(40)]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    common = [
        "+model=tiny", "data=jsonl", "model.source=folder", word("model.name", tmp_path / LOCAL_MODEL),
        word("data.path", prompts), word("work_dir", tmp_path / name),
    ]  # fmt: skip
    with in_folder(tmp_path, monkeypatch):
        run_module("train.regenerate", [*common, *SMALL["train.regenerate"]], monkeypatch)
        assert list((tmp_path / name).rglob("shard-*.jsonl"))
        run_module("train.mtp", [*common, *SMALL["train.mtp"]], monkeypatch)
        (config,) = (tmp_path / name).rglob("mtp/config.json")
        assert read_config(config.parent)["kind"] == "heads"
        bench = [*common, "drafter=heads", "tasks=[chat]", *SMALL["eval.bench"]]
        run_module("eval.bench", bench, monkeypatch)
    assert list((tmp_path / name).rglob("*.json"))
    outside = {path.name for path in tmp_path.iterdir()}
    assert {name, LOCAL_MODEL, prompts.name} <= outside
