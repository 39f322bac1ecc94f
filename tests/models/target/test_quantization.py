"""Quantised targets: what is refused anywhere, and, where the packages are, that heads train on them and decode."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from models.checkpoint import load_heads, read_target_quantization, save_heads
from models.decoding.decoder import Decoder
from models.decoding.reference import decode_plainly
from models.decoding.rows import GenerationParams
from models.drafters.heads import HeadsDrafter
from models.drafters.model import load_draft
from models.heads import HEAD_KINDS, HeadOptions, build_head
from models.target import quantization as quantization_module
from models.target.model import Target, TargetOptions, load_target
from models.target.placement import plain_copy
from models.target.quantization import INT8, NF4, NONE, is_quantized, plain_tensors
from models.target.tiny import make_tiny_target
from scripts.generate import choose_target, make_parser
from tests.models.decoding.scripted import random_prompts
from tests.train.test_mtp import make_config
from train.distill.cut import cut_layers
from train.heads.trainer import require_unchanged
from train.mtp import train_heads

KINDS = (INT8, NF4)
# Largest gap of quantised logits to plain ones, which are of order 10 in this model: rounding, not another model.
LARGEST_GAP = {INT8: 0.5, NF4: 4.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for blocks of 64 weights."""
    folder = tmp_path_factory.mktemp("model")
    tiny = make_tiny_target(hidden_size=128, intermediate_size=256, tie_word_embeddings=False)
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path, kind: str, dtype: str = "float32") -> Target:
    if kind != NONE:
        pytest.importorskip(quantization_module.PACKAGES[kind])
    return load_target(TargetOptions(name=str(folder), quantization=kind, dtype=dtype, device="cpu"))


# Anywhere


def test_unknown_names(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.quantization='int3' is unknown; choose one of none, int8, nf4"):
        load(folder, NONE) and load_target(TargetOptions(name=str(folder), quantization="int3"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_package_is_named(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded."""
    monkeypatch.setattr(quantization_module, "find_spec", lambda name: None)
    package = quantization_module.PACKAGES[kind]
    with pytest.raises(ValueError, match=rf"not installed: pip install 'foretoken\[{package}\]'"):
        load_target(TargetOptions(name="no/such-model", quantization=kind))


def test_a_plain_layer_is_copied_as_it_is() -> None:
    """Nothing is computed anew where nothing is quantised."""
    target = make_tiny_target(dtype="bfloat16")
    layer = target.layers()[0]
    copied = plain_copy(layer)
    assert not any(is_quantized(module) for module in layer.modules())
    for (name, tensor), (_, other) in zip(layer.named_parameters(), copied.named_parameters(), strict=True):
        assert other is not tensor
        assert torch.equal(tensor, other), name
    assert [name for name, _ in plain_tensors("a", layer.self_attn.q_proj.weight)] == ["a"]


class Doubled(nn.Linear):
    """Holds its weight in another form, as a quantised layer does: in whole numbers of halves."""

    compute_dtype = torch.float32

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None)
        self.weight = nn.Parameter((2 * plain.weight).round().to(torch.int8), requires_grad=False)
        self.bias = plain.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.float() / 2, self.bias)


@pytest.mark.parametrize("bias", [False, True])
def test_a_copy_is_what_the_layer_does(bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 5, bias)
    with torch.no_grad():
        plain.weight.mul_(20)
    layer = nn.Sequential(nn.Linear(6, 6), Doubled(plain))
    copied = plain_copy(layer)
    assert [type(part) for part in copied] == [nn.Linear, nn.Linear]
    torch.testing.assert_close(copied[1].weight.data, layer[1].weight.float() / 2)  # with a bias: up to its rounding
    x = torch.randn(4, 6)
    torch.testing.assert_close(copied(x), layer(x))
    assert torch.equal(copied[0].weight, layer[0].weight)
    assert copied[0].weight is not layer[0].weight


def test_random_weights_and_adapters_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization_module, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match=r"model\.quantization=int8 with model\.source=random: leave it out"):
        load_target(TargetOptions(name="tiny", source="random", quantization=INT8))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ValueError, match="cannot be merged into quantised weights"):
        load_target(TargetOptions(name=str(tmp_path), quantization=INT8))


def test_a_draft_is_cut_from_plain_weights() -> None:
    target = make_tiny_target()
    target.quantization = INT8
    with pytest.raises(ValueError, match=r"cut\.layers=1 with model\.quantization=int8"):
        cut_layers(target, 1)


def test_a_checkpoint_of_another_quantisation_is_refused(tmp_path: Path) -> None:
    """Older checkpoints, which say nothing of it, are of plain targets."""
    target = make_tiny_target()
    save_heads(tmp_path, build_head(target, HeadOptions("medusa", 2)))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config["target"].pop("quantization") == NONE
    path.write_text(json.dumps(config))
    assert read_target_quantization(tmp_path) == NONE
    load_heads(tmp_path, target)
    target.quantization = NF4
    with pytest.raises(ValueError, match="quantization is nf4, expected none"):
        load_heads(tmp_path, target)


# With the packages


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_model_rounded(kind: str, dtype: str, folder: Path) -> None:
    """Linear layers are quantised, all else is as it was; the logits are near the plain ones, and not the same."""
    target, plain = load(folder, kind, dtype), load(folder, NONE, dtype)
    before = {name: tensor.clone() for name, tensor in parts_of(target).items()}
    assert target.quantization == kind
    assert target.dtype == plain.dtype == getattr(torch, dtype)
    assert all(is_quantized(layer.mlp.up_proj) and is_quantized(layer.self_attn.q_proj) for layer in target.layers())
    assert not is_quantized(target.output_head)
    assert torch.equal(target.output_head.weight, plain.output_head.weight)
    ids = torch.arange(3, 40)[None]
    gap = (target.logits(target.hidden(ids)) - plain.logits(plain.hidden(ids))).abs().max().item()
    assert 0.01 < gap < LARGEST_GAP[kind]
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    # Neither passes nor looking at the weights changes them.
    after = parts_of(target)
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    again = (target.logits(target.hidden(ids)) - plain.logits(plain.hidden(ids))).abs().max().item()
    assert again == gap


def parts_of(target: Target) -> dict[str, torch.Tensor]:
    return dict(part for item in target.model.state_dict().items() for part in plain_tensors(*item))


@pytest.mark.parametrize("kind", KINDS)
def test_fingerprint(kind: str, folder: Path) -> None:
    """The same for each loading; another than the plain weights'; and it hears of a change in one quantised layer."""
    target = load(folder, kind)
    fingerprint = target.fingerprint()
    assert load(folder, kind).fingerprint() == fingerprint
    assert load(folder, NONE).fingerprint() != fingerprint
    require_unchanged(target, fingerprint)
    layer = target.layers()[1].mlp.down_proj
    numbers = layer.weight.qdata if kind == INT8 else layer.weight.data
    assert not numbers.is_floating_point()
    with torch.no_grad():
        numbers.view(-1)[:8] = numbers.view(-1)[8:16].clone() + 1
    with pytest.raises(AssertionError, match="weights have changed"):
        require_unchanged(target, fingerprint)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_layer_is_plain_and_does_the_same(kind: str, folder: Path) -> None:
    target = load(folder, kind)
    layer = target.layers()[-1].mlp
    copied = plain_copy(layer)
    assert not any(is_quantized(module) for module in copied.modules())
    x = torch.randn(7, 128)
    torch.testing.assert_close(copied(x), layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head_kind", HEAD_KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_train_and_decode(kind: str, head_kind: str, folder: Path, tmp_path: Path) -> None:
    """From prompts to a checkpoint; greedy decoding is the quantised target's own, token for token, also batched."""
    target = load(folder, kind)
    options = TargetOptions(name=str(folder), quantization=kind, dtype="float32", device="cpu")
    config = replace(make_config(tmp_path), model=options, heads=HeadOptions(kind=head_kind, num_draft_tokens=3))
    assert train_heads(config) >= 1.0
    head = load_heads(config.paths.heads, target)
    assert head.state_dict().keys() == build_head(target, head.options).state_dict().keys()
    assert all(tensor.is_floating_point() for tensor in head.state_dict().values())
    prompts = random_prompts(5, longest=20, seed=3)
    results = Decoder(target, HeadsDrafter(head), 3).generate(prompts, GenerationParams(24), max_batch_size=3)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == decode_plainly(target, prompt, 24)
    with pytest.raises(ValueError, match=f"quantization is none, expected {kind}"):
        load_heads(config.paths.heads, load(folder, NONE))
    assert read_target_quantization(Path(config.paths.heads)) == kind
    assert choose_target(make_parser().parse_args([config.paths.heads])).quantization == kind


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_says_the_same(kind: str, folder: Path) -> None:
    """`generate` on the quantised model, greedy, token for token."""
    target = load(folder, kind)
    for prompt in random_prompts(3, longest=20, seed=4):
        ids = target.model.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0, attention_mask=None
        )
        assert decode_plainly(target, prompt, 16) == ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_model_stays_plain(kind: str, folder: Path) -> None:
    target = load(folder, kind)
    options = TargetOptions(name=str(folder), quantization=kind, dtype="float32", device="cpu", draft=str(folder))
    assert load_draft(options, target).quantization == NONE
