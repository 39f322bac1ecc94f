"""How well a draft model drafts for a target, on texts that are there already: nothing is decoded.

Shape suffixes: N positions, T time, K draft, L answer tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from models.sampling import SamplingParams, transform_logits
from models.target.model import Target
from train.data.examples import OnlineRows
from train.heads.acceptance import PROBS_ROWS, answer_spans, simulate
from train.heads.hidden_cache import CachedRows


@dataclass(frozen=True)
class Measured:
    """acceptance: mean of sum_x min(p(x), q(x)) over answer positions, p and q as they are sampled from (at temperature
    1 where decoding is greedy). agreement: share of positions with equal first guesses. mean_block_length and
    acceptance_at: of decoding these texts in blocks, as `train.heads.acceptance` simulates it."""

    acceptance: float
    agreement: float
    mean_block_length: float
    acceptance_at: list[float]


@dataclass(frozen=True)
class HeldOut:
    """The texts that drafts are measured on, and how the target decodes them."""

    target: Target
    rows: CachedRows | OnlineRows
    sampling: SamplingParams
    num_draft_tokens: int

    @torch.no_grad()
    def measure(self, draft: Target) -> Measured:
        """Acceptance of `draft` on the answers; the target's hidden states are made where a row has none."""
        target = self.target
        draft.model.eval()
        overlap, agreed, tables = [], [], []
        indices = tqdm(range(len(self.rows)), desc="held-out", unit="text", leave=False)
        for row in (self.rows[index] for index in indices):
            ids_T = row.input_ids.to(target.device)
            teacher_TH = target.hidden(ids_T[None])[0] if row.hidden is None else row.hidden.to(target.device)
            states_TH = draft.hidden(ids_T[None])[0]
            for first, end in answer_spans(row.loss_mask):
                before = slice(first - 1, end - 1)
                found = _rates(target, draft, teacher_TH[before], states_TH[before], ids_T[first:end], self.sampling)
                overlap.append(found[0])
                agreed.append(found[1])
                tables.append(block_table(found[2], self.num_draft_tokens))
        if not tables:
            raise ValueError(
                "no held-out text has an answer to draft; use more prompts, or another data.heldout_fraction"
            )
        simulated = simulate(tables)
        return Measured(
            torch.cat(overlap).mean().item(),
            torch.cat(agreed).mean().item(),
            simulated.mean_block_length,
            simulated.acceptance_at,
        )


def block_table(kept_L: Tensor, num_draft_tokens: int) -> Tensor:
    """[K, L] as `simulate` reads it: entry [k-1, i] is the probability that a block with root i keeps its k-th draft.

    A draft model reads the text alone, so that is the probability of place i + k, wherever the block began.
    """
    length = len(kept_L)
    steps = range(1, num_draft_tokens + 1)
    return torch.stack([F.pad(kept_L[step:], (0, min(step, length))) for step in steps])


def _rates(
    target: Target, draft: Target, teacher_NH: Tensor, states_NH: Tensor, labels_N: Tensor, sampling: SamplingParams
) -> Sequence[Tensor]:
    """sum_x min(p, q), equality of first guesses, and the probability that the label was an accepted draft, each [N]
    on the CPU."""
    drawn = replace(sampling, temperature=1.0) if sampling.is_greedy else sampling
    num_shared = min(target.num_tokens, draft.num_tokens)
    found: list[list[Tensor]] = [[], [], []]
    for teacher, states, labels in zip(*(x.split(PROBS_ROWS) for x in (teacher_NH, states_NH, labels_N)), strict=True):
        logits_p = target.logits(teacher)[:, : target.num_tokens]
        logits_q = draft.logits(states)[:, :num_shared]
        logits_q = F.pad(logits_q, (0, target.num_tokens - num_shared), value=-torch.inf)
        guess_q = logits_q.argmax(dim=-1)
        p_NV, q_NV = transform_logits(logits_p, drawn), transform_logits(logits_q, drawn)
        if sampling.is_greedy:
            kept = (guess_q == labels).float()
        else:
            p, q = (probs.gather(1, labels[:, None])[:, 0] for probs in (p_NV, q_NV))
            kept = (q / p.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1)
        agreed = (guess_q == logits_p.argmax(dim=-1)).float()
        for values, value in zip(found, (torch.minimum(p_NV, q_NV).sum(dim=-1), agreed, kept), strict=True):
            values.append(value.cpu())
    return [torch.cat(values) for values in found]
