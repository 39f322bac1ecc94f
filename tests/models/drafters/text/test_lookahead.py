"""Lookahead decoding: lossless, and its window and pool by their definitions."""

import pytest
import torch

from models.decoding.counters import Counters, add_up
from models.decoding.decoder import Decoder
from models.decoding.reference import decode_plainly
from models.decoding.rows import GenerationParams
from models.drafters.build import make_drafter
from models.drafters.options import DrafterOptions, default_draft_tokens
from models.drafters.text.lookahead import LookaheadDrafter, LookaheadReader, merged
from models.processors.prefix import ProcessorParams
from models.sampling import SamplingParams
from models.target.model import Target, TargetOptions
from models.target.tiny import FAMILIES, make_tiny_target
from models.verification.blockwise import BlockVerification
from models.verification.token import TokenVerification
from tests.models.decoding.scripted import random_prompts, transformers_generate
from tests.models.decoding.test_decoder import check_counters
from tests.models.decoding.trees import LAW_VOCAB, check_law

NEW_TOKENS = 40
PROMPTS = random_prompts(4, longest=25)
W, N, G = 4, 4, 3


def make(target: Target) -> LookaheadDrafter:
    return LookaheadDrafter(target, W, N, G)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_reference(family: str) -> None:
    target = make_tiny_target(family=family)
    expected = [decode_plainly(target, prompt, NEW_TOKENS, eos_token_ids=()) for prompt in PROMPTS]
    params = GenerationParams(NEW_TOKENS, eos_token_ids=())
    for depth, max_batch_size in ((3, 4), (1, 1), (2, 3)):
        results = Decoder(target, make(target), depth).generate(PROMPTS, params, max_batch_size)
        assert [result.tokens for result in results] == expected
    assert [transformers_generate(target, p, NEW_TOKENS) for p in PROMPTS[:2]] == [
        decode_plainly(target, p, NEW_TOKENS) for p in PROMPTS[:2]
    ]


def looping() -> tuple[Target, list[list[int]]]:
    """A target that soon repeats itself, so that many guesses are right."""
    target = make_tiny_target(num_hidden_layers=1)
    return target, [decode_plainly(target, prompt, 100, eos_token_ids=()) for prompt in PROMPTS]


def test_ends_inside_a_guess() -> None:
    target, endless = looping()
    total = Counters()
    for place in (3, 40, 61, 77):
        params = GenerationParams(100, eos_token_ids=(endless[0][place],))
        for whole, result in zip(endless, Decoder(target, make(target), 3).generate(PROMPTS, params, 3), strict=True):
            eos = endless[0][place]
            assert result.tokens == (whole[: whole.index(eos) + 1] if eos in whole else whole)
            check_counters(result)
            total = add_up([total, result.counters])
    for length in (1, 2, 3, 90):
        results = Decoder(target, make(target), 3).generate(PROMPTS, GenerationParams(length, eos_token_ids=()))
        assert [result.tokens for result in results] == [whole[:length] for whole in endless]
    assert len(total.accepted_at) == 3
    assert min(total.accepted_at) > 15


def test_processors() -> None:
    target = make_tiny_target()
    processors = ProcessorParams(repetition_penalty=1.2, no_repeat_ngram_size=4)
    params = GenerationParams(NEW_TOKENS, eos_token_ids=(), processors=processors)
    results = Decoder(target, make(target), 3).generate(PROMPTS, params, 3)
    assert [result.tokens for result in results] == [
        decode_plainly(target, p, NEW_TOKENS, eos_token_ids=(), processors=processors) for p in PROMPTS
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_do_not_depend_on_the_batch(temperature: float) -> None:
    target = make_tiny_target(vocab_size=20)
    prompts = random_prompts(5, longest=15, vocab_size=20)
    params = GenerationParams(30, SamplingParams(temperature, top_k=6), seed=4, eos_token_ids=())
    alone = Decoder(target, make(target), 3).generate(prompts, params, 1)
    assert add_up(result.counters for result in alone).accepted > 0
    for max_batch_size in (2, 5):
        assert Decoder(target, make(target), 3).generate(prompts, params, max_batch_size) == alone


@pytest.mark.parametrize("rule", [TokenVerification(), BlockVerification()])
def test_law_is_the_targets(rule: TokenVerification | BlockVerification) -> None:
    """See `check_law` for N, threshold and false-alarm probability."""
    target = make_tiny_target(seed=3, vocab_size=LAW_VOCAB, num_hidden_layers=1)
    prompts = [[3, 4, 1, 2, 4, 3, 3], [2, 1, 0, 2], [4, 4, 3, 1, 0, 2, 4, 4, 1, 3, 4, 0]]
    check_law(Decoder(target, make(target), 3, rule), prompts, least_kept=0.2)


def test_window_and_pool_by_definition() -> None:
    """Decoded on the side by whole forwards: what every column sees, what becomes n-grams, and which are guessed.

    Column j's last row sees the text, the first row up to column j, and the rows of its own column between.
    """
    target = make_tiny_target(vocab_size=20)
    prompt = random_prompts(1, longest=15, vocab_size=20, seed=2)[0] + [5, 6, 7, 5, 6]
    drafter = make(target)
    text = [*prompt, *decode_plainly(target, prompt, 60, eos_token_ids=())]
    seen: list[list[list[int]]] = []
    propose = drafter.propose

    def watched(state: list[LookaheadReader], *args: object) -> object:
        seen.append([list(row) for row in state[0].window])
        return propose(state, *args)

    drafter.propose = watched
    lengths = [len(prompt)]
    Decoder(target, drafter, 3).generate(
        [prompt],
        GenerationParams(60, eos_token_ids=()),
        on_tokens=lambda _, tokens, verdicts: lengths.append(lengths[-1] + len(tokens)),
    )
    reader = LookaheadReader(W, N, G)
    reader.read(text[: lengths[1]])
    for window, length, end in zip(seen[:-1], lengths[1:], lengths[2:], strict=False):
        assert window == reader.window
        after = []
        for column in range(W):
            path = [*window[0][: column + 1], *(row[column] for row in window[1:])]
            logits_V = target.logits(target.hidden(torch.tensor([text[:length] + path])))[0, -1]
            after.append(int(target.hide_padding(logits_V).argmax()))
        reader.move(after)
        reader.read(text[length:end])
        assert reader.window == [*window[1:], after]
    assert lengths[-1] == len(text)
    assert len(seen) > 10


def test_pool() -> None:
    """The most recent three continuations of each first token, of the text and of the window's columns."""
    reader = LookaheadReader(2, 3, 3)
    reader.read([1, 2, 3, 1, 4, 5, 1, 2, 3, 1])
    assert reader.guesses() == [(2, 3), (4, 5)]
    assert reader.window == [[5, 1], [1, 2]]  # the last five tokens, from the first on
    reader.move([8, 9])  # completes 5 1 8 and 1 2 9
    assert reader.window == [[1, 2], [8, 9]]
    reader.move([7, 6])  # completes 1 8 7 and 2 9 6; the oldest guess leaves
    assert reader.guesses() == [(8, 7), (2, 9), (2, 3)]
    reader.read([7, 7, 1])
    assert reader.guesses() == [(7, 7), (8, 7), (2, 9)]
    reader.read([2, 3, 1, 2, 9, 1])  # seen again: the most recent once more
    assert reader.guesses() == [(2, 9), (2, 3), (7, 7)]
    reader.read([4])
    assert reader.guesses() == [(5, 1)]
    reader.read([19])
    assert reader.guesses() == []


def test_guesses_share_their_beginnings() -> None:
    tokens, parents = merged([(1, 2, 3), (1, 2, 4), (5, 2, 3), (1, 2, 3)])
    assert tokens == [1, 2, 3, 4, 5, 2, 3]
    assert parents == [-1, 0, 1, 1, -1, 4, 5]
    assert merged([]) == ([], [])


def test_by_name() -> None:
    target = make_tiny_target()
    options = DrafterOptions("lookahead", num_columns=5, ngram_size=4, num_guesses=6)
    drafter, record = make_drafter(options, TargetOptions(name="tiny", source="random"), target)
    assert isinstance(drafter, LookaheadDrafter)
    assert (drafter.num_nodes, drafter.max_draft_tokens, default_draft_tokens(drafter)) == (18, 3, 3)
    assert record["fingerprint"] == "num_columns=5, ngram_size=4, num_guesses=6"
    with pytest.raises(ValueError, match="num_draft_tokens=4: must be 1 to 3 with this drafter"):
        Decoder(target, drafter, 4)
    for sizes in ((0, 4, 6), (5, 1, 6), (5, 4, 0)):
        with pytest.raises(ValueError, match=f"drafter.num_columns={sizes[0]}, drafter.ngram_size={sizes[1]}, drafter"):
            LookaheadDrafter(target, *sizes)
