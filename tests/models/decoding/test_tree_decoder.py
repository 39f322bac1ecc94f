"""Decoding with trees, greedy == reference, whatever the tree; and all that ends, changes or refuses a block."""

import pytest
import torch

from models.decoding.counters import add_up
from models.decoding.decoder import Decoder
from models.decoding.reference import decode_plainly
from models.decoding.rows import GenerationParams
from models.processors.prefix import ProcessorParams
from models.target.model import Target
from models.target.tiny import FAMILIES, make_tiny_target
from models.verification.base import Rule
from models.verification.ensemble import StaticEnsemble
from models.verification.thresholds import TypicalAcceptance
from tests.models.decoding.scripted import random_prompts, transformers_generate
from tests.models.decoding.test_decoder import check_counters
from tests.models.decoding.trees import BigramTrees, ScriptedTrees

NUM_PROMPTS = 6
NEW_TOKENS = 20
DEPTH = 4
PROMPTS = random_prompts(NUM_PROMPTS, longest=25)


class Case:
    """A target, its own continuations, and drafters of trees that know them."""

    def __init__(self, target: Target, new_tokens: int = NEW_TOKENS) -> None:
        self.target = target
        self.known = {tuple(p): decode_plainly(target, p, new_tokens + 8, eos_token_ids=()) for p in PROMPTS}
        self.endless = [self.known[tuple(prompt)][:new_tokens] for prompt in PROMPTS]

    def decoder(self, depth: int = DEPTH, side: bool = False, rule: Rule | None = None) -> Decoder:
        return Decoder(self.target, ScriptedTrees(self.target, self.known, side), depth, rule)


@pytest.fixture(scope="module")
def llama() -> Case:
    return Case(make_tiny_target())


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_reference_and_transformers(family: str) -> None:
    """Ragged rows that leave and join, trees of their own, and hidden states of the kept path handed to the drafter."""
    case = Case(make_tiny_target(family=family))
    assert [transformers_generate(case.target, p, NEW_TOKENS) for p in PROMPTS] == [
        decode_plainly(case.target, p, NEW_TOKENS) for p in PROMPTS
    ]
    for depth, max_batch_size, side in ((4, 4, False), (2, 1, False), (3, 3, True)):
        decoder = case.decoder(depth, side)
        results = decoder.generate(PROMPTS, GenerationParams(NEW_TOKENS, eos_token_ids=()), max_batch_size)
        assert [result.tokens for result in results] == case.endless
        total = add_up(result.counters for result in results)
        assert total.emitted == NUM_PROMPTS * NEW_TOKENS
        assert all(0 < count < drafted for count, drafted in zip(total.accepted_at[:2], total.drafted_at, strict=False))
        assert decoder.drafter.num_watched > 0 or not side
        assert decoder.timings.target_passes >= max(result.counters.blocks for result in results)


@pytest.mark.parametrize("max_new_tokens", range(1, 10))
def test_length_limit(llama: Case, max_new_tokens: int) -> None:
    """Ends on the token, and no node counts that is too deep for its row."""
    params = GenerationParams(max_new_tokens, eos_token_ids=())
    for result, expected in zip(llama.decoder().generate(PROMPTS, params), llama.endless, strict=True):
        assert result.tokens == expected[:max_new_tokens]
        assert result.finish_reason == "length"
        counters = result.counters
        assert counters.emitted == max_new_tokens == 1 + counters.accepted + counters.blocks


def test_context_limit() -> None:
    """Nodes may stand past the context's end; none of them is kept, and the sequence fills the context."""
    target = make_tiny_target(max_position_embeddings=30)
    known = {tuple(p): decode_plainly(target, p, 30 - len(p), eos_token_ids=()) for p in PROMPTS}
    results = Decoder(target, ScriptedTrees(target, known), DEPTH).generate(
        PROMPTS, GenerationParams(40, eos_token_ids=())
    )
    assert [result.tokens for result in results] == list(known.values())


@pytest.mark.parametrize("stop_place", [0, 1, 2, 4, 9])
def test_eos_inside_a_tree(llama: Case, stop_place: int) -> None:
    eos = llama.endless[0][stop_place]
    params = GenerationParams(NEW_TOKENS, eos_token_ids=(eos,))
    for endless, result in zip(llama.endless, llama.decoder().generate(PROMPTS, params, 3), strict=True):
        assert result.tokens == (endless[: endless.index(eos) + 1] if eos in endless else endless)
        assert result.finish_reason == ("eos" if eos in endless else "length")
        check_counters(result)


def test_stop_strings(llama: Case) -> None:
    num_stopped = 0
    for start in (2, 5, 9):
        stop = llama.target.tokenizer.decode(llama.endless[0][start : start + 2], skip_special_tokens=True)
        if not stop or "\ufffd" in stop:
            continue
        params = GenerationParams(NEW_TOKENS, eos_token_ids=(), stop_strings=(stop,))
        plain = Decoder(llama.target).generate(PROMPTS, params)
        results = llama.decoder().generate(PROMPTS, params)
        assert [(r.tokens, r.text) for r in results] == [(r.tokens, r.text) for r in plain]
        num_stopped += sum(result.finish_reason == "stop" for result in results)
    assert num_stopped > 0


def test_streaming_and_logprobs(llama: Case) -> None:
    """Log-probabilities are those of plain decoding, and streamed tokens add up."""
    heard: list[list[int]] = [[] for _ in PROMPTS]
    params = GenerationParams(NEW_TOKENS, eos_token_ids=(), logprobs=True)
    results = llama.decoder().generate(
        PROMPTS, params, 4, on_tokens=lambda index, tokens, verdicts: heard[index].extend(tokens)
    )
    assert heard == [result.tokens for result in results]
    for one, plain in zip(results, Decoder(llama.target).generate(PROMPTS, params), strict=True):
        assert torch.allclose(torch.tensor(one.logprobs), torch.tensor(plain.logprobs), atol=2e-4)
        assert len(one.verdicts) == len(one.tokens)


PROCESSORS = ProcessorParams(repetition_penalty=1.3, presence_penalty=0.7, no_repeat_ngram_size=2)


def test_processors_see_the_path_to_each_node(llama: Case) -> None:
    """The scripted path is that of the processed target, so that a wrong prefix at any node shows as a lost token."""
    expected = [
        decode_plainly(llama.target, p, NEW_TOKENS + 8, eos_token_ids=(), processors=PROCESSORS) for p in PROMPTS
    ]
    drafter = ScriptedTrees(llama.target, {tuple(p): e for p, e in zip(PROMPTS, expected, strict=True)})
    params = GenerationParams(NEW_TOKENS, eos_token_ids=(), processors=PROCESSORS)
    results = Decoder(llama.target, drafter, DEPTH).generate(PROMPTS, params, 4)
    assert [result.tokens for result in results] == [tokens[:NEW_TOKENS] for tokens in expected]
    assert [result.tokens for result in results] != llama.endless
    assert add_up(result.counters for result in results).accepted > 20


def test_a_grammar_that_fails_on_a_wrong_branch_is_not_heard(llama: Case) -> None:
    """It knows the right text's beginnings alone; and where the right text itself leaves it, the error is raised."""
    known = {tuple(text[:end]) for text in llama.endless for end in range(len(text) + 1)}

    def allowed(prompt: tuple[int, ...], generated: tuple[int, ...]) -> torch.Tensor:
        if generated not in known:
            raise RuntimeError("left the grammar")
        return torch.ones(llama.target.vocab_size, dtype=torch.bool)

    params = GenerationParams(NEW_TOKENS, eos_token_ids=(), processors=ProcessorParams(allowed_tokens=allowed))
    results = llama.decoder().generate(PROMPTS, params)
    assert [result.tokens for result in results] == llama.endless
    for end in range(1, NEW_TOKENS):
        known.discard(tuple(llama.endless[0][:end]))
        with pytest.raises(RuntimeError, match="left the grammar"):
            llama.decoder().generate(PROMPTS[:1], params)
        known.add(tuple(llama.endless[0][:end]))


@pytest.mark.parametrize("stop_place", range(2, 9))
def test_a_grammar_that_ends_with_the_text_is_not_heard(llama: Case, stop_place: int) -> None:
    """The path goes on behind the EOS, where the grammar fails; the text does not."""
    eos = llama.endless[0][stop_place]
    end = llama.endless[0].index(eos)

    def allowed(prompt: tuple[int, ...], generated: tuple[int, ...]) -> torch.Tensor:
        if eos in generated:
            raise RuntimeError("left the grammar")
        return torch.ones(llama.target.vocab_size, dtype=torch.bool)

    processors = ProcessorParams(allowed_tokens=allowed)
    params = GenerationParams(NEW_TOKENS, eos_token_ids=(eos,), processors=processors)
    assert llama.decoder().generate(PROMPTS[:1], params)[0].tokens == llama.endless[0][: end + 1]


@pytest.mark.parametrize("place", [2, 5, 6, 9, 11])
def test_bad_rows_end_alone(place: int) -> None:
    """Logits that are no numbers after one token: the row ends as invalid where it emits it, and only there."""
    target = make_tiny_target()
    case = Case(target)
    whole = target.logits
    marked_H = target.hidden(torch.tensor([[*PROMPTS[0], *case.endless[0][: place + 1]]]))[0, -1]

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        is_marked = (hidden - marked_H).abs().amax(dim=-1, keepdim=True) < 1e-3
        return whole(hidden).masked_fill(is_marked, torch.nan)

    target.logits = logits
    results = case.decoder().generate(PROMPTS, GenerationParams(NEW_TOKENS, eos_token_ids=()), 3)
    assert results[0].tokens == case.endless[0][: place + 1]
    assert results[0].finish_reason == "invalid"
    assert [result.tokens for result in results[1:]] == case.endless[1:]


def test_refusals(llama: Case) -> None:
    for rule in (StaticEnsemble(0.5), TypicalAcceptance()):
        with pytest.raises(ValueError, match=f"trees, which {type(rule).__name__} cannot judge: use verifier=lossless"):
            llama.decoder(rule=rule)
    with pytest.raises(ValueError, match="on_block is for drafts that are chains"):
        llama.decoder().generate(PROMPTS, on_block=lambda record: None)
    with pytest.raises(ValueError, match="the drafter's vocabulary has 12 tokens"):
        Decoder(llama.target, BigramTrees(12, "distinct"), DEPTH)
