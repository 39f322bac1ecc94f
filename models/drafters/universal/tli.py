"""TLI, token-level intersection: draft from the tokens that both vocabularies have (Timor et al. 2025, arXiv
2502.05202, algorithm 4).

q is the draft model's distribution over the tokens whose bytes the target has a token for, renormalised, on the
target's ids; from there on it is a drafter like any other, and every rule judges it exactly. Tokens match by their
bytes, where the paper compares vocabulary entries: "Ġthe" and "▁the" are one token. Of several ids of the same bytes
only the one counts that the tokenizer itself writes, so that each id has one partner.

Shape suffixes: B rows, K drafted tokens, H the draft model's hidden size, D its vocabulary, V the target's.
"""

import torch
from torch import Tensor

from ...heads.base import last_kept
from ...processors.block import BlockProcessor
from ...sampling import SamplingParams, sample_from, transform_logits
from ...target.model import Target
from ..base import Draft
from .base import UniversalDrafter, UniversalState
from .translation import Translator


class TokenIntersection(UniversalDrafter):
    """Drafts tokens of both vocabularies. `num_shared` says how many there are."""

    method = "tli"

    def __init__(self, draft: Target, target: Target) -> None:
        """ValueError where no token is in both vocabularies; see also `UniversalDrafter`."""
        super().__init__(draft, target)
        pairs = shared_tokens(self.translator)
        if not pairs:
            raise ValueError(
                f"draft model {draft.name!r} and target {target.name!r} share no token, so there is nothing that "
                "method=tli could draft: use method=slem, or another draft model."
            )
        self.num_shared = len(pairs)
        self._target_ids_S = torch.tensor([pair[0] for pair in pairs], device=draft.device)
        self._draft_ids_S = torch.tensor([pair[1] for pair in pairs], device=draft.device)
        self._to_draft_V = torch.zeros(target.vocab_size, dtype=torch.long, device=draft.device)
        self._to_draft_V[self._target_ids_S] = self._draft_ids_S

    @torch.no_grad()
    def propose(
        self,
        state: UniversalState,
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
    ) -> Draft:
        """See `Drafter.propose`."""
        num_rows = len(state.texts)
        is_on = self._make_room(state, [num_draft_tokens] * num_rows)
        if not any(is_on):
            return Draft(torch.zeros(num_rows, 0, dtype=torch.long, device=self.draft.device), counts=[0] * num_rows)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        hidden: list[Tensor] = [last_kept(*self._read_all(state, is_on))]
        for place in range(num_draft_tokens):
            if place > 0:
                hidden.append(self._step(state, self._to_draft_V[tokens[-1]], is_on))
            logits_BV = self._to_target(self._logits(hidden[-1]))
            if processor is not None:
                logits_BV = processor.draft(logits_BV, tokens)
            if uniforms_BK is None:
                tokens.append(logits_BV.argmax(dim=-1))
            else:
                probs.append(transform_logits(logits_BV, params))
                tokens.append(sample_from(probs[-1], uniforms_BK[:, place]))
        probs_BKV = torch.stack(probs, dim=1) if probs else None
        counts = [num_draft_tokens if on else 0 for on in is_on]
        return Draft(torch.stack(tokens, dim=1), probs_BKV, counts, hidden_BKH=torch.stack(hidden, dim=1))

    def _to_target(self, logits_BD: Tensor) -> Tensor:
        """Logits [B, V] over the target's ids, -inf at those that are not shared."""
        logits_BV = logits_BD.new_full((len(logits_BD), self.vocab_size), -torch.inf)
        logits_BV[:, self._target_ids_S] = logits_BD[:, self._draft_ids_S]
        return logits_BV


def shared_tokens(translator: Translator) -> list[tuple[int, int]]:
    """Pairs (target's id, draft model's id) of the same bytes, or special tokens that mean the same; sorted.

    Of several draft ids that mean one special token of the target, the lowest counts.
    """
    ours, theirs = translator.target_spelling.id_of, translator.spelling.id_of
    pairs = {ours[data]: theirs[data] for data in ours.keys() & theirs.keys()}
    num_ours, num_theirs = len(translator.target_spelling.spelled), len(translator.spelling.spelled)
    for draft_id, target_id in sorted(translator.special_to_target.items()):
        if target_id < num_ours and draft_id < num_theirs:
            pairs.setdefault(target_id, draft_id)
    return sorted(pairs.items())
