"""Greedy decoding: speculative == reference == transformers' generate, token for token, in float32."""

import itertools
from typing import Any

import pytest
from torch import Tensor

from models.decoding.counters import add_up
from models.decoding.decoder import Decoder
from models.decoding.reference import decode_plainly
from models.decoding.rows import DecodeResult, GenerationParams, TokenVerdict
from models.processors.prefix import ProcessorParams
from models.target.model import Target
from models.target.tiny import FAMILIES, make_tiny_target
from tests.models.decoding.scripted import ScriptedDrafter, random_prompts, transformers_generate

NUM_PROMPTS = 6
NEW_TOKENS = 20
PROMPTS = random_prompts(NUM_PROMPTS, longest=25)


class Case:
    """A target, its own continuations of the prompts, and a drafter that knows them."""

    def __init__(self, target: Target, prompts: list[list[int]], new_tokens: int) -> None:
        self.target = target
        self.prompts = prompts
        endless = {tuple(p): decode_plainly(target, p, new_tokens + 8, eos_token_ids=()) for p in prompts}
        self.drafter = ScriptedDrafter(target, endless)
        self.endless = [endless[tuple(prompt)][:new_tokens] for prompt in prompts]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(make_tiny_target(family=request.param), PROMPTS, NEW_TOKENS)


@pytest.fixture(scope="module")
def llama() -> Case:
    return Case(make_tiny_target(), PROMPTS, NEW_TOKENS)


def test_reference_equals_transformers(case: Case) -> None:
    for prompt in case.prompts:
        expected = transformers_generate(case.target, prompt, NEW_TOKENS)
        assert decode_plainly(case.target, prompt, NEW_TOKENS) == expected


@pytest.mark.parametrize("max_batch_size", [1, 3, NUM_PROMPTS])
def test_plain_equals_reference(case: Case, max_batch_size: int) -> None:
    params = GenerationParams(max_new_tokens=NEW_TOKENS, eos_token_ids=())
    results = Decoder(case.target).generate(case.prompts, params, max_batch_size)
    assert [result.tokens for result in results] == case.endless
    assert all(result.counters.mean_block_length == 1.0 for result in results)
    assert not any(any(result.accepted) for result in results)


@pytest.mark.parametrize("max_batch_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4, 5, 6])
def test_speculative_equals_reference(llama: Case, num_draft_tokens: int, max_batch_size: int) -> None:
    check_speculative(llama, num_draft_tokens, max_batch_size)


@pytest.mark.parametrize(("num_draft_tokens", "max_batch_size"), [(1, 4), (2, 3), (3, 1), (4, 2), (6, 4)])
def test_speculative_equals_reference_in_every_family(case: Case, num_draft_tokens: int, max_batch_size: int) -> None:
    check_speculative(case, num_draft_tokens, max_batch_size)


def check_speculative(case: Case, num_draft_tokens: int, max_batch_size: int) -> None:
    """Every acceptance count occurs, in ragged batches whose rows leave and join on the way."""
    params = GenerationParams(max_new_tokens=NEW_TOKENS, eos_token_ids=())
    results = Decoder(case.target, case.drafter, num_draft_tokens).generate(case.prompts, params, max_batch_size)
    assert [result.tokens for result in results] == case.endless
    total = add_up(result.counters for result in results)
    assert total.emitted == NUM_PROMPTS * NEW_TOKENS
    assert total.sequences == NUM_PROMPTS
    assert total.accepted == sum(sum(result.accepted) for result in results)
    assert all(0 < count < drafted for count, drafted in zip(total.accepted_at, total.drafted_at, strict=True))


def test_repeated_prompts_are_read_once(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they join a batch that is under way; and each row goes its own way from there."""
    order = [0, 1, 0, 0, 2, 1, 0]
    widths: list[tuple[int, ...]] = []
    whole = llama.target.hidden

    def hidden(ids_BT: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        widths.append(tuple(ids_BT.shape))
        return whole(ids_BT, *args, **kwargs)

    monkeypatch.setattr(llama.target, "hidden", hidden)
    params = GenerationParams(max_new_tokens=NEW_TOKENS, eos_token_ids=())
    prompts = [llama.prompts[i] for i in order]
    results = Decoder(llama.target, llama.drafter, 3).generate(prompts, params)
    assert [result.tokens for result in results] == [llama.endless[i] for i in order]
    assert widths[0] == (3, max(len(llama.prompts[i]) for i in order))
    results = Decoder(llama.target, llama.drafter, 3).generate(prompts, params, max_batch_size=4)
    assert [result.tokens for result in results] == [llama.endless[i] for i in order]


@pytest.mark.parametrize("max_new_tokens", range(1, 12))
def test_length_limit(llama: Case, max_new_tokens: int) -> None:
    """Ends on the token, wherever in a block that is, and drafts nothing that could not be emitted."""
    params = GenerationParams(max_new_tokens=max_new_tokens, eos_token_ids=())
    for result, expected in zip(
        Decoder(llama.target, llama.drafter, 4).generate(llama.prompts, params), llama.endless, strict=True
    ):
        assert result.tokens == expected[:max_new_tokens]
        assert result.finish_reason == "length"
        counters = result.counters
        assert counters.emitted == max_new_tokens
        # No stop cuts a block short, so each emits what it accepts and one token more.
        assert counters.emitted == 1 + counters.accepted + counters.blocks


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 6])
@pytest.mark.parametrize("stop_place", [0, 1, 2, 4, 9])
def test_eos_inside_a_block(llama: Case, num_draft_tokens: int, stop_place: int) -> None:
    """Any token may be the EOS: it closes the tokens, whether drafted, recovered, a bonus, or the prefill's."""
    decoder = Decoder(llama.target, llama.drafter if num_draft_tokens else None, num_draft_tokens)
    eos = llama.endless[0][stop_place]
    params = GenerationParams(max_new_tokens=NEW_TOKENS, eos_token_ids=(eos,))
    results = decoder.generate(llama.prompts, params, max_batch_size=3)
    for prompt, endless, result in zip(llama.prompts, llama.endless, results, strict=True):
        expected = endless[: endless.index(eos) + 1] if eos in endless else endless
        assert result.tokens == expected
        assert decode_plainly(llama.target, prompt, NEW_TOKENS, eos_token_ids=(eos,)) == expected
        assert result.finish_reason == ("eos" if eos in endless else "length")
        check_counters(result)


def check_counters(result: DecodeResult) -> None:
    """Nothing behind a stop is counted, and emitted tokens add up."""
    counters = result.counters
    assert counters.emitted == len(result.tokens) == len(result.accepted)
    assert counters.accepted == sum(result.accepted) == sum(counters.accepted_at)
    assert counters.drafted == sum(counters.drafted_at)
    assert counters.accepted <= counters.drafted
    cut_short = counters.blocks > 0 and result.accepted[-1]
    assert counters.emitted == 1 + counters.accepted + counters.blocks - cut_short


def test_target_eos_is_the_default(llama: Case) -> None:
    """Without eos_token_ids the target's own end the text, as in transformers' generate."""
    results = Decoder(llama.target).generate(llama.prompts, GenerationParams(max_new_tokens=60))
    assert [r.tokens for r in results] == [transformers_generate(llama.target, p, 60) for p in llama.prompts]
    assert {r.finish_reason for r in results} == {"eos", "length"}


@pytest.mark.parametrize("num_draft_tokens", [0, 5])
def test_stop_strings_across_tokens(llama: Case, num_draft_tokens: int) -> None:
    """One token a byte here, so that a stop string of several characters spans tokens and often blocks."""
    decoder = Decoder(llama.target, llama.drafter if num_draft_tokens else None, num_draft_tokens)
    num_stopped = 0
    for endless, start, length in itertools.product(llama.endless, (0, 3, 9), (1, 3)):
        stop = llama.target.tokenizer.decode(endless[start : start + length], skip_special_tokens=True)
        if not stop or "\ufffd" in stop:
            continue
        params = GenerationParams(max_new_tokens=NEW_TOKENS, eos_token_ids=(), stop_strings=("never so", stop))
        for whole, result in zip(llama.endless, decoder.generate(llama.prompts, params), strict=True):
            assert result.tokens == whole[: len(result.tokens)]
            assert stop not in result.text
            check_counters(result)
            if result.finish_reason == "stop":
                num_stopped += 1
                before, after = (llama.target.tokenizer.decode(result.tokens[:end]) for end in (-1, len(result.tokens)))
                assert stop in after
                assert stop not in before
                assert after.startswith(result.text + stop)
            else:
                assert stop not in llama.target.tokenizer.decode(whole)
    assert num_stopped >= 10


@pytest.mark.parametrize("max_batch_size", [1, 3])
def test_streaming_adds_up_to_the_result(llama: Case, max_batch_size: int) -> None:
    tokens: dict[int, list[int]] = {}
    verdicts: dict[int, list[TokenVerdict]] = {}
    longest = 0

    def on_tokens(index: int, new_tokens: list[int], flags: list[TokenVerdict]) -> None:
        nonlocal longest
        longest = max(longest, len(new_tokens))
        tokens.setdefault(index, []).extend(new_tokens)
        verdicts.setdefault(index, []).extend(flags)

    params = GenerationParams(max_new_tokens=NEW_TOKENS, eos_token_ids=(llama.endless[0][10],))
    decoder = Decoder(llama.target, llama.drafter, 4)
    done: list[tuple[int, DecodeResult]] = []
    results = decoder.generate(
        llama.prompts, params, max_batch_size, on_tokens, on_done=lambda index, result: done.append((index, result))
    )
    assert longest == 5
    assert sorted(done, key=lambda pair: pair[0]) == list(enumerate(results))
    for index, result in enumerate(results):
        assert tokens[index] == result.tokens
        assert verdicts[index] == result.verdicts


def test_context_end_is_a_length_limit() -> None:
    """With learned positions (GPT-2) a position past the context would be an error: not even padding may reach it."""
    target = make_tiny_target(max_position_embeddings=32)
    prompts = [PROMPTS[0][:3], [9] * 20, [8] * 31]
    endless = Case(target, prompts, 40)
    for decoder in (Decoder(target), Decoder(target, endless.drafter, 5)):
        results = decoder.generate(prompts, GenerationParams(max_new_tokens=40, eos_token_ids=()))
        assert [len(p) + len(r.tokens) for p, r in zip(prompts, results, strict=True)] == [32, 32, 32]
        assert [r.tokens for r in results] == [
            e[: len(r.tokens)] for e, r in zip(endless.endless, results, strict=True)
        ]


def test_timings_cover_the_passes(llama: Case) -> None:
    decoder = Decoder(llama.target, llama.drafter, 3)
    results = decoder.generate(llama.prompts, GenerationParams(max_new_tokens=NEW_TOKENS, eos_token_ids=()))
    timings = decoder.timings
    assert timings.prefills == 1
    assert timings.target_passes == max(result.counters.blocks for result in results)
    assert min(timings.prefill_s, timings.target_s, timings.draft_s, timings.verify_s) > 0


def test_no_prompts_no_results(llama: Case) -> None:
    assert Decoder(llama.target).generate([]) == []


PROCESSORS = {
    "repetition": ProcessorParams(repetition_penalty=1.4),
    "counts": ProcessorParams(frequency_penalty=0.7, presence_penalty=0.9),
    "ngrams": ProcessorParams(no_repeat_ngram_size=2),
    "minimum": ProcessorParams(min_new_tokens=9),
    "grammar": ProcessorParams(allowed_tokens=lambda prompt, generated: range(60 + len(generated) % 3, 250, 3)),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_in_a_block_are_plain_decodings(llama: Case, name: str) -> None:
    """Ragged batches, long blocks: each place sees the prefix that it would have had alone."""
    processors = PROCESSORS[name]
    eos = (llama.endless[0][3],)
    expected = [decode_plainly(llama.target, p, NEW_TOKENS, eos_token_ids=eos, processors=processors) for p in PROMPTS]
    assert expected != [decode_plainly(llama.target, p, NEW_TOKENS, eos_token_ids=eos) for p in PROMPTS]
    endless = {
        tuple(p): decode_plainly(llama.target, p, NEW_TOKENS + 8, eos_token_ids=(), processors=processors)
        for p in PROMPTS
    }
    endless |= {
        tuple(p): tokens + endless[tuple(p)][len(tokens) :] for p, tokens in zip(PROMPTS, expected, strict=True)
    }
    drafter = ScriptedDrafter(llama.target, endless)
    params = GenerationParams(NEW_TOKENS, eos_token_ids=eos, processors=processors)
    for drafts, batch in ((0, 6), (1, 4), (5, 1), (5, 4)):
        results = Decoder(llama.target, drafter if drafts else None, drafts).generate(PROMPTS, params, batch)
        assert [result.tokens for result in results] == expected
        assert not drafts or add_up(result.counters for result in results).accepted > 0


def test_refuses_what_does_not_fit(llama: Case) -> None:
    target, drafter = llama.target, llama.drafter
    with pytest.raises(ValueError, match="num_draft_tokens=2 without a drafter: must be 0"):
        Decoder(target, None, 2)
    with pytest.raises(ValueError, match="num_draft_tokens=0: must be at least 1"):
        Decoder(target, drafter, 0)
    with pytest.raises(ValueError, match="vocabulary has 264 tokens, that of target 'tiny' 300"):
        Decoder(make_tiny_target(vocab_size=300), drafter, 2)
    decoder = Decoder(target)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        decoder.generate([[5], []])
    with pytest.raises(ValueError, match="prompt 0 has id 264: the model's ids are 0 to 263"):
        decoder.generate([[5, 264]])
    with pytest.raises(ValueError, match="prompt 0 has 512 tokens: the context"):
        decoder.generate([[5] * 512])
    with pytest.raises(ValueError, match="max_batch_size=0"):
        decoder.generate([[5]], max_batch_size=0)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        GenerationParams(max_new_tokens=0)
    with pytest.raises(ValueError, match="min_new_tokens=9: must be at most max_new_tokens=8"):
        GenerationParams(max_new_tokens=8, processors=PROCESSORS["minimum"])
    with pytest.raises(ValueError, match="stop_strings="):
        GenerationParams(stop_strings=("",))
