"""The command: what it writes for whom, the line that it prints, and one line for everything that cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.checkpoint import load_heads, save_ensemble, save_heads
from models.ensemble import EnsembleHead, EnsembleOptions
from models.export.eagle3_served import read_sglang, read_speculators
from models.export.mtp_layer import read_mtp
from models.export.servers import REFUSALS, SERVERS
from models.export.vllm import read_medusa
from models.heads import HEAD_KINDS, HeadOptions, build_head
from models.target.tiny import make_tiny_target
from scripts.export import main


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a kind, and one of an ensemble head."""
    root = tmp_path_factory.mktemp("checkpoints")
    target = make_tiny_target()
    for kind in HEAD_KINDS:
        save_heads(root / kind, build_head(target, HeadOptions(kind, 3)))
    record = {"kind": "model", "name": "draft", "fingerprint": "0"}
    save_ensemble(root / "ensemble", EnsembleHead(EnsembleOptions(target_size=32, draft_size=32)), target, record)
    return root


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_to_vllm(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "served"
    code, printed, _ = run(capsys, checkpoints / "medusa", out, "--to", "vllm")
    assert code == 0
    command, options = printed.split("--speculative-config ")
    assert command == "vllm serve tiny "
    assert json.loads(options.strip().strip("'")) == {
        "method": "medusa",
        "model": str(out),
        "num_speculative_tokens": 3,
    }
    assert read_medusa(out).config["dtype"] == "float32"


def test_eagle3_to_vllm(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "served"
    code, printed, _ = run(capsys, checkpoints / "eagle3", out, "--to", "vllm")
    assert code == 0
    command, options = printed.split("--speculative-config ")
    assert command == "vllm serve tiny "
    assert json.loads(options.strip().strip("'")) == {
        "method": "eagle3",
        "model": str(out),
        "num_speculative_tokens": 3,
    }
    assert read_speculators(out).reads == (0, 1, 2)


def test_eagle3_to_sglang(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "served"
    code, printed, _ = run(capsys, checkpoints / "eagle3", out, "--to", "sglang", "--dtype", "bfloat16")
    assert code == 0
    assert printed.split() == [
        *("python", "-m", "sglang.launch_server", "--model-path", "tiny", "--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", str(out), "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "4"),
    ]
    served = read_sglang(out)
    assert served.reads == (0, 1, 2)
    assert {tensor.dtype for tensor in served.tensors.values()} == {torch.bfloat16}


def test_the_recursive_head_to_vllm(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = run(capsys, checkpoints / "mtp", tmp_path / "served", "--to", "vllm")
    assert code == 0
    note, printed = printed.splitlines()
    assert note.startswith("# note: servers do without the first pair's embedding")
    assert printed.startswith(
        """vllm serve tiny --hf-overrides '{"num_nextn_predict_layers": 1}' --speculative-config '{"""
    )
    assert '"method": "mtp"' in printed
    assert read_mtp(tmp_path / "served").config["num_hidden_layers"] == 3


def test_the_recursive_head_to_sglang(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same folder."""
    code, printed, _ = run(capsys, checkpoints / "mtp", tmp_path / "served", "--to", "sglang")
    assert code == 0
    assert "--speculative-algorithm NEXTN" in printed
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in printed
    assert run(capsys, checkpoints / "mtp", tmp_path / "vllm", "--to", "vllm")[0] == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "served" / name).read_bytes() == (tmp_path / "vllm" / name).read_bytes()


def test_a_map_is_vllms(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, checkpoints / "mtp", tmp_path / "out", "--to", "hf", "--token-map")
    assert (code, error) == (2, "error: --token-map with --to hf: only --to vllm has one; leave it out\n")
    for kind in ("mtp", "eagle3"):
        code, _, error = run(capsys, checkpoints / kind, tmp_path / "out", "--to", "vllm", "--token-map")
        assert code == 2
        assert error == (
            f"error: --token-map: only Medusa heads have one in vLLM, and these are {kind} heads; leave it out\n"
        )


def test_in_another_dtype(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = run(capsys, checkpoints / "medusa", tmp_path / "served", "--to", "vllm", "--dtype", "bfloat16")
    assert code == 0
    assert {tensor.dtype for tensor in read_medusa(tmp_path / "served").tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_to_hf(kind: str, checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = run(capsys, checkpoints / kind, tmp_path / "out", "--to", "hf")
    assert code == 0
    assert "README.md" in printed
    target = make_tiny_target()
    before, after = (load_heads(folder, target).state_dict() for folder in (checkpoints / kind, tmp_path / "out"))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize(("server", "kind"), sorted(REFUSALS))
def test_heads_that_a_server_has_no_place_for(
    server: str, kind: str, checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason and what to use instead, in one line, and nothing written."""
    code, printed, error = run(capsys, checkpoints / kind, tmp_path / "out", "--to", server)
    assert (code, printed) == (2, "")
    assert error.startswith(f"error: {kind} heads cannot go to {server}: ")
    assert "use --to hf" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_each_server_takes_or_refuses_each_kind() -> None:
    taken = {("hf", kind) for kind in HEAD_KINDS} | {("vllm", "medusa")}
    taken |= {(server, kind) for server in ("vllm", "sglang") for kind in ("mtp", "eagle3")}
    assert taken | REFUSALS.keys() == {(server, kind) for server in SERVERS for kind in HEAD_KINDS}
    assert not taken & REFUSALS.keys()


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("server", ["vllm", "hf"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("cut", "is damaged or cut short"),
        ("weights", "model.safetensors is missing"),
        ("json", "is no readable JSON"),
        ("version", "has format version 7, this Foretoken reads 1"),
        ("foreign", "it is no Foretoken checkpoint"),
        ("target", "was trained for target 'tiny', not for 'tiny'"),
        ("head", "config.json lacks head"),
        ("name", "lacks name"),
        ("gone", "has no config.json"),
    ],
)
def test_damaged_checkpoints(
    damage: str, message: str, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "heads"
    target = make_tiny_target(seed=1 if damage == "target" else 0)
    save_heads(folder, build_head(target, HeadOptions("medusa", 3)))
    config, weights = folder / "config.json", folder / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-9])
    elif damage == "weights":
        weights.unlink()
    elif damage == "json":
        config.write_text(config.read_text()[:-9])
    elif damage == "version":
        edit(folder, format_version=7)
    elif damage == "foreign":
        target.model.save_pretrained(folder)
        capsys.readouterr()  # its progress
    elif damage == "head":
        config.write_text(
            json.dumps({key: value for key, value in json.loads(config.read_text()).items() if key != "head"})
        )
    elif damage == "name":
        edit(folder, target={})
    elif damage == "gone":
        config.unlink()
    code, printed, error = run(capsys, folder, tmp_path / "out", "--to", server)
    assert (code, printed) == (2, "")
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_ensemble_is_no_draft_head(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, checkpoints / "ensemble", tmp_path / "out", "--to", "vllm")
    assert code == 2
    assert "holds 'ensemble', expected draft heads" in error


@pytest.mark.parametrize("server", ["vllm", "hf"])
def test_nothing_is_overwritten(
    server: str, checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the checkpoint itself, nor whatever else there is; an empty folder is fine."""
    before = (checkpoints / "medusa" / "model.safetensors").read_bytes()
    code, _, error = run(capsys, checkpoints / "medusa", checkpoints / "medusa", "--to", server)
    assert code == 2
    assert "is there already, and not empty" in error
    assert (checkpoints / "medusa" / "model.safetensors").read_bytes() == before
    (tmp_path / "file").write_text("")
    assert run(capsys, checkpoints / "medusa", tmp_path / "file", "--to", server)[0] == 2
    (tmp_path / "empty").mkdir()
    assert run(capsys, checkpoints / "medusa", tmp_path / "empty", "--to", server)[0] == 0


def test_push(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tests are offline: the folder is written, and the push says what is wrong."""
    code, _, error = run(capsys, checkpoints / "mtp", tmp_path / "a", "--to", "vllm", "--push", "me/heads")
    assert code == 2
    assert "--push with --to vllm" in error
    code, _, error = run(capsys, checkpoints / "mtp", tmp_path / "b", "--to", "hf", "--push", "me/heads")
    assert code == 2
    assert "could not be pushed to 'me/heads'" in error
    assert "HF_HUB_OFFLINE" in error
    assert error.count("\n") == 1
    load_heads(tmp_path / "b", make_tiny_target())
