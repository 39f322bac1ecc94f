"""A process that is killed while it saves, before each single step: what is loaded then is wholly old or wholly new."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import files
from models.checkpoint import CONFIG_NAME, WEIGHTS_NAME, heads_record, load_heads, read_config, save_heads
from models.files import NEXT, finish_save, new_files, whole_folder
from models.heads import HeadOptions, build_head
from models.target.model import TargetOptions, load_target
from models.target.tiny import make_tiny_target

STEPS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "ctypes.dlsym", "os.fsync", "renameat2")
KILLED = 9
MOST_STEPS = 300


def run_and_kill(work: Callable[[], None], before: int) -> bool:
    """Do the work in a process of its own that dies before its step of this number; whether it did."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, KILLED), code
        return code == KILLED
    count = 0

    def step(event: str, arguments: Any = None) -> None:
        nonlocal count
        if event not in STEPS:
            return
        if count == before:
            os._exit(KILLED)
        count += 1

    try:
        fsync, exchange = os.fsync, files._exchange
        os.fsync = lambda handle: (step("os.fsync"), fsync(handle))[1]
        files._exchange = lambda one, other: (step("renameat2"), exchange(one, other))[1]  # type: ignore[assignment]
        sys.addaudithook(step)
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


def deaths(work: Callable[[], None], prepare: Callable[[], None], check: Callable[[], str]) -> list[str]:
    """What is found after a death before each step, and at last without one."""
    found = []
    for before in range(MOST_STEPS):
        prepare()
        was_killed = run_and_kill(work, before)
        found.append(check())
        if not was_killed:
            return found
    raise AssertionError(f"more than {MOST_STEPS} steps")


def assert_one_rename_decides(found: list[str]) -> None:
    """Old up to some step, new from there on; each is seen more than once."""
    assert found == sorted(found, key=("old", "new").index)
    assert found.count("old") > 3
    assert found.count("new") > 1


def make_heads(value: float) -> Any:
    head = build_head(make_tiny_target(), HeadOptions("medusa", 2))
    for weight in head.parameters():
        torch.nn.init.constant_(weight, value)
    return head


@pytest.mark.parametrize("is_first", [False, True])
def test_heads(is_first: bool, tmp_path: Path) -> None:
    """Weights and config are of one save; other files stay. The first save: there is no checkpoint, or a whole one."""
    folder, target = tmp_path / "heads", make_tiny_target()
    old, new = make_heads(0.1), make_heads(0.2)

    def prepare() -> None:
        for path in (folder, folder / NEXT):
            for name in (CONFIG_NAME, WEIGHTS_NAME):
                (path / name).unlink(missing_ok=True)
        if (folder / NEXT).is_dir():
            (folder / NEXT).rmdir()
        folder.mkdir(exist_ok=True)
        (folder / "log.jsonl").write_text("{}")
        if not is_first:
            save_heads(folder, old, {"which": "old"})

    def check() -> str:
        assert (folder / "log.jsonl").read_text() == "{}"
        try:
            which = read_config(folder)["provenance"]["which"]
        except ValueError:
            assert is_first
            return "old"
        value = 0.1 if which == "old" else 0.2
        assert all(bool((weight == value).all()) for weight in load_heads(folder, target).state_dict().values())
        assert len(heads_record(folder)["fingerprint"]) == 16
        assert not (folder / NEXT).exists()
        return str(which)

    assert_one_rename_decides(deaths(lambda: save_heads(folder, new, {"which": "new"}), prepare, check))


def test_a_draft_model(tmp_path: Path) -> None:
    """As `train.draft` writes it; loading it as a model moves in what was decided."""
    folder = tmp_path / "draft"
    targets = {name: make_tiny_target(seed) for name, seed in (("old", 1), ("new", 2))}

    def save(name: str) -> None:
        with new_files(folder, last="config.json") as scratch:
            targets[name].model.save_pretrained(scratch)
            targets[name].tokenizer.save_pretrained(scratch)
            (scratch / "which").write_text(name)

    def check() -> str:
        loaded = load_target(TargetOptions(str(folder), "draft", "folder", "float32", "cpu"))
        name = (folder / "which").read_text()
        assert loaded.fingerprint() == targets[name].fingerprint()
        return name

    found = []
    for before in range(0, MOST_STEPS, 3):  # a third of the steps: each loads a model
        save("old")
        was_killed = run_and_kill(lambda: save("new"), before)
        found.append(check())
        if not was_killed:
            break
    assert_one_rename_decides(found)


def test_a_whole_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"

    def save(name: str) -> None:
        with whole_folder(folder) as scratch:
            for file in ("a", "b"):
                (scratch / file).write_text(name)

    def check() -> str:
        held = {path.name: path.read_text() for path in folder.iterdir()}
        assert held in ({"a": "old", "b": "old"}, {"a": "new", "b": "new"})
        return held["a"]

    if not files._exchange(tmp_path, tmp_path):
        pytest.skip("this disk cannot exchange two names")
    assert_one_rename_decides(deaths(lambda: save("new"), lambda: save("old"), check))


def test_weights_of_another_save_are_refused(tmp_path: Path) -> None:
    """Files that were copied by hand, or by a tool that was stopped half-way; older configs do not tell."""
    target = make_tiny_target()
    save_heads(tmp_path, make_heads(0.1))
    tensors = {name: tensor * 2 for name, tensor in load_file(tmp_path / WEIGHTS_NAME).items()}
    save_file(tensors, tmp_path / WEIGHTS_NAME)
    with pytest.raises(ValueError, match=r"is not the file that config\.json was written with: sha256 is") as told:
        load_heads(tmp_path, target)
    assert "\n" not in str(told.value)
    config = (tmp_path / CONFIG_NAME).read_text()
    (tmp_path / CONFIG_NAME).write_text(config.replace("weights_sha256", "of_another_kind"))
    load_heads(tmp_path, target)


def test_several_readers_may_settle_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NEXT).mkdir()
    for name in ("a", "config.json"):
        (tmp_path / NEXT / name).write_text("new")
    replace = os.replace

    def race(old: Path, new: Path) -> None:
        monkeypatch.undo()
        finish_save(tmp_path)
        replace(old, new)

    monkeypatch.setattr(files.os, "replace", race)
    finish_save(tmp_path, "config.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "config.json"]
