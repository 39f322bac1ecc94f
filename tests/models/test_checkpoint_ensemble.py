"""Checkpoints of the ensemble head: they load again bit for bit, for the pair they were trained for and no other."""

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import checkpoint
from models.ensemble import KINDS, EnsembleHead, EnsembleOptions
from models.heads import HeadOptions, build_head
from models.target.model import Target
from models.target.tiny import make_tiny_target
from tests.planting import blank_module

REAL = SimpleNamespace(**vars(checkpoint))
DRAFTER = {"kind": "model", "name": "small", "fingerprint": "0123456789abcdef"}
Edit = Callable[[Path], None]


def make_head(kind: str = "linear", target_size: int = 32) -> EnsembleHead:
    torch.manual_seed(0)
    head = EnsembleHead(EnsembleOptions(kind=kind, draft_size=5, target_size=target_size, width=7, initial_weight=0.7))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter))
    return head


@pytest.fixture(scope="module")
def target() -> Target:
    return make_tiny_target()


def save(code: SimpleNamespace, folder: Path, target: Target, kind: str = "linear") -> EnsembleHead:
    head = make_head(kind)
    code.save_ensemble(folder, head, target, DRAFTER, {"command": "rl", "lam": 0.1}, {"acceptance": 0.8})
    return head


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_part(folder: Path, part: str, **changes: Any) -> None:
    """Change entries of one record of the config; None removes one."""
    record = {**json.loads((folder / "config.json").read_text())[part], **changes}
    edit_config(folder, **{part: {key: value for key, value in record.items() if value is not None}})


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change tensors, `_` standing for the dot; None removes one."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | {name.replace("_", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


# ---- each check takes the code, so that it can be shown to catch faults ----


def check_round_trip(code: SimpleNamespace, target: Target, folder: Path) -> None:
    """Tensors, options and what it weighs; float32 on a target in bfloat16, frozen, in eval mode."""
    for kind in KINDS:
        head = save(code, folder, target, kind)
        for other in (target, make_tiny_target(dtype="bfloat16")):
            loaded = code.load_ensemble(folder, other, {**DRAFTER, "name": "moved elsewhere"})
            assert loaded.options == head.options
            assert loaded.state_dict().keys() == head.state_dict().keys()
            assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in loaded.state_dict().items())
            assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
            assert not loaded.training
            assert not any(parameter.requires_grad for parameter in loaded.parameters())
        features = torch.randn(3, head.num_features)
        assert torch.equal(loaded(features), head(features))
        assert set(load_file(folder / "model.safetensors")) == {name for name, _ in head.named_parameters()}
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def check_config(code: SimpleNamespace, target: Target, folder: Path) -> None:
    """All that is told of it."""
    save(code, folder, target, "mlp")
    assert code.read_config(folder) == {
        "format_version": 1,
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "kind": "ensemble",
        "ensemble": {"kind": "mlp", "draft_size": 5, "target_size": 32, "initial_weight": 0.7, "width": 7},
        "target": {
            "name": "tiny",
            "model_type": "llama",
            "hidden_size": 32,
            "vocab_size": 264,
            "quantization": "none",
            "fingerprint": target.fingerprint(),
            "tokenizer_fingerprint": target.tokenizer_fingerprint(),
        },
        "drafter": DRAFTER,
        "provenance": {"command": "rl", "lam": 0.1},
        "measured": {"acceptance": 0.8},
    }


REFUSED: dict[str, tuple[Edit, str]] = {
    "heads": (lambda folder: edit_config(folder, kind="heads"), "holds 'heads', expected an ensemble head"),
    "later format": (
        lambda folder: edit_config(folder, format_version=2),
        "has format version 2, this Foretoken reads 1",
    ),
    "no drafter": (
        lambda folder: edit_config(folder, drafter=None),
        "lacks kind, name, fingerprint; the checkpoint is",
    ),
    "no options": (lambda folder: edit_config(folder, ensemble=None), "ensemble options do not fit this Foretoken"),
    "unknown option": (
        lambda folder: edit_part(folder, "ensemble", depth=3),
        r"ensemble options do not fit this Foretoken .*depth",
    ),
    "missing option": (
        lambda folder: edit_part(folder, "ensemble", draft_size=None),
        r"ensemble options do not fit this Foretoken .*draft_size",
    ),
    "unknown kind": (lambda folder: edit_part(folder, "ensemble", kind="tree"), "ensemble.kind='tree' is unknown"),
    "other kind": (
        lambda folder: edit_part(folder, "ensemble", kind="mlp"),
        r"does not fit the mlp ensemble head: missing hidden\.0\.bias \(7,\)",
    ),
    "other width of the target": (
        lambda folder: edit_part(folder, "ensemble", target_size=31),
        "ensemble.target_size is 31, expected 32, the target's; it is damaged",
    ),
    "other width of the draft": (
        lambda folder: edit_part(folder, "ensemble", draft_size=6),
        r"does not fit the linear ensemble head: output\.weight is \(1, 37\), expected \(1, 38\)",
    ),
    "missing tensor": (lambda folder: edit_tensors(folder, output_bias=None), r"missing output\.bias \(1,\)"),
    "unknown tensor": (lambda folder: edit_tensors(folder, extra=torch.ones(2)), r"unknown extra \(2,\)"),
    "not finite": (
        lambda folder: edit_tensors(folder, output_bias=torch.tensor([torch.nan])),
        r"holds numbers that are not finite in output\.bias",
    ),
    "cut short": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"half"),
        "model.safetensors is damaged or cut short",
    ),
    "no tensors": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json; .*rl.diversed"),
    "other target": (
        lambda folder: edit_part(folder, "target", fingerprint="another"),
        "was trained for target 'tiny', not for 'tiny': fingerprint is .*, expected another",
    ),
}


def refusal(code: SimpleNamespace, folder: Path, target: Target, drafter: dict[str, str] = DRAFTER) -> str:
    """What is said when loading fails; empty if it does not."""
    try:
        code.load_ensemble(folder, target, drafter)
    except ValueError as error:
        return str(error)
    return ""


def check_refused(code: SimpleNamespace, target: Target, folder: Path) -> None:
    """Whatever is damaged, or was made for something else."""
    for name, (edit, message) in REFUSED.items():
        save(code, folder, target)
        edit(folder)
        assert re.search(message, refusal(code, folder, target)), name


def check_pair(code: SimpleNamespace, target: Target, folder: Path) -> None:
    """Another target's head and another drafter's; the message has both sides."""
    save(code, folder, target)
    assert refusal(code, folder, target) == ""
    assert re.search("was trained for target 'tiny'.*fingerprint is ", refusal(code, folder, make_tiny_target(seed=1)))
    for key, value in (("fingerprint", "fedcba9876543210"), ("kind", "heads")):
        message = refusal(code, folder, target, {**DRAFTER, key: value, "name": "large"})
        expected = f"trained for drafter 'small', not for 'large': {key} is {value}, expected {DRAFTER[key]}$"
        assert re.search(expected, message)
    with pytest.raises(ValueError, match="width 16, those of target 'tiny' are 32 wide"):
        code.save_ensemble(folder, make_head(target_size=16), target, DRAFTER)


def check_records(code: SimpleNamespace, target: Target, folder: Path) -> None:
    """Heads are told apart by tensors, options and draft vocabulary, not by where or when they were saved."""
    torch.manual_seed(0)
    head = build_head(target, HeadOptions(kind="medusa", num_draft_tokens=2))
    code.save_heads(folder / "one", head)
    code.save_heads(folder / "two", head, {"command": "again"}, {"mean_block_length": 2.0})
    one, two = code.heads_record(folder / "one"), code.heads_record(str(folder / "two"))
    assert (one["kind"], one["name"], two["name"]) == ("heads", "one", "two")
    assert one["fingerprint"] == two["fingerprint"]
    seen = {one["fingerprint"]}
    edit_config(folder / "two", draft_vocab=[1, 2])
    seen.add(code.heads_record(folder / "two")["fingerprint"])
    edit_part(folder / "one", "head", num_layers=2)
    seen.add(code.heads_record(folder / "one")["fingerprint"])
    with torch.no_grad():
        next(head.parameters()).view(-1)[0].add_(1.0)
    code.save_heads(folder / "one", head)
    seen.add(code.heads_record(folder / "one")["fingerprint"])
    assert len(seen) == 4
    assert code.model_record(target) == {"kind": "model", "name": "tiny", "fingerprint": target.fingerprint()}
    (folder / "one" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        code.heads_record(folder / "one")


CHECKS = (check_pair, check_config, check_round_trip, check_records, check_refused)


@pytest.mark.parametrize("check", CHECKS)
def test_checkpoint(check: Callable[..., None], target: Target, tmp_path: Path) -> None:
    check(REAL, target, tmp_path / "folder")


PLANTED = {
    "drafter not compared": ("    _require_same_drafter(folder, config", "    print(folder, config"),
    "drafter's kind not compared": ('for key in ("kind", "fingerprint")', 'for key in ("fingerprint",)'),
    "drafter told apart by its name": ('for key in ("kind", "fingerprint")', "for key in DRAFTER_KEYS"),
    "target not compared": ("    _require_same_target(folder, config", "    print(folder, config"),
    "kind not compared": ('if config.get("kind") != kind:', "if False:"),
    "record not required": ('    _require_keys(folder, config["drafter"], DRAFTER_KEYS)\n', ""),
    "tensors not compared": ("    if problems:", "    if False:"),
    "tensors loaded loosely": (
        '_load_strictly(head, folder / WEIGHTS_NAME, f"the {options.kind} ensemble head", config.get(WEIGHTS_SHA256))',
        "head.load_state_dict(load_file(folder / WEIGHTS_NAME), strict=False)",
    ),
    "in the target's dtype": ("return head.to(target.device)", "return head.to(target.dtype)"),
    "still training": ("return head.to(target.device).eval()", "return head.to(target.device)"),
    "width not checked when saving": ("if head.options.target_size != target.hidden_size:", "if False:"),
    "width not checked when loading": ("if options.target_size != target.hidden_size:", "if False:"),
    "untrained head saved": (
        "    _write(folder, head, config)\n\n\ndef heads_record",
        "    _write(folder, EnsembleHead(head.options), config)\n\n\ndef heads_record",
    ),
    "measurements lost": ('"measured": measured or {}', '"measured": {}'),
    "hash of the options alone": ('hashlib.file_digest(weights, "sha256")', "hashlib.sha256()"),
    "hash of the tensors alone": ('[config.get("head"), config.get("draft_vocab")]', "[]"),
    "hash with the place": (
        'digest = hashlib.file_digest(weights, "sha256")',
        "digest = hashlib.sha256(str(path).encode())",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = PLANTED[fault]
    source = inspect.getsource(checkpoint)
    assert right in source, f"the planted fault no longer matches the code: {right}"
    module = blank_module("faulty_checkpoint", checkpoint.__package__)
    monkeypatch.setitem(sys.modules, "faulty_checkpoint", module)
    exec(compile(source.replace(right, wrong, 1), "faulty checkpoint", "exec"), module.__dict__)
    code = SimpleNamespace(**vars(module))
    assert any(fails(check, code, target, tmp_path / f"{i}") for i, check in enumerate(CHECKS))


def fails(check: Callable[..., None], *arguments: Any) -> bool:
    """Whether a check refuses this code."""
    try:
        check(*arguments)
    except (AssertionError, LookupError, RuntimeError, TypeError, ValueError, pytest.fail.Exception):
        return True
    return False


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_while_writing_keeps_the_old_one(
    error: BaseException, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    save(REAL, folder, target)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(tensors: dict[str, torch.Tensor], path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(type(error)):
        checkpoint.save_ensemble(folder, make_head("mlp"), target, DRAFTER)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
