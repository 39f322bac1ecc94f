"""The logits processors at every place of a block, each shown the prefix that plain decoding would show it there.

Shape suffixes: B rows, K drafted tokens, T positions (of a block: K + 1 places), V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.decoding.processors import Processors, widen


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
    ) -> None:
        """prompts, generated: of each row, without drafted tokens; the root belongs to generated.

        shown: the prompts as `ProcessorParams` says that some steps see them; None: as they are.
        """
        self._processors = processors
        self._prompts = [tuple(prompt) for prompt in prompts]
        self._generated = [tuple(tokens) for tokens in generated]
        self._shown = self._prompts if shown is None else [tuple(prompt) for prompt in shown]
        self._failures: dict[int, tuple[int, Exception]] = {}  # row: (place, error)
        self._tree_failures: dict[tuple[int, int], Exception] = {}  # (row, place of its tree): error

    def draft(self, logits_BV: Tensor, drafted: Sequence[Tensor]) -> Tensor:
        """A drafter's logits [B, V] at place len(drafted), processed. drafted: tokens [B] at the places before it.

        A row whose processors fail keeps its logits: a draft is only proposed, and `target` meets the failure again if
        it comes from the text. (It need not: a grammar may want a token that a reduced draft vocabulary lacks.)
        """
        if self._processors.is_empty:
            return logits_BV
        assert logits_BV.shape == (len(self._prompts), self._processors.vocab_size)
        drafted_BK = torch.stack(list(drafted), dim=1).tolist() if drafted else [[]] * len(logits_BV)
        rows = []
        for b, logits_V in enumerate(logits_BV):
            try:
                rows.append(self._apply(b, logits_V, drafted_BK[b]))
            except Exception:
                rows.append(widen(logits_V))
        return torch.stack(rows)

    def target(self, logits_BTV: Tensor, drafted_BK: Tensor, num_drafted: Sequence[int]) -> Tensor:
        """The target's logits [B, K + 1, V], processed at places 0 .. num_drafted[b] of row b. Not in place.

        Left as they are: places behind a drafted token with p = 0, which no rule accepts, and those from a failure on.
        Raises what the processors raise at place 0.
        """
        if self._processors.is_empty:
            return logits_BTV
        scores_BTV = widen(logits_BTV).clone()
        for b, (tokens, count) in enumerate(zip(drafted_BK.tolist(), num_drafted, strict=True)):
            self._process_row(b, scores_BTV[b], tokens[:count])
        return scores_BTV

    def target_tree(
        self, logits_BTV: Tensor, tokens_BN: Tensor, drafted_BN: Tensor, parents: Sequence[tuple[int, ...]]
    ) -> Tensor:
        """The same for a drafted tree a row (`drafters.base.Branches`): place n + 1 sees the path down to node n.

        `follow` must then be told the path that was kept, before `raise_if_reached` is asked.
        """
        if self._processors.is_empty:
            return logits_BTV
        scores_BTV = widen(logits_BTV).clone()
        rows = zip(tokens_BN.tolist(), drafted_BN.tolist(), parents, strict=True)
        for b, (tokens, drafted, above) in enumerate(rows):
            self._process_tree(b, scores_BTV[b], tokens, drafted, above)
        return scores_BTV

    def follow(self, paths: Sequence[Sequence[int]]) -> None:
        """The places of its tree that each row has kept, the root (0) first: from here on they count as a chain."""
        for b, path in enumerate(paths):
            failed = [depth for depth, place in enumerate(path) if (b, place) in self._tree_failures]
            if failed:
                self._failures[b] = (failed[0], self._tree_failures[b, path[failed[0]]])

    def raise_if_reached(self, num_emitted: Sequence[int]) -> None:
        """Raise what failed at a place that gave its row a token; num_emitted[b]: tokens that the block gave row b."""
        for b, (place, error) in self._failures.items():
            if num_emitted[b] > place:
                raise error

    def _process_row(self, b: int, scores_TV: Tensor, tokens: Sequence[int]) -> None:
        """In place."""
        for place in range(len(tokens) + 1):
            try:
                scores_TV[place] = self._apply(b, scores_TV[place], tokens[:place])
            except Exception as error:
                if place == 0:
                    raise
                self._failures[b] = (place, error)
                return
            if place < len(tokens) and scores_TV[place, tokens[place]] == -torch.inf:
                return

    def _process_tree(
        self, b: int, scores_TV: Tensor, tokens: Sequence[int], drafted: Sequence[bool], parents: tuple[int, ...]
    ) -> None:
        """In place."""
        scores_TV[0] = self._apply(b, scores_TV[0], ())
        paths: dict[int, tuple[int, ...]] = {-1: ()}  # of the nodes that plain decoding may come to
        for node, (token, is_drafted, parent) in enumerate(zip(tokens, drafted, parents, strict=True)):
            if not is_drafted or parent not in paths or scores_TV[parent + 1, token] == -torch.inf:
                continue
            path = (*paths[parent], token)
            try:
                scores_TV[node + 1] = self._apply(b, scores_TV[node + 1], path)
            except Exception as error:
                self._tree_failures[b, node + 1] = error
                continue
            paths[node] = path

    def _apply(self, b: int, logits_V: Tensor, drafted: Sequence[int]) -> Tensor:
        generated = (*self._generated[b], *drafted)
        return self._processors.apply(logits_V, self._prompts[b], generated, self._shown[b])
