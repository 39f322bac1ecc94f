"""What transformers' `generate` prepared, its logits processors and stopping criteria, in this project's own options.

Nothing is dropped: what has no option goes to the decoder as it is where it depends on the text so far alone, and
everything else is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor
from transformers.generation import logits_process as hf
from transformers.generation import stopping_criteria as hf_stopping

from models.decoding.processors import ProcessorParams
from models.decoding.sampling import SamplingParams

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
_SAMPLING: dict[type, tuple[int, str]] = {
    hf.TemperatureLogitsWarper: (5, "temperature"),
    hf.TopKLogitsWarper: (6, "top_k"),
    hf.TopPLogitsWarper: (7, "top_p"),
    hf.MinPLogitsWarper: (8, "min_p"),
}


def read_criteria(criteria: Iterable[Any], width: int) -> tuple[int, tuple[int, ...], tuple[str, ...]]:
    """(most new tokens, EOS ids, stop strings), for input_ids of this width.

    ValueError for any other criterion, and without a length.
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
            stop_strings += one.stop_strings
        else:
            raise ValueError(
                f"stopping criterion {type(one).__name__}: this decoder stops at a length, an EOS or a string; "
                f"{INSTEAD}"
            )
    if not limits:
        raise ValueError("there is no length limit: give max_new_tokens")
    return min(limits), tuple(eos_token_ids), tuple(stop_strings)


def read_processors(
    processors: Sequence[Any], do_sample: bool, width: int, pads: Sequence[int]
) -> tuple[SamplingParams, ProcessorParams]:
    """The processors as options that are applied in the same order. pads: padding of each row of input_ids.

    Temperature, top-k, top-p and min-p at the end, in this order, are the sampling's; before a stranger (typical_p
    comes behind them) they stay processors, which is slower. ValueError for one that depends on more than the text so
    far, or that the decoder applies earlier than it stands.
    """
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
        if ignored is not None and not (isinstance(ignored, Tensor) and ignored.tolist() == list(pads)):
            raise ValueError(
                f"repetition_penalty with prompt_ignore_length={ignored}: this decoder penalises prompt and output "
                f"alike; {INSTEAD}"
            )
        options["repetition_penalty"] = one.penalty
    elif isinstance(one, hf.NoRepeatNGramLogitsProcessor):
        options["no_repeat_ngram_size"] = one.ngram_size
    elif isinstance(one, hf.NoBadWordsLogitsProcessor):
        options["bad_words_ids"] = tuple(tuple(word) for word in one.sequence_bias)
    else:
        # MinLength counts the padded prompt, and MinNewTokens skips it: the same number of new tokens.
        new = one.min_length - width if isinstance(one, hf.MinLengthLogitsProcessor) else one.min_new_tokens
        options["min_new_tokens"] = max(new, options.get("min_new_tokens", 0))
