"""The acceptance that heads would reach on text that the target wrote, without decoding it again.

For a chain draft and lossless verification, given that the emitted token was y, it was an accepted draft with
probability min(1, q(y) / p(y)): the share of y's mass that comes through acceptance. At temperature 0 this is 1 where
the head's first guess is y, else 0. From these probabilities a block's length and the number of blocks follow
exactly, by dynamic programming over where each block starts, so the figure is comparable to what the decoder counts
on that text.

Shape suffixes: K draft, L answer tokens, N places, R ranks, V vocabulary, H hidden (with the
layers that the head reads).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.heads import DraftHead
from models.sampling import SamplingParams, transform_logits

# Rows of full-vocabulary probabilities held at once.
PROBS_ROWS = 256
# Guesses of a head that are told apart by rank.
NUM_RANKS = 10


@dataclass(frozen=True)
class Simulated:
    """mean_block_length: emitted tokens a target pass. acceptance_at: of the blocks that drafted a k-th token, the
    share that kept it (and all before it)."""

    mean_block_length: float
    acceptance_at: list[float]


def answer_spans(loss_mask_T: Tensor) -> list[tuple[int, int]]:
    """(first, end) of every answer in a text: a conversation has several, and may go on after the last."""
    edges_T = torch.nn.functional.pad(loss_mask_T.int(), (1, 1)).diff()
    firsts, ends = ((edges_T == edge).nonzero()[:, 0].tolist() for edge in (1, -1))
    # Before a text's very first token there is no hidden state to draft from.
    return [(max(first, 1), end) for first, end in zip(firsts, ends, strict=True) if end > max(first, 1)]


def accept_probabilities(
    head: DraftHead, hidden_TH: Tensor, input_ids_T: Tensor, first: int, sampling: SamplingParams
) -> Tensor:
    """[K, L]: entry [k-1, i] is the probability that a block whose root is answer token i keeps its k-th draft, given
    that it kept those before; 0 past the answer's end.

    hidden and ids [T] end with the answer, which starts at `first` > 0.
    """
    length = len(input_ids_T) - first
    states_KLH = _answer_states(head, hidden_TH, input_ids_T, first)
    out_KL = torch.zeros(head.num_draft_tokens, length)
    for k in range(1, min(head.num_draft_tokens, length - 1) + 1):
        labels = input_ids_T[first + k :]
        teacher = head.target.get.final(hidden_TH[first - 1 + k : first - 1 + length])
        out_KL[k - 1, : length - k] = _kept(head, states_KLH[k - 1, : length - k], k, labels, teacher, sampling)
    return out_KL


def _answer_states(head: DraftHead, hidden_TH: Tensor, input_ids_T: Tensor, first: int) -> Tensor:
    """States [K, L, H] of blocks whose roots are the answer's tokens, each reading the text's own tokens."""
    # Root i stands at position first + i, so its block reads the hidden state before it.
    bases_1L = torch.arange(first - 1, len(input_ids_T) - 1, device=input_ids_T.device)[None]
    states_KLH: Tensor = head(hidden_TH[None], input_ids_T[None], bases_1L)[:, 0]
    return states_KLH


def rank_hits(head: DraftHead, hidden_TH: Tensor, input_ids_T: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """(hits [K, R], places [K]), int64: how often head k's r-th likeliest token was the answer's own.

    Over all roots of the answer behind which it has a k-th token; the head reads the answer's own tokens up to there,
    whether it would have guessed them or not. Arguments as for `accept_probabilities`.
    """
    length = len(input_ids_T) - first
    states_KLH = _answer_states(head, hidden_TH, input_ids_T, first)
    num_ranks = min(NUM_RANKS, head.vocab_size)
    hits_KR = torch.zeros(head.num_draft_tokens, num_ranks, dtype=torch.long)
    places_K = torch.tensor([max(0, length - k) for k in range(1, head.num_draft_tokens + 1)])
    for k in range(1, min(head.num_draft_tokens, length - 1) + 1):
        labels_N = input_ids_T[first + k :]
        for states, labels in zip(
            states_KLH[k - 1, : length - k].split(PROBS_ROWS), labels_N.split(PROBS_ROWS), strict=True
        ):
            logits = head.target.get.hide_padding(head.widen(head.logits(states, k)))
            is_hit_NR = logits.topk(num_ranks, dim=-1).indices == labels[:, None]
            hits_KR[k - 1] += is_hit_NR.sum(dim=0).cpu()
    return hits_KR, places_K


def accuracy_by_rank(counted: Iterable[tuple[Tensor, Tensor]]) -> list[list[float]]:
    """[k][r]: share of places where head k + 1's r-th guess is right, over many answers' `rank_hits`; 0 of no place."""
    hits, places = zip(*counted, strict=True)
    shares_KR = torch.stack(hits).sum(dim=0) / torch.stack(places).sum(dim=0).clamp(min=1)[:, None]
    return shares_KR.tolist()


def _kept(
    head: DraftHead, states_NH: Tensor, step: int, labels_N: Tensor, teacher_NH: Tensor, sampling: SamplingParams
) -> Tensor:
    """min(1, q(y) / p(y)) [N] on the CPU."""
    kept = []
    for states, labels, teacher in zip(*(x.split(PROBS_ROWS) for x in (states_NH, labels_N, teacher_NH)), strict=True):
        draft_logits = head.target.get.hide_padding(head.widen(head.logits(states, step)))
        if sampling.is_greedy:
            kept.append(draft_logits.argmax(dim=-1) == labels)
        else:
            q = transform_logits(draft_logits, sampling).gather(1, labels[:, None])[:, 0]
            logits = head.target.get.hide_padding(head.target.get.logits(teacher))
            p = transform_logits(logits, sampling).gather(1, labels[:, None])[:, 0]
            kept.append((q / p.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1))
    return torch.cat(kept).float().cpu()


def simulate(accept: Sequence[Tensor]) -> Simulated:
    """Expected decoding of texts with these acceptance probabilities, each [K, L]. The first token is the prefill's."""
    num_steps = accept[0].shape[0] if accept else 0
    emitted = blocks = 0.0
    drafted_at, kept_at = [0.0] * num_steps, [0.0] * num_steps
    for accept_KL in accept:
        table = accept_KL.tolist()
        length = accept_KL.shape[1]
        emitted += length - 1
        # starts[i]: probability that a block starts with root i. Blocks move forward alone, so one sweep is exact.
        starts = [0.0] * length
        starts[0] = 1.0
        for root in range(length - 1):
            reach = starts[root]
            blocks += reach
            for k in range(1, min(num_steps, length - 1 - root) + 1):
                drafted_at[k - 1] += starts[root]
                kept = reach * table[k - 1][root]
                starts[root + k] += reach - kept
                reach = kept
                kept_at[k - 1] += kept
            # All drafts kept: one more token from the target, unless the text is over.
            end = root + min(num_steps, length - 1 - root) + 1
            if end < length:
                starts[end] += reach
    rates = [kept / drafted if drafted else 0.0 for kept, drafted in zip(kept_at, drafted_at, strict=True)]
    return Simulated(emitted / blocks if blocks else 0.0, rates)
