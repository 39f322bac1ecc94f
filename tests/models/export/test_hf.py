"""Folders for the hub: the checkpoint as it was, a card with what was measured, and the hub out of reach."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from models.checkpoint import load_heads, read_config, save_heads
from models.export import hf as module
from models.export.custom_generate import load_speculative
from models.export.hf import export_hf, fetch_folder, model_card, push_folder
from models.heads import HeadOptions, build_head
from models.target.model import Target
from models.target.tiny import make_tiny_target

ACCEPTANCE = {"mean_block_length": 2.345, "acceptance_at": [0.75, 0.5, 0.25], "on": "held-out answers, simulated"}
PROVENANCE = {"command": "python -m train.mtp +model=tiny", "commit": "abc"}


@pytest.fixture
def target() -> Target:
    return make_tiny_target()


@pytest.fixture
def exported(target: Target, tmp_path: Path) -> Path:
    head = build_head(target, HeadOptions("medusa", 3), torch.arange(3, 120, 2))
    save_heads(tmp_path / "heads", head, PROVENANCE, ACCEPTANCE)
    export_hf(tmp_path / "heads", load_heads(tmp_path / "heads", target, torch.float32), tmp_path / "out")
    return tmp_path / "out"


def test_the_checkpoint_is_as_it_was(exported: Path, tmp_path: Path) -> None:
    assert read_config(exported) == read_config(tmp_path / "heads")
    names = ["README.md", "config.json", "model.safetensors"]
    assert sorted(path.name for path in exported.iterdir()) == names
    assert (exported / "model.safetensors").read_bytes() == (tmp_path / "heads" / "model.safetensors").read_bytes()


def test_the_card_carries_the_measured_table(exported: Path) -> None:
    card = (exported / "README.md").read_text()
    head, _, rest = card.removeprefix("---\n").partition("---\n")
    assert "base_model: tiny" in head.splitlines()
    assert "Mean block length 2.35 tokens a target pass (held-out answers, simulated)." in rest
    table = [line for line in rest.splitlines() if line.startswith("|")]
    assert table == [
        "| place in the block | 1 | 2 | 3 |",
        "| --- | --- | --- | --- |",
        "| kept, with all before it | 0.750 | 0.500 | 0.250 |",
    ]
    assert "- command: python -m train.mtp +model=tiny" in rest
    assert "- draft vocabulary: 59 tokens" in rest


def test_the_cards_code_runs(
    exported: Path, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a folder for the target and for the heads in the place of the hub's names."""
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    code = (exported / "README.md").read_text().split("```python\n")[1].split("```")[0]
    code = code.replace('"tiny"', repr(str(tmp_path / "target"))).replace("FOLDER OR OWNER/NAME", str(exported))
    code = code.replace('return_tensors="pt")', 'return_tensors="pt", return_token_type_ids=False)')
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("Once upon a time")


def test_a_card_without_measurements(exported: Path) -> None:
    config = {**read_config(exported), "acceptance": {}, "provenance": {}, "draft_vocab": None}
    card = model_card(config)
    assert "Nothing was measured." in card
    assert "Nothing was noted." in card
    assert "- draft vocabulary: the target's" in card


def test_out_of_the_hubs_cache(exported: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, a repository that was fetched before is read from where the hub's client keeps it."""
    repository = tmp_path / "cache" / "models--me--heads"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123")
    exported.rename(repository / "snap")
    (repository / "snapshots").mkdir()
    (repository / "snap").rename(repository / "snapshots" / "0123")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        module, "snapshot_download", lambda *words, **options: download(*words, cache_dir=tmp_path / "cache", **options)
    )
    assert fetch_folder("me/heads") == repository / "snapshots" / "0123"
    load_speculative("me/heads", target.model, target.tokenizer)
    with pytest.raises(ValueError, match=r"heads 'me/others' are neither a folder here nor in the local cache"):
        fetch_folder("me/others")


download = module.snapshot_download


@pytest.mark.parametrize("name", ["me/heads", "no such: name", "a/b/c"])
def test_the_hub_out_of_reach(name: str, exported: Path) -> None:
    with pytest.raises(ValueError, match="neither a folder here nor in the local cache") as caught:
        fetch_folder(name)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="could not be pushed") as caught:
        push_folder(exported, name)
    assert "\n" not in str(caught.value)


def test_a_folder_that_looks_local(tmp_path: Path) -> None:
    assert fetch_folder(tmp_path) == tmp_path
    assert fetch_folder("./nowhere") == Path("nowhere")


def test_only_checkpoints_are_pushed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        push_folder(tmp_path, "me/heads")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="it is no Foretoken checkpoint"):
        push_folder(tmp_path, "me/heads")


def test_push_uploads_the_folder(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A private repository unless asked otherwise, then the folder; the client is the hub's."""
    calls: list[tuple[str, dict[str, object]]] = []

    class Api:
        endpoint = "https://hub"

        def create_repo(self, repository: str, **options: object) -> None:
            calls.append((repository, options))

        def upload_folder(self, **options: object) -> None:
            calls.append(("upload", options))

    monkeypatch.setattr(module, "HfApi", Api)
    assert push_folder(exported, "me/heads") == "https://hub/me/heads"
    assert calls[0] == ("me/heads", {"private": True, "exist_ok": True})
    assert calls[1][1]["repo_id"] == "me/heads"
    assert calls[1][1]["folder_path"] == exported
