"""What a draft model may write next, as a tree of sequences of its ids, and psi: the law of the target's tokens in it.

Pure: it says which sequences the draft model should be asked about, and is told its probabilities. A sequence is a leaf
until it is expanded; then its children are the leaves. The tree is for one row and one block.

Shape suffixes: D the draft model's vocabulary, V the target's.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .spelling import NO_TOKEN
from .translation import Translator

MAX_TABLES = 4096  # kept in memory, each of D entries
MAX_LEAVES = 256  # sequences that go on to the next place; the lightest are given up


class FirstTokens:
    """For any text the target's first token of it, and for any text with one more of the draft model's ids."""

    def __init__(self, translator: Translator, vocab_size: int) -> None:
        """vocab_size: the target's."""
        self.vocab_size = vocab_size
        self.spelled = translator.spelling.spelled
        self.endings = {
            index: translator.special_to_target[index]
            for index in translator.eos_ids
            if translator.special_to_target.get(index, vocab_size) < vocab_size and index < len(self.spelled)
        }
        is_text = [spelled is not None for spelled in self.spelled]
        self.is_drawn_D = torch.tensor([text or index in self.endings for index, text in enumerate(is_text)])
        self._target = translator.target_spelling
        self._prefixes = {token[:length] for token in self._target.id_of for length in range(len(token))}
        self._firsts: dict[bytes, int] = {}
        self._tables: dict[bytes, tuple[Tensor, Tensor]] = {}

    def length(self, token: int) -> int:
        """Bytes of one of the target's tokens."""
        return len(self._target.spelled[token] or b"")

    def is_open(self, text: bytes) -> bool:
        """Whether a longer text could begin with a token that is longer than this text."""
        return text in self._prefixes

    def first(self, text: bytes) -> int:
        """The target's first token of a text that is not empty; NO_TOKEN where it has none."""
        if text not in self._firsts:
            ids = self._target.encode(text)
            spelled = self._target.spell(ids[:1])
            if not spelled or not text.startswith(spelled):
                ids = self._target.longest_match(text)
            if len(self._firsts) > MAX_TABLES * len(self.spelled):
                self._firsts.clear()
            self._firsts[text] = ids[0] if ids else NO_TOKEN
        return self._firsts[text]

    def table(self, text: bytes) -> tuple[Tensor, Tensor]:
        """For the text with each of the draft model's ids behind it: (first tokens int64 [D], is it open, bool [D]).

        NO_TOKEN where the id is never drawn. An id that ends the text adds nothing, and is the target's EOS after none.
        """
        if text not in self._tables:
            firsts, opens = [], []
            for index, spelled in enumerate(self.spelled):
                if index in self.endings:
                    firsts.append(self.first(text) if text else self.endings[index])
                else:
                    firsts.append(NO_TOKEN if spelled is None else self.first(text + spelled))
                opens.append(spelled is not None and index not in self.endings and self.is_open(text + spelled))
            if len(self._tables) > MAX_TABLES:
                self._tables.clear()
            self._tables[text] = torch.tensor(firsts), torch.tensor(opens)
        return self._tables[text]


@dataclass(frozen=True)
class Leaf:
    """A drafted sequence that is not expanded.

    path: what its ids but the last were called when they were read. last_id: None for the text so far itself. rest: its
    text behind the tokens that are drawn already. end: the target's EOS where the text ends with it.
    """

    path: tuple[int, ...]
    last_id: int | None
    rest: bytes
    mass: float
    end: int | None = None


@dataclass(frozen=True)
class _Expanded:
    path: tuple[int, ...]
    rest: bytes
    mass: float
    probs_D: Tensor  # float64; 0 for children that are expanded themselves


class TextTree:
    """One row's tree. At each place: expand what is `wanted` until nothing is, read `psi`, `condition` on a token."""

    def __init__(self, firsts: FirstTokens, max_expanded: int, min_mass: float, max_depth: int) -> None:
        """max_expanded: sequences a place; min_mass: of those that are; max_depth: ids of the longest of them."""
        self._firsts = firsts
        self._max_expanded, self._min_mass, self._max_depth = max_expanded, min_mass, max_depth
        self._leaves = [Leaf((), None, b"", 1.0)]
        self._expanded: list[_Expanded] = []

    def wanted(self) -> list[Leaf]:
        """Leaves to expand now, taken out of the tree. The heaviest ones, and one at least where psi is nothing yet."""
        num_left = self._max_expanded - len(self._expanded)
        if num_left <= 0:
            return []
        own = [leaf for leaf in self._leaves if leaf.end is None and self._firsts.is_open(leaf.rest)]
        own = [leaf for leaf in own if len(leaf.path) + (leaf.last_id is not None) <= self._max_depth]
        candidates = [(leaf.mass, leaf, -1) for leaf in own if leaf.mass >= self._min_mass]
        for parent, expanded in enumerate(self._expanded):
            if len(expanded.path) < self._max_depth:
                candidates += [(leaf.mass, leaf, parent) for leaf in self._open_children(expanded)]
        if not candidates and own and not self.psi().any():
            candidates = [(leaf.mass, leaf, -1) for leaf in own]
            num_left = 1
        chosen = sorted(candidates, key=lambda candidate: -candidate[0])[:num_left]
        for _, leaf, parent in chosen:
            if parent < 0:
                self._leaves.remove(leaf)
            else:
                self._expanded[parent].probs_D[leaf.last_id] = 0.0
        return [leaf for _, leaf, _ in chosen]

    def expand(self, leaf: Leaf, path: tuple[int, ...], probs_D: Tensor) -> None:
        """path: the leaf's own, with what its last id was called. probs_D: what follows it."""
        self._expanded.append(_Expanded(path, leaf.rest, leaf.mass, probs_D.double().clone()))

    def psi(self) -> Tensor:
        """Law of the next of the target's tokens, float64 [V]; zeros where no text goes on."""
        psi_V = torch.zeros(self._firsts.vocab_size, dtype=torch.float64)
        for leaf in self._leaves:
            if (token := self._first_of(leaf)) != NO_TOKEN:
                psi_V[token] += leaf.mass
        for expanded in self._expanded:
            firsts_D, _ = self._firsts.table(expanded.rest)
            masses_D = (expanded.mass * expanded.probs_D).masked_fill(firsts_D == NO_TOKEN, 0.0)
            psi_V.index_add_(0, firsts_D.clamp(min=0), masses_D)
        total = psi_V.sum()
        return psi_V / total if total > 0 else psi_V

    def condition(self, token: int) -> None:
        """Keep what begins with this token, without it; the weights sum to one again."""
        length = self._firsts.length(token)
        kept = [leaf for leaf in self._leaves if self._first_of(leaf) == token and leaf.rest]
        for expanded in self._expanded:
            firsts_D, _ = self._firsts.table(expanded.rest)
            kept += [leaf for leaf in self._children(expanded, firsts_D == token) if leaf.rest]
        kept = sorted(kept, key=lambda leaf: -leaf.mass)[:MAX_LEAVES]
        total = sum(leaf.mass for leaf in kept)
        self._leaves = [replace(leaf, rest=leaf.rest[length:], mass=leaf.mass / total) for leaf in kept]
        self._expanded = []

    def _first_of(self, leaf: Leaf) -> int:
        if leaf.rest:
            return self._firsts.first(leaf.rest)
        return NO_TOKEN if leaf.end is None else leaf.end

    def _open_children(self, expanded: _Expanded) -> list[Leaf]:
        _, is_open_D = self._firsts.table(expanded.rest)
        return self._children(expanded, is_open_D & (expanded.mass * expanded.probs_D >= self._min_mass))

    def _children(self, expanded: _Expanded, which_D: Tensor) -> list[Leaf]:
        leaves = []
        for index in (which_D & (expanded.probs_D > 0)).nonzero()[:, 0].tolist():
            mass = expanded.mass * float(expanded.probs_D[index])
            end = self._firsts.endings.get(index)
            text = expanded.rest if end is not None else expanded.rest + (self._firsts.spelled[index] or b"")
            leaves.append(Leaf(expanded.path, index, text, mass, end))
        return leaves
