"""Two sources in one draft: lossless, with the q of each place, and a choice that follows what pays."""

import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from models.decoding.decoder import BlockRecord, Decoder
from models.decoding.reference import decode_plainly
from models.decoding.rows import GenerationParams
from models.drafters import drawing
from models.drafters import hybrid as real_code
from models.drafters import model as model_code
from models.drafters.build import make_drafter
from models.drafters.estimates import KeepRates
from models.drafters.heads import HeadsDrafter
from models.drafters.hybrid import HybridDrafter, Plan
from models.drafters.model import ModelDrafter
from models.drafters.options import DrafterOptions, check_drafter
from models.drafters.text.ngram import NgramDrafter
from models.drafters.text.suffix import SuffixDrafter
from models.heads import HeadOptions, build_head
from models.sampling import SamplingParams, transform_logits
from models.target.model import Target, TargetOptions
from models.target.tiny import make_tiny_target
from tests.models.decoding.scripted import random_prompts
from tests.models.decoding.test_decoder_sampled import (
    FALSE_ALARM,
    NUM_SAMPLES,
    NUM_TOKENS,
    SAMPLING,
    VOCAB_SIZE,
    chi_square_p_value,
    exact_law,
)
from tests.models.drafters.test_model import sibling
from tests.planting import blank_module

PROB_TOLERANCE = 1e-4  # float32 probabilities whose logits were computed in passes of different shapes


def head_of(target: Target, kind: str = "mtp") -> HeadsDrafter:
    return HeadsDrafter(build_head(target, HeadOptions(kind=kind, num_draft_tokens=5)))


PAIRS: dict[str, Callable[[Target], tuple[object, object]]] = {
    "ngram, heads": lambda target: (NgramDrafter(target, 1, 3), head_of(target)),
    "suffix, hydra": lambda target: (SuffixDrafter(target, 1, 0.0, 100), head_of(target, "hydra")),
    "ngram, medusa": lambda target: (NgramDrafter(target, 1, 3), head_of(target, "medusa")),
    "ngram, model": lambda target: (NgramDrafter(target, 1, 3), ModelDrafter(sibling(target, 0.02), target)),
    "model, heads": lambda target: (ModelDrafter(sibling(target, 0.02), target), head_of(target)),
}


class Planned(HybridDrafter):
    """Puts blocks together in every way in turn, other ways in other rows, whatever they cost."""

    num_plans = 0

    def _plan(
        self, num_given: Sequence[int], matches: Sequence[int], num_draft_tokens: int, times: object
    ) -> list[Plan]:
        plans = []
        for count, match in zip(num_given, matches, strict=True):
            self.num_plans += 1
            ways = [(m, n) for m in range(count + 1) for n in range(num_draft_tokens - m + 1)]
            plans.append(Plan(*ways[self.num_plans * 7 % len(ways)], match))
        return plans


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("max_batch_size", [1, 4])
@pytest.mark.parametrize("make", [HybridDrafter, Planned])
def test_greedy_equals_reference(name: str, max_batch_size: int, make: type[HybridDrafter]) -> None:
    """Ragged rows that come and go, EOS inside blocks, texts that repeat themselves so that n-grams match."""
    target = make_tiny_target()
    prompts = [prompt * 2 for prompt in random_prompts(6, longest=12)]
    endless = [decode_plainly(target, prompt, 30, eos_token_ids=()) for prompt in prompts]
    eos_token_ids = (endless[0][9], endless[3][17])
    expected = [decode_plainly(target, prompt, 30, eos_token_ids=eos_token_ids) for prompt in prompts]
    decoder = Decoder(target, make(*PAIRS[name](target)), 5)
    results = decoder.generate(prompts, GenerationParams(30, eos_token_ids=eos_token_ids), max_batch_size)
    assert [result.tokens for result in results] == expected
    # The real one may find that drafting does not pay.
    assert sum(result.counters.drafted for result in results) > (20 if make is Planned else 0)


def check_q(code: ModuleType, name: str, max_batch_size: int = 3) -> None:
    """Each place's q is one-hot for text, and a fresh forward's of the model that drew it; drafts are drawn from it."""
    target = make_tiny_target(seed=3, vocab_size=VOCAB_SIZE)
    draft = sibling(target, 0.3)
    model = model_code.ModelDrafter(draft, target)

    class Turns(Planned):
        pass

    Turns.__bases__ = (_planned(code),)
    first = NgramDrafter(target, 1, 3) if name == "ngram, model" else model
    second = model if name == "ngram, model" else head_of(target)
    drafter = Turns(first, second)
    prompts = [[5, 7, 4, 5, 7], [9, 9], [3, 3, 8, 10, 6, 3, 3]]
    texts = [list(prompt) for prompt in prompts]
    num_model = num_text = 0

    def on_tokens(index: int, tokens: list[int], verdicts: Sequence[str]) -> None:
        if verdicts[0] == "prefill":
            texts[index] += tokens

    def on_block(record: BlockRecord) -> None:
        nonlocal num_model, num_text
        block = record.block
        for b, index in enumerate(record.indices):
            count, plan = int(block.num_drafted_B[b]), plans[b]
            drafted = block.draft_tokens_BK[b, :count].tolist()
            of_model = range(plan.num_first, count) if name == "ngram, model" else range(min(plan.num_first, count))
            q_KV = None if block.draft_probs_BKV is None else block.draft_probs_BKV[b]
            for place in range(count):
                if place in of_model:
                    logits_V = fresh_logits(draft, [*texts[index], *drafted[:place]])
                    expected_V = transform_logits(logits_V, SAMPLING)
                    assert (q_KV[place] - expected_V).abs().max() < PROB_TOLERANCE
                    num_model += 1
                elif name == "ngram, model":
                    assert q_KV is None or q_KV[place, drafted[place]] == 1.0
                    num_text += 1
                assert q_KV is None or q_KV[place, drafted[place]] > 0
            num_accepted = int(record.verdict.num_accepted_B[b])
            emitted = [*drafted[:num_accepted], int(record.verdict.next_token_B[b])]
            texts[index] += emitted[: record.num_emitted[b]]

    plans: list[Plan] = []
    propose = drafter.propose

    def spy(state: object, *args: object, **kwargs: object) -> object:
        draft = propose(state, *args, **kwargs)
        plans[:] = state.plans
        return draft

    drafter.propose = spy  # type: ignore[method-assign]
    params = GenerationParams(24, SAMPLING, seed=4, eos_token_ids=())
    results = Decoder(target, drafter, 4).generate(prompts, params, max_batch_size, on_tokens, on_block=on_block)
    assert [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)] == [r.tokens for r in results]
    assert num_model > 15
    assert num_text > 5 or name != "ngram, model"


def _planned(code: ModuleType) -> type:
    return type("Base", (code.HybridDrafter,), {"num_plans": 0, "_plan": Planned._plan})


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLING], ids=["greedy", "sampled"])
def test_text_longer_than_the_heads_can_draft(sampling: SamplingParams) -> None:
    """Heads of two tokens beside text of six: rows of text alone keep what lies behind the heads' reach."""
    target = make_tiny_target(seed=3, vocab_size=VOCAB_SIZE)
    head = HeadsDrafter(build_head(target, HeadOptions(kind="medusa", num_draft_tokens=2)))
    widths: list[tuple[int, bool]] = []

    class Turns(HybridDrafter):
        turn = 0

        def _plan(
            self, num_given: Sequence[int], matches: Sequence[int], num_draft_tokens: int, times: object
        ) -> list[Plan]:
            plans = []
            for count, match in zip(num_given, matches, strict=True):
                self.turn += 1
                is_second = self.turn % 2 or not count
                plans.append(Plan(0, min(2, num_draft_tokens), match) if is_second else Plan(count, 0, match))
            return plans

        def propose(self, *args: object, **kwargs: object) -> object:
            draft = super().propose(*args, **kwargs)  # type: ignore[arg-type]
            for b, plan in enumerate(args[0].plans):  # type: ignore[attr-defined]
                assert draft.counts[b] == plan.num_first + plan.num_second
            widths.append((draft.tokens_BK.shape[1], draft.probs_BKV is not None))
            if draft.probs_BKV is not None:
                drawn = draft.probs_BKV.gather(2, draft.tokens_BK[..., None])[..., 0]
                assert all((drawn[b, :count] > 0).all() for b, count in enumerate(draft.counts))
                assert draft.probs_BKV.shape[:2] == draft.tokens_BK.shape
            return draft

    prompts = [[5, 7, 4] * 3, [9, 9, 2] * 3, [3, 8, 10] * 3, [1, 2, 3, 4] * 2]
    decoder = Decoder(target, Turns(NgramDrafter(target, 1, 3), head), 6)
    results = decoder.generate(prompts, GenerationParams(30, sampling, seed=2, eos_token_ids=()), 4)
    assert max(width for width, _ in widths) == 6
    if sampling.is_greedy:
        assert [r.tokens for r in results] == [decode_plainly(target, p, 30, eos_token_ids=()) for p in prompts]


@torch.no_grad()
def fresh_logits(model: Target, text: list[int]) -> Tensor:
    return model.logits(model.hidden(torch.tensor([text]))[0, -1])


@pytest.mark.parametrize("name", ["ngram, model", "model, heads"])
def test_q(name: str) -> None:
    for max_batch_size in (1, 3):
        check_q(real_code, name, max_batch_size)


@pytest.mark.parametrize("name", ["ngram, heads", "ngram, model", "model, heads"])
def test_law(name: str) -> None:
    """N = 2000 texts of 3 tokens a prompt, false alarm 1e-6 each: the target's law, however blocks are put together."""
    target = make_tiny_target(seed=3, vocab_size=VOCAB_SIZE)
    decoder = Decoder(target, Planned(*PAIRS[name](target)), 2)
    prompts = [[5, 7, 4, 5, 7], [9, 9], [3, 3, 8, 10, 3, 3]]
    params = GenerationParams(NUM_TOKENS, SAMPLING, seed=11, eos_token_ids=())
    results = decoder.generate(prompts * NUM_SAMPLES, params, 256)
    for place, prompt in enumerate(prompts):
        samples = [result.tokens for result in results[place :: len(prompts)]]
        assert chi_square_p_value(samples, exact_law(target, prompt, SAMPLING)) > FALSE_ALARM
    assert sum(result.counters.accepted for result in results) > 0.05 * len(results)


def check_state(code: ModuleType) -> None:
    """A perfect second source behind any first one: all that it drafts is kept, so it has read what it should have."""
    target = make_tiny_target()
    perfect = model_code.ModelDrafter(sibling(target, 0.0), target)
    drafter = _planned(code)(NgramDrafter(target, 1, 3), perfect)
    prompts = [prompt * 2 for prompt in random_prompts(5, longest=12)]
    expected = [decode_plainly(target, prompt, 30, eos_token_ids=()) for prompt in prompts]
    kept: list[bool] = []
    absorb = drafter.absorb

    def spy(state: object, hidden: Tensor, tokens: Tensor, counts: Sequence[int]) -> None:
        for plan, count in zip(state.plans, counts, strict=True):
            if plan is not None and count - 1 >= plan.num_first:
                kept.append(count - 1 == plan.num_first + plan.num_second)
        absorb(state, hidden, tokens, counts)

    drafter.absorb = spy
    for max_batch_size in (1, 3):
        results = Decoder(target, drafter, 4).generate(prompts, GenerationParams(30, eos_token_ids=()), max_batch_size)
        assert [result.tokens for result in results] == expected
    # At a text's end a draft is cut to what may still be emitted.
    assert sum(kept) > 0.9 * len(kept)
    assert len(kept) > 30


def test_state() -> None:
    check_state(real_code)


def check_choice(code: ModuleType) -> None:
    """From estimates that are set by hand: the plan of the largest rate, found by enumeration in the test."""
    target = make_tiny_target()
    drafter = code.HybridDrafter(NgramDrafter(target, 1, 3), head_of(target))
    times = code._Times()
    for n in (0, 4, 8):
        for _ in range(100):
            times.target.observe(n, 1.0 + 0.05 * n)
            times.second.observe(n, 0.1 * n)
    drafter._first_rates[5].observe(8, [8] * 1000)  # a long match is always kept,
    drafter._first_rates[0].observe(8, [0] * 1000)  # a short one never
    drafter._second_rates[0].observe(5, [1] * 1000)  # the head's first token is, the second is not
    drafter._second_rates[1].observe(5, [0] * 1000)

    def plan(num_given: int, match: int, num_draft_tokens: int) -> Plan:
        (found,) = drafter._plan([num_given], [match], num_draft_tokens, times)
        return found

    assert plan(8, 5, 8) == Plan(8, 0, 5)
    assert plan(8, 0, 8) == Plan(0, 1, 0)
    assert plan(3, 5, 8) == Plan(3, 0, 5)
    drafter._second_rates[1].observe(5, [5] * 5000)
    assert plan(3, 5, 8) == Plan(3, 5, 5)
    assert plan(3, 5, 4) == Plan(3, 0, 5)  # a step behind three given ones costs four
    drafter._second_rates[0].observe(5, [0] * 5000)
    assert plan(0, 0, 8) == Plan(0, 0, 0)


def test_choice() -> None:
    check_choice(real_code)


def check_learning(code: ModuleType) -> None:
    """What is kept is booked to the source that gave it, in the class of its match."""
    target = make_tiny_target()
    drafter = code.HybridDrafter(NgramDrafter(target, 1, 3), head_of(target))
    state = drafter.start([[1, 2]] * 3)
    state.plans = [Plan(3, 2, 1), Plan(0, 2, 2), None]
    drafter._learn(state, [5, 1, 4])
    assert drafter._first_rates[1].kept[:4].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert drafter._second_rates[1].tried[:2].tolist() == [1.0, 1.0]
    assert drafter._second_rates[1].kept[:2].tolist() == [1.0, 0.0]
    assert drafter._second_rates[0].tried[:2].tolist() == [1.0, 0.0]
    assert drafter._second_rates[0].kept[:2].tolist() == [0.0, 0.0]
    assert sum(drafter._first_rates[2].tried) == 0
    assert state.plans == [None] * 3
    state.plans = [Plan(3, 2, 1), None, None]
    drafter._learn(state, [3, 1, 1])
    assert drafter._first_rates[1].kept[:3].tolist() == pytest.approx([1.99, 1.99, 0.99], abs=0.02)
    assert drafter._second_rates[1].tried[0] == pytest.approx(1.0, abs=0.01)


def test_learning() -> None:
    check_learning(real_code)


CHECKS: dict[str, Callable[[ModuleType], None]] = {
    "q": lambda code: check_q(code, "ngram, model"),
    "q of one row": lambda code: check_q(code, "ngram, model", 1),
    "q of the first": lambda code: check_q(code, "model, heads"),
    "state": check_state,
    "choice": check_choice,
    "learning": check_learning,
}
FAULTS = [
    # (check that must refuse it, module, right, wrong)
    ("q", "hybrid", "self.first.absorb(state.first,", "(lambda *unused: None)(state.first,"),
    ("state", "hybrid", "self.second.absorb(state.second,", "(lambda *unused: None)(state.second,"),
    ("q", "hybrid", "given.probs_BKV)\n        started =", "torch.full((1,), 0.1))\n        started ="),
    ("q of the first", "hybrid", "for count in counts], given.probs_BKV)", "for count in counts], None)"),
    ("choice", "hybrid", "reached_M[:, None] * more_MN", "more_MN"),
    ("choice", "hybrid", "times.target.all_seconds(m_M1 + n_1N)", "times.target.all_seconds(0 * (m_M1 + n_1N))"),
    ("choice", "hybrid", "m_M1 > 0, behind_N, alone_N", "m_M1 > 0, alone_N, behind_N"),
    ("choice", "hybrid", "(m_M1 + n_1N > longest)", "(n_1N > longest)"),
    ("learning", "hybrid", "(plan, count - 1) for plan", "(plan, count) for plan"),
    ("learning", "hybrid", "(plan.num_second, kept - plan.num_first)", "(plan.num_second, kept)"),
    ("learning", "hybrid", "state.plans = [None] * len(counts)", "pass"),
    (
        "q",
        "drawing",
        "is_given_B[:, None], self._prefix.probs(len(self.tokens), q_BV), q_BV",
        "is_given_B[:, None], q_BV, q_BV",
    ),
    ("q", "drawing", "torch.where(is_given_B, self._prefix.tokens_BP[:, len(self.tokens)], tokens_B)", "tokens_B"),
    (
        "q of one row",
        "drawing",
        "[prefix.probs(place, probs[0]) for place in range(self.num_given)] + probs",
        "probs[:1] * self.num_given + probs",
    ),
    ("state", "model", "state.num_drafted_entries += len(drafted)", "pass"),
    ("state", "model", "[[*unread[:n], *more]", "[[*unread[:n]]"),
]


@pytest.mark.parametrize(("check", "module", "right", "wrong"), FAULTS)
def test_planted_faults_are_caught(
    check: str, module: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module_of = {"hybrid": real_code, "drawing": drawing, "model": model_code}[module]
    source = inspect.getsource(module_of)
    assert right in source, f"the planted fault no longer matches the code: {right}"
    faulty = blank_module("faulty_code", module_of.__package__)
    monkeypatch.setitem(sys.modules, "faulty_code", faulty)  # dataclasses look their module up
    exec(compile(source.replace(right, wrong, 1), "faulty code", "exec"), faulty.__dict__)
    if module == "drawing":
        monkeypatch.setattr(model_code, "Drawing", faulty.Drawing)
    if module == "model":
        monkeypatch.setattr(model_code, "ModelDrafter", faulty.ModelDrafter)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError, TypeError)):
        CHECKS[check](faulty if module == "hybrid" else real_code)


def test_options() -> None:
    values = {"min_match": 1, "max_match": 3, "min_probability": 0.1, "remembered_tokens": 0}
    target = make_tiny_target()
    model = TargetOptions("tiny", source="random")
    drafter, record = make_drafter(DrafterOptions("hybrid", first="ngram", second="model", **values), model, target)
    assert isinstance(drafter, HybridDrafter)
    assert record["name"].startswith("ngram + ")
    for first, second, message in (
        ("heads", "model", "drafter.first='heads'"),
        ("ngram", "suffix", "drafter.second='suffix'"),
        ("model", "model", "one of them must be another"),
    ):
        with pytest.raises(ValueError, match=message):
            check_drafter(DrafterOptions("hybrid", first=first, second=second, **values))
    with pytest.raises(ValueError, match="vocabularies of"):
        HybridDrafter(NgramDrafter(make_tiny_target(vocab_size=300), 1, 3), head_of(target))


def test_sampling_is_the_seeds_alone() -> None:
    """Plans may differ from run to run with the clock; with plans that do not, the same seed gives the same text."""
    target = make_tiny_target()
    prompts = random_prompts(3, longest=20)
    params = GenerationParams(20, SamplingParams(1.0), seed=5)
    runs = [
        [r.tokens for r in Decoder(target, Planned(*PAIRS["ngram, heads"](target)), 4).generate(prompts, params, 1)]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", ["ngram, heads", "ngram, model", "model, heads"])
def test_plans_are_the_best_of_all_ways(name: str) -> None:
    """Every row's plan against a listing of all ways, for rates and times that were learned from random blocks."""
    target = make_tiny_target()
    drafter = HybridDrafter(*PAIRS[name](target))
    generator = np.random.default_rng(0)
    for rates in (*drafter._first_rates, *drafter._second_rates):
        for _ in range(20):
            rates.observe(12, generator.integers(0, 13, 4).tolist())
    times = real_code._Times()
    for line in (times.target, times.first, times.second, times.planning):
        for _ in range(20):
            line.observe(int(generator.integers(1, 12)), float(generator.random()))
    counts, matches = [0, 1, 3, 12, 7, 12], [0, 1, 2, 3, 1, 0]
    second, longest = drafter.second, min(drafter.second.max_draft_tokens or 12, 12)
    for plan, count, match in zip(drafter._plan(counts, matches, 12, times), counts, matches, strict=True):
        first = drafter._first_rates[match]

        def rate(m: int, n: int, first: KeepRates = first) -> float:
            seconds = times.target.seconds(m + n) + times.planning.seconds(1)
            if isinstance(drafter.first, ModelDrafter) and m:
                seconds += times.first.seconds(m)
            if n:
                seconds += times.second.seconds(n if isinstance(second, ModelDrafter) else m + n)
            more = drafter._second_rates[m > 0].expected_tokens()[n] - 1.0
            return (first.expected_tokens()[m] + first.reached()[m] * more) / seconds

        ways = [(m, n) for m in range(count + 1) for n in range(max(0, longest - m) + 1)]
        best = max(rate(*way) for way in ways)
        assert (plan.num_first, plan.num_second) in ways
        assert rate(plan.num_first, plan.num_second) == pytest.approx(best, rel=1e-9)
