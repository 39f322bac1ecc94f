"""Our decoder inside `generate` on padded batches: whatever counts or matches tokens sees what `generate` shows it."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria, WatermarkingConfig
from transformers.generation import logits_process as hf

from models.decoding.decoder import Decoder
from models.decoding.stops import TokenBytes
from models.export.custom_generate import SpeculativeGenerate
from models.processors import custom as custom_processors
from models.target.tiny import make_tiny_target
from tests.models.decoding.scripted import BigramDrafter, ScriptedDrafter

TARGET = make_tiny_target(vocab_size=259)
WRITES = TokenBytes(TARGET.tokenizer)
NEW = 12
EOS = [151, 158, 40, 41]
COMMON = [118, 171, 195, 62, 55, 190, *EOS]  # what this model likes to write, and the prompts are made of
TOKENS = st.sampled_from(COMMON)
WORDS = st.lists(TOKENS, min_size=1, max_size=3)


def padded(prompts: list[list[int]], pad: int) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def both(prompts: list[list[int]], pad: int, width: int, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    """New tokens by `generate` itself, and by our decoder in blocks of which some are kept whole, in part, or not."""
    x = padded(prompts, pad)
    asked = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": EOS, **options}
    expected = TARGET.model.generate(**x, **asked)[:, x["input_ids"].shape[1] :].tolist()
    # Equal prompts of two rows are padded alike, so what they give is equal, too.
    drafter = ScriptedDrafter(TARGET, {tuple(p): tokens for p, tokens in zip(prompts, expected, strict=True)})
    speculative = SpeculativeGenerate(Decoder(TARGET, drafter, width))
    found = TARGET.model.generate(**x, **asked, custom_generate=speculative)[:, x["input_ids"].shape[1] :].tolist()
    return expected, found


PROMPTS = st.lists(st.lists(TOKENS, min_size=1, max_size=6), min_size=1, max_size=4)
# Options of `generate`, each of which makes a processor that may count or match padding.
OPTIONS = {
    "repetition_penalty": st.sampled_from([0.6, 1.5]),
    "no_repeat_ngram_size": st.integers(1, 3),
    "bad_words_ids": st.lists(WORDS, min_size=1, max_size=4),
    "min_length": st.integers(1, 14),
    "min_new_tokens": st.integers(1, NEW),
    "forced_bos_token_id": TOKENS,
    "forced_eos_token_id": st.one_of(TOKENS, st.just(EOS[:2])),
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 6), st.sampled_from([1.1, 1.5])),
    "suppress_tokens": st.lists(TOKENS, min_size=1, max_size=3),
    "begin_suppress_tokens": st.lists(TOKENS, min_size=1, max_size=3),
    "sequence_bias": st.dictionaries(WORDS.map(tuple), st.sampled_from([-9.0, 3.0]), min_size=1, max_size=4),
    "renormalize_logits": st.just(True),
    "watermarking_config": st.builds(
        WatermarkingConfig, seeding_scheme=st.just("lefthash"), bias=st.just(4.0), context_width=st.integers(1, 4)
    ),
}
# And processors as a caller may give them.
GIVEN = {
    "repetition": lambda pads: hf.RepetitionPenaltyLogitsProcessor(1.5),
    "repetition behind the first": lambda pads: hf.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=2),
    "repetition but for the padding": lambda pads: hf.RepetitionPenaltyLogitsProcessor(1.5, torch.tensor(pads)),
    "minimum of others": lambda pads: hf.MinLengthLogitsProcessor(9, COMMON[:2]),
    "new minimum of others": lambda pads: hf.MinNewTokensLengthLogitsProcessor(max(pads), 5, COMMON[:2]),
    "epsilon": lambda pads: hf.EpsilonLogitsWarper(0.05),
    "eta": lambda pads: hf.EtaLogitsWarper(0.05),
    "min p": lambda pads: hf.MinPLogitsWarper(0.3),
    "temperature": lambda pads: hf.TemperatureLogitsWarper(0.5),
    "top h": lambda pads: hf.TopHLogitsWarper(0.5),
    "top k": lambda pads: hf.TopKLogitsWarper(3),
    "top p": lambda pads: hf.TopPLogitsWarper(0.6),
    "typical": lambda pads: hf.TypicalLogitsWarper(0.6),
    "selfhash": lambda pads: hf.WatermarkLogitsProcessor(259, "cpu", seeding_scheme="selfhash", context_width=3),
}


def made(name: str) -> set[type]:
    """The classes of transformers' processors that this option makes."""
    config = GenerationConfig(**{name: st_example(OPTIONS[name])}, max_length=20)
    config._eos_token_tensor = torch.tensor(EOS)
    return {type(one) for one in TARGET.model._get_logits_processor(config, input_ids_seq_length=3, device="cpu")}


def st_example(strategy: Any) -> Any:
    found: list[Any] = []

    @settings(max_examples=1, database=None)
    @given(strategy)
    def take(value: Any) -> None:
        found.append(value)

    take()
    return found[0]


def test_every_processor_that_is_let_through_is_tried() -> None:
    tried = set().union(*map(made, OPTIONS)) | {type(make([0])) for make in GIVEN.values()}
    assert tried >= custom_processors._PURE
    assert {hf.ExponentialDecayLengthPenalty, hf.SuppressTokensAtBeginLogitsProcessor} <= tried


@settings(max_examples=80, deadline=None)
@given(PROMPTS, TOKENS, st.integers(1, 4), st.data())
def test_padding_is_seen_as_generate_sees_it(prompts: list[list[int]], pad: int, width: int, data: Any) -> None:
    """Greedy, token for token, alone or several at once; the padding is a token that the text has as well."""
    names = data.draw(st.lists(st.sampled_from([*OPTIONS]), min_size=1, max_size=3, unique=True))
    options = {name: data.draw(OPTIONS[name], label=name) for name in names}
    if "bad_words_ids" in options:  # an EOS by itself is no bad word, and one option must be left
        options["bad_words_ids"].append([COMMON[0], COMMON[1]])
    given_names = data.draw(st.lists(st.sampled_from([*GIVEN]), max_size=1))
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    options["logits_processor"] = [GIVEN[name](pads) for name in given_names]
    refusal = ""
    try:
        expected, found = both(prompts, pad, width, **options)
    except ValueError as error:
        refusal, expected, found = str(error), [], []
    # An order or a double that the decoder lacks; nothing left to choose; options that generate itself refuses.
    assume(not any(part in refusal for part in ("comes behind", "is there twice", "left no token", "is also in `supp")))
    assert not refusal
    assert found == expected


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_alone_on_padded_rows(name: str) -> None:
    """Never refused when alone."""
    prompts = [[118], [171, 195, 118, 62], [118, 118]]

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(OPTIONS[name])
    def check(value: Any) -> None:
        value = [*value, [COMMON[0], COMMON[1]]] if name == "bad_words_ids" else value
        expected, found = both(prompts, 118, 3, **{name: value})
        assert found == expected

    check()


@pytest.mark.parametrize("name", GIVEN)
def test_each_given_processor_alone_on_padded_rows(name: str) -> None:
    expected, found = both([[118], [171, 195, 118, 62], [118, 118]], 118, 3, logits_processor=[GIVEN[name]([3, 0, 2])])
    assert found == expected


def test_forced_eos_comes_at_generates_length() -> None:
    """The row of one token is forced at the padded length, with the others."""
    expected, found = both([[118], [171, 195, 118, 62, 55]], 0, 3, forced_eos_token_id=77)
    assert found == expected
    assert {row[-1] for row in found} == {77}


@settings(max_examples=50, deadline=None)
@given(PROMPTS, st.one_of(TOKENS, st.sampled_from([0, 1, 2])), st.integers(1, 5), st.data())
def test_stop_strings_are_generates(prompts: list[list[int]], pad: int, width: int, data: Any) -> None:
    """Cut out of prompt and output of a row, so that they begin in the prompt, in padding, or inside a block."""
    plain, _ = both(prompts, pad, width, eos_token_id=[])
    row = data.draw(st.integers(0, len(prompts) - 1))
    shown = [pad] * (max(map(len, prompts)) - len(prompts[row])) + prompts[row] + plain[row]
    places = st.integers(0, len(shown) - 1)
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(places)
        text = b"".join(WRITES.of(token) or b"" for token in shown[start : start + data.draw(st.integers(1, 5))])
        stops += [stop] if (stop := text.decode(errors="ignore")) else []
    stops.append("<|start|>")
    criteria = StoppingCriteriaList([StopStringCriteria(TARGET.tokenizer, stops)])
    expected, found = both(prompts, pad, width, eos_token_id=[], stopping_criteria=criteria)
    assert found == expected


def test_a_special_token_stops() -> None:
    """Which `generate` stops at; the text before it is left."""
    expected, _ = both([[118, 171]], 0, 3, eos_token_id=[])
    bias = {(*expected[0][:4], 1): 1e4}  # <|start|> comes fifth
    criteria = StoppingCriteriaList([StopStringCriteria(TARGET.tokenizer, ["<|start|>"])])
    options: dict[str, Any] = {"eos_token_id": [], "stopping_criteria": criteria, "sequence_bias": bias}
    expected, found = both([[118, 171]], 0, 3, **options)
    assert found == expected
    assert found[0] == [*expected[0][:4], 1]


@pytest.mark.parametrize("name", ["no_repeat_ngram_size", "forced_eos_token_id", "sequence_bias"])
def test_sampled_law_on_a_padded_row(name: str) -> None:
    """Two new tokens against the law that generate's own processors give by enumeration.

    N = 4000 draws of a row among few outcomes (top_k 3); total variation from their own law is .02 on average and
    beyond .06 in less than one case of 1e5 (McDiarmid: exp(-2 N .04^2) = 3e-6).
    """
    options: dict[str, Any] = {
        "no_repeat_ngram_size": 1,
        "forced_eos_token_id": 77,
        "sequence_bias": {(118, 118, 171): 4.0},
    }
    x = padded([[171], [62, 55, 118]], 118)
    config = GenerationConfig(**{name: options[name]}, max_length=5)
    config._eos_token_tensor = torch.tensor([], dtype=torch.long)
    steps = TARGET.model._get_logits_processor(config, input_ids_seq_length=3, device="cpu")
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(2):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, mass in law.items():
            ids = torch.tensor([[171, *tokens]])
            scores = TARGET.model(ids).logits[:, -1].float()
            scores = steps(torch.tensor([[118, 118, 171, *tokens]]), scores)
            probs = hf.TopKLogitsWarper(3)(ids, scores).softmax(dim=-1)[0]
            for token in probs.nonzero()[:, 0].tolist():
                longer[(*tokens, token)] = mass * float(probs[token])
        law = longer
    torch.manual_seed(0)
    speculative = SpeculativeGenerate(Decoder(TARGET, BigramDrafter(259), 2))
    asked = {"max_new_tokens": 2, "do_sample": True, "top_k": 3, "eos_token_id": [], name: options[name]}
    rows = {key: value.repeat(4000, 1)[: 2 * 4000] for key, value in x.items()}
    out = TARGET.model.generate(**rows, **asked, custom_generate=speculative)[::2, 3:].tolist()
    counts = {tokens: out.count(list(tokens)) / len(out) for tokens in law}
    assert abs(sum(counts.values()) - 1) < 1e-9
    assert sum(abs(counts[tokens] - mass) for tokens, mass in law.items()) / 2 < 0.06
