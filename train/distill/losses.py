"""What a draft model loses by differing from its target: the divergences of DistillSpec, in chunks over positions.

With p the target's next-token distribution and q the draft's (Zhou et al. 2024, arXiv 2310.08461, section 4 and its
table of divergences):

  kl           sum_x p(x) log(p(x) / q(x))
  reverse_kl   sum_x q(x) log(q(x) / p(x))
  tv           1 - sum_x min(p(x), q(x)), the probability that a drafted token is rejected
  jsd          b KL(p || m) + (1 - b) KL(q || m) with m = b p + (1 - b) q (Agarwal et al. 2024, arXiv 2306.13649)

Gradients are made chunk by chunk during the forward pass, so that no N x V tensor of all positions ever exists.

Shape suffixes: N positions, H hidden, V tokens that both models have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.target.model import Target

LOSSES = ("kl", "reverse_kl", "tv", "jsd")
MAX_CHUNK_ELEMENTS = 2**23


@dataclass
class DistillOptions:
    """What the draft learns from, and what of it is trained.

    loss: kl, reverse_kl, tv or jsd; jsd_beta: the target's weight b in jsd. on_policy: share of the batches whose
    answers the draft writes itself, anew each time (0: the given text alone, 1: never). on_policy_temperature: of what
    it writes.
    train_embeddings: embeddings and output head, too; frozen they stay the starting model's. num_draft_tokens: length
    of the blocks in the held-out simulation. max_heldout: held-out texts that are used, 0 for all.
    chunk_elements: logits held at once (float32).
    """

    loss: str = "kl"
    jsd_beta: float = 0.5
    on_policy: float = 0.0
    on_policy_temperature: float = 1.0
    train_embeddings: bool = False
    num_draft_tokens: int = 4
    max_heldout: int = 64
    chunk_elements: int = MAX_CHUNK_ELEMENTS

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"distil.loss={self.loss!r} is unknown; choose one of {', '.join(LOSSES)}")
        if not 0 < self.jsd_beta < 1:
            raise ValueError(f"distil.jsd_beta={self.jsd_beta} must lie in (0, 1)")
        if not 0 <= self.on_policy <= 1:
            raise ValueError(f"distil.on_policy={self.on_policy} must lie in [0, 1]")
        if not self.on_policy_temperature > 0:
            raise ValueError(f"distil.on_policy_temperature={self.on_policy_temperature} must be above 0")
        for name, least in (("num_draft_tokens", 1), ("max_heldout", 0), ("chunk_elements", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"distil.{name}={getattr(self, name)} must be at least {least}")


@dataclass(frozen=True)
class DistillSums:
    """Sums over positions. total: the loss, differentiable. overlap: sum_x min(p, q). agreed: equal first guesses."""

    total: Tensor
    overlap: Tensor
    agreed: Tensor


def divergence(log_p_NV: Tensor, log_q_NV: Tensor, options: DistillOptions) -> Tensor:
    """The chosen loss [N] of each position, differentiable in log q. p may have mass on tokens that q lacks."""
    if options.loss == "kl":
        return (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(dim=-1)
    if options.loss == "reverse_kl":
        return (log_q_NV.exp() * (log_q_NV - log_p_NV)).sum(dim=-1)
    if options.loss == "tv":
        return 1 - torch.minimum(log_p_NV, log_q_NV).exp().sum(dim=-1)
    beta = torch.tensor(options.jsd_beta, dtype=log_p_NV.dtype, device=log_p_NV.device)
    log_m_NV = torch.logaddexp(log_p_NV + beta.log(), log_q_NV + (1 - beta).log())
    of_p_N = (log_p_NV.exp() * (log_p_NV - log_m_NV)).sum(dim=-1)
    of_q_N = (log_q_NV.exp() * (log_q_NV - log_m_NV)).sum(dim=-1)
    return beta * of_p_N + (1 - beta) * of_q_N


def log_probs(target: Target, draft: Target, teacher_NH: Tensor, states_NH: Tensor) -> tuple[Tensor, Tensor]:
    """log p and log q [N, V] in float32 from hidden states of each: p is normalised over all of the target's tokens,
    q over the V that the draft may draft. Differentiable in the draft's states and output head."""
    num_shared = min(target.num_tokens, draft.num_tokens)
    logits_q = draft.finish_logits(draft.output_head(states_NH)).float()[:, :num_shared]
    logits_p = target.logits(teacher_NH)[:, : target.num_tokens]
    return logits_p.log_softmax(dim=-1)[:, :num_shared], logits_q.log_softmax(dim=-1)


def distill_loss(
    target: Target, draft: Target, teacher_NH: Tensor, states_NH: Tensor, options: DistillOptions
) -> DistillSums:
    """The summed loss of N positions, differentiable in the draft's hidden states and its trained output head."""

    def loss_of(part: slice, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_p_NV, log_q_NV = log_probs(target, draft, teacher_NH[part], states)
        loss = divergence(log_p_NV, log_q_NV, options).sum()
        with torch.no_grad():
            overlap = torch.minimum(log_p_NV, log_q_NV).exp().sum()
            agreed = (log_p_NV.argmax(dim=-1) == log_q_NV.argmax(dim=-1)).sum()
        return loss, overlap, agreed

    rows = max(1, options.chunk_elements // draft.vocab_size)
    trained = [weight for weight in draft.output_head.parameters() if weight.requires_grad]
    return DistillSums(*_ChunkedLoss.apply(loss_of, rows, states_NH, *trained))


LossOf = Callable[[slice, Tensor], tuple[Tensor, Tensor, Tensor]]


class _ChunkedLoss(torch.autograd.Function):
    """Sums over chunks of `rows` positions, with their gradients in the states and in the weights that are passed."""

    @staticmethod
    def forward(ctx: Any, loss_of: LossOf, rows: int, states_NH: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        sums = states_NH.new_zeros(3, dtype=torch.float32)
        states_grad = torch.empty_like(states_NH)
        weight_grads = [torch.zeros_like(weight) for weight in weights]
        for start in range(0, len(states_NH), rows):
            part = slice(start, start + rows)
            with torch.enable_grad():
                states = states_NH[part].detach().requires_grad_()
                found = loss_of(part, states)
                grads = torch.autograd.grad(found[0], [states, *weights])
            sums += torch.stack([value.detach().float() for value in found])
            states_grad[part] = grads[0]
            for total, grad in zip(weight_grads, grads[1:], strict=True):
                total += grad
        ctx.save_for_backward(states_grad, *weight_grads)
        total, overlap, agreed = sums.unbind()
        ctx.mark_non_differentiable(overlap, agreed)
        return total, overlap, agreed

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *unused: Tensor) -> tuple[Any, ...]:
        return None, None, *(grad * grad_total.to(grad.dtype) for grad in ctx.saved_tensors)


def answer_places(loss_mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns [N] of the positions whose next token is part of an answer."""
    rows_N, columns_N = F.pad(loss_mask_BT[:, 1:], (0, 1)).nonzero(as_tuple=True)
    return rows_N, columns_N
