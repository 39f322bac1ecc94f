"""Processors: every place of a block sees what transformers' own list gives on the same prefix, exactly.

The same checks are then shown to fail for faults planted in the real source.
"""

import inspect
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as hf

from models.decoding import processors
from models.decoding.processors import BlockProcessor, ProcessorParams, Processors
from models.tiny import make_tiny_target
from tests.models.decoding.scripted import random_prompts

VOCAB = 24
COMMON = 9  # what texts are mostly made of, so that tokens and n-grams come again
EOS = (2, 5)
WIDTH = 3  # drafted tokens
TARGET = make_tiny_target()


def other_parity(prompt: Sequence[int], generated: Sequence[int]) -> list[int]:
    """A grammar that depends on the last token, the length of the output and the first prompt token."""
    parity = ([*prompt, *generated][-1] + len(generated) + prompt[0]) % 2
    return [token for token in range(VOCAB) if token % 2 == parity or token in EOS]


def parity_mask(prompt: Sequence[int], generated: Sequence[int]) -> Tensor:
    """The same as a mask."""
    return torch.isin(torch.arange(VOCAB), torch.tensor(other_parity(prompt, generated)))


class Pull:
    """A processor that says of itself that it depends on the prefix alone: it pulls towards the first token."""

    depends_only_on_prefix = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, input_ids[0, 0]] += 0.5 * input_ids.shape[1]  # in place, as some do
        return scores


def bias() -> hf.SequenceBiasLogitsProcessor:
    return hf.SequenceBiasLogitsProcessor([[[3], 1.5], [[4, 6], -2.0], [[1, 7, 7], 4.0]])


CASES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition rewarded": {"repetition_penalty": 0.5},
    "frequency": {"frequency_penalty": 0.75},
    "presence": {"presence_penalty": -1.5},
    "frequency and presence": {"frequency_penalty": 0.5, "presence_penalty": 0.25},
    "no unigram twice": {"no_repeat_ngram_size": 1},
    "no bigram twice": {"no_repeat_ngram_size": 2},
    "no trigram twice": {"no_repeat_ngram_size": 3},
    "bad words": {"bad_words_ids": ((3,), (1, 7, 7), *((token, (token + 2) % COMMON) for token in range(COMMON)))},
    "minimum length": {"min_new_tokens": 4},
    "grammar": {"allowed_tokens": other_parity},
    "grammar as a mask": {"allowed_tokens": parity_mask},
    "warper": {"custom": (hf.TypicalLogitsWarper(0.8),)},
    "custom": {"custom": (bias(), Pull(), hf.MinLengthLogitsProcessor(8, list(EOS)))},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 1.0},
    "bans": {"no_repeat_ngram_size": 2, "bad_words_ids": ((3,), (4, 6)), "min_new_tokens": 5},
    "all": {
        "repetition_penalty": 1.25,
        "frequency_penalty": 0.25,
        "presence_penalty": 0.5,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": ((3,), (4, 6)),
        "min_new_tokens": 4,
        "allowed_tokens": parity_mask,
        "custom": (hf.TemperatureLogitsWarper(0.5), Pull(), hf.TopKLogitsWarper(4), hf.LogitNormalization()),
    },
}


class CountPenalty(hf.LogitsProcessor):
    """OpenAI's definition, token by token; transformers has none."""

    def __init__(self, prompt_length: int, frequency: float, presence: float) -> None:
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for token, count in Counter(input_ids[0, self.prompt_length :].tolist()).items():
            scores[0, token] -= self.frequency * count
            scores[0, token] -= self.presence
        return scores


def expected(options: dict[str, Any], prompt: list[int], generated: list[int], logits_V: Tensor) -> Tensor:
    """What the list of transformers' `generate` gives for this prefix as a batch of one."""
    known = ("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens")
    config = GenerationConfig(
        num_beams=1, num_return_sequences=1, **{name: options[name] for name in known if name in options}
    )
    if "bad_words_ids" in options:
        config.bad_words_ids = [list(word) for word in options["bad_words_ids"]]
    config._eos_token_tensor = torch.tensor(EOS)
    grammar = options.get("allowed_tokens")
    steps = TARGET.model._get_logits_processor(
        config,
        input_ids_seq_length=len(prompt),
        prefix_allowed_tokens_fn=grammar and (lambda _, ids: other_parity(prompt, ids[len(prompt) :].tolist())),
        logits_processor=LogitsProcessorList(options.get("custom", ())),
    )
    penalty = CountPenalty(len(prompt), options.get("frequency_penalty", 0.0), options.get("presence_penalty", 0.0))
    after = 1 if steps and isinstance(steps[0], hf.RepetitionPenaltyLogitsProcessor) else 0
    steps.insert(after, penalty)
    return steps(torch.tensor([prompt + generated]), logits_V[None].clone())[0]


@dataclass
class Batch:
    """Ragged rows, a draft that the target might have given, and what each place must become."""

    prompts: list[list[int]]
    generated: list[list[int]]
    logits_BTV: Tensor
    drafted_BK: Tensor
    num_drafted: list[int]
    expected_BTV: Tensor


def make_batch(options: dict[str, Any], seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    num_rows = 6

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    prompts = [draw(0, COMMON, length) for length in draw(1, 9, num_rows)]
    generated = [draw(0, COMMON, length) for length in [0, 1, 2, 3, *draw(1, 7, num_rows - 4)]]
    num_drafted = [*range(WIDTH + 1), WIDTH, WIDTH]
    logits_BTV = torch.randn(num_rows, WIDTH + 1, VOCAB, generator=generator) * 3
    logits_BTV[..., :COMMON] += 3.0
    drafted_BK = torch.tensor([draw(0, VOCAB, WIDTH) for _ in prompts])  # behind num_drafted: anything
    expected_BTV = logits_BTV.clone()
    for b, count in enumerate(num_drafted):
        for place in range(count + 1):
            text = generated[b] + drafted_BK[b, :place].tolist()
            expected_BTV[b, place] = expected(options, prompts[b], text, logits_BTV[b, place])
            if place < count:
                drafted_BK[b, place] = torch.multinomial(expected_BTV[b, place].softmax(-1), 1, generator=generator)
    return Batch(prompts, generated, logits_BTV, drafted_BK, num_drafted, expected_BTV)


@cache
def batches(case: str) -> list[Batch]:
    return [make_batch(CASES[case], seed) for seed in range(2)]


def block_of(code: SimpleNamespace, case: str, batch: Batch) -> BlockProcessor:
    made = code.Processors(code.ProcessorParams(**CASES[case]), EOS, VOCAB)
    return code.BlockProcessor(made, batch.prompts, batch.generated)


def check_places(code: SimpleNamespace) -> None:
    """Target side: places that are judged as transformers has them, those behind as they were, the input untouched."""
    for case in CASES:
        for batch in batches(case):
            before = batch.logits_BTV.clone()
            got = block_of(code, case, batch).target(batch.logits_BTV, batch.drafted_BK, batch.num_drafted)
            assert torch.equal(got, batch.expected_BTV), case
            assert torch.equal(batch.logits_BTV, before), case


def check_draft(code: SimpleNamespace) -> None:
    """Drafting side: the same logits become the same."""
    for case in CASES:
        for batch in batches(case):
            before = batch.logits_BTV.clone()
            block = block_of(code, case, batch)
            for place in range(WIDTH + 1):
                got = block.draft(batch.logits_BTV[:, place], list(batch.drafted_BK[:, :place].unbind(1)))
                rows = [b for b, count in enumerate(batch.num_drafted) if count >= place]
                assert torch.equal(got[rows], batch.expected_BTV[rows, place]), case
            assert torch.equal(batch.logits_BTV, before), case


def check_plain(code: SimpleNamespace) -> None:
    """Plain decoding, token by token, one prefix at a time."""
    for case in CASES:
        made = code.Processors(code.ProcessorParams(**CASES[case]), EOS, VOCAB)
        for batch in batches(case):
            for b, count in enumerate(batch.num_drafted):
                text = list(batch.generated[b])
                for place in range(count + 1):
                    got = made.apply(batch.logits_BTV[b, place], batch.prompts[b], text)
                    assert torch.equal(got, batch.expected_BTV[b, place]), case
                    text += batch.drafted_BK[b, place : place + 1].tolist()


def ladder(prompt: Sequence[int], generated: Sequence[int]) -> list[int]:
    """Each token is at most 2 above the one before it. Token 7 ends the text, and nothing may be asked after it."""
    text = [prompt[-1], *generated]
    steps = [after - before for before, after in itertools.pairwise(text)]
    if not all(0 < step <= 2 for step in steps):
        raise LookupError(f"no such text: {generated}")
    return [] if text[-1] >= 7 else [text[-1] + 1, text[-1] + 2]


def check_impossible(code: SimpleNamespace) -> None:
    """A drafted token that the grammar forbids gets -inf; what lies behind it is never shown to the grammar."""
    made = code.Processors(code.ProcessorParams(allowed_tokens=ladder), EOS, VOCAB)
    block = code.BlockProcessor(made, [[1], [0]], [[], [1]])
    logits_BTV = torch.randn(2, WIDTH + 1, VOCAB, generator=torch.Generator().manual_seed(0))
    got = block.target(logits_BTV, torch.tensor([[2, 9, 4], [3, 4, 5]]), [3, 3])
    assert [(row_V > -torch.inf).nonzero()[:, 0].tolist() for row_V in got[0, :2]] == [[2, 3], [3, 4]]
    assert torch.equal(got[0, 2:], logits_BTV[0, 2:])
    assert [(row_V > -torch.inf).nonzero()[:, 0].tolist() for row_V in got[1]] == [[2, 3], [4, 5], [5, 6], [6, 7]]
    block.raise_if_reached([4, 4])
    # A drafter is not told that its token is forbidden, and goes on.
    drafted = [torch.tensor([2, 3]), torch.tensor([9, 4])]
    got_BV = block.draft(logits_BTV[:, 2], drafted)
    assert torch.equal(got_BV[0], logits_BTV[0, 2])
    assert (got_BV[1] > -torch.inf).nonzero()[:, 0].tolist() == [5, 6]


def check_failures(code: SimpleNamespace) -> None:
    """A grammar that ends where a stop string would end the text: an error only if decoding really goes on there."""
    made = code.Processors(code.ProcessorParams(allowed_tokens=ladder), EOS, VOCAB)
    logits_BTV = torch.randn(2, WIDTH + 1, VOCAB, generator=torch.Generator().manual_seed(0))
    drafted_BK = torch.tensor([[2, 3, 4], [6, 7, 9]])
    block = code.BlockProcessor(made, [[1], [5]], [[], []])
    got = block.target(logits_BTV, drafted_BK, [3, 3])
    assert (got[1, :2] > -torch.inf).sum(dim=-1).tolist() == [2, 2]
    assert torch.equal(got[1, 2:], logits_BTV[1, 2:])
    assert torch.equal(block.draft(logits_BTV[:, 2], list(drafted_BK[:, :2].unbind(1)))[1], logits_BTV[1, 2])
    block.raise_if_reached([4, 2])
    with pytest.raises(ValueError, match=r"allowed_tokens left no token to choose after 1 prompt tokens and 2 more"):
        block.raise_if_reached([4, 3])
    over = code.BlockProcessor(made, [[1], [5]], [[], [7]])
    with pytest.raises(ValueError, match="allowed_tokens left no token"):
        over.target(logits_BTV, drafted_BK, [0, 0])
    assert torch.equal(over.draft(logits_BTV[:, 0], [])[1], logits_BTV[1, 0])


def check_sick_logits(code: SimpleNamespace) -> None:
    """Logits without a law come back as they are, whatever a processor would say to them, and harm no other row."""
    case = "all"
    batch = batches(case)[0]
    for sick in (torch.nan, torch.inf, -torch.inf):
        logits_BTV = batch.logits_BTV.clone()
        logits_BTV[0, 0, :] = sick
        logits_BTV[5, 1, : VOCAB if sick < 0 else 1] = sick
        got = block_of(code, case, batch).target(logits_BTV, batch.drafted_BK, batch.num_drafted)
        for b, place in [(0, 0), (5, 1)]:
            assert torch.equal(got[b, place].nan_to_num(7.0), logits_BTV[b, place].nan_to_num(7.0))
        assert torch.equal(got[1:5], batch.expected_BTV[1:5])


class Gives:
    """A processor that gives what it was told to."""

    depends_only_on_prefix = True

    def __init__(self, give: Callable[[Tensor], Any]) -> None:
        self.give = give

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        return self.give(scores)


def check_results(code: SimpleNamespace) -> None:
    """What a processor must not give is refused with its name."""
    no_law = "must be finite, or -inf to forbid the token"
    wrong: list[tuple[Callable[[Tensor], Any], str]] = [
        (
            lambda scores: torch.full_like(scores, -torch.inf),
            "left no token to choose after 2 prompt tokens and 1 more",
        ),
        (lambda scores: scores.index_fill(1, torch.tensor([3]), torch.nan), f"made a logit nan .*{no_law}"),
        (lambda scores: scores.index_fill(1, torch.tensor([3]), torch.inf), f"made a logit inf .*{no_law}"),
        (lambda scores: scores[0], r"returned \(24,\) .*must be scores \(1, 24\)"),
        (lambda scores: scores[:, 1:], r"returned \(1, 23\) .*must be scores \(1, 24\)"),
        (lambda scores: None, "returned NoneType .*must be scores"),
    ]
    for give, message in wrong:
        params = code.ProcessorParams(custom=(Pull(), Gives(give)))
        with pytest.raises(ValueError, match=rf"custom\[1\] \(Gives\) {message}"):
            code.Processors(params, EOS, VOCAB).apply(torch.zeros(VOCAB), [1, 2], [3])


CHECKS = [check_results, check_impossible, check_failures, check_sick_logits, check_places, check_draft, check_plain]
REAL = SimpleNamespace(**vars(processors))


@pytest.mark.parametrize("check", CHECKS)
def test_prefix_is_plain_decodings(check: Callable[[SimpleNamespace], None]) -> None:
    check(REAL)


def planted(right: str, wrong: str) -> SimpleNamespace:
    """The module made anew with `wrong` in place of the first `right` in its source."""
    source = inspect.getsource(processors)
    assert right in source, f"the planted fault no longer matches the code: {right}"
    faulty = ModuleType("faulty_processors")
    sys.modules[faulty.__name__] = faulty  # where dataclasses look
    try:
        exec(compile(source.replace(right, wrong, 1), "faulty processors", "exec"), faulty.__dict__)
    finally:
        del sys.modules[faulty.__name__]
    return SimpleNamespace(**vars(faulty))


def fails(check: Callable[[SimpleNamespace], None], code: SimpleNamespace) -> bool:
    try:
        check(code)
    except (AssertionError, IndexError, LookupError, RuntimeError, ValueError, pytest.fail.Exception):
        return True
    return False


PLANTED = {
    "only the last token of the block": ("scores_TV[place], tokens[:place])", "scores_TV[place], tokens[:place][-1:])"),
    "prefix one token short": ("scores_TV[place], tokens[:place])", "scores_TV[place], tokens[: max(0, place - 1)])"),
    "prefix one token long": ("scores_TV[place], tokens[:place])", "scores_TV[place], tokens[: place + 1])"),
    "prefix without the block": ("scores_TV[place], tokens[:place])", "scores_TV[place], ())"),
    "the neighbour's prompt": ("self._prompts[b]", "self._prompts[b - 1]"),
    "the neighbour's output": ("(*self._generated[b], *drafted)", "(*self._generated[b - 1], *drafted)"),
    "the block alone": ("(*self._generated[b], *drafted)", "tuple(drafted)"),
    "output without the prompt": ("[self.prompt + self.generated]", "[self.generated]"),
    "prompt without the output": ("[self.prompt + self.generated]", "[self.prompt]"),
    "minimum length counted from the prompt on": ("processor(prefix.generated_1T", "processor(prefix.text_1T"),
    "frequency counts the prompt": ("bincount(prefix.generated_1T[0]", "bincount(prefix.text_1T[0]"),
    "frequency without a count": ("frequency * counts_V", "frequency * (counts_V > 0)"),
    "presence counts": ("presence * (counts_V > 0)", "presence * counts_V"),
    "frequency before repetition": ('steps.append(("frequency', 'steps.insert(0, ("frequency'),
    "custom first": ('steps.append((f"custom', 'steps.insert(0, (f"custom'),
    "grammar after custom": ("return steps", 'return sorted(steps, key=lambda step: step[0] == "allowed_tokens")'),
    "grammar inverted": ("masked_fill(~_as_mask(", "masked_fill(_as_mask("),
    "grammar has prompt and output exchanged": (
        "(prefix.prompt, prefix.generated)",
        "(prefix.generated, prefix.prompt)",
    ),
    "bans fed the output alone": (
        "_on_text(bad_words)",
        "lambda prefix, scores: bad_words(prefix.generated_1T, scores)",
    ),
    "target in place": ("_widen(logits_BTV).clone()", "_widen(logits_BTV)"),
    "one prefix in place": ("_widen(logits_V)[None].clone()", "_widen(logits_V)[None]"),
    "padding processed": ("tokens[:count])", "tokens)"),
    "bonus place left out": ("range(len(tokens) + 1)", "range(max(1, len(tokens)))"),
    "draft one token short": ("logits_V, drafted_BK[b])", "logits_V, drafted_BK[b][:-1])"),
    "grammar asked behind what it forbids": ("tokens[place]] == -torch.inf", "tokens[place]] == torch.inf"),
    "error at a place that nothing reaches": ("if place == 0:", "if True:"),
    "error at the first place waits": ("if place == 0:", "if False:"),
    "error raised one token early": ("num_emitted[b] > place", "num_emitted[b] >= place"),
    "error raised one token late": ("num_emitted[b] > place", "num_emitted[b] > place + 1"),
    "sick logits processed": ("if not scores_1V.amax().isfinite():", "if False:"),
    "NaN goes through": ("if not math.isfinite(best):", "if best == math.inf:"),
    "empty grammar goes through": ("if best == -math.inf:", "if False:"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    """Each change to the real source makes at least one of the checks above fail."""
    mutant = planted(*PLANTED[fault])
    assert any(fails(check, mutant) for check in CHECKS)


def test_nothing_set_costs_nothing() -> None:
    assert ProcessorParams().is_empty
    assert not any(ProcessorParams(**options).is_empty for options in CASES.values())
    logits_BTV = torch.zeros(2, 4, VOCAB)
    # A minimum length without an EOS has nothing to do either.
    for params, eos in [(ProcessorParams(), EOS), (ProcessorParams(min_new_tokens=5), ())]:
        made = Processors(params, eos, VOCAB)
        block = BlockProcessor(made, [[1], [2]], [[], []])
        assert made.is_empty
        assert block.target(logits_BTV, torch.zeros(2, 3, dtype=torch.long), [3, 2]) is logits_BTV
        assert block.draft(logits_BTV[:, 0], []).data_ptr() == logits_BTV.data_ptr()


def test_a_draft_vocabulary_may_lack_every_allowed_token() -> None:
    """Then the drafter's logits stay as they are: whatever it drafts is rejected, and decoding goes on."""
    made = Processors(ProcessorParams(allowed_tokens=lambda prompt, generated: [3]), EOS, VOCAB)
    logits_BV = torch.zeros(2, VOCAB)
    logits_BV[0, 3] = -torch.inf
    got_BV = BlockProcessor(made, [[1], [1]], [[], []]).draft(logits_BV, [])
    assert torch.equal(got_BV[0], logits_BV[0])
    assert (got_BV[1] > -torch.inf).nonzero()[:, 0].tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    made = Processors(ProcessorParams(**CASES["all"]), EOS, VOCAB)
    logits_BTV = torch.randn(1, 2, VOCAB, generator=torch.Generator().manual_seed(0)).to(dtype)
    block = BlockProcessor(made, [[1, 2]], [[3]])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    target_BTV = block.target(logits_BTV, torch.tensor([[4]]), [1])
    assert target_BTV.dtype == block.draft(logits_BTV[:, 0], []).dtype == wide
    assert torch.equal(target_BTV, block.target(logits_BTV.to(wide), torch.tensor([[4]]), [1]))


# What transformers' own loop does


def decode(made: Processors, prompt: list[int], eos: tuple[int, ...], new_tokens: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < new_tokens and not (tokens and tokens[-1] in eos):
        logits_V = TARGET.logits(TARGET.hidden(torch.tensor([prompt + tokens])))[0, -1]
        tokens.append(int(made.apply(logits_V, prompt, tokens).argmax()))
    return tokens


def generate(prompt: list[int], eos: tuple[int, ...], new_tokens: int, **options: Any) -> list[int]:
    if "bad_words_ids" in options:
        options["bad_words_ids"] = [list(word) for word in options["bad_words_ids"]]
    output = TARGET.model.generate(
        torch.tensor([prompt]),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=list(eos),
        **options,
    )
    return output[0, len(prompt) :].tolist()


NEW_TOKENS = 32


def test_greedy_equals_generate() -> None:
    """Token by token, and in blocks of the output's own tokens at each place."""
    changes: Counter[str] = Counter()
    for prompt in random_prompts(3, longest=20):
        free = generate(prompt, (), NEW_TOKENS)
        ends = (free[4], free[9])
        words = ((free[0],), (free[1], free[2]), tuple(free[5:8]))
        bans = {"no_repeat_ngram_size": 2, "bad_words_ids": words, "min_new_tokens": 12}
        cases: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
            ("penalty", (), {"repetition_penalty": 1.5}),
            ("reward", (), {"repetition_penalty": 0.6}),
            ("no unigram twice", (), {"no_repeat_ngram_size": 1}),
            ("no bigram twice", (), {"no_repeat_ngram_size": 2}),
            ("bad words", ends, {"bad_words_ids": words}),
            ("minimum length", ends, {"min_new_tokens": 7}),
            ("all", ends, {"repetition_penalty": 1.2, **bans}),
        ]
        for name, eos, options in cases:
            made = Processors(ProcessorParams(**options), eos, TARGET.vocab_size)
            tokens = generate(prompt, eos, NEW_TOKENS, **options)
            assert decode(made, prompt, eos, NEW_TOKENS) == tokens, name
            check_blocks(made, prompt, tokens)
            first_eos = next((place for place, token in enumerate(free) if token in eos), NEW_TOKENS)
            changes[name] += tokens != free[: first_eos + 1]
    assert min(changes.values()) > 0, changes


def check_blocks(made: Processors, prompt: list[int], tokens: list[int]) -> None:
    """Blocks that begin anywhere in the output, and draft what follows, choose just that."""
    logits_TV = TARGET.logits(TARGET.hidden(torch.tensor([prompt + tokens])))[0, len(prompt) - 1 : -1]
    for start in range(len(tokens)):
        chosen = tokens[start : start + WIDTH + 1]
        logits_1TV = logits_TV[None, start : start + len(chosen)]
        block = BlockProcessor(made, [prompt], [tokens[:start]])
        got_1TV = block.target(logits_1TV, torch.tensor([chosen[:-1]]), [len(chosen) - 1])
        assert got_1TV[0].argmax(dim=-1).tolist() == chosen


def test_grammar_on_a_model() -> None:
    """One to four digits, then EOS: nothing else comes out of a random model, greedy or sampled."""
    eos = TARGET.eos_token_ids
    digits = TARGET.tokenizer.convert_tokens_to_ids(list("0123456789"))

    def number(prompt: Sequence[int], generated: Sequence[int]) -> list[int]:
        return [*(digits if len(generated) < 4 else []), *(eos if generated else [])]

    made = Processors(ProcessorParams(allowed_tokens=number), eos, TARGET.vocab_size)
    prompt = random_prompts(1, longest=9)[0]
    texts = [decode(made, prompt, eos, NEW_TOKENS)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        tokens: list[int] = []
        while not tokens or tokens[-1] not in eos:
            logits_V = TARGET.logits(TARGET.hidden(torch.tensor([prompt + tokens])))[0, -1]
            probs_V = made.apply(logits_V, prompt, tokens).softmax(dim=-1)
            tokens.append(int(torch.multinomial(probs_V, 1, generator=generator)))
        texts.append(tokens)
    assert len({tuple(tokens) for tokens in texts}) > 3
    for tokens in texts:
        assert tokens[-1] in eos
        assert 1 <= len(tokens[:-1]) <= 4
        assert TARGET.tokenizer.decode(tokens[:-1]).isdecimal()
