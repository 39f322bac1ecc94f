"""Checks of the processors of a block: every place sees what transformers' own list gives on the same prefix, exactly.

`code` is the modules under test, real or with a planted fault.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as hf

from models.processors.block import BlockProcessor
from models.target.tiny import make_tiny_target

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
                    before_V = batch.logits_BTV[b, place].clone()
                    got = made.apply(batch.logits_BTV[b, place], batch.prompts[b], text)
                    assert torch.equal(got, batch.expected_BTV[b, place]), case
                    assert torch.equal(batch.logits_BTV[b, place], before_V), case
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
            alone = code.Processors(code.ProcessorParams(**CASES[case]), EOS, VOCAB)
            got_V = alone.apply(logits_BTV[b, place], batch.prompts[b], batch.generated[b])
            for row_V in (got[b, place], got_V):
                assert torch.equal(row_V.nan_to_num(7.0), logits_BTV[b, place].nan_to_num(7.0))
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
