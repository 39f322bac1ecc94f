"""Which foreign logits processors the decoder takes: those whose result depends on the text so far alone.

A processor is called one row at a time, several times a block, with texts that may be rolled back.
"""

from collections.abc import Callable

from torch import Tensor
from transformers.generation import logits_process as hf

# transformers' convention: (input_ids [1, T], scores [1, V]) -> scores [1, V]
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]

# Of transformers' processors, those whose result depends on (input_ids, scores) alone, whatever was called before.
_PURE = frozenset(
    {
        hf.EpsilonLogitsWarper,
        hf.EtaLogitsWarper,
        hf.ForcedBOSTokenLogitsProcessor,
        hf.ForcedEOSTokenLogitsProcessor,
        hf.LogitNormalization,
        hf.MinLengthLogitsProcessor,
        hf.MinPLogitsWarper,
        hf.SequenceBiasLogitsProcessor,
        hf.SuppressTokensLogitsProcessor,
        hf.TemperatureLogitsWarper,
        hf.TopHLogitsWarper,
        hf.TopKLogitsWarper,
        hf.TopPLogitsWarper,
        hf.TypicalLogitsWarper,
        hf.WatermarkLogitsProcessor,
    }
)
_ONE_PROMPT = "it is made for one prompt, or for one length of prompt, and rows differ in theirs"
_REFUSED = {
    hf.EncoderNoRepeatNGramLogitsProcessor: _ONE_PROMPT,
    hf.EncoderRepetitionPenaltyLogitsProcessor: _ONE_PROMPT,
    hf.ExponentialDecayLengthPenalty: _ONE_PROMPT,
    hf.InfNanRemoveLogitsProcessor: "it makes the -inf of forbidden tokens a number again",
    hf.MinNewTokensLengthLogitsProcessor: f"{_ONE_PROMPT}; use min_new_tokens",
    hf.NoBadWordsLogitsProcessor: "there is an option for it; use bad_words_ids",
    hf.NoRepeatNGramLogitsProcessor: "there is an option for it; use no_repeat_ngram_size",
    hf.PrefixConstrainedLogitsProcessor: "it goes by a row's place in the batch; use allowed_tokens",
    hf.RepetitionPenaltyLogitsProcessor: "there is an option for it; use repetition_penalty",
    hf.SuppressTokensAtBeginLogitsProcessor: _ONE_PROMPT,
    hf.SynthIDTextWatermarkLogitsProcessor: "it remembers earlier calls, rolled back or not",
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor: "it runs the model on a cache of its own that never rolls back",
}
_UNKNOWN = "it is not known to depend on the text so far alone"


def check_custom(index: int, processor: object) -> None:
    """Accept what is known, or says, to depend on the prefix alone. Known by exact type: a subclass may differ."""
    name = type(processor).__name__
    if not callable(processor):
        raise ValueError(f"custom[{index}]={name}: must be callable with (input_ids, scores).")
    if type(processor) in _PURE or getattr(processor, "depends_only_on_prefix", False) is True:
        return
    raise ValueError(
        f"custom[{index}]={name} is refused: {_REFUSED.get(type(processor), _UNKNOWN)}. A processor is called one row "
        "at a time, several times a block, with texts that may be rolled back. Leave it out, or use a class that says "
        "depends_only_on_prefix = True, and whose result depends on (input_ids, scores) alone."
    )
