"""What is written for vLLM is read back by names of its own, gives our head's logits, and is refused when damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.export import vllm as module
from models.export.vllm import check_medusa, export_medusa, read_medusa
from models.heads import HeadOptions, build_head
from models.heads.medusa import MedusaHeads
from models.target.model import Target
from models.target.tiny import make_tiny_target

DRAFT_VOCAB = torch.arange(3, 120, 2)


def make_head(target: Target, draft_vocab: torch.Tensor | None = None, **options: Any) -> MedusaHeads:
    torch.manual_seed(0)
    head = build_head(target, HeadOptions("medusa", **{"num_draft_tokens": 3, "num_layers": 2, **options}), draft_vocab)
    assert isinstance(head, MedusaHeads)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return head.to(target.dtype).eval()


CASES = {
    "shared": {},
    "own": {"own_output_head": True},
    "reduced": {"draft_vocab": DRAFT_VOCAB},
    "own, reduced": {"draft_vocab": DRAFT_VOCAB, "own_output_head": True},
    "with a map": {"draft_vocab": DRAFT_VOCAB},
    "reduced to all": {"draft_vocab": torch.arange(264)},
    "one layer, five heads": {"num_layers": 1, "num_draft_tokens": 5},
}


@pytest.fixture
def target() -> Target:
    return make_tiny_target()


@pytest.mark.parametrize("case", CASES)
def test_names_shapes_and_config(case: str, target: Target, tmp_path: Path) -> None:
    """Written out here once more, from the format's description alone."""
    head = make_head(target, **CASES[case])
    export_medusa(head, tmp_path / "out", token_map="map" in case)
    options = head.options
    rows = len(DRAFT_VOCAB) if case == "with a map" else 264
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 32,
        "vocab_size": 264,
        "num_heads": options.num_draft_tokens,
        "num_hidden_layers": options.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": not options.own_output_head,
        "truncated_vocab_size": rows,
        "dtype": "float32",
    }
    expected = {}
    for i in range(options.num_draft_tokens):
        for j in range(options.num_layers):
            expected[f"blocks.{i}.layers.{j}.weight"] = (32, 32)
            expected[f"blocks.{i}.layers.{j}.bias"] = (32,)
        if options.own_output_head or i == 0:
            expected[f"lm_heads.{i}.weight"] = (rows, 32)
    if case == "with a map":
        expected["token_map"] = (rows,)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_drafts_are_ours(case: str, dtype: str, tmp_path: Path) -> None:
    """From hidden states of the target: each head's likeliest token is the one that our drafting takes."""
    target = make_tiny_target(dtype=dtype)
    head = make_head(target, **CASES[case])
    export_medusa(head, tmp_path / "out", token_map="map" in case)
    ids = torch.randint(3, 259, (1, 12), generator=torch.Generator().manual_seed(1))
    hidden = target.hidden(ids)
    served = read_medusa(tmp_path / "out").logits(hidden[0, -1:])
    state = head.start(1)
    with torch.no_grad():
        head.absorb(state, hidden, ids.roll(-1, dims=1), [12])
    tokens = None
    for k in range(head.num_draft_tokens):
        logits = head.draft_logits(state, tokens)
        is_drafted = logits.isfinite()
        assert is_drafted.sum() == (264 if head.draft_vocab is None else len(head.draft_vocab))
        torch.testing.assert_close(
            served[k].float()[is_drafted], logits[is_drafted], rtol=1e-2 if dtype == "bfloat16" else 1e-5, atol=1e-2
        )
        tokens = logits.argmax(dim=-1)
        assert torch.equal(served[k].argmax(dim=-1), tokens)


@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_families_that_change_logits(family: str, tmp_path: Path) -> None:
    """A soft cap is left to nobody: it does not change the likeliest token."""
    export_medusa(make_head(make_tiny_target(family=family), DRAFT_VOCAB), tmp_path / "out")


def test_a_bias_of_the_output_head_is_refused(target: Target, tmp_path: Path) -> None:
    target.output_head.bias = torch.nn.Parameter(torch.zeros(264), requires_grad=False)
    with pytest.raises(ValueError, match=r"target 'tiny' has a bias in its output head.*use --to hf"):
        export_medusa(make_head(target), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tokens_outside_of_the_vocabulary_are_never_the_likeliest(target: Target, tmp_path: Path) -> None:
    """Whatever the state: their logit is the mean of the others'."""
    export_medusa(make_head(target, DRAFT_VOCAB), tmp_path)
    states = torch.randn(1000, 32, generator=torch.Generator().manual_seed(2)) * 10
    logits_NV = read_medusa(tmp_path).logits(states)[0]
    outside = [token for token in range(264) if token not in DRAFT_VOCAB]
    mean_N1 = logits_NV[:, DRAFT_VOCAB].mean(dim=-1, keepdim=True)
    torch.testing.assert_close(logits_NV[:, outside], mean_N1.expand(-1, len(outside)), rtol=1e-4, atol=1e-4)
    assert torch.isin(logits_NV.argmax(dim=-1), DRAFT_VOCAB).all()


def test_a_map_for_heads_of_their_own_is_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--token-map with heads.own_output_head=true: .*leave --token-map out"):
        export_medusa(make_head(target, DRAFT_VOCAB, own_output_head=True), tmp_path / "out", token_map=True)
    assert not (tmp_path / "out").exists()


# The check


def swap_heads(tensors: dict[str, torch.Tensor]) -> None:
    for part in ("weight", "bias"):
        one, other = f"blocks.0.layers.0.{part}", f"blocks.1.layers.0.{part}"
        tensors[one], tensors[other] = tensors[other], tensors[one]


def swap_layers(tensors: dict[str, torch.Tensor]) -> None:
    one, other = "blocks.2.layers.0.weight", "blocks.2.layers.1.weight"
    tensors[one], tensors[other] = tensors[other], tensors[one]


def shift_map(tensors: dict[str, torch.Tensor]) -> None:
    tensors["token_map"] = tensors["token_map"] + 1


def draft_what_may_not_be(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_heads.0.weight"][0] = 9 * tensors["lm_heads.0.weight"][3]


def drop_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors["blocks.0.layers.1.bias"] = torch.zeros(32)


@pytest.mark.parametrize("damage", [swap_heads, swap_layers, shift_map, drop_bias])
def test_the_check_sees_wrong_numbers(
    damage: Callable[[dict[str, torch.Tensor]], None], target: Target, tmp_path: Path
) -> None:
    """Under right names and shapes."""
    head = make_head(target, DRAFT_VOCAB)
    export_medusa(head, tmp_path, token_map=True)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"head \d gives other logits when it is read as vLLM reads it"):
        check_medusa(tmp_path, head)


def test_the_check_sees_tokens_that_may_not_be_drafted(target: Target, tmp_path: Path) -> None:
    head = make_head(target, DRAFT_VOCAB)
    export_medusa(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    draft_what_may_not_be(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="head 1 gives other logits"):
        check_medusa(tmp_path, head)


def test_the_check_is_part_of_the_export(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = module._tensors

    def wrong(head: MedusaHeads, token_map: bool) -> dict[str, torch.Tensor]:
        found = tensors(head, token_map)
        swap_heads(found)
        return found

    monkeypatch.setattr(module, "_tensors", wrong)
    with pytest.raises(ValueError, match="gives other logits"):
        export_medusa(make_head(target), tmp_path / "out")


# Damaged folders


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, r"no config of Medusa heads"),
        ({"num_heads": 4}, r"missing blocks\.3\.layers\.0\.bias \(32,\)"),
        ({"num_heads": 2}, r"unknown blocks\.2\.layers\.0\.bias"),
        ({"num_heads": "3"}, r"lacks num_heads"),
        ({"hidden_size": 16}, r"is \(32,\), expected \(16,\)"),
        ({"medusa_fc_bias": False}, r"unknown blocks\.0\.layers\.0\.bias"),
        ({"original_lm_head": False}, r"missing lm_heads\.1\.weight"),
        ({"truncated_vocab_size": 264}, r"unknown token_map"),
        ({"vocab_size": 100}, r"token_map must be different ids below 100"),
        ({"truncated_vocab_size": None}, r"lacks truncated_vocab_size"),
    ],
)
def test_config_must_fit(changes: dict[str, Any], message: str, target: Target, tmp_path: Path) -> None:
    export_medusa(make_head(target, DRAFT_VOCAB), tmp_path, token_map=True)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        read_medusa(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"text"'])
def test_config_must_be_json(text: str, target: Target, tmp_path: Path) -> None:
    export_medusa(make_head(target), tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is no "):
        read_medusa(tmp_path)


def test_files_cut_short_or_missing(target: Target, tmp_path: Path) -> None:
    export_medusa(make_head(target), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"damaged or cut short"):
        read_medusa(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        read_medusa(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json is no readable JSON"):
        read_medusa(tmp_path)
