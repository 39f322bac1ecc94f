"""Checkpoints: what is written loads again, bit for bit, and everything else is refused with what was expected."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import checkpoint as checkpoint_module
from models.checkpoint import load_heads, read_config, save_heads
from models.heads import HEAD_KINDS, DraftHead, HeadOptions, build_head
from models.target.model import Target
from models.target.tiny import make_tiny_target

DRAFT_VOCAB = torch.arange(3, 120, 2)


def make_head(target: Target, kind: str = "mtp", draft_vocab: torch.Tensor | None = None, **options: Any) -> DraftHead:
    torch.manual_seed(0)
    head = build_head(target, HeadOptions(kind=kind, **{"num_draft_tokens": 3, **options}), draft_vocab)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return head


@pytest.fixture
def target() -> Target:
    return make_tiny_target()


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    save_heads(tmp_path / "heads", make_head(target))
    return tmp_path / "heads"


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("draft_vocab", [None, DRAFT_VOCAB], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_round_trip(kind: str, draft_vocab: torch.Tensor | None, own: bool, target: Target, tmp_path: Path) -> None:
    """Tensors, options, vocabulary and what it drafts; frozen, in eval mode, with nothing of the target in the file."""
    head = make_head(target, kind, draft_vocab, own_output_head=own, num_layers=1 if kind == "eagle3" else 2)
    save_heads(tmp_path, head)
    loaded = load_heads(tmp_path, target)
    assert type(loaded) is type(head)
    assert loaded.options == head.options
    assert (loaded.draft_vocab is None) == (draft_vocab is None)
    assert draft_vocab is None or torch.equal(loaded.draft_vocab, draft_vocab)
    assert loaded.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    ids = torch.randint(3, 259, (2, 12), generator=torch.Generator().manual_seed(1))
    hidden = target.hidden(ids, reads=head.reads)
    for one, other in zip(*(draft(h, hidden, ids) for h in (head, loaded)), strict=True):
        assert torch.equal(one, other)
    assert set(load_file(tmp_path / "model.safetensors")) == {name for name, _ in head.named_parameters()}


def draft(head: DraftHead, hidden: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    state = head.start(2)
    with torch.no_grad():
        head.absorb(state, hidden[:, :8], ids[:, 1:9], [8, 5])
    return [head.draft_logits(state, None), head.draft_logits(state, ids[:, 9])]


def test_loads_in_the_targets_dtype(tmp_path: Path) -> None:
    """Trained and written in float32; used in the target's own, or in what is asked for."""
    target = make_tiny_target(dtype="bfloat16")
    save_heads(tmp_path, make_head(target))
    assert all(tensor.dtype == torch.float32 for tensor in load_file(tmp_path / "model.safetensors").values())
    assert load_heads(tmp_path, target).trainable_dtype() == torch.bfloat16
    assert load_heads(tmp_path, target, torch.float32).trainable_dtype() == torch.float32


def test_heads_fit_the_target_in_another_dtype(folder: Path) -> None:
    load_heads(folder, make_tiny_target(dtype="bfloat16"))


def test_config(target: Target, tmp_path: Path) -> None:
    """All that design asks of it."""
    head = make_head(target, "hydra", DRAFT_VOCAB, own_output_head=True)
    save_heads(tmp_path, head, {"command": "train", "steps": 7}, {"mean_block_length": 2.5})
    config = read_config(tmp_path)
    assert config["format_version"] == 1
    assert config["kind"] == "heads"
    assert config["head"] == {
        "kind": "hydra",
        "num_draft_tokens": 3,
        "num_layers": 1,
        "own_output_head": True,
        "draft_vocab_size": 0,
        "blank_first": False,
    }
    assert config["concatenation"] == "[state; embedding]"
    assert config["output_head"] == "own"
    assert config["draft_vocab"] == DRAFT_VOCAB.tolist()
    assert config["target"] == {
        "name": "tiny",
        "model_type": "llama",
        "hidden_size": 32,
        "vocab_size": 264,
        "quantization": "none",
        "fingerprint": target.fingerprint(),
        "tokenizer_fingerprint": target.tokenizer_fingerprint(),
    }
    assert config["provenance"] == {"command": "train", "steps": 7}
    assert config["acceptance"] == {"mean_block_length": 2.5}


# Writing


def test_other_files_stay(target: Target, folder: Path) -> None:
    (folder / "log.jsonl").write_text("kept")
    save_heads(folder, make_head(target, "medusa"))
    assert (folder / "log.jsonl").read_text() == "kept"
    assert load_heads(folder, target).kind == "medusa"
    assert [path.name for path in folder.parent.iterdir()] == ["heads"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_while_writing_keeps_the_old_one(
    error: BaseException, target: Target, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(tensors: dict[str, torch.Tensor], path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(checkpoint_module, "save_file", fail)
    with pytest.raises(type(error)):
        save_heads(folder, make_head(target, "medusa"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["heads"]


# Refused


@pytest.mark.parametrize("other", ["seed", "family", "tokenizer"])
def test_another_target_is_refused(other: str, folder: Path) -> None:
    """With what differs: expected and found."""
    target = {
        "seed": lambda: make_tiny_target(seed=1),
        "family": lambda: make_tiny_target(family="qwen3"),
        "tokenizer": make_tiny_target,
    }[other]()
    named = "fingerprint is "
    if other == "tokenizer":
        target.tokenizer.chat_template += " "
        named = f"tokenizer_fingerprint is {target.tokenizer_fingerprint()}, expected "
    with pytest.raises(ValueError, match=rf"was trained for target 'tiny', not for 'tiny': .*{named}"):
        load_heads(folder, target)


def test_other_sizes_are_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"hidden_size is 16, expected 32"):
        load_heads(folder, make_tiny_target(hidden_size=16))
    with pytest.raises(ValueError, match=r"vocab_size is 300, expected 264"):
        load_heads(folder, make_tiny_target(vocab_size=300))


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "several"])
def test_tensors_must_fit(damage: str, folder: Path, target: Target) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    expected = []
    if damage in ("missing", "several"):
        del tensors["project.weight"]
        expected.append(r"missing project\.weight \(32, 64\)")
    if damage in ("shape", "several"):
        tensors["norm_state.weight"] = torch.ones(31)
        expected.append(r"norm_state\.weight is \(31,\), expected \(32,\)")
    if damage in ("unknown", "several"):
        tensors["extra"] = torch.ones(2, 3)
        expected.append(r"unknown extra \(2, 3\)")
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"does not fit mtp heads: " + ".*".join(expected)):
        load_heads(folder, target)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_must_be_finite(value: float, folder: Path, target: Target) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["project.weight"][3, 4] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"not finite in project\.weight"):
        load_heads(folder, target)


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_file_cut_short(keep: int, folder: Path, target: Target) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short .*export the checkpoint again"):
        load_heads(folder, target)


def test_a_missing_file(folder: Path, target: Target) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing; the checkpoint is incomplete"):
        load_heads(folder, target)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json; give the folder that train\.mtp wrote"):
        load_heads(folder, target)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_heads(folder / "nowhere", target)


@pytest.mark.parametrize("text", ["", "{", '"text"', "[1]", "7"])
def test_config_must_be_json(text: str, folder: Path, target: Target) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_heads(folder, target)


def test_a_transformers_folder_is_no_checkpoint(target: Target, tmp_path: Path) -> None:
    target.model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no format_version: .*a transformers model goes into model\.name"):
        load_heads(tmp_path, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, r"has format version 2, this Foretoken reads 1"),
        ({"kind": "ensemble"}, r"holds 'ensemble', expected draft heads"),
        ({"head": {"kind": "mtp", "width": 3}}, r"head options do not fit this Foretoken .*width"),
        ({"head": {"kind": "eagle9"}}, r"heads\.kind='eagle9' is unknown"),
        ({"head": {"kind": "medusa", "num_draft_tokens": 3}}, r"does not fit medusa heads: "),
        ({"draft_vocab": [1, 2, 9999]}, r"draft_vocab must be rising ids below 264"),
        ({"draft_vocab": [2, 1]}, r"draft_vocab must be rising ids below 264"),
        ({"draft_vocab": [-1, 1]}, r"draft_vocab must be rising ids below 264"),
        ({"draft_vocab": []}, r"draft_vocab must be rising ids below 264"),
        ({"target": {}}, r"config\.json lacks name, hidden_size, vocab_size"),
        ({"target": None}, r"config\.json lacks name, hidden_size"),
    ],
)
def test_config_must_fit(changes: dict[str, Any], message: str, folder: Path, target: Target) -> None:
    edit(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_heads(folder, target)


@pytest.mark.parametrize("missing", ["kind", "head", "draft_vocab", "target"])
def test_config_must_be_whole(missing: str, folder: Path, target: Target) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config[missing]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json|expected draft heads"):
        load_heads(folder, target)
