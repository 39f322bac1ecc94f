"""A target whose layers lie on the disk gives what one in memory gives, to the bit; and where layers are put."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.heads import HEAD_KINDS, HeadOptions, build_head
from models.sampling import SamplingParams
from models.target import placement
from models.target.model import Target, TargetOptions, load_target
from models.target.placement import budgets, own_gpus, parse_limits, plan_layers, require_one_device
from models.target.tiny import make_tiny_target

ROOM = {"cuda:0": 10, "cuda:2": 5, "cpu": 4}


@pytest.mark.parametrize(
    ("layers", "rest", "plan"),
    [
        ([2, 2], 1, ["cuda:0"] * 2),
        ([4, 4, 4], 1, ["cuda:0", "cuda:0", "cuda:2"]),
        ([4] * 6, 2, ["cuda:0", "cuda:0", "cuda:2", "cpu", "disk", "disk"]),
        ([9, 5, 1], 1, ["cuda:0", "cuda:2", "cpu"]),  # nothing goes back to what has room left
        ([11, 1], 0, ["disk", "disk"]),
        ([], 10, []),
    ],
)
def test_layers_fill_devices_in_order(layers: list[int], rest: int, plan: list[str]) -> None:
    assert plan_layers(layers, rest, ROOM) == plan


def test_what_heads_read_must_fit() -> None:
    with pytest.raises(ValueError, match=r"take 0\.00 GB and cuda:0 may hold .* raise model\.max_memory"):
        plan_layers([1], 11, ROOM)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_no_gpu_is_two_processes(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """Each has that of its own number first, and as many as the others."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    shares = []
    for rank in range(num_ranks):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        shares.append(own_gpus(8))
        assert shares[-1][0] == f"cuda:{rank}"
        assert own_gpus(0) == []
    assert {len(share) for share in shares} == {8 // num_ranks}
    assert len({gpu for share in shares for gpu in share}) == num_ranks * (8 // num_ranks)
    if num_ranks > 1:
        with pytest.raises(ValueError, match="at most one process a GPU"):
            own_gpus(1)


def test_limits() -> None:
    assert parse_limits(["cuda:1=2GiB", "cpu=1MB"]) == {"cuda:1": 2 * 2**30, "cpu": 10**6}
    for wrong in ("cpu", "cpu=", "cpu=much", "disk=1GB", "0=1GB"):
        with pytest.raises(ValueError, match=r"model\.max_memory has .* write a list"):
            parse_limits([wrong])
    with pytest.raises(ValueError, match=r"names cuda:7; this process has cpu"):
        budgets({"cuda:7": 5})


def saved(folder: Path, **overrides: bool) -> tuple[Target, TargetOptions]:
    """A target in memory and how its folder is loaded: six layers."""
    tiny = make_tiny_target(num_hidden_layers=6, **overrides)
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    options = TargetOptions(str(folder), source="folder", dtype="float32")
    return load_target(replace(options, device="cpu")), options


def spread_over_disk(target: Target, options: TargetOptions, layers_in_memory: int) -> Target:
    weights = sum(weight.nbytes for weight in target.model.parameters())
    layer = sum(weight.nbytes for weight in target.layers()[0].parameters())
    limit = weights - (6 - layers_in_memory) * layer + layer // 2
    spread = load_target(replace(options, device_map="auto", max_memory=[f"cpu={limit // 1000}KB"]))
    on_disk = [any(weight.is_meta for weight in part.parameters()) for part in spread.layers()]
    assert on_disk == [False] * layers_in_memory + [True] * (6 - layers_in_memory)
    return spread


@pytest.mark.parametrize("tied", [True, False])
def test_spread_over_the_disk_is_the_same(tmp_path: Path, tied: bool) -> None:
    """Hidden states, logits, fingerprint and greedy text; heads and output head are in memory."""
    whole, options = saved(tmp_path, tie_word_embeddings=tied)
    spread = spread_over_disk(whole, options, layers_in_memory=2)
    assert spread.device == whole.device
    assert not spread.output_head.weight.is_meta
    ids_BT = torch.arange(3, 27).view(2, 12)
    hidden_BTH = whole.hidden(ids_BT)
    assert torch.equal(spread.hidden(ids_BT), hidden_BTH)
    assert torch.equal(spread.logits(hidden_BTH), whole.logits(hidden_BTH))
    assert torch.equal(spread.model(input_ids=ids_BT).logits, whole.model(input_ids=ids_BT).logits)
    assert spread.fingerprint() == whole.fingerprint()
    prompts = [[5, 6, 7, 8], [9, 10], [11]]
    params = GenerationParams(12, SamplingParams(0.0))
    texts = [[row.tokens for row in Decoder(of).generate(prompts, params, 2)] for of in (whole, spread)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", sorted(HEAD_KINDS))
def test_heads_on_a_spread_target_are_the_same(tmp_path: Path, kind: str) -> None:
    """Also those that start as a copy of the last layer, which is on the disk: weights, states and gradients."""
    whole, options = saved(tmp_path)
    spread = spread_over_disk(whole, options, layers_in_memory=3)
    heads = []
    for of in (whole, spread):
        torch.manual_seed(0)
        heads.append(build_head(of, HeadOptions(kind, 2)))
    ids_BT = torch.arange(3, 27).view(2, 12)
    texts = [torch.arange(3, 200)]
    for head in heads:
        head.fit_start(texts)
        hidden_BTX = head.target.get.hidden(ids_BT, reads=head.reads)
        head(hidden_BTX, ids_BT).square().sum().backward()
    states = [head.state_dict() for head in heads]
    assert states[0].keys() == states[1].keys()
    for (name, weight), other in zip(heads[0].named_parameters(), heads[1].parameters(), strict=True):
        assert torch.equal(weight, other), name
        assert torch.equal(weight.grad, other.grad), name


def test_all_in_memory_is_one_device(tmp_path: Path) -> None:
    whole, options = saved(tmp_path)
    spread = load_target(replace(options, device_map="auto"))
    assert not any(weight.is_meta for weight in spread.model.parameters())
    ids_BT = torch.arange(3, 15)[None]
    assert torch.equal(spread.hidden(ids_BT), whole.hidden(ids_BT))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_map": "balanced"}, "is unknown; choose one of none, auto"),
        ({"max_memory": ["cpu=1GB"]}, "is for model.device_map=auto"),
        ({"device_map": "auto", "device": "cpu"}, "chooses devices itself"),
        ({"device_map": "auto", "source": "random"}, "chooses devices itself"),
        ({"device_map": "auto", "max_memory": ["cpu=x"]}, "write a list"),
        ({"device_map": "auto", "max_memory": ["cpu=1KB"]}, "embeddings, norm and output head take"),
    ],
)
def test_options_are_checked(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    _, options = saved(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_target(replace(options, **changes))


def test_some_commands_need_one_device() -> None:
    require_one_device("none", "train.sft")
    with pytest.raises(ValueError, match=r"model\.device_map=auto: train\.sft works on .* set model\.device_map=none"):
        require_one_device("auto", "train.sft")


def test_a_copy_of_layers_in_memory_is_a_copy() -> None:
    layer = make_tiny_target().layers()[0]
    copied = placement.plain_copy(layer)
    for weight, other in zip(layer.parameters(), copied.parameters(), strict=True):
        assert torch.equal(weight, other)
        assert weight.data_ptr() != other.data_ptr()
