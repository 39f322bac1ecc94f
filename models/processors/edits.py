"""The built-in processors at many places at once: few ids of each place change, found by the rows' histories.

`processors` says what they do, one prefix at a time; the numbers are the same, bit for bit.

Shape suffixes: P places (of all rows), E changed entries, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from .history import Counts, History, Ints
from .prefix import ProcessorParams


@dataclass(frozen=True)
class Place:
    """A place of a row's block: it sees the row's text and the path, which are the drafted tokens before it.

    slot: which of the scores [P, V] are its own. parent: the place before it, by its number in the list of places; -1:
    none, and the place is reached whatever was drafted.
    """

    row: int
    slot: int
    path: tuple[int, ...]
    parent: int = -1


class BlockEdits:
    """Penalties and bans, without grammar and custom processors."""

    def __init__(self, params: ProcessorParams, eos_token_ids: Collection[int], vocab_size: int) -> None:
        self._params, self._vocab_size = params, vocab_size
        self._eos = tuple(eos_token_ids)
        self._always = [word[0] for word in params.bad_words_ids if len(word) == 1]
        self._longest = max(map(len, params.bad_words_ids), default=0)
        self._words: dict[tuple[int, ...], list[int]] = {}  # first tokens: last ones
        for word in params.bad_words_ids:
            if len(word) > 1:
                self._words.setdefault(word[:-1], []).append(word[-1])
        self._lengths = sorted({len(first) for first in self._words})

    def apply(
        self, scores_PV: Tensor, places: Sequence[Place], histories: Sequence[History]
    ) -> tuple[set[int], set[int]]:
        """Change the scores of these places, which lie row by row, in place.

        Returns (slots that a penalty gave a NaN or +inf, slots where something became -inf).
        """
        params = self._params
        ill: set[int] = set()
        emptied: set[int] = set()
        if params.repetition_penalty != 1.0:
            repetition = float(params.repetition_penalty)

            def repeated(scores_E: Tensor, counts_E: Tensor) -> Tensor:
                penalised_E = torch.where(scores_E < 0, scores_E * repetition, scores_E / repetition)
                return torch.where(counts_E > 0, penalised_E, scores_E)

            self._edit(scores_PV, places, histories, lambda row: row.of_text, repeated, ill, emptied)
        if params.frequency_penalty or params.presence_penalty:

            def counted(scores_E: Tensor, counts_E: Tensor) -> Tensor:
                spent_E = params.frequency_penalty * counts_E.to(scores_E.dtype)
                return scores_E - spent_E - params.presence_penalty * (counts_E > 0)

            self._edit(scores_PV, places, histories, lambda row: row.of_output, counted, ill, emptied)
        banned = [(place.slot, token) for place in places for token in self._banned(place, histories[place.row])]
        if banned:
            slots, tokens = np.asarray(banned, dtype=np.int64).T
            flat_E = torch.from_numpy(slots * self._vocab_size + tokens).to(scores_PV.device)
            scores_PV.view(-1).index_fill_(0, flat_E, -torch.inf)
            emptied.update(slots.tolist())
        return ill, emptied

    def _edit(
        self,
        scores_PV: Tensor,
        places: Sequence[Place],
        histories: Sequence[History],
        counts_of: Callable[[History], Counts],
        change: Callable[[Tensor, Tensor], Tensor],
        ill: set[int],
        emptied: set[int],
    ) -> None:
        """Change the scores of all ids that were counted."""
        flats: list[Ints] = []
        all_counts: list[Ints] = []
        for row, group in groupby(places, key=lambda place: place.row):
            members = list(group)
            ids, counts = counts_of(histories[row]).with_paths([place.path for place in members])
            slots = np.asarray([place.slot for place in members], dtype=np.int64)
            flats.append((slots[:, None] * self._vocab_size + ids).ravel())
            all_counts.append(counts.ravel())
        if not flats:
            return
        flat_E = torch.from_numpy(np.concatenate(flats)).to(scores_PV.device)
        counts_E = torch.from_numpy(np.concatenate(all_counts)).to(scores_PV.device)
        before_E = scores_PV.view(-1)[flat_E]
        after_E = change(before_E, counts_E)
        scores_PV.view(-1)[flat_E] = after_E
        is_odd_E = before_E.isfinite() & ~after_E.isfinite()
        is_new_E = is_odd_E & (after_E == -torch.inf)
        ill.update((flat_E[is_odd_E & ~is_new_E] // self._vocab_size).tolist())
        emptied.update((flat_E[is_new_E] // self._vocab_size).tolist())

    def _banned(self, place: Place, history: History) -> Iterable[int]:
        params = self._params
        if size := params.no_repeat_ngram_size:
            # A prompt that is shown with its padding may hold ids that this vocabulary lacks.
            yield from (token for token in history.repeats(size, place.path) if token < self._vocab_size)
        yield from self._always
        if self._lengths:
            text = [*history.tail(self._longest), *place.path]
            for length in self._lengths:
                if length <= len(text):
                    yield from self._words.get(tuple(text[len(text) - length :]), ())
        if len(history.generated) + len(place.path) < params.min_new_tokens:
            yield from (token for token in self._eos if token < self._vocab_size)
