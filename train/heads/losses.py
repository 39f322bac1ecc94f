"""Draft-head losses, computed in chunks so that no K x N x V tensor ever exists.

p is the target's distribution at the position, q the head's. A head with a reduced draft vocabulary of D tokens has q
on those alone, while p stays normalised over all V tokens: what p holds outside can never be drafted.

  ce   -log q(label); 0 where the label cannot be drafted
  kl   sum_x p(x) log(p(x) / q(x)) over the draft vocabulary
  tv   1 - sum_x min(p(x), q(x)), the probability that a draft is rejected (Leviathan et al. 2023, arXiv 2211.17192)
  lk   -log sum_x min(p(x), q(x)), the same overlap with a gradient that does not fade when the overlap is small

`loss_and_gradient` has closed-form gradients; `reference_loss` is the plain form that tests hold it to.

Shape suffixes: K draft, N positions, H hidden, D vocabulary of the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.heads import DraftHead
from train.heads.targets import HeadTargets, draft_bases, line_up

# The overlap's logarithm is taken no lower than this, where the gradient of `lk` would only be noise.
MIN_OVERLAP = 1e-6
MAX_CHUNK_ELEMENTS = 2**22


@dataclass
class LossOptions:
    """Weights of the four losses, which the module describes, and of the heads.

    ce: weight of cross-entropy on the text. kl: weight of the forward KL to the target's distribution. tv: weight of
    the total variation. lk: weight of minus the logarithm of the overlap. beta: head k counts beta^(k-1), normalised to
    sum 1.
    chunk_elements: logits held at once (float32); peak memory is a few times this, whatever K and V are.
    """

    ce: float = 0.0
    kl: float = 1.0
    tv: float = 0.0
    lk: float = 0.0
    beta: float = 0.8
    chunk_elements: int = MAX_CHUNK_ELEMENTS

    def __post_init__(self) -> None:
        weights = {"ce": self.ce, "kl": self.kl, "tv": self.tv, "lk": self.lk}
        if min(weights.values()) < 0 or not any(weights.values()):
            raise ValueError(f"loss weights {weights} must be 0 or more, and one of them above 0")
        if not 0 < self.beta <= 1:
            raise ValueError(f"loss.beta={self.beta} must lie in (0, 1]")


@dataclass(frozen=True)
class HeadLoss:
    """total: sum over heads and positions, head weights applied, to be divided by the number of answer tokens.

    loss_K, correct_K, count_K: per head, the summed unweighted loss, right first guesses, and supervised positions.
    """

    total: Tensor
    loss_K: Tensor
    correct_K: Tensor
    count_K: Tensor


def head_weights(num_draft_tokens: int, beta: float) -> Tensor:
    """beta^(k-1), normalised: [K]."""
    weights = beta ** torch.arange(num_draft_tokens, dtype=torch.float32)
    return weights / weights.sum()


def head_loss(head: DraftHead, targets: HeadTargets, options: LossOptions) -> HeadLoss:
    """The weighted loss of all heads, differentiable in their states and, where trained, in their output heads.

    Gradients are made chunk by chunk during the forward pass, so that the backward pass only scales them.
    """
    num_steps = len(targets.states_KNH)
    weights = [head.output_weight(step) for step in range(1, num_steps + 1)]
    total, loss_K, correct_K = _ChunkedLoss.apply(targets.states_KNH, head, targets, options, *weights)
    return HeadLoss(total, loss_K, correct_K, targets.valid_KN.sum(dim=1))


def supervised_loss(
    model: nn.Module,
    head: DraftHead,
    hidden_BTH: Tensor,
    input_ids_BT: Tensor,
    loss_mask_BT: Tensor,
    log_normaliser_BT: Tensor | None,
    options: LossOptions,
) -> HeadLoss:
    """The loss of all heads on a batch. model: the head itself, or what wraps it for training.

    hidden_BTH: with the layers that the head reads, see `Target.hidden`.
    """
    bases_BS = draft_bases(loss_mask_BT)
    states_KBSH = model(hidden_BTH, input_ids_BT, bases_BS)
    final_BTH = head.target.get.final(hidden_BTH)
    targets = line_up(states_KBSH, bases_BS, final_BTH, input_ids_BT, loss_mask_BT, log_normaliser_BT)
    return head_loss(head, targets, options)


class _ChunkedLoss(torch.autograd.Function):
    """Loss and all gradients in one sweep over chunks of positions."""

    @staticmethod
    def forward(
        ctx: Any, states_KNH: Tensor, head: DraftHead, targets: HeadTargets, options: LossOptions, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_steps, num_positions, _ = states_KNH.shape
        scale_K = head_weights(num_steps, options.beta).to(states_KNH.device)
        states_grad = torch.empty_like(states_KNH) if ctx.needs_input_grad[0] else None
        weight_grads = [
            torch.zeros_like(w) if needed else None for w, needed in zip(weights, ctx.needs_input_grad[4:], strict=True)
        ]
        loss_K = states_KNH.new_zeros(num_steps, dtype=torch.float32)
        correct_K = torch.zeros_like(loss_K)
        labels_N = draft_labels(head, targets.labels_N)
        rows = max(1, options.chunk_elements // weights[0].shape[0])
        for start in range(0, num_positions, rows):
            part = slice(start, start + rows)
            teacher_ND = teacher_probs(head, targets, part)
            valid_KN = targets.valid_KN[:, part]
            for k in range(num_steps):
                states_NH = states_KNH[k, part]
                logits_ND, chain = _head_logits(head, states_NH, weights[k])
                loss_N, right_N, grad_ND = loss_and_gradient(logits_ND, teacher_ND, labels_N[part], options)
                loss_K[k] += loss_N[valid_KN[k]].sum()
                correct_K[k] += (right_N & valid_KN[k]).sum()
                grad_ND *= (scale_K[k] * valid_KN[k])[:, None]
                grad_ND = chain(grad_ND)
                if states_grad is not None:
                    states_grad[k, part] = grad_ND @ weights[k]
                if (weight_grad := weight_grads[k]) is not None:
                    weight_grad += grad_ND.T @ states_NH.to(grad_ND.dtype)
        ctx.save_for_backward(states_grad, *weight_grads)
        ctx.mark_non_differentiable(loss_K, correct_K)
        return (loss_K * scale_K).sum(), loss_K, correct_K

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *unused: Tensor) -> tuple[Any, ...]:
        states_grad, *weight_grads = ctx.saved_tensors
        scaled = [None if grad is None else grad * grad_total.to(grad.dtype) for grad in (states_grad, *weight_grads)]
        return (scaled[0], None, None, None, *scaled[1:])


def _head_logits(head: DraftHead, states_NH: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
    """Float32 logits [N, D], and what turns a gradient in them into one in the raw product, in the weight's dtype."""
    bias = head.frozen_bias(weight.dtype)
    raw = F.linear(states_NH.to(weight.dtype), weight, bias)
    if not head.target.get.changes_logits:
        return raw.float(), lambda grad: grad.to(weight.dtype)
    with torch.enable_grad():
        raw = raw.float().requires_grad_()
        finished = head.target.get.finish_logits(raw)
    return finished.detach(), lambda grad: torch.autograd.grad(finished, raw, grad)[0].to(weight.dtype)


def teacher_probs(head: DraftHead, targets: HeadTargets, part: slice) -> Tensor:
    """p over the head's vocabulary [N, D] in float32, normalised over the target's whole vocabulary."""
    hidden_NH = targets.teacher_NH[part]
    if head.draft_vocab is None:
        return head.target.get.logits(hidden_NH).softmax(dim=-1)
    logits_ND = head.frozen_logits(hidden_NH)
    if targets.log_normaliser_N is None:
        normaliser_N = head.target.get.logits(hidden_NH).logsumexp(dim=-1)
    else:
        normaliser_N = targets.log_normaliser_N[part]
    return (logits_ND - normaliser_N[:, None]).exp_()


def draft_labels(head: DraftHead, labels_N: Tensor) -> Tensor:
    """Labels as places in the head's vocabulary; -1 where a token cannot be drafted."""
    if head.draft_vocab is None:
        return labels_N
    places_N = torch.searchsorted(head.draft_vocab, labels_N).clamp(max=len(head.draft_vocab) - 1)
    return torch.where(head.draft_vocab[places_N] == labels_N, places_N, -1)


def loss_and_gradient(
    logits_ND: Tensor, p_ND: Tensor, labels_N: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [N], whether the first guess is the label [N], and the loss's gradient in the logits [N, D].

    With q = softmax(z), m = sum p and S = sum min(p, q): d ce = q - 1[label]; d kl = m q - p; d S = q (1[q < p] - sum
    of q where q < p), from which d tv = -d S and d lk = -d S / S.
    """
    right_N = logits_ND.argmax(dim=-1) == labels_N
    log_sum_N = logits_ND.logsumexp(dim=-1)
    q_ND = (logits_ND - log_sum_N[:, None]).exp_()
    loss_N = torch.zeros_like(log_sum_N)
    of_q_N1 = torch.zeros_like(log_sum_N)[:, None]  # the gradient's terms of the form (a number a row) * q
    grad_ND = torch.zeros_like(q_ND) if not options.kl else p_ND * -options.kl
    if options.kl:
        mass_N = p_ND.sum(dim=-1)
        entropy_N = torch.special.entr(p_ND).sum(dim=-1)
        loss_N += options.kl * (mass_N * log_sum_N - (p_ND * logits_ND).sum(dim=-1) - entropy_N)
        of_q_N1 = of_q_N1 + options.kl * mass_N[:, None]
    if options.tv or options.lk:
        below_ND = q_ND < p_ND
        overlap_N = torch.minimum(p_ND, q_ND).sum(dim=-1)
        slope_N = options.tv + options.lk / overlap_N.clamp(min=MIN_OVERLAP) * (overlap_N >= MIN_OVERLAP)
        loss_N += options.tv * (1 - overlap_N) - options.lk * overlap_N.clamp(min=MIN_OVERLAP).log()
        moved_ND = q_ND * below_ND
        of_q_N1 = of_q_N1 + (slope_N * moved_ND.sum(dim=-1))[:, None]
        grad_ND -= moved_ND * slope_N[:, None]
    if options.ce:
        known_N = labels_N >= 0
        index_N1 = labels_N.clamp(min=0)[:, None]
        loss_N += options.ce * known_N * (log_sum_N - logits_ND.gather(1, index_N1)[:, 0])
        of_q_N1 = of_q_N1 + options.ce * known_N[:, None]
        grad_ND.scatter_add_(1, index_N1, -options.ce * known_N[:, None].to(grad_ND.dtype))
    grad_ND += q_ND.mul_(of_q_N1)
    return loss_N, right_N, grad_ND


def reference_loss(head: DraftHead, targets: HeadTargets, options: LossOptions) -> Tensor:
    """The same total without chunks or closed forms, by autograd: K x N x V in memory."""
    num_steps = targets.states_KNH.shape[0]
    p_ND = teacher_probs(head, targets, slice(None))
    labels_N = draft_labels(head, targets.labels_N)
    total = torch.zeros((), device=p_ND.device)
    for k, weight in enumerate(head_weights(num_steps, options.beta).tolist()):
        log_q_ND = head.logits(targets.states_KNH[k], k + 1).log_softmax(dim=-1)
        overlap_N = torch.minimum(p_ND, log_q_ND.exp()).sum(dim=-1)
        loss_N = (
            options.ce * torch.where(labels_N >= 0, -log_q_ND.gather(1, labels_N.clamp(min=0)[:, None])[:, 0], 0.0)
            + options.kl * (torch.xlogy(p_ND, p_ND) - p_ND * log_q_ND).sum(dim=-1)
            + options.tv * (1 - overlap_N)
            - options.lk * overlap_N.clamp(min=MIN_OVERLAP).log()
        )
        total = total + weight * loss_N[targets.valid_KN[k]].sum()
    return total
