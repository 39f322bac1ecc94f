"""Drafters that read the text alone, each lossless: greedy, by enumeration, and by the law of real runs.

The same checks are then shown to fail for faults planted in the real source.
"""

import importlib
import inspect
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models.decoding.counters import add_up
from models.decoding.decoder import Decoder
from models.decoding.reference import decode_plainly
from models.decoding.rows import GenerationParams
from models.drafters.text.rows import TextDrafter
from models.processors.prefix import ProcessorParams
from models.sampling import SamplingParams
from models.target.model import Target
from models.target.tiny import make_tiny_target
from models.verification.base import Block
from models.verification.token import TokenVerification
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
from tests.models.verification.enumeration import EXACT, Toy, cells, cumulated
from tests.planting import blank_module

PACKAGE = "models.drafters.text"
MODULES = ("rows", "suffix_automaton", "ngram", "suffix")  # each after those it imports
REAL = SimpleNamespace(**{name: importlib.import_module(f"{PACKAGE}.{name}") for name in MODULES})
# name -> the drafter
MAKE: dict[str, Callable[[SimpleNamespace, Target], TextDrafter]] = {
    "ngram": lambda code, target: code.ngram.NgramDrafter(target, 1, 4),
    "suffix": lambda code, target: code.suffix.SuffixDrafter(target, 1, 0.0),
    "suffix, careful": lambda code, target: code.suffix.SuffixDrafter(target, 2, 0.5),
    "suffix, remembering": lambda code, target: code.suffix.SuffixDrafter(target, 1, 0.0, 150),
}
NEW_TOKENS = 30
NUM_IDS = 16
PROMPTS = random_prompts(6, longest=20, vocab_size=NUM_IDS)
EVERY_LENGTH = [(1, 4), (2, 1), (3, 3), (8, 2)]  # (num_draft_tokens, max_batch_size)


def repeating_target() -> Target:
    """A random target that repeats itself: of few tokens, and with little in a layer but the token itself."""
    target = make_tiny_target(1, family="qwen3", num_hidden_layers=1, vocab_size=NUM_IDS)
    with torch.no_grad():
        for name, weight in target.model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight *= 0.3
    return target


# What holds of the code, checked on the real modules and on copies with planted faults.


def check_blocks(code: SimpleNamespace, name: str) -> None:
    """What each block drafts is what a fresh drafter proposes after the row's settled text, whatever the batch."""
    target = repeating_target()
    params = GenerationParams(24, SamplingParams(0.5, top_k=3), seed=3, eos_token_ids=(7, 13))
    texts = [list(prompt) for prompt in PROMPTS]
    num_compared = 0

    def on_tokens(index: int, tokens: list[int], verdicts: list[str]) -> None:
        if verdicts[0] == "prefill":
            texts[index] += tokens

    def on_block(record) -> None:  # type: ignore[no-untyped-def]
        nonlocal num_compared
        block, verdict = record.block, record.verdict
        assert block.draft_probs_BKV is None
        for b, index in enumerate(record.indices):
            text, count = texts[index], int(block.num_drafted_B[b])
            remaining = params.max_new_tokens - (len(text) - len(PROMPTS[index]))
            drafted = block.draft_tokens_BK[b, :count].tolist()
            assert drafted == fresh_draft(MAKE[name](REAL, target), text, min(4, remaining - 1))
            num_compared += count > 0
            num_accepted = int(verdict.num_accepted_B[b])
            text += [*drafted[:num_accepted], int(verdict.next_token_B[b])][: record.num_emitted[b]]

    decoder = Decoder(target, MAKE[name](code, target), 4)
    results = decoder.generate(PROMPTS, params, 3, on_tokens, on_block=on_block)
    assert [prompt + result.tokens for prompt, result in zip(PROMPTS, results, strict=True)] == texts
    assert num_compared > 10
    assert decoder.timings.prefills >= 3
    assert add_up(result.counters for result in results).accepted > 3


def fresh_draft(drafter: TextDrafter, text: list[int], count: int) -> list[int]:
    if count == 0:
        return []
    state = drafter.start([text[:3]])
    drafter.absorb(state, torch.zeros(1, len(text) - 1, 1), torch.tensor([text[1:]]), [len(text) - 1])
    draft = drafter.propose(state, count, SamplingParams(), None)
    assert draft.counts == [draft.tokens_BK.shape[1]]
    return draft.tokens_BK[0].tolist()


def check_greedy(code: SimpleNamespace, name: str) -> None:
    """K 1 to 8, batch 1 to 4, ragged prompts, EOS inside blocks."""
    target = repeating_target()
    endless = [decode_plainly(target, prompt, NEW_TOKENS, eos_token_ids=()) for prompt in PROMPTS]
    eos_token_ids = (endless[0][6], endless[3][9])
    expected = [up_to(tokens, eos_token_ids) for tokens in endless]
    assert len({len(tokens) for tokens in expected}) >= 3
    params = GenerationParams(NEW_TOKENS, eos_token_ids=eos_token_ids)
    for num_draft_tokens, max_batch_size in EVERY_LENGTH:
        decoder = Decoder(target, MAKE[name](code, target), num_draft_tokens)
        results = decoder.generate(PROMPTS, params, max_batch_size)
        assert [result.tokens for result in results] == expected
        assert add_up(result.counters for result in results).mean_block_length > 1.1


def up_to(tokens: list[int], eos_token_ids: tuple[int, ...]) -> list[int]:
    return tokens[: next((place + 1 for place, token in enumerate(tokens) if token in eos_token_ids), None)]


def check_exact(code: SimpleNamespace, name: str) -> None:
    """Every way that a decode can go, in float64: the output's law is the target's own."""
    length, num_draft_tokens, prompt = 4, 2, [0, 1, 0, 2, 1]
    toy = Toy(3, length, seed=5, zeros=True)
    law, accepted = enumerated_law(
        MAKE[name](code, make_tiny_target(vocab_size=3)), toy, prompt, length, num_draft_tokens
    )
    assert np.abs(law - toy.target_law(length)).max() < EXACT
    assert accepted > 0.1 or name == "suffix, careful"


def enumerated_law(
    drafter: TextDrafter, toy: Toy, prompt: list[int], length: int, num_draft_tokens: int
) -> tuple[np.ndarray, float]:
    """Law of `length` tokens, and the expected number of accepted ones, by the rule's real verdicts."""
    rng = np.random.default_rng(7)
    law, accepted = np.zeros((toy.vocab_size,) * length), 0.0
    states: dict[tuple[int, ...], float] = {(token,): p for token, p in enumerate(toy.p[()]) if p > 0}  # the prefill's
    while states:
        following: dict[tuple[int, ...], float] = defaultdict(float)
        for text, weight in states.items():
            if len(text) == length:
                law[text] += weight
                continue
            state = drafter.start([prompt])
            settled = [*prompt[1:], *text]
            drafter.absorb(state, torch.zeros(1, len(settled), 1), torch.tensor([settled]), [len(settled)])
            width = min(num_draft_tokens, length - len(text) - 1)
            draft = drafter.propose(state, width, SamplingParams(1.0), torch.zeros(1, width)) if width else None
            tokens = [] if draft is None else draft.tokens_BK[0].tolist()[: draft.counts[0]]
            probs = [toy.p[(*text, *tokens[:k])] for k in range(len(tokens) + 1)]
            axes = [cells([p[token]], rng) for p, token in zip(probs, tokens, strict=False)]
            residuals = [np.where(np.arange(len(p)) == t, 0.0, p) for p, t in zip(probs, tokens, strict=False)]
            last = [*cumulated(probs[-1]), *itertools.chain(*map(cumulated, residuals))]
            for combination in itertools.product(*axes, cells(last, rng)):
                middles, sizes = zip(*combination, strict=True)
                verdict = TokenVerification().verify(
                    Block(
                        torch.tensor(np.array(probs))[None],
                        None if draft is None else draft.probs_BKV,
                        torch.tensor([tokens], dtype=torch.long),
                        torch.tensor([len(tokens)]),
                        torch.tensor([middles[:-1]], dtype=torch.float64),
                        torch.tensor([middles[-1]], dtype=torch.float64),
                    )
                )
                kept = int(verdict.num_accepted_B)
                accepted += weight * float(np.prod(sizes)) * kept
                following[(*text, *tokens[:kept], int(verdict.next_token_B))] += weight * float(np.prod(sizes))
        states = following
    return law, accepted


def check_unmatched(code: SimpleNamespace, name: str) -> None:
    """A text that repeats nothing is not drafted for, alone or beside one that is."""
    target = make_tiny_target()
    assert fresh_draft(MAKE[name](code, target), [5, 6, 7, 8], 3) == []
    drafter = MAKE[name](code, target)
    state = drafter.start([[5, 6], [8, 9]])
    drafter.absorb(state, torch.zeros(2, 4, 1), torch.tensor([[6, 5, 6, 0], [9, 0, 0, 0]]), [3, 1])
    draft = drafter.propose(state, 2, SamplingParams(), None)
    assert draft.tokens_BK.tolist() == [[5, 6], [0, 0]]
    assert draft.counts == [2, 0]


CHECKS = {"unmatched": check_unmatched, "blocks": check_blocks, "greedy": check_greedy, "exact": check_exact}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("check", CHECKS)
def test_checks(check: str, name: str) -> None:
    if (check, name) == ("blocks", "suffix, remembering"):
        pytest.skip("its drafts depend on the other rows")
    CHECKS[check](REAL, name)


@pytest.mark.parametrize("name", ["ngram", "suffix, remembering"])
def test_law_is_the_targets(name: str) -> None:
    """N = 2000 texts of 3 tokens a prompt, ragged neighbours; refused below p = 1e-6, the false-alarm rate of each."""
    target = make_tiny_target(seed=3, vocab_size=VOCAB_SIZE)
    prompts = [[5, 7, 4, 5, 7], [9, 9]]
    params = GenerationParams(NUM_TOKENS, SAMPLING, seed=11, eos_token_ids=())
    decoder = Decoder(target, MAKE[name](REAL, target), 2)
    results = decoder.generate(prompts * NUM_SAMPLES, params, 333)
    for place, prompt in enumerate(prompts):
        samples = [result.tokens for result in results[place :: len(prompts)]]
        assert chi_square_p_value(samples, exact_law(target, prompt, SAMPLING)) > FALSE_ALARM
    counters = add_up(result.counters for result in results)
    assert 0.02 < counters.acceptance_rate < 0.9
    assert counters.drafted > 100


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", [name for name in MAKE if "remembering" not in name])
def test_rows_do_not_depend_on_the_batch(name: str, temperature: float) -> None:
    """Counters too: a row's drafts are the same whatever stands beside it, and after rows left and joined."""
    target = repeating_target()
    params = GenerationParams(NEW_TOKENS, SamplingParams(temperature, top_k=4), seed=3)
    decoder = Decoder(target, MAKE[name](REAL, target), 4)
    alone = decoder.generate(PROMPTS, params, max_batch_size=1)
    assert decoder.generate(PROMPTS, params, max_batch_size=4) == alone


@pytest.mark.parametrize("name", MAKE)
def test_penalties(name: str) -> None:
    """The drafts know nothing of them; the output is right all the same."""
    target = repeating_target()
    processors = ProcessorParams(repetition_penalty=1.3, no_repeat_ngram_size=3)
    params = GenerationParams(16, eos_token_ids=(), processors=processors)
    results = Decoder(target, MAKE[name](REAL, target), 3).generate(PROMPTS[:3], params, 2)
    for prompt, result in zip(PROMPTS, results, strict=False):
        assert result.tokens == decode_plainly(target, prompt, 16, eos_token_ids=(), processors=processors)


def test_nothing_drafted_is_remembered() -> None:
    """Proposing twice, and wider than the text, gives the same again."""
    target = make_tiny_target()
    for make in MAKE.values():
        drafter = make(REAL, target)
        state = drafter.start([[5]])
        drafter.absorb(state, torch.zeros(1, 4, 1), torch.tensor([[6, 5, 6, 5]]), [4])
        first = drafter.propose(state, 9, SamplingParams(), None).tokens_BK
        assert torch.equal(drafter.propose(state, 9, SamplingParams(), None).tokens_BK, first)
        assert first.tolist() == [[6, 5, 6, 5, 6, 5, 6, 5, 6]]


FAULTS = [
    # (check that must refuse it, drafter, right, wrong)
    ("blocks", "ngram", "reader.read(tokens[:count])", "reader.read(tokens)"),
    ("blocks", "ngram", "reader.read(tokens[:count])", "reader.read(tokens[: count - 1])"),
    ("blocks", "ngram", "reader.read(prompt[:1])", "pass"),
    ("unmatched", "ngram", "reader.read(prompt[:1])", "reader.read(prompt)"),
    ("unmatched", "ngram", "reader.read(tokens[:count])", "reader.read(tokens)"),
    ("unmatched", "ngram", "Draft(tokens_BK, counts=counts)", "Draft(tokens_BK)"),
    ("blocks", "ngram", "[state[row] for row in rows]", "state[: len(rows)]"),
    ("blocks", "ngram", "state += other", "state[:] = other + state"),
    ("blocks", "ngram", "Draft(tokens_BK, counts=counts)", "Draft(tokens_BK)"),
    ("blocks", "ngram", "            self._source, self.match_length = None, 0\n", ""),
    ("blocks", "ngram", "self._behind[ngram] = end", "self._behind.setdefault(ngram, end)"),
    ("blocks", "ngram", "self._source + place % period", "self._source - 1 + place % period"),
    ("blocks", "ngram", "return [self._text[self._source + place % period] for place in range(count)]",
     "drafted = [self._text[self._source + place % period] for place in range(count)]\n"
     "        self._text += drafted\n        return drafted"),
    ("blocks", "suffix", "self._state = self._own.extend(self._state, token)",
     "self._state = self._own.extend(0, token)"),
    ("blocks", "suffix", "return self._own, self._state",
     "return self._own, self._own.links[self._own.match(self._state)]"),
    ("blocks", "suffix", "self._count(state, token)", "self._count(target, token)"),
    ("blocks", "suffix", "self.links[known] = twin", "pass"),
    ("exact", "ngram", "Draft(tokens_BK, counts=counts)",
     "Draft(tokens_BK, torch.full((len(rows), width, self.vocab_size), 1 / self.vocab_size), counts=counts)"),
    ("exact", "suffix", "Draft(tokens_BK, counts=counts)",
     "Draft(tokens_BK, torch.nn.functional.one_hot(tokens_BK, self.vocab_size) * 0.5, counts=counts)"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "name", "right", "wrong"), FAULTS)
def test_planted_faults_are_caught(check: str, name: str, right: str, wrong: str) -> None:
    faulty = planted(right, wrong)
    with pytest.raises((AssertionError, IndexError, KeyError, RuntimeError, ValueError)):
        CHECKS[check](faulty, name)


def planted(right: str, wrong: str) -> SimpleNamespace:
    """All modules made anew, with `wrong` in place of the first `right` in their sources."""
    sources = {name: inspect.getsource(getattr(REAL, name)) for name in MODULES}
    place = next((name for name in MODULES if right in sources[name]), None)
    assert place is not None, f"the planted fault no longer matches the code: {right}"
    sources[place] = sources[place].replace(right, wrong, 1)
    before = {name: sys.modules[f"{PACKAGE}.{name}"] for name in MODULES}
    made = SimpleNamespace()
    try:
        for name in MODULES:
            module = sys.modules[f"{PACKAGE}.{name}"] = blank_module(f"{PACKAGE}.{name}", PACKAGE)
            exec(compile(sources[name], f"faulty {name}", "exec"), module.__dict__)
            setattr(made, name, module)
    finally:
        sys.modules.update({f"{PACKAGE}.{name}": module for name, module in before.items()})
    return made


def test_seeds_repeat_with_a_memory() -> None:
    """The same call gives the same texts and counts, once the memory is cleared."""
    target = repeating_target()
    drafter = MAKE["suffix, remembering"](REAL, target)
    decoder = Decoder(target, drafter, 4)
    params = GenerationParams(NEW_TOKENS, SamplingParams(1.0, top_k=4), seed=3)
    first = decoder.generate(PROMPTS, params, 3)
    drafter.forget()  # type: ignore[attr-defined]
    assert decoder.generate(PROMPTS, params, 3) == first
    greedy = replace(params, sampling=SamplingParams())
    drafter.forget()  # type: ignore[attr-defined]
    assert [r.tokens for r in decoder.generate(PROMPTS, greedy, 3)] == [
        r.tokens for r in Decoder(target).generate(PROMPTS, greedy, 3)
    ]
