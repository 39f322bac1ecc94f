"""Our decoder inside transformers' `generate`: the same greedy tokens, the same law, and no argument dropped."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextStreamer,
)
from transformers.generation import logits_process as hf

from models.checkpoint import heads_record, load_heads, save_ensemble, save_heads
from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.drafters.heads import HeadsDrafter
from models.ensemble import EnsembleHead, EnsembleOptions
from models.export.custom_generate import SpeculativeGenerate, load_speculative
from models.export.generate_arguments import read_processors
from models.heads import HEAD_KINDS, HeadOptions, build_head
from models.processors.prefix import ProcessorParams
from models.sampling import SamplingParams
from models.target.model import Target
from models.target.tiny import make_tiny_target
from models.verification.ensemble import StaticEnsemble
from tests.models.drafters.universal.vocabularies import make_tokenizer

TEXTS = ["hello there", "a", "some more text"]
NEW = 24
# Every token is met within some thirty, inside blocks as well.
EOS = [151, 158, 40, 41]


@pytest.fixture(scope="module")
def target() -> Target:
    """Without rows that pad the output head: `generate` would emit them."""
    return make_tiny_target(vocab_size=259)


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("heads")
    for kind in HEAD_KINDS:
        torch.manual_seed(0)
        head = build_head(target, HeadOptions(kind, 3))
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        save_heads(root / kind, head)
    return root


@pytest.fixture(scope="module")
def speculative(target: Target, folder: Path) -> SpeculativeGenerate:
    return load_speculative(folder / "medusa", target.model, target.tokenizer)


def inputs(target: Target, texts: list[str] = TEXTS) -> dict[str, torch.Tensor]:
    found = target.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def both(target: Target, speculative: SpeculativeGenerate, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What `generate` gives by itself, and with our decoder."""
    options = {**inputs(target), "max_new_tokens": NEW, "do_sample": False, **options}
    return target.model.generate(**options), target.model.generate(**options, custom_generate=speculative)


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_greedy_is_generates_own(kind: str, target: Target, folder: Path) -> None:
    """A ragged batch, in blocks of which some are kept in part."""
    speculative = load_speculative(folder / kind, target.model, target.tokenizer)
    expected, found = both(target, speculative)
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype
    assert sum(result.counters.drafted for result in speculative.results) > 0


@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_id": EOS},
        {"eos_token_id": EOS, "pad_token_id": 7},
        {"eos_token_id": EOS, "min_new_tokens": 20},
        {"eos_token_id": EOS, "min_length": 30},
        {"max_new_tokens": None, "max_length": 17},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "eos_token_id": EOS, "min_new_tokens": 9},
        {"bad_words_ids": [[118], [171, 195], [62, 55]]},
        {"sequence_bias": {(118,): -10.0, (190, 118): 3.0}},
        {"suppress_tokens": [118, 171]},
        {"num_return_sequences": 1, "return_dict_in_generate": True},
    ],
    ids=str,
)
def test_options_reach_the_decoder(
    options: dict[str, Any], target: Target, speculative: SpeculativeGenerate, recwarn: pytest.WarningsRecorder
) -> None:
    expected, found = both(target, speculative, **options)
    if options.get("return_dict_in_generate"):
        expected, found = expected.sequences, found.sequences
    assert torch.equal(found, expected)


def test_stop_strings(target: Target, speculative: SpeculativeGenerate) -> None:
    """`generate` keeps its tokenizer from a custom one, so the criterion is given."""
    plain = target.model.generate(**inputs(target), max_new_tokens=NEW, do_sample=False)
    characters = [target.tokenizer.decode([token]) for token in plain[0, -NEW + 4 :].tolist()]
    stop = next(one for one in characters if len(one) == 1 and one.isascii() and one.isprintable())
    criteria = StoppingCriteriaList([StopStringCriteria(target.tokenizer, [stop])])
    expected, found = both(target, speculative, stopping_criteria=criteria, max_new_tokens=NEW)
    assert torch.equal(found, expected)
    assert speculative.results[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "sampling", "processors"),
    [
        ({"temperature": 0.7}, SamplingParams(0.7), ProcessorParams()),
        ({"top_k": 5}, SamplingParams(1.0, top_k=5), ProcessorParams()),
        (
            {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
            SamplingParams(1.3, 40, 0.9, 0.02),
            ProcessorParams(),
        ),
        (
            {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.2, "eos_token_id": EOS, "min_new_tokens": 4},
            SamplingParams(0.9, top_p=0.8),
            ProcessorParams(repetition_penalty=1.2, min_new_tokens=4),
        ),
    ],
)
def test_sampling_is_the_decoders_own(
    options: dict[str, Any],
    sampling: SamplingParams,
    processors: ProcessorParams,
    target: Target,
    folder: Path,
    speculative: SpeculativeGenerate,
) -> None:
    """Token for token what the decoder draws with the options written out, whose law its own tests prove."""
    x = inputs(target)
    torch.manual_seed(5)
    found = target.model.generate(
        **x, max_new_tokens=NEW, do_sample=True, **{"top_k": 0, **options}, custom_generate=speculative
    )
    torch.manual_seed(5)
    seed = int(torch.randint(2**62, ()))
    decoder = Decoder(target, HeadsDrafter(load_heads(folder / "medusa", target)), 3)
    prompts = [target.tokenizer(text)["input_ids"] for text in TEXTS]
    eos = tuple(options.get("eos_token_id", (2,)))
    params = GenerationParams(NEW, sampling, seed, eos_token_ids=eos, processors=processors)
    for row, result in zip(
        found[:, x["input_ids"].shape[1] :].tolist(), decoder.generate(prompts, params), strict=True
    ):
        assert row[: len(result.tokens)] == result.tokens
        assert set(row[len(result.tokens) :]) <= {0}


@pytest.mark.parametrize("options", [{}, {"typical_p": 0.6}], ids=["sampling's own", "behind them a stranger"])
def test_the_law_is_generates(options: dict[str, Any], target: Target, speculative: SpeculativeGenerate) -> None:
    """Against the law of three tokens that transformers' own forward and processors give, by enumeration.

    N = 3000 sequences of at most 4^3 outcomes; the total variation of so many from their own law is .05 on average and
    beyond .09 in less than one case of 1e5 (McDiarmid: 2 exp(-2 N (.04)^2) is 1e-4, and is far from tight here).
    """
    ids = torch.tensor([target.tokenizer("law")["input_ids"]])
    chain = [hf.TemperatureLogitsWarper(1.5), hf.TopKLogitsWarper(4)]
    chain += [hf.TypicalLogitsWarper(0.6)] if options else []
    law = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, mass in law.items():
            text = torch.cat([ids, torch.tensor([tokens], dtype=torch.long)], dim=1)
            with torch.no_grad():
                scores = target.model(text).logits[:, -1].float()
            probs = LogitsProcessorList(chain)(text, scores).softmax(dim=-1)[0]
            for token in probs.nonzero()[:, 0].tolist():
                longer[(*tokens, token)] = mass * float(probs[token])
        law = longer
    torch.manual_seed(0)
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=3,
        do_sample=True,
        temperature=1.5,
        top_k=4,
        eos_token_id=[],
        num_return_sequences=3000,
        custom_generate=speculative,
        **options,
    )
    counts = Counter(map(tuple, out[:, ids.shape[1] :].tolist()))
    assert counts.keys() <= law.keys()
    assert len(law) > 8
    assert sum(abs(counts[tokens] / 3000 - mass) for tokens, mass in law.items()) / 2 < 0.09
    assert speculative.results[0].counters.drafted > 0


def test_seeds(target: Target, speculative: SpeculativeGenerate) -> None:
    """torch's own seed, and a stream that goes on from call to call."""

    def draw() -> list[list[int]]:
        return target.model.generate(
            **inputs(target), max_new_tokens=8, do_sample=True, top_k=0, custom_generate=speculative
        ).tolist()

    torch.manual_seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    assert draw() == first != second


def test_tokens_are_heard_of(target: Target, speculative: SpeculativeGenerate) -> None:
    heard: dict[int, list[int]] = {0: [], 1: [], 2: []}
    out = target.model.generate(
        **inputs(target),
        max_new_tokens=10,
        do_sample=False,
        custom_generate=speculative,
        on_tokens=lambda index, tokens, verdicts: heard[index].extend(tokens),
    )
    assert out[:, -10:].tolist() == list(heard.values())


def test_verifiers(target: Target, folder: Path, tmp_path: Path) -> None:
    """A relaxed rule spends distance; an ensemble's checkpoint is one, for the drafter that it was trained with."""
    head = EnsembleHead(EnsembleOptions(target_size=32, draft_size=32, initial_weight=0.3))
    save_ensemble(tmp_path, head, target, heads_record(folder / "medusa"))
    options = {**inputs(target), "max_new_tokens": NEW, "do_sample": True, "top_k": 0}
    for choice in ({"verifier": StaticEnsemble(0.3)}, {"ensemble": tmp_path}):
        relaxed = load_speculative(folder / "medusa", target.model, target.tokenizer, 2, **choice)
        target.model.generate(**options, custom_generate=relaxed)
        assert all(result.certificate > 0 for result in relaxed.results)
        assert max(len(result.counters.drafted_at) for result in relaxed.results) == 2
    with pytest.raises(ValueError, match=r"was trained for drafter 'medusa', not for 'mtp'"):
        load_speculative(folder / "mtp", target.model, target.tokenizer, ensemble=tmp_path)
    with pytest.raises(ValueError, match="verifier and ensemble are both given"):
        load_speculative(folder / "mtp", target.model, target.tokenizer, 2, StaticEnsemble(1.0), tmp_path)


class Never(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Stranger(hf.LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def filled_cache(target: Target) -> DynamicCache:
    cache = DynamicCache(config=target.config)
    target.model(torch.tensor([[5, 6]]), cache=cache)
    return cache


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, r"generation mode 'beam_search': this decoder is greedy or samples"),
        ({"output_scores": True, "return_dict_in_generate": True}, r"output_scores=True: "),
        ({"stopping_criteria": [Never()]}, r"stopping criterion Never: "),
        ({"stopping_criteria": [MaxTimeCriteria(1.0)]}, r"stopping criterion MaxTimeCriteria: "),
        ({"max_time": 1.0}, r"stopping criterion MaxTimeCriteria: "),
        ({"logits_processor": [Stranger()]}, r"custom\[0\]=Stranger is refused: it is not known to depend"),
        (
            {"prefix_allowed_tokens_fn": lambda batch, ids: [5, 6]},
            r"custom\[0\]=PrefixConstrainedLogitsProcessor is refused: .*use allowed_tokens",
        ),
        (
            {"sequence_bias": {(118,): -1.0}, "repetition_penalty": 1.5},
            r"RepetitionPenaltyLogitsProcessor comes behind",
        ),
        (
            {"logits_processor": [hf.RepetitionPenaltyLogitsProcessor(1.5, torch.tensor([1, 2, 3]))]},
            r"prompt_ignore_length=\[1, 2, 3\]: this decoder leaves out the padding alone",
        ),
        (
            {"logits_processor": [hf.NoRepeatNGramLogitsProcessor(2), hf.NoRepeatNGramLogitsProcessor(3)]},
            r"NoRepeatNGramLogitsProcessor is there twice, and this decoder applies one no_repeat_ngram_size; leave",
        ),
        (
            {"stopping_criteria": [StopStringCriteria(make_tokenizer("byte_bpe"), ["a"])]},
            r"stop_strings=\['a'\] were given another tokenizer",
        ),
    ],
)
def test_refused(options: dict[str, Any], message: str, target: Target, speculative: SpeculativeGenerate) -> None:
    with pytest.raises(ValueError, match=message):
        target.model.generate(
            **inputs(target), **{"max_new_tokens": 4, "do_sample": False, **options}, custom_generate=speculative
        )


def test_other_inputs_are_refused(target: Target, speculative: SpeculativeGenerate) -> None:
    x = inputs(target)
    options = {"max_new_tokens": 4, "custom_generate": speculative}
    embeds = target.embed(x["input_ids"])
    with pytest.raises(ValueError, match="inputs_embeds is an input that this decoder does not know"):
        target.model.generate(inputs_embeds=embeds, attention_mask=x["attention_mask"], **options)
    with pytest.raises(ValueError, match="past_key_values of an earlier call"):
        target.model.generate(torch.tensor([[5, 6, 7]]), cache=filled_cache(target), **options)
    other = make_tiny_target(vocab_size=259)
    with pytest.raises(ValueError, match="custom_generate was loaded for another LlamaForCausalLM"):
        other.model.generate(**x, **options)


def test_another_models_heads_are_refused(folder: Path) -> None:
    other = make_tiny_target(seed=1, vocab_size=259)
    with pytest.raises(ValueError, match=r"was trained for target 'tiny', not for "):
        load_speculative(folder / "medusa", other.model, other.tokenizer)


def test_variants_stay_processors() -> None:
    """Warpers with options that the sampling lacks, in another order, or twice, are called as they are."""
    temperature, top_k, top_p = hf.TemperatureLogitsWarper(0.5), hf.TopKLogitsWarper(3), hf.TopPLogitsWarper(0.5)
    wide = hf.TopPLogitsWarper(0.5, min_tokens_to_keep=2)
    for processors, sampling, custom in (
        ([temperature, top_k, top_p], SamplingParams(0.5, 3, 0.5), ()),
        ([top_k, temperature], SamplingParams(0.5), (top_k,)),
        ([temperature, wide], SamplingParams(1.0), (temperature, wide)),
        ([top_k, top_k], SamplingParams(1.0, top_k=3), (top_k,)),
        ([temperature, hf.LogitNormalization()], SamplingParams(1.0), ...),
    ):
        found, rest = read_processors(processors, True, 4, [0], [])
        assert found == sampling
        assert rest.custom == (tuple(processors) if custom is ... else custom)
    greedy, rest = read_processors([top_k], False, 4, [0], [])
    assert greedy.is_greedy
    assert rest.custom == (top_k,)


def test_a_streamer_hears_the_prompt_alone(target: Target, speculative: SpeculativeGenerate) -> None:
    """What `generate` does with it: a change there would let us pass it on."""

    class Heard(TextStreamer):
        def __init__(self) -> None:
            self.calls = 0

        def put(self, value: torch.Tensor) -> None:
            self.calls += 1

        def end(self) -> None:
            self.calls += 1

    streamer = Heard()
    ids = torch.tensor([[5, 6, 7]])
    target.model.generate(ids, max_new_tokens=4, streamer=streamer, custom_generate=speculative)
    assert streamer.calls == 1
