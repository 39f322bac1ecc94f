"""The logits processors at every place of a block, each shown the prefix that plain decoding would show it there.

Built-in penalties and bans change all places in one pass (`block_edits`); grammar and custom processors are asked place
by place. A place where something fails is done again by `Processors`, one prefix alone, which knows what to say.

Shape suffixes: B rows, K drafted tokens, N nodes, T positions (of a block: K + 1 places), P places of all rows,
V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .edits import BlockEdits, Place
from .history import History
from .prefix import Processors, widen

# Places whose masks become limits at a time: all at once they would take as much memory again as the logits.
MASKED_TOGETHER = 4


class BlockProcessor:
    """The processors for one block of a batch: place k of a row sees its text and the first k drafted tokens.

    Places that plain decoding may never come to (behind a stop string, say) can make a grammar fail: the error waits
    until `raise_if_reached` knows better.
    """

    def __init__(
        self,
        processors: Processors,
        prompts: Sequence[Sequence[int]],
        generated: Sequence[Sequence[int]],
        shown: Sequence[Sequence[int]] | None = None,
        histories: Sequence[History] | None = None,
    ) -> None:
        """prompts, generated: of each row, without drafted tokens; the root belongs to generated.

        shown: the prompts as `ProcessorParams` says that some steps see them; None: as they are. histories: of the
        same prompts, kept from the rows' last blocks; None: made here.
        """
        self._processors = processors
        self._edits = BlockEdits(processors.params, processors.eos_token_ids, processors.vocab_size)
        self._generated = [tuple(tokens) for tokens in generated]
        if histories is None:
            histories = [History(*pair) for pair in zip(prompts, prompts if shown is None else shown, strict=True)]
        pairs = zip(histories, self._generated, strict=True)
        self._histories = [history.catch_up(tokens) for history, tokens in pairs]
        self._failures: dict[int, tuple[int, Exception]] = {}  # row: (place, error)
        self._tree_failures: dict[tuple[int, int], Exception] = {}  # (row, place of its tree): error

    def draft(self, logits_BV: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        """A drafter's logits [B, V] at place len(drafted), processed. drafted: tokens [B] at the places before it.

        A row whose processors fail keeps its logits: a draft is only proposed, and `target` meets the failure again if
        it comes from the text. (It need not: a grammar may want a token that a reduced draft vocabulary lacks.)
        """
        if self._processors.is_empty:
            return logits_BV
        assert logits_BV.shape == (len(self._histories), self._processors.vocab_size)
        drafted_BK = torch.stack(list(drafted), dim=1).tolist() if drafted else [[]] * len(logits_BV)
        scores_BV, _ = self._process(logits_BV, [Place(b, b, tuple(path)) for b, path in enumerate(drafted_BK)])
        return scores_BV

    def target(self, logits_BTV: Tensor, drafted_BK: Tensor, num_drafted: Sequence[int]) -> Tensor:
        """The target's logits [B, K + 1, V], processed at places 0 .. num_drafted[b] of row b. Not in place.

        Left as they are: places behind a drafted token with p = 0, which no rule accepts, and those from a failure on.
        Raises what the processors raise at place 0.
        """
        if self._processors.is_empty:
            return logits_BTV
        places: list[Place] = []
        for b, (tokens, count) in enumerate(zip(drafted_BK.tolist(), num_drafted, strict=True)):
            first, slot = len(places), b * logits_BTV.shape[1]
            places.append(Place(b, slot, ()))
            places += [Place(b, slot + k, tuple(tokens[:k]), first + k - 1) for k in range(1, count + 1)]
        scores_BTV, failures = self._process_block(logits_BTV, places)
        self._failures = {b: (place, error) for (b, place), error in failures.items()}
        return scores_BTV

    def target_tree(
        self, logits_BTV: Tensor, tokens_BN: Tensor, drafted_BN: Tensor, parents: Sequence[tuple[int, ...]]
    ) -> Tensor:
        """The same for a drafted tree a row (`drafters.base.Branches`): place n + 1 sees the path down to node n.

        `follow` must then be told the path that was kept, before `raise_if_reached` is asked.
        """
        if self._processors.is_empty:
            return logits_BTV
        places: list[Place] = []
        rows = zip(tokens_BN.tolist(), drafted_BN.tolist(), parents, strict=True)
        for b, (tokens, drafted, above) in enumerate(rows):
            slot, number_of = b * logits_BTV.shape[1], {-1: len(places)}  # of the nodes that are there
            places.append(Place(b, slot, ()))
            for node, (token, is_drafted, parent) in enumerate(zip(tokens, drafted, above, strict=True)):
                if is_drafted and parent in number_of:
                    number_of[node] = len(places)
                    path = (*places[number_of[parent]].path, token)
                    places.append(Place(b, slot + node + 1, path, number_of[parent]))
        scores_BTV, self._tree_failures = self._process_block(logits_BTV, places)
        return scores_BTV

    def follow(self, paths: Sequence[Sequence[int]]) -> None:
        """The places of its tree that each row has kept, the root (0) first: from here on they count as a chain."""
        self._failures = {}
        for b, path in enumerate(paths):
            failed = [depth for depth, place in enumerate(path) if (b, place) in self._tree_failures]
            if failed:
                self._failures[b] = (failed[0], self._tree_failures[b, path[failed[0]]])

    def raise_if_reached(self, num_emitted: Sequence[int]) -> None:
        """Raise what failed at a place that gave its row a token; num_emitted[b]: tokens that the block gave row b."""
        for b, (place, error) in self._failures.items():
            if num_emitted[b] > place:
                raise error

    def _process_block(
        self, logits_BTV: Tensor, places: Sequence[Place]
    ) -> tuple[Tensor, dict[tuple[int, int], Exception]]:
        """Scores [B, T, V], and what failed at which (row, place). Raises what fails at a root."""
        width = logits_BTV.shape[1]
        scores_PV, failures = self._process(logits_BTV.flatten(0, 1), places)
        for slot in sorted(failures):
            if slot % width == 0:
                raise failures[slot]
        return scores_PV.view(logits_BTV.shape), {divmod(slot, width): error for slot, error in failures.items()}

    def _process(self, logits_PV: Tensor, places: Sequence[Place]) -> tuple[Tensor, dict[int, Exception]]:
        """New scores, and what failed in which slot: there, and at places that nothing reaches, logits stay."""
        wide = torch.float64 if logits_PV.dtype == torch.float64 else torch.float32
        scores_PV = logits_PV.to(wide, copy=True, memory_format=torch.contiguous_format)
        has_law = logits_PV.amax(dim=-1).isfinite().tolist()
        able = [place for place in places if has_law[place.slot]]
        ill, emptied = self._edits.apply(scores_PV, able, self._histories)
        walk = _Walk(self._processors, scores_PV, places, self._histories)
        reached = walk.run(has_law, ill)
        if emptied or walk.num_masks:
            is_finite = scores_PV.amax(dim=-1).isfinite().tolist()
            ill |= {place.slot for place in able if not is_finite[place.slot]}
        failures: dict[int, Exception] = {}
        ill |= walk.failed
        for number, place in enumerate(places):
            if number in reached and place.slot in ill:
                try:
                    scores_PV[place.slot] = self._apply(place, logits_PV[place.slot])
                except Exception as error:
                    failures[place.slot] = error
        kept = [p.slot for number, p in enumerate(places) if number not in reached or p.slot in failures]
        if kept:
            scores_PV[kept] = widen(logits_PV[kept])
        return scores_PV, failures

    def _apply(self, place: Place, logits_V: Tensor) -> Tensor:
        history = self._histories[place.row]
        generated = (*self._generated[place.row], *place.path)
        return self._processors.apply(logits_V, history.prompt, generated, history.shown)


class _Walk:
    """Which places plain decoding may come to, and the grammar and the custom processors at these, in order.

    Neither is asked behind a token that is forbidden.
    """

    def __init__(
        self, processors: Processors, scores_PV: Tensor, places: Sequence[Place], histories: Sequence[History]
    ) -> None:
        self._processors, self._scores_PV, self._places, self._histories = processors, scores_PV, places, histories
        self._has_grammar = processors.params.allowed_tokens is not None
        self._has_custom = bool(processors.params.custom)
        self.num_masks = 0
        self.failed: set[int] = set()  # slots

    def run(self, has_law: Sequence[bool], ill: set[int]) -> set[int]:
        """The numbers of the places that are reached; their scores are changed. Failures are for the caller to name."""
        is_open = self._open_after_edits()
        masked: list[int] = []  # slots, in the order of the masks
        masks_PV = self._scores_PV.new_zeros(
            (len(self._places) if self._has_grammar and not self._has_custom else 0, self._scores_PV.shape[1]),
            dtype=torch.bool,
        )
        mask_of: dict[int, int] = {}  # number of the place: its mask
        reached: set[int] = set()
        for number, place in enumerate(self._places):
            if (parent := place.parent) >= 0:
                before = self._places[parent].slot
                if parent not in reached or before in self.failed or not is_open[number]:
                    continue
                if parent in mask_of and not masks_PV[mask_of[parent], place.path[-1]]:
                    continue
                if self._has_custom and self._scores_PV[before, place.path[-1]] == -torch.inf:
                    continue
            reached.add(number)
            if not has_law[place.slot]:
                continue
            if place.slot in ill:
                self.failed.add(place.slot)
                continue
            if not self._has_grammar and not self._has_custom:
                continue
            try:
                if self._has_custom:
                    self._one_by_one(place)
                else:
                    # Copied at once: a grammar may reuse its tensor for the next answer.
                    masks_PV[len(masked)] = self._allowed(place)
                    mask_of[number] = len(masked)
                    masked.append(place.slot)
            except Exception:
                self.failed.add(place.slot)
        self._mask(masked, masks_PV[: len(masked)])
        return reached

    def _open_after_edits(self) -> list[bool]:
        """Of each place, whether the token that leads to it is not forbidden by penalties and bans."""
        lead = [(number, place) for number, place in enumerate(self._places) if place.parent >= 0]
        is_open = [True] * len(self._places)
        if lead:
            slots = torch.tensor([self._places[place.parent].slot for _, place in lead], device=self._scores_PV.device)
            tokens = torch.tensor([place.path[-1] for _, place in lead], device=self._scores_PV.device)
            flags = (self._scores_PV[slots, tokens] != -torch.inf).tolist()
            for (number, _), flag in zip(lead, flags, strict=True):
                is_open[number] = flag
        return is_open

    def _text(self, place: Place) -> tuple[int, ...]:
        return (*self._histories[place.row].generated, *place.path)

    def _allowed(self, place: Place) -> Tensor:
        return self._processors.allowed(self._histories[place.row].prompt, self._text(place))

    def _one_by_one(self, place: Place) -> None:
        """Grammar and custom processors of one place. ValueError where no token is left before the latter."""
        history, scores_V = self._histories[place.row], self._scores_PV[place.slot]
        if self._has_grammar:
            limits_V = _limits(self._allowed(place).to(scores_V.device), scores_V.dtype)
            torch.minimum(scores_V, limits_V, out=scores_V)
        if not scores_V.amax().isfinite():
            raise ValueError("no token is left")
        scores_V.copy_(self._processors.apply_custom(scores_V, history.prompt, self._text(place), history.shown))

    def _mask(self, slots: list[int], masks_PV: Tensor) -> None:
        """Forbid what the masks do not allow."""
        self.num_masks = len(slots)
        for first in range(0, len(slots), MASKED_TOGETHER):
            some = slots[first : first + MASKED_TOGETHER]
            limits = _limits(masks_PV[first : first + MASKED_TOGETHER], self._scores_PV.dtype)
            if some[-1] - some[0] + 1 == len(some):  # nothing is copied
                part_PV = self._scores_PV[some[0] : some[-1] + 1]
                torch.minimum(part_PV, limits, out=part_PV)
            else:
                self._scores_PV[some] = torch.minimum(self._scores_PV[some], limits)


def _limits(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Inf where a token is allowed, -inf elsewhere: a minimum with it is ten times as fast on a CPU as masked_fill."""
    return allowed.to(dtype).sub_(0.5).mul_(torch.inf)
