"""Processors: what is accepted keeps its promise, and what cannot be supported is refused, never ignored."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from models.processors import custom as custom_processors
from models.processors.prefix import ProcessorParams, Processors
from models.target.tiny import make_tiny_target

VOCAB = 24
COMMON = 9  # what texts are made of, so that tokens come again
EOS = (2, 5)


class Declared:
    """A processor that says of itself that it depends on the prefix alone."""

    depends_only_on_prefix = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


PURE = [
    hf.EpsilonLogitsWarper(0.05),
    hf.EtaLogitsWarper(0.1),
    hf.ForcedBOSTokenLogitsProcessor(3),
    hf.ForcedEOSTokenLogitsProcessor(5, 2),
    hf.LogitNormalization(),
    hf.MinLengthLogitsProcessor(4, [2]),
    hf.MinPLogitsWarper(0.2),
    hf.SequenceBiasLogitsProcessor([[[3], 1.5], [[4, 6], -2.0]]),
    hf.SuppressTokensLogitsProcessor([3, 4]),
    hf.TemperatureLogitsWarper(0.7),
    hf.TopHLogitsWarper(0.5),
    hf.TopKLogitsWarper(3),
    hf.TopPLogitsWarper(0.6),
    hf.TypicalLogitsWarper(0.6),
    hf.WatermarkLogitsProcessor(VOCAB, "cpu"),
]


def test_accepted_processors_keep_their_promise() -> None:
    """The result depends on the row's own prefix alone: not on earlier calls, not on other rows."""
    assert {type(processor) for processor in PURE} == custom_processors._PURE
    generator = torch.Generator().manual_seed(0)
    for processor in PURE:
        ProcessorParams(custom=(processor,))
        changed = False
        for length in (1, 3, 4, 6):
            ids_BT = torch.randint(0, COMMON, (4, length), generator=generator)
            scores_BV = torch.randn(4, VOCAB, generator=generator) * 3
            first = [processor(ids_BT[b : b + 1], scores_BV[b : b + 1].clone()) for b in range(4)]
            again = [processor(ids_BT[b : b + 1], scores_BV[b : b + 1].clone()) for b in reversed(range(4))]
            together = processor(ids_BT, scores_BV.clone())
            assert torch.equal(torch.cat(first), torch.cat(again[::-1]))
            assert torch.equal(torch.cat(first), together)
            changed |= not torch.equal(together, scores_BV)
        assert changed, processor


class Narrower(hf.TopKLogitsWarper):
    """A subclass may do anything."""


class Undeclared(Declared):
    depends_only_on_prefix = False


REFUSED: list[tuple[Any, str]] = [
    (hf.UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, make_tiny_target().model), "a cache of its own"),
    (hf.SynthIDTextWatermarkLogitsProcessor(3, [1, 2], 8, 0, 8, "cpu"), "remembers earlier calls"),
    (hf.PrefixConstrainedLogitsProcessor(lambda row, ids: [1], 1), "use allowed_tokens"),
    (hf.RepetitionPenaltyLogitsProcessor(1.2), "use repetition_penalty"),
    (hf.NoRepeatNGramLogitsProcessor(2), "use no_repeat_ngram_size"),
    (hf.NoBadWordsLogitsProcessor([[3]]), "use bad_words_ids"),
    (hf.MinNewTokensLengthLogitsProcessor(3, 4, 2), "use min_new_tokens"),
    (hf.EncoderRepetitionPenaltyLogitsProcessor(1.2, torch.tensor([[1]])), "made for one prompt"),
    (hf.EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor([[1]])), "made for one prompt"),
    (hf.ExponentialDecayLengthPenalty((2, 1.5), 2, 3), "made for one prompt"),
    (hf.SuppressTokensAtBeginLogitsProcessor([1], 3), "made for one prompt"),
    (hf.InfNanRemoveLogitsProcessor(), "a number again"),
    (hf.ClassifierFreeGuidanceLogitsProcessor(2.0), "not known"),
    (hf.BarkEosPrioritizerLogitsProcessor(2, 0.5), "not known"),
    (Narrower(3), "not known"),
    (Undeclared(), "not known"),
    (lambda input_ids, scores: scores, "not known"),
]


@pytest.mark.parametrize(("processor", "reason"), REFUSED, ids=lambda value: type(value).__name__)
def test_refuses_custom_processors(processor: Any, reason: str) -> None:
    name = type(processor).__name__
    says = rf"custom\[1\]={name} is refused: .*{reason}.* rolled back.* depends_only_on_prefix = True"
    with pytest.raises(ValueError, match=says):
        ProcessorParams(custom=(Declared(), processor))


def test_every_refusal_is_tested() -> None:
    assert {type(processor) for processor, _ in REFUSED} >= set(custom_processors._REFUSED)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("repetition_penalty", 0.0, "must be a positive number"),
        ("repetition_penalty", float("nan"), "must be a positive number"),
        ("repetition_penalty", float("inf"), "must be a positive number"),
        ("frequency_penalty", 2.5, r"must be in \[-2, 2\]"),
        ("presence_penalty", float("nan"), r"must be in \[-2, 2\]"),
        ("no_repeat_ngram_size", -1, "must be 0"),
        ("min_new_tokens", -1, "must be 0"),
        ("bad_words_ids", [[3]], "must be a tuple of tuples"),
        ("bad_words_ids", ((3,), ()), "must be a tuple of tuples"),
        ("bad_words_ids", (3,), "must be a tuple of tuples"),
        ("allowed_tokens", [3], "must be a function"),
        ("custom", [Declared()], "must be a tuple"),
        ("custom", (3,), "must be callable"),
    ],
)
def test_refuses_values_out_of_range(option: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=rf"^{option}.*{says}"):
        ProcessorParams(**{option: value})


@pytest.mark.parametrize(
    ("word", "says"),
    [((3, VOCAB), "0 to 23"), ((-1,), "0 to 23"), ((2,), "an EOS id: .*eos_token_ids=()")],
)
def test_refuses_bad_words_that_do_not_fit_the_target(word: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=f"^bad_words_ids has .*{says}"):
        Processors(ProcessorParams(bad_words_ids=((4,), word)), EOS, VOCAB)


@pytest.mark.parametrize(
    ("allowed", "says"),
    [
        (None, "must be a collection"),
        (3, "must be a collection"),
        ([3, VOCAB], "ids of this target are 0 to 23"),
        ([-1], "ids of this target are 0 to 23"),
        ([0.5], "ids of this target are 0 to 23"),
        ([True] * VOCAB, "ids of this target are 0 to 23"),
        (torch.tensor([3, 4]), "must be a bool mask"),
        (torch.ones(VOCAB - 1, dtype=torch.bool), "must be a bool mask"),
        (set(), "left no token to choose"),
        (torch.zeros(VOCAB, dtype=torch.bool), "left no token to choose"),
    ],
    ids=str,
)
def test_refuses_what_is_no_set_of_tokens(allowed: Any, says: str) -> None:
    made = Processors(ProcessorParams(allowed_tokens=lambda prompt, generated: allowed), EOS, VOCAB)
    with pytest.raises(ValueError, match=f"^allowed_tokens .*{says}"):
        made.apply(torch.zeros(VOCAB), [1], [])


def test_grammar_and_bans_that_contradict_each_other_are_an_error() -> None:
    """transformers would lift the ban here, in silence."""
    params = ProcessorParams(bad_words_ids=((3,),), allowed_tokens=lambda prompt, generated: {3})
    with pytest.raises(ValueError, match="allowed_tokens left no token to choose"):
        Processors(params, EOS, VOCAB).apply(torch.zeros(VOCAB), [1], [])
