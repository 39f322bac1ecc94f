"""A draft cut from its target: which layers, that nothing else changes, and the least-squares start."""

import pytest
import torch
from torch import Tensor, nn

from models.target.model import Target
from models.target.tiny import FAMILIES, make_tiny_target
from train.distill.cut import RIDGE, cut_layers, fit_start, least_squares, spread_evenly

PLAIN_FAMILIES = ("llama", "mistral", "qwen3")


def make_texts(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 259, (length,), generator=generator) for length in (40, 25, 33, 40, 9)]


@pytest.mark.parametrize(
    ("num_layers", "num_kept", "expected"),
    [(30, 8, [0, 4, 8, 12, 17, 21, 25, 29]), (3, 2, [0, 2]), (5, 4, [0, 1, 3, 4]), (6, 1, [0]), (32, 3, [0, 16, 31])],
)
def test_layers_are_spread_evenly(num_layers: int, num_kept: int, expected: list[int]) -> None:
    assert spread_evenly(num_layers, num_kept) == expected


def test_no_layer_twice() -> None:
    for num_layers in range(2, 65):
        for num_kept in range(1, num_layers + 1):
            kept = spread_evenly(num_layers, num_kept)
            assert len(set(kept)) == num_kept
            assert kept == sorted(kept)
            assert 0 <= kept[0] <= kept[-1] < num_layers


def logits_without(target: Target, kept: list[int], ids: Tensor) -> Tensor:
    """The target's own logits where every layer but the kept hands on what it got."""
    handles = []
    for index, layer in enumerate(target.layers()):
        if index not in kept:
            skip = lambda module, inputs, output: (inputs[0], *output[1:]) if isinstance(output, tuple) else inputs[0]  # noqa: E731
            handles.append(layer.register_forward_hook(skip))
    logits = target.logits(target.hidden(ids))
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_kept", [1, 2, 3])
def test_a_cut_is_the_target_without_the_other_layers(family: str, num_kept: int) -> None:
    """Bit for bit, beyond the sliding windows, whatever kind of attention a layer has."""
    target = make_tiny_target(0, family=family, num_hidden_layers=5)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    draft = cut_layers(target, num_kept)
    ids = make_texts()[0][None]
    kept = spread_evenly(5, num_kept)
    assert len(draft.layers()) == num_kept
    assert torch.equal(draft.logits(draft.hidden(ids)), logits_without(target, kept, ids))
    types = getattr(target.config, "layer_types", None)
    if types is not None:
        assert draft.config.layer_types == [types[layer] for layer in kept]
    with torch.no_grad():
        for weight in draft.model.parameters():
            weight.fill_(0.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in target.model.state_dict().items())


def test_a_cut_decodes_as_the_target_does() -> None:
    """The same tokens end an answer; a tied head stays tied; bfloat16 becomes float32."""
    target = make_tiny_target(0, dtype="bfloat16")
    target.model.generation_config.eos_token_id = [2, 7]
    target.config.quantization_config = {"quant_method": "gguf"}
    draft = cut_layers(Target(target.model, target.tokenizer, "t"), 2)
    assert draft.eos_token_ids == (2, 7)
    assert draft.dtype == torch.float32
    assert draft.output_head.weight is draft.model.get_input_embeddings().weight
    assert torch.equal(draft.output_head.weight, target.output_head.weight.float())
    assert not hasattr(draft.config, "quantization_config")


@pytest.mark.parametrize("num_kept", [-1, 3, 4])
def test_a_cut_must_leave_something_out(num_kept: int) -> None:
    with pytest.raises(ValueError, match=rf"cut\.layers={num_kept} must be at least 1 and less than the target's 3"):
        cut_layers(make_tiny_target(0), num_kept)


# The start in closed form


def test_least_squares_is_the_minimum() -> None:
    """The gradient of the stated objective is zero there, in float64."""
    generator = torch.Generator().manual_seed(0)
    inner, wanted, weight = (torch.randn(60, n, generator=generator, dtype=torch.float64) for n in (9, 4, 1))
    weight = weight.abs()
    change = least_squares(inner, wanted, weight).requires_grad_()
    ridge = RIDGE * (weight * inner.square()).sum(0).mean()
    objective = (weight * (inner @ change.T - wanted).square()).sum() + ridge * change.square().sum()
    (gradient,) = torch.autograd.grad(objective, change)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-9, rtol=0)


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_layers_that_do_nothing_need_no_fit(family: str) -> None:
    """Where the layers left out add nothing, the cut is the target, and fitting it changes nothing."""
    target = make_tiny_target(0, family=family, num_hidden_layers=5)
    with torch.no_grad():
        for index in (1, 3):
            target.layers()[index].self_attn.o_proj.weight.fill_(0.0)
            target.layers()[index].mlp.down_proj.weight.fill_(0.0)
    draft = cut_layers(target, 3)
    before = {name: tensor.clone() for name, tensor in draft.model.state_dict().items()}
    fit_start(draft, target, make_texts())
    for name, tensor in draft.model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], atol=1e-4, rtol=0, msg=name)


def run_layer(target: Target, text: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """What the down projection of a layer reads [T, I], and what the layer puts out [T, H], for one text alone."""
    found = {}
    layer = target.layers()[index]
    handles = [
        layer.mlp.down_proj.register_forward_hook(lambda module, inputs, output: found.update(inner=inputs[0][0])),
        layer.register_forward_hook(
            lambda module, inputs, output: found.update(out=(output[0] if isinstance(output, tuple) else output)[0])
        ),
    ]
    target.hidden(text[None])
    for handle in handles:
        handle.remove()
    return found["inner"], found["out"]


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_a_fit_is_that_of_unpadded_texts(family: str) -> None:
    """Layer by layer: each matrix is the least-squares one for what the fitted layers before it put out, with the
    target's layer before the next kept one as the goal. Texts are run one by one."""
    target = make_tiny_target(0, family=family, num_hidden_layers=5)
    draft, plain = cut_layers(target, 3), cut_layers(target, 3)
    texts = make_texts()
    fit_start(draft, target, texts)
    for index, goal_layer in enumerate([1, 3, 4]):
        goals = torch.cat([run_layer(target, text, goal_layer)[1] for text in texts])
        inner, out = (torch.cat(parts) for parts in zip(*(run_layer(plain, t, index) for t in texts), strict=True))
        scale = goals.square().mean(dim=-1, keepdim=True).sqrt()
        gram = (inner / scale).T @ (inner / scale)
        ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
        change = torch.linalg.inv(gram.double() + ridge) @ ((inner / scale).T @ ((goals - out) / scale)).double()
        down = plain.layers()[index].mlp.down_proj
        with torch.no_grad():
            down.weight += change.T.float()
        fitted = draft.layers()[index].mlp.down_proj.weight
        torch.testing.assert_close(fitted, down.weight, atol=2e-3, rtol=0, msg=f"layer {index}")
        with torch.no_grad():
            down.weight.copy_(fitted)


def test_a_fit_brings_the_draft_nearer_on_other_texts() -> None:
    target = make_tiny_target(0, num_hidden_layers=5)
    ids = torch.cat([text[:9] for text in make_texts(7)]).view(5, 9)

    def gap(draft: Target) -> float:
        return (draft.hidden(ids) - target.hidden(ids)).square().mean().item()

    draft = cut_layers(target, 3)
    before = gap(draft)
    fit_start(draft, target, [torch.cat(make_texts(seed))[:100] for seed in range(20)])
    assert gap(draft) < 0.95 * before
    assert not any(module._forward_hooks for module in [*draft.model.modules(), *target.model.modules()])


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_family_that_normalises_what_the_mlp_gives_is_refused(family: str) -> None:
    target = make_tiny_target(0, family=family)
    with pytest.raises(ValueError, match=r"as it is \(relative gap .*\), so it cannot .*; set cut\.fit_tokens=0"):
        fit_start(cut_layers(target, 2), target, make_texts())


def test_a_layer_without_a_down_projection_is_refused() -> None:
    target = make_tiny_target(0)
    draft = cut_layers(target, 2)
    draft.layers()[1].mlp = nn.Identity()
    with pytest.raises(ValueError, match=r"has no mlp\.down_proj to fit; set cut\.fit_tokens=0"):
        fit_start(draft, target, make_texts())
