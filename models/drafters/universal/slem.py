"""SLEM, string-level exact match: draft text, and let the target's tokenizer say which tokens it is (Timor et al. 2025,
arXiv 2502.05202, algorithm 2).

The drafted tokens carry no distribution over the target's ids, so they are judged as certain ones, q = one-hot: kept
with probability p(x). The paper draws them from the draft model; here they are its most likely ones at any temperature:
a certain token is kept most often where p is largest, and that is the draft model's best guess of it. Beyond the paper,
the first id may begin inside the settled text (see `healing`).

Shape suffixes: B rows, H the draft model's hidden size, D its vocabulary.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...heads.base import last_kept
from ...processors.block import BlockProcessor
from ...sampling import SamplingParams
from ...target.model import Target
from ..base import Draft
from .base import UniversalDrafter, UniversalState
from .healing import Healer
from .translation import Transcript

MAX_STEPS_PER_TOKEN = 8  # most ids of the draft model that are drafted for one of the target's


@dataclass
class _Line:
    """What a row drafts: ids, whose text begins with some that is settled."""

    ids: list[int] = field(default_factory=list)
    num_settled_bytes: int = 0


class StringExactMatch(UniversalDrafter):
    """Drafts the text that the draft model finds most likely."""

    method = "slem"

    def __init__(self, draft: Target, target: Target) -> None:
        """See `UniversalDrafter`."""
        super().__init__(draft, target)
        self._healer = Healer(self.translator)

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
        lines = [_Line() for _ in state.texts]
        if any(is_on):
            self._draft_text(state, num_steps, is_on, lines)
        rows = [self._to_target(text, line, num_draft_tokens) for text, line in zip(state.texts, lines, strict=True)]
        width = max(map(len, rows))
        tokens_BK = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.draft.device)
        return Draft(tokens_BK.long(), counts=[len(row) for row in rows])

    def _num_read_again(self, text: Transcript) -> int:
        """See `UniversalDrafter._num_read_again`: one more than may be taken back."""
        return 1 + self._healer.num_taken_back(text)

    def _draft_text(self, state: UniversalState, num_steps: list[int], is_on: list[bool], lines: list[_Line]) -> None:
        """Append num_steps[b] of the draft model's ids to row b's line, fewer where one of them is no text."""
        ids_B = self._first_ids(state, is_on, lines)
        while True:
            for row, index in enumerate(ids_B.tolist()):
                if is_on[row]:
                    lines[row].ids.append(index)
            is_on = [
                on and len(line.ids) < steps and self.translator.spelling.spelled[line.ids[-1]] is not None
                for on, line, steps in zip(is_on, lines, num_steps, strict=True)
            ]
            if not any(is_on):
                return
            ids_B = self._logits(self._step(state, ids_B, is_on)).argmax(dim=-1)

    def _first_ids(self, state: UniversalState, is_on: list[bool], lines: list[_Line]) -> Tensor:
        """Each row's first id [B]: the likeliest behind its text, or one that goes across its end."""
        taken_back = [
            self._healer.num_taken_back(text) if on else 0 for text, on in zip(state.texts, is_on, strict=True)
        ]
        hidden_BTH, counts = self._read_all(state, is_on)
        ids_B = self._logits(last_kept(hidden_BTH, counts)).argmax(dim=-1)
        rollback = [0] * len(counts)
        for row, num in enumerate(taken_back):
            if num == 0:
                continue
            text = state.texts[row]
            index = self._healer.across(text, num, self._logits(hidden_BTH[row, counts[row] - 1 - num]))
            if index is not None:
                ids_B[row], rollback[row] = index, num
                lines[row].num_settled_bytes = sum(map(len, text.sources[-num:]))
                del state.read[row][-num:]
        state.cache.rollback(rollback)
        return ids_B

    def _to_target(self, text: Transcript, line: _Line, num_draft_tokens: int) -> list[int]:
        """The target's ids for what was drafted, a closing special token included where the target has one."""
        spelling, drafted, closing = self.translator.spelling, line.ids, []
        if drafted and spelling.spelled[drafted[-1]] is None:
            special = self.translator.special_to_target.get(drafted[-1])
            drafted, closing = drafted[:-1], [] if special is None else [special]
        data = (spelling.spell(drafted) or b"")[line.num_settled_bytes :]
        return [*self.translator.to_target(text, data), *closing][:num_draft_tokens]


def _num_steps(text: Transcript, num_draft_tokens: int) -> int:
    """Ids of the draft model that are about num_draft_tokens of the target's, going by the text so far."""
    ratio = (len(text.ids) + text.num_dropped) / max(1, text.num_target_tokens)
    return math.ceil(num_draft_tokens * min(max(ratio, 1.0), MAX_STEPS_PER_TOKEN))
