"""Distillation losses: their values, their gradients, and that chunks, families and padded heads change nothing."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.target.model import Target
from models.target.tiny import FAMILIES, make_tiny_target
from train.distill.losses import LOSSES, DistillOptions, answer_places, distill_loss, divergence, log_probs

# Float32 sums in another order.
GRADIENT_TOLERANCE = 1e-5
NUM_POSITIONS = 11


def random_log_probs(seed: int, shape: tuple[int, ...] = (50, 7)) -> Tensor:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    return logits.log_softmax(dim=-1)


def plain_value(loss: str, p: Tensor, q: Tensor, beta: float) -> Tensor:
    """From probabilities, as the papers have them."""
    if loss == "kl":
        return F.kl_div(q.log(), p, reduction="none").sum(-1)
    if loss == "reverse_kl":
        return F.kl_div(p.log(), q, reduction="none").sum(-1)
    if loss == "tv":
        return (p - q).abs().sum(-1) / 2
    m = beta * p + (1 - beta) * q
    return beta * F.kl_div(m.log(), p, reduction="none").sum(-1) + (1 - beta) * F.kl_div(
        m.log(), q, reduction="none"
    ).sum(-1)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_values(loss: str, beta: float) -> None:
    log_p, log_q = random_log_probs(0), random_log_probs(1)
    found = divergence(log_p, log_q, DistillOptions(loss, beta))
    torch.testing.assert_close(found, plain_value(loss, log_p.exp(), log_q.exp(), beta), atol=1e-12, rtol=1e-12)
    assert (found > 0).all()
    same = divergence(log_p, log_p.clone(), DistillOptions(loss, beta))
    torch.testing.assert_close(same, torch.zeros_like(same), atol=1e-12, rtol=0)


def test_bounds_hold_where_the_two_share_nothing() -> None:
    """The bounded losses reach their bound; reverse KL and KL grow without one, and stay finite."""
    log_p = torch.tensor([[0.0, -200.0]], dtype=torch.float64)
    log_q = log_p.flip(-1)
    found = {loss: divergence(log_p, log_q, DistillOptions(loss, 0.3)).item() for loss in LOSSES}
    assert found["tv"] == pytest.approx(1.0, abs=1e-12)
    assert found["jsd"] == pytest.approx(-0.3 * math.log(0.3) - 0.7 * math.log(0.7), abs=1e-12)
    assert found["kl"] == pytest.approx(200.0)
    assert found["reverse_kl"] == pytest.approx(200.0)


def test_kl_and_its_reverse_are_not_swapped() -> None:
    """KL(p | q) charges a draft that misses what the target likes; the reverse one that likes what it must not."""
    p, narrow = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.999, 0.001]])
    forward, reverse = (divergence(p.log(), narrow.log(), DistillOptions(loss)).item() for loss in LOSSES[:2])
    assert forward > 2 * reverse


def make_pair(family: str = "llama", train_head: bool = True) -> tuple[Target, Target, Tensor, Tensor]:
    """Target, draft, and hidden states of both."""
    target, draft = make_tiny_target(0, family=family), make_tiny_target(1, family=family)
    draft.output_head.weight.requires_grad_(train_head)
    generator = torch.Generator().manual_seed(2)
    teacher, states = (torch.randn(NUM_POSITIONS, target.hidden_size, generator=generator) for _ in range(2))
    return target, draft, teacher, states.requires_grad_()


def plain_loss(target: Target, draft: Target, teacher: Tensor, states: Tensor, options: DistillOptions) -> Tensor:
    """All positions at once, by autograd."""
    p = target.logits(teacher)[:, : target.num_tokens].softmax(-1)
    q = draft.finish_logits(draft.output_head(states)).float()[:, : draft.num_tokens].softmax(-1)
    return plain_value(options.loss, p[:, : q.shape[1]], q, options.jsd_beta).sum()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_chunks_are_those_of_the_whole(loss: str, family: str) -> None:
    """In the states and in a trained output head, for chunks that divide the positions and that do not."""
    target, draft, teacher, states = make_pair(family)
    weight = draft.output_head.weight
    whole = plain_loss(target, draft, teacher, states, DistillOptions(loss))
    expected = torch.autograd.grad(3 * whole, [states, weight])
    for rows in (1, 4, NUM_POSITIONS, 100):
        options = DistillOptions(loss, chunk_elements=rows * draft.vocab_size)
        sums = distill_loss(target, draft, teacher, states, options)
        assert sums.total.item() == pytest.approx(whole.item(), rel=1e-5)
        found = torch.autograd.grad(3 * sums.total, [states, weight])
        for ours, theirs in zip(found, expected, strict=True):
            scale = theirs.abs().max().item()
            torch.testing.assert_close(ours, theirs, atol=GRADIENT_TOLERANCE * scale, rtol=0)


def test_a_frozen_head_gets_no_gradient() -> None:
    target, draft, teacher, states = make_pair(train_head=False)
    distill_loss(target, draft, teacher, states, DistillOptions()).total.backward()
    assert states.grad is not None
    assert draft.output_head.weight.grad is None
    assert target.output_head.weight.grad is None


def test_sums_beside_the_loss() -> None:
    """The overlap is the probability that lossless verification keeps a draft: sum_x q(x) min(1, p(x) / q(x))."""
    target, draft, teacher, states = make_pair()
    sums = distill_loss(target, draft, teacher, states, DistillOptions(chunk_elements=3 * draft.vocab_size))
    p = target.logits(teacher)[:, : target.num_tokens].softmax(-1)
    q = draft.logits(states)[:, : draft.num_tokens].softmax(-1)
    assert sums.overlap.item() == pytest.approx((q * (p / q).clamp(max=1)).sum().item(), rel=1e-5)
    assert sums.agreed.item() == (p.argmax(-1) == q.argmax(-1)).sum().item()
    assert not sums.overlap.requires_grad


@pytest.mark.parametrize("loss", LOSSES)
def test_heads_padded_to_other_sizes(loss: str) -> None:
    """Rows of an output head that only pad it are in neither distribution, however large their logits are."""
    target, draft, teacher, states = make_pair(train_head=False)
    expected = distill_loss(target, draft, teacher, states, DistillOptions(loss)).total
    wide = make_tiny_target(1, vocab_size=draft.vocab_size + 40)
    with torch.no_grad():
        for padded, plain in ((wide, draft),):
            padded.output_head.weight[: plain.vocab_size] = plain.output_head.weight
            padded.output_head.weight[plain.num_tokens :] = 50.0
        target.output_head.weight[target.num_tokens :] = 50.0
    found = distill_loss(target, wide, teacher, states, DistillOptions(loss)).total
    torch.testing.assert_close(found, expected)


def test_tokens_that_the_draft_lacks_keep_their_mass() -> None:
    """p is normalised over the target's tokens, so what the draft cannot draft counts as rejected."""
    target, draft, teacher, states = make_pair(train_head=False)
    draft.num_tokens = 100
    log_p, log_q = log_probs(target, draft, teacher, states)
    full = target.logits(teacher)[:, : target.num_tokens].softmax(-1)
    torch.testing.assert_close(log_p.exp(), full[:, :100])
    torch.testing.assert_close(log_q.exp().sum(-1), torch.ones(NUM_POSITIONS))
    loss = divergence(log_p, log_q, DistillOptions("tv"))
    torch.testing.assert_close(loss, 1 - torch.minimum(full[:, :100], log_q.exp()).sum(-1))


def test_answer_places() -> None:
    """Position t is where token t + 1 is drawn; a mask's first column has no position before it."""
    mask = torch.tensor([[0, 0, 1, 1, 0], [1, 0, 0, 1, 1]]).bool()
    rows, columns = answer_places(mask)
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 2), (1, 3)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "hinge"}, r"distil\.loss='hinge' is unknown; choose one of kl, reverse_kl, tv, jsd"),
        ({"jsd_beta": 1.0}, r"distil\.jsd_beta=1\.0 must lie in \(0, 1\)"),
        ({"on_policy": 1.5}, r"distil\.on_policy=1\.5 must lie in \[0, 1\]"),
        ({"on_policy_temperature": 0.0}, r"distil\.on_policy_temperature=0\.0 must be above 0"),
        ({"num_draft_tokens": 0}, r"distil\.num_draft_tokens=0 must be at least 1"),
        ({"max_heldout": -1}, r"distil\.max_heldout=-1 must be at least 0"),
    ],
)
def test_options_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistillOptions(**changes)
