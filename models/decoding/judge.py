"""From one target pass to what it emits: probabilities, the rule's verdict, flags, log-probabilities and certificate.

Stands between the loop (`decoder`), which runs models, and the rules (`verification`), which are pure functions.

Shape suffixes: B rows, K drafted tokens, T = K + 1 places, V vocabulary, H hidden.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..drafters.base import Draft
from ..sampling import SamplingParams, transform_logits
from ..verification.base import Block, Rule, Verdict
from ..verification.token import verify_greedy
from .rows import Emission, Row, TokenLogprobs, TokenVerdict

# What rounding could add to the sum of a block's distances stays within it.
ALMOST_ONE = 1.0 - 2.0**-50


@dataclass(frozen=True)
class Judgement:
    """What came of one pass. `block` is what the rule saw; None where the decoding is greedy and no rule was asked."""

    verdict: Verdict
    emissions: list[Emission]
    block: Block | None

    @property
    def ill_rows(self) -> list[int]:
        """Rows whose pass was no number at some place, kept or not."""
        return [row for row, emission in enumerate(self.emissions) if emission.met_ill]


class Judge:
    """Applies one rule, within a budget for each sequence.

    distance_budget: most that a sequence's certificate may reach; 0 is lossless, inf leaves the rule alone.
    """

    def __init__(self, rule: Rule, distance_budget: float = math.inf) -> None:
        """Raises ValueError for a budget that is no number of at least 0."""
        if not distance_budget >= 0.0:
            raise ValueError(f"distance_budget={distance_budget}: must be at least 0; inf leaves the rule alone.")
        self.rule = rule
        self.distance_budget = distance_budget

    def judge(
        self,
        rows: Sequence[Row],
        logits_BTV: Tensor,
        raw_BTV: Tensor,
        draft: Draft,
        num_drafted: Sequence[int],
        uniforms_BU: Tensor | None,
        sampling: SamplingParams,
        hidden_BTH: Tensor,
    ) -> Judgement:
        """The verdict on a block (K >= 0), and what each row emits.

        logits_BTV: after penalties; raw_BTV: before them. num_drafted: tokens of each row that count. uniforms_BU: at
        least K + 1 float64 numbers a row, the last one for the token after the accepted ones; None when greedy.
        """
        num_drafted_B = torch.tensor(num_drafted, device=logits_BTV.device)
        is_ill_BT = ~logits_BTV.amax(dim=-1).isfinite()  # NaN, +inf, or nothing but -inf
        probs_BTV, block = None, None
        if uniforms_BU is None:
            tokens_BT = logits_BTV.argmax(dim=-1).masked_fill(is_ill_BT, -1)  # -1 equals no drafted token
            verdict = verify_greedy(tokens_BT, draft.tokens_BK, num_drafted_B)
        else:
            probs_BTV = transform_logits(logits_BTV, sampling)
            block = Block(
                probs_BTV,
                draft.probs_BKV,
                draft.tokens_BK,
                _before_nan(draft, num_drafted_B),
                uniforms_BU[:, : draft.tokens_BK.shape[1]],
                uniforms_BU[:, -1],
                self._budget(rows, logits_BTV.device),
                hidden_BTH,
                draft.hidden_BKH,
            )
            verdict, num_drafted_B = self.rule.verify(block), block.num_drafted_B
        emissions = make_emissions(verdict, draft.tokens_BK, num_drafted_B, is_ill_BT, is_ill_BT.any(dim=1))
        if any(row.wants_logprobs for row in rows):
            emissions = with_logprobs(emissions, verdict, raw_BTV, probs_BTV, self.rule.knows_law)
        return Judgement(verdict, emissions, block)

    def _budget(self, rows: Sequence[Row], device: torch.device) -> Tensor | None:
        if self.rule.is_lossless or self.distance_budget == math.inf:
            return None
        left = [max(0.0, self.distance_budget - row.certificate) * ALMOST_ONE for row in rows]
        return torch.tensor(left, dtype=torch.float64, device=device)


def _before_nan(draft: Draft, num_drafted_B: Tensor) -> Tensor:
    """Drafted tokens before the first whose q is not a distribution. Which places these are, no drawn token decides."""
    if draft.probs_BKV is None or draft.probs_BKV.shape[1] == 0:
        return num_drafted_B
    is_good_BK = ~draft.probs_BKV.amax(dim=-1).isnan()
    return torch.minimum(num_drafted_B, is_good_BK.long().cumprod(dim=1).sum(dim=1))


def make_emissions(
    verdict: Verdict, draft_tokens_BK: Tensor, num_drafted_B: Tensor, is_ill_BT: Tensor, met_ill_B: Tensor
) -> list[Emission]:
    """One a row, brought to the CPU. is_ill_BT: places without a law; met_ill_B: rows whose pass had one anywhere."""
    is_ill_B = is_ill_BT.gather(1, verdict.num_accepted_B[:, None])[:, 0]
    columns = [verdict.num_accepted_B, verdict.next_token_B, num_drafted_B, verdict.is_bonus_B.long(), is_ill_B.long()]
    columns.append(met_ill_B.long())
    numbers = torch.stack(columns, dim=1).tolist()
    drafted = draft_tokens_BK.tolist()
    distances = verdict.distances_BK.tolist() if verdict.distances_BK is not None else None
    relaxed = verdict.relaxed_BK.tolist() if verdict.relaxed_BK is not None else None
    emissions = []
    for b, (num_accepted, next_token, num_drafted, is_bonus, is_ill, met_ill) in enumerate(numbers):
        verdicts: list[TokenVerdict] = ["accepted"] * num_accepted
        if relaxed is not None:
            verdicts = ["relaxed" if flag else "accepted" for flag in relaxed[b][:num_accepted]]
        tokens = drafted[b][:num_accepted]
        if not is_ill:
            tokens.append(next_token)
            verdicts.append("bonus" if is_bonus else "recovered")
        emissions.append(
            Emission(
                tokens,
                verdicts,
                num_drafted,
                num_accepted,
                [] if distances is None else distances[b][: min(num_accepted + 1, num_drafted)],
                is_invalid=bool(is_ill),
                met_ill=bool(met_ill),
            )
        )
    return emissions


def with_logprobs(
    emissions: list[Emission], verdict: Verdict, raw_BTV: Tensor, probs_BTV: Tensor | None, knows_law: bool
) -> list[Emission]:
    """The same with log-probabilities. probs_BTV None: greedy, where p and nu give all mass to the emitted token."""
    width = raw_BTV.shape[1]
    padded = [emission.tokens + [0] * (width - len(emission.tokens)) for emission in emissions]
    tokens_BT1 = torch.tensor(padded, device=raw_BTV.device)[..., None]
    model_BT = (raw_BTV.gather(2, tokens_BT1)[..., 0] - raw_BTV.logsumexp(dim=-1)).tolist()
    target_BT = (
        torch.zeros(tokens_BT1.shape[:2])
        if probs_BTV is None
        else probs_BTV.gather(2, tokens_BT1)[..., 0].double().log()
    )
    verify_BT = target_BT if verdict.verify_probs_BT is None else verdict.verify_probs_BT.log()
    target, verify = target_BT.tolist(), verify_BT.tolist()
    return [
        replace(
            emission,
            logprobs=[
                TokenLogprobs(model_BT[b][place], target[b][place], verify[b][place] if knows_law else None)
                for place in range(len(emission.tokens))
            ],
        )
        for b, emission in enumerate(emissions)
    ]
