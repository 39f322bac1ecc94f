"""Drafts from two sources: what one proposes, and behind it, or instead of it, what the other does.

The first is an n-gram or a suffix of the text, or a smaller model; the second the target's trained heads, or a smaller
model. How many tokens m come from the first and how many n then from the second is chosen for the most tokens a second,

    (1 + r_1 + .. + r_m + r_m (s_1 + .. + s_n)) / (planning + pass(m + n) + first(m) + second(m, n)),

from running estimates: r_i of how often the first's i-th token is kept (for text: by the length of the match that it
goes on from), s_i the same of the second's, and the times of a target pass and of drafting. Nothing of this looks at a
token that is still to be judged, so the choice leaves every rule's output law as it is.

Shape suffixes: B rows, T positions, K drafted tokens, P tokens of the first source, H hidden.
"""

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..processors.block import BlockProcessor
from ..sampling import SamplingParams
from . import heads, model
from .base import Draft
from .drawing import Prefix
from .estimates import KeepRates, Line
from .heads import HeadsDrafter
from .model import ModelDrafter
from .options import Build, DrafterContext, DrafterOptions, part_of
from .text import ngram, suffix
from .text.rows import TextDrafter

SOURCES: dict[str, Build] = {"ngram": ngram.build, "suffix": suffix.build, "heads": heads.build, "model": model.build}
# Matches of these lengths and more are told apart.
MATCH_LENGTHS = (2, 3, 4, 6, 9, 16)
# Observations that estimates remember, and the share of them that each block lets go, so that a source which was left
# out is tried again.
MEMORY_TOKENS, MEMORY_TIMES, FADE = 128.0, 32.0, 0.005
MAX_PLACES = 64
AnyInt = TypeVar("AnyInt", int, np.ndarray)


@dataclass(frozen=True)
class Plan:
    """How one row's block is put together: tokens of the first source, tokens of the second, and the match's class."""

    num_first: int
    num_second: int
    match: int


@dataclass
class HybridState:
    """Both sources' states, and the plans of the block that is under way (None: this row has none)."""

    first: Any
    second: Any
    plans: list[Plan | None]


@dataclass
class _Times:
    """Seconds of a target pass, and of drafting with each source, for one number of rows."""

    target: Line = field(default_factory=lambda: Line(MEMORY_TIMES))
    first: Line = field(default_factory=lambda: Line(MEMORY_TIMES))
    second: Line = field(default_factory=lambda: Line(MEMORY_TIMES))
    planning: Line = field(default_factory=lambda: Line(MEMORY_TIMES))  # a block's, with looking up what text offers


@dataclass(frozen=True)
class _Pass:
    """A target pass over a draft of so many tokens, since it was proposed."""

    times: _Times
    num_tokens: int
    began_at: float


class HybridDrafter:
    """Begins a block with tokens of `first`, and goes on behind them, or instead of them, with those of `second`.

    How many of each: the numbers with the most tokens a second, by running estimates (see the module).
    """

    def __init__(self, first: TextDrafter | ModelDrafter, second: HeadsDrafter | ModelDrafter) -> None:
        """ValueError where the two have different vocabularies."""
        if first.vocab_size != second.vocab_size:
            raise ValueError(
                f"the sources of a hybrid have vocabularies of {first.vocab_size} and {second.vocab_size} tokens: "
                "both must be made for the same target"
            )
        self.first, self.second = first, second
        self.vocab_size = first.vocab_size
        self.reads = second.reads if isinstance(second, HeadsDrafter) else ()
        self.max_draft_tokens: int | None = None
        self._device = next(second.network.parameters()).device if second.network is not None else None
        networks = [part.network for part in (first, second) if part.network is not None]
        self.network: nn.Module | None = nn.ModuleList(networks)
        self._first_rates = [KeepRates(MAX_PLACES, MEMORY_TOKENS) for _ in range(len(MATCH_LENGTHS) + 1)]
        # Alone, and behind tokens of the first source.
        self._second_rates = [KeepRates(MAX_PLACES, MEMORY_TOKENS) for _ in range(2)]
        self._times: dict[int, _Times] = {}
        self._under_way: _Pass | None = None

    def forget(self) -> None:
        """Begin a new run: what the first source remembers of earlier prompts and answers is dropped."""
        if forget := getattr(self.first, "forget", None):
            forget()

    def start(self, prompts: Sequence[Sequence[int]]) -> HybridState:
        """See `Drafter.start`."""
        self._under_way = None  # a block whose rows all ended is never absorbed
        return HybridState(self.first.start(prompts), self.second.start(prompts), [None] * len(prompts))

    def absorb(self, state: HybridState, hidden_BTH: Tensor, next_tokens_BT: Tensor, counts: Sequence[int]) -> None:
        """See `Drafter.absorb`."""
        self._learn(state, counts)
        self.first.absorb(state.first, hidden_BTH, next_tokens_BT, counts)
        self.second.absorb(state.second, hidden_BTH, next_tokens_BT, counts)

    def propose(
        self,
        state: HybridState,
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
    ) -> Draft:
        """See `Drafter.propose`. As long as pays, which may be no token at all."""
        num_rows = len(state.plans)
        times = self._times.setdefault(num_rows, _Times())
        started = time.perf_counter()
        if isinstance(self.first, TextDrafter):
            given = self.first.propose(state.first, num_draft_tokens, params, uniforms_BK, processor)
            matches = [bisect_right(MATCH_LENGTHS, length) for length in self.first.match_lengths(state.first)]
            assert given.counts is not None
            plans = self._plan(given.counts, matches, num_draft_tokens, times)
            times.planning.observe(1, _since(started))
        else:
            (plan,) = self._plan([num_draft_tokens], [0], num_draft_tokens, times)
            times.planning.observe(1, _since(started))
            started = time.perf_counter()
            given = Draft(torch.zeros(num_rows, 0, dtype=torch.long, device=self._device), counts=[0] * num_rows)
            if plan.num_first:
                given = self.first.propose(state.first, plan.num_first, params, uniforms_BK, processor)
            plans = [Plan(min(plan.num_first, count), plan.num_second, 0) for count in given.counts or ()]
        times.first.observe(max(plan.num_first for plan in plans), _since(started))
        draft = self._go_on(state, given, plans, params, uniforms_BK, processor, times)
        state.plans = list(plans)
        self._under_way = _Pass(times, draft.tokens_BK.shape[1], time.perf_counter())
        return draft

    def select_rows(self, state: HybridState, rows: Sequence[int]) -> None:
        """See `Drafter.select_rows`."""
        self.first.select_rows(state.first, rows)
        self.second.select_rows(state.second, rows)
        state.plans = [state.plans[row] for row in rows]

    def extend(self, state: HybridState, other: HybridState) -> None:
        """See `Drafter.extend`."""
        self.first.extend(state.first, other.first)
        self.second.extend(state.second, other.second)
        state.plans += other.plans

    def _go_on(
        self,
        state: HybridState,
        given: Draft,
        plans: Sequence[Plan],
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None,
        times: _Times,
    ) -> Draft:
        """The plans' tokens of the first source, and the second's behind them."""
        counts = [plan.num_first for plan in plans]
        if not any(plan.num_second for plan in plans):
            probs_BKV = None if given.probs_BKV is None else given.probs_BKV[:, : max(counts)]
            return Draft(given.tokens_BK[:, : max(counts)], probs_BKV, counts)
        # Rows of the first source alone may be longer than what the second one can draft.
        narrow = max(plan.num_first + plan.num_second for plan in plans if plan.num_second)
        prefix = Prefix(given.tokens_BK[:, :narrow], [min(count, narrow) for count in counts], given.probs_BKV)
        started = time.perf_counter()
        draft = self.second.propose(state.second, narrow, params, uniforms_BK, processor, prefix)
        times.second.observe(self._num_steps(min(prefix.counts), narrow - min(prefix.counts)), _since(started))
        assert draft.counts is not None
        limits = [plan.num_first + plan.num_second for plan in plans]
        rows = zip(draft.counts, limits, plans, strict=True)
        counts = [min(count, limit) if plan.num_second else limit for count, limit, plan in rows]
        return _lengthen(draft, given, counts)

    def _plan(
        self, num_given: Sequence[int], matches: Sequence[int], num_draft_tokens: int, times: _Times
    ) -> list[Plan]:
        """Each row's best of all ways to put at most num_draft_tokens together from its tokens of the first source.

        All ways of one class of matches are weighed at once: a grid over m and n, whose best n for each m, and best of
        these up to each m, are then looked up for every row.
        """
        most = min(num_draft_tokens, MAX_PLACES)
        longest = min(self.second.max_draft_tokens or num_draft_tokens, most)
        m_M1, n_1N = np.arange(most + 1)[:, None], np.arange(longest + 1)[None]
        seconds_MN = times.target.all_seconds(m_M1 + n_1N) + times.planning.seconds(1)
        if not isinstance(self.first, TextDrafter):
            seconds_MN = seconds_MN + np.where(m_M1 > 0, times.first.all_seconds(m_M1), 0.0)
        steps_MN = self._num_steps(m_M1, n_1N)
        seconds_MN = seconds_MN + np.where(n_1N > 0, times.second.all_seconds(steps_MN), 0.0)
        alone_N, behind_N = (np.asarray(rates.expected_tokens(longest)) - 1.0 for rates in self._second_rates)
        more_MN = np.where(m_M1 > 0, behind_N, alone_N)
        is_out_MN = (n_1N > 0) & (m_M1 + n_1N > longest)
        best: dict[int, list[tuple[int, int]]] = {}
        for match in set(matches):
            reached_M = np.asarray(self._first_rates[match].reached(most))
            tokens_MN = reached_M.cumsum()[:, None] + reached_M[:, None] * more_MN
            rate_MN = np.where(is_out_MN, -np.inf, tokens_MN / np.maximum(seconds_MN, 1e-9))
            n_M, rate_M = rate_MN.argmax(axis=1), rate_MN.max(axis=1)
            is_new_M = rate_M > np.maximum.accumulate(np.concatenate([[-np.inf], rate_M[:-1]]))
            m_M = np.maximum.accumulate(np.where(is_new_M, np.arange(most + 1), 0))
            best[match] = [(int(m), int(n_M[m])) for m in m_M]
        return [Plan(*best[match][min(count, most)], match) for count, match in zip(num_given, matches, strict=True)]

    def _num_steps(self, given: AnyInt, drawn: AnyInt) -> AnyInt:
        """Passes of the second source: a model reads what is given in one of them, heads go through it step by step."""
        return drawn if isinstance(self.second, ModelDrafter) else given + drawn

    def _learn(self, state: HybridState, counts: Sequence[int]) -> None:
        """From what became of the block that was proposed last."""
        if self._under_way is not None:
            passed = time.perf_counter() - self._under_way.began_at
            self._under_way.times.target.observe(self._under_way.num_tokens, passed)
            self._under_way = None
        for rates in (*self._first_rates, *self._second_rates):
            rates.fade(FADE)
        done = [(plan, count - 1) for plan, count in zip(state.plans, counts, strict=True) if plan is not None]
        for match in {plan.match for plan, _ in done}:
            rows = [(plan.num_first, kept) for plan, kept in done if plan.match == match]
            self._first_rates[match].observe([m for m, _ in rows], [min(kept, m) for m, kept in rows])
        for is_behind in (False, True):
            seconds = [
                (plan.num_second, kept - plan.num_first)
                for plan, kept in done
                if (plan.num_first > 0) == is_behind and kept >= plan.num_first
            ]
            self._second_rates[is_behind].observe([n for n, _ in seconds], [kept for _, kept in seconds])
        state.plans = [None] * len(counts)


def _since(started: float) -> float:
    """Seconds."""
    return time.perf_counter() - started


def _lengthen(draft: Draft, given: Draft, counts: Sequence[int]) -> Draft:
    """The draft with the first source's tokens at the places behind it that rows of that source alone still have."""
    width = draft.tokens_BK.shape[1]
    tokens_BK = torch.cat([draft.tokens_BK, given.tokens_BK[:, width : max(counts)]], dim=1)
    probs_BKV = draft.probs_BKV
    if probs_BKV is not None and tokens_BK.shape[1] > width:
        behind = Prefix(given.tokens_BK, counts, given.probs_BKV)
        more = [behind.probs(place, probs_BKV[:, 0]) for place in range(width, tokens_BK.shape[1])]
        probs_BKV = torch.cat([probs_BKV, torch.stack(more, dim=1)], dim=1)
    return Draft(tokens_BK, probs_BKV, counts)


def build(options: DrafterOptions, context: DrafterContext) -> tuple[HybridDrafter, dict[str, Any]]:
    """See `options.Build`. ValueError for what one of the two sources refuses."""
    assert options.first is not None
    assert options.second is not None
    (first, first_record), (second, second_record) = (
        SOURCES[kind](part_of(options, kind), context) for kind in (options.first, options.second)
    )
    assert isinstance(first, TextDrafter | ModelDrafter)
    assert isinstance(second, HeadsDrafter | ModelDrafter)
    record = {"kind": options.kind}
    for name in ("name", "fingerprint"):
        record[name] = f"{first_record[name]} + {second_record[name]}"
    return HybridDrafter(first, second), record
