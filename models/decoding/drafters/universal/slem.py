"""SLEM, string-level exact match: draft text, and let the target's tokenizer say which tokens it is (Timor et al. 2025,
arXiv 2502.05202, algorithm 2).

The drafted tokens carry no distribution over the target's ids, so they are judged as certain ones, q = one-hot: kept
with probability p(x). The paper draws them from the draft model; here they are its most likely ones at any temperature,
since sum_x p(x) q(x) is at most p at its own most likely token.

Shape suffixes: B rows, H the draft model's hidden size, D its vocabulary.
"""

import math

import torch
from torch import Tensor

from models.decoding.drafters.base import Draft
from models.decoding.drafters.universal.base import UniversalDrafter, UniversalState
from models.decoding.drafters.universal.translation import Transcript
from models.decoding.processors import BlockProcessor
from models.decoding.sampling import SamplingParams

MAX_STEPS_PER_TOKEN = 8  # most ids of the draft model that are drafted for one of the target's


class StringExactMatch(UniversalDrafter):
    """Drafts the text that the draft model finds most likely."""

    method = "slem"

    @torch.no_grad()
    def propose(
        self,
        state: UniversalState,
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
    ) -> Draft:
        """See `Drafter.propose`. `processor` is not asked: it knows the target's ids alone."""
        num_steps = [_num_steps(text, num_draft_tokens) for text in state.texts]
        is_on = self._make_room(state, num_steps)
        drafted: list[list[int]] = [[] for _ in state.texts]
        if any(is_on):
            self._draft_text(state, num_steps, is_on, drafted)
        rows = [self._to_target(text, ids, num_draft_tokens) for text, ids in zip(state.texts, drafted, strict=True)]
        width = max(map(len, rows))
        tokens_BK = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.draft.device)
        return Draft(tokens_BK.long(), counts=[len(row) for row in rows])

    def _draft_text(
        self, state: UniversalState, num_steps: list[int], is_on: list[bool], drafted: list[list[int]]
    ) -> None:
        """Append num_steps[b] of the draft model's ids to row b's list, fewer where one of them is no text."""
        hidden_BH = self._read(state, is_on)
        while True:
            ids_B = self._logits(hidden_BH).argmax(dim=-1)
            for row, index in enumerate(ids_B.tolist()):
                if is_on[row]:
                    drafted[row].append(index)
            is_on = [
                on and len(ids) < steps and self.translator.spelling.spelled[ids[-1]] is not None
                for on, ids, steps in zip(is_on, drafted, num_steps, strict=True)
            ]
            if not any(is_on):
                return
            hidden_BH = self._step(state, ids_B, is_on)

    def _to_target(self, text: Transcript, drafted: list[int], num_draft_tokens: int) -> list[int]:
        """The target's ids for what was drafted, a closing special token included where the target has one."""
        spelling, closing = self.translator.spelling, []
        if drafted and spelling.spelled[drafted[-1]] is None:
            special = self.translator.special_to_target.get(drafted[-1])
            drafted, closing = drafted[:-1], [] if special is None else [special]
        data = spelling.spell(drafted) or b""
        return [*self.translator.to_target(text, data), *closing][:num_draft_tokens]


def _num_steps(text: Transcript, num_draft_tokens: int) -> int:
    """Ids of the draft model that are about num_draft_tokens of the target's, going by the text so far."""
    ratio = (len(text.ids) + text.num_dropped) / max(1, text.num_target_tokens)
    return math.ceil(num_draft_tokens * min(max(ratio, 1.0), MAX_STEPS_PER_TOKEN))
