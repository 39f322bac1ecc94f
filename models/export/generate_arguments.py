"""What transformers' `generate` prepared, its logits processors and stopping criteria, in this project's own options.

Nothing is dropped: what has no option goes to the decoder as it is where it depends on the text so far alone, and
everything else is refused. The text so far is the padded one: `generate` shows its processors rows of one width, and
those that count or match tokens take the padding for text (the repetition penalty alone is told to leave it out).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf
from transformers.generation import stopping_criteria as hf_stopping

from ..processors.prefix import ProcessorParams
from ..sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTEAD = "leave it out, or call generate without custom_generate"
# The places at which the decoder applies what it has options for; strangers come between these and the sampling's.
_OPTIONS: dict[type, int] = {
    hf.RepetitionPenaltyLogitsProcessor: 0,
    hf.NoRepeatNGramLogitsProcessor: 1,
    hf.NoBadWordsLogitsProcessor: 2,
    hf.MinLengthLogitsProcessor: 3,
    hf.MinNewTokensLengthLogitsProcessor: 3,
}
_STRANGER = 4
# Made for one width of prompt, which the padded rows of one call share: for them alone they depend on the text so far.
_FOR_ONE_WIDTH = (hf.ExponentialDecayLengthPenalty, hf.SuppressTokensAtBeginLogitsProcessor)
_SAMPLING: dict[type, tuple[int, str]] = {
    hf.TemperatureLogitsWarper: (5, "temperature"),
    hf.TopKLogitsWarper: (6, "top_k"),
    hf.TopPLogitsWarper: (7, "top_p"),
    hf.MinPLogitsWarper: (8, "min_p"),
}


def read_criteria(
    criteria: Iterable[Any], width: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, tuple[int, ...], tuple[str, ...]]:
    """(most new tokens, EOS ids, stop strings), for input_ids of this width and a target with this tokenizer.

    ValueError for any other criterion, for stop strings that were given another tokenizer, and without a length.
    """
    limits: list[int] = []
    eos_token_ids: list[int] = []
    stop_strings: list[str] = []
    for one in criteria:
        if type(one) is hf_stopping.MaxLengthCriteria:
            limits.append(one.max_length - width)
        elif type(one) is hf_stopping.EosTokenCriteria:
            eos_token_ids += one.eos_token_id.tolist()
        elif type(one) is hf_stopping.StopStringCriteria:
            _check_tokenizer(one, tokenizer)
            stop_strings += one.stop_strings
        else:
            raise ValueError(
                f"stopping criterion {type(one).__name__}: this decoder stops at a length, an EOS or a string; "
                f"{INSTEAD}"
            )
    if not limits:
        raise ValueError("there is no length limit: give max_new_tokens")
    return min(limits), tuple(eos_token_ids), tuple(stop_strings)


def _check_tokenizer(one: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """ValueError where the criterion reads other text in the same ids than this tokenizer writes."""
    ours = hf_stopping.StopStringCriteria(tokenizer, list(one.stop_strings))
    if not torch.equal(ours.embedding_vec.cpu(), one.embedding_vec.cpu()):
        raise ValueError(
            f"stop_strings={list(one.stop_strings)} were given another tokenizer than the one that custom_generate was "
            "loaded with; give generate that one"
        )


@dataclass(frozen=True)
class OnPaddedRows:
    """A processor that depends on the text so far alone where all rows are padded to one width, as they are here."""

    processor: Any
    depends_only_on_prefix = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """As the processor itself."""
        return self.processor(input_ids, scores)


def read_processors(
    processors: Sequence[Any], do_sample: bool, width: int, pads: Sequence[int], eos_token_ids: Sequence[int]
) -> tuple[SamplingParams, ProcessorParams]:
    """The processors as options that are applied in the same order. pads: padding of each row of input_ids.

    Temperature, top-k, top-p and min-p at the end, in this order, are the sampling's; before a stranger (typical_p
    comes behind them) they stay processors, which is slower. ValueError for one that depends on more than the text so
    far, that the decoder applies earlier than it stands, or that is there twice.
    """
    processors = [_on_padded_rows(one, pads, eos_token_ids) for one in processors]
    num_last = _count_sampling(processors) if do_sample else 0
    first, last = processors[: len(processors) - num_last], processors[len(processors) - num_last :]
    for one, other in pairwise(first):
        if _place(other) < min(_place(one), _STRANGER):
            raise ValueError(
                f"{type(other).__name__} comes behind {type(one).__name__}, and this decoder applies it before; "
                f"{INSTEAD}"
            )
    options: dict[str, Any] = {}
    for one in first:
        if _place(one) < _STRANGER:
            _read_option(one, width, pads, options)
    custom = tuple(one for one in first if _place(one) >= _STRANGER)
    sampling = {name: getattr(one, name) for one in last for name in [_SAMPLING[type(one)][1]]}
    return SamplingParams(**{"temperature": float(do_sample), **sampling}), ProcessorParams(**options, custom=custom)


def _on_padded_rows(one: Any, pads: Sequence[int], eos_token_ids: Sequence[int]) -> Any:
    """What the decoder has no option for, or only with another meaning, but can call with padded rows."""
    if type(one) is hf.RepetitionPenaltyLogitsProcessor:
        ignored = one.prompt_ignore_length
        needs_padding = isinstance(ignored, int) or (ignored is None and any(pads))
        return OnPaddedRows(one) if needs_padding else one
    if type(one) in (hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor):
        return one if set(one.eos_token_id.tolist()) == set(eos_token_ids) else OnPaddedRows(one)
    return OnPaddedRows(one) if type(one) in _FOR_ONE_WIDTH else one


def _place(one: Any) -> int:
    return _OPTIONS.get(type(one), _STRANGER)


def _count_sampling(processors: Sequence[Any]) -> int:
    """How many at the end are the sampling's own, in its order and without options that it lacks."""
    count, before = 0, len(_SAMPLING) + _STRANGER + 1
    for one in reversed(processors):
        place, _ = _SAMPLING.get(type(one), (before, ""))
        is_plain = getattr(one, "min_tokens_to_keep", 1) == 1 and getattr(one, "filter_value", -math.inf) == -math.inf
        if place >= before or not is_plain:
            break
        count, before = count + 1, place
    return count


def _read_option(one: Any, width: int, pads: Sequence[int], options: dict[str, Any]) -> None:
    """Enter a processor that the decoder has an option for. ValueError for one of its variants."""
    if isinstance(one, hf.RepetitionPenaltyLogitsProcessor):
        ignored = one.prompt_ignore_length
        if ignored is not None and ignored.tolist() != list(pads):
            raise ValueError(
                f"repetition_penalty with prompt_ignore_length={ignored.tolist()}: this decoder leaves out the padding "
                f"alone, {list(pads)}; pad on the left, or {INSTEAD}"
            )
        _enter(options, "repetition_penalty", one.penalty, one)
    elif isinstance(one, hf.NoRepeatNGramLogitsProcessor):
        _enter(options, "no_repeat_ngram_size", one.ngram_size, one)
    elif isinstance(one, hf.NoBadWordsLogitsProcessor):
        _enter(options, "bad_words_ids", tuple(tuple(word) for word in one.sequence_bias), one)
    else:
        # MinLength counts the padded prompt, and MinNewTokens skips it: the same number of new tokens.
        new = one.min_length - width if isinstance(one, hf.MinLengthLogitsProcessor) else one.min_new_tokens
        options["min_new_tokens"] = max(new, options.get("min_new_tokens", 0))


def _enter(options: dict[str, Any], name: str, value: Any, one: Any) -> None:
    if name in options:
        raise ValueError(f"{type(one).__name__} is there twice, and this decoder applies one {name}; {INSTEAD}")
    options[name] = value
