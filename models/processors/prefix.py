"""What changes the target's logits depending on the text so far: penalties, bans, a minimum length, a grammar.

p is the softmax of the processed logits, so a place of a block must be shown exactly the prefix that plain decoding
would have shown there: the prompt, all that was emitted, and the drafted tokens before the place. `Processors` does one
prefix, and so says what is right; `block_processor` does every place of a block at once. Temperature, top-k, top-p and
min-p come afterwards, in `sampling`.

Shape suffixes: B rows, K drafted tokens, T positions (of a block: K + 1 places), V vocabulary.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from .custom import LogitsProcessor, check_custom

# (prompt, generated) -> the tokens that may come next, as ids or, faster where they are many, as a bool mask [V]
AllowedTokens = Callable[[tuple[int, ...], tuple[int, ...]], Collection[int] | Tensor]


@dataclass(frozen=True)
class ProcessorParams:
    """What to do to the logits of every row, in the order of transformers' `generate`; the defaults do nothing.

    repetition_penalty (Keskar et al. 2019, arXiv 1909.05858, section 4.1; negative logits are multiplied by it, as
    transformers does) counts prompt and output; frequency_penalty and presence_penalty (OpenAI's and vLLM's: logit -
    frequency * count - presence * [count > 0]) the output alone.
    no_repeat_ngram_size: no n-gram of prompt and output comes twice. bad_words_ids: sequences whose last token is
    forbidden after the others. min_new_tokens: EOS is forbidden among the output's first tokens. allowed_tokens: a
    grammar. custom: objects like transformers' LogitsProcessor, called with one row at a time, last of all.
    All count from the first token of the row's own prompt. Where a caller shows the processors another prompt than the
    decoder reads (`Decoder.generate`, shown_prompts: one with its padding), n-grams, bad words and custom see that one.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    allowed_tokens: AllowedTokens | None = None
    custom: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty}: must be a positive number; 1 switches it off."
            )
        for option in ("frequency_penalty", "presence_penalty"):
            if not -2.0 <= (value := getattr(self, option)) <= 2.0:
                raise ValueError(f"{option}={value}: must be in [-2, 2]; 0 switches it off.")
        if self.no_repeat_ngram_size < 0:
            raise ValueError(
                f"no_repeat_ngram_size={self.no_repeat_ngram_size}: must be 0 (off) or the length of the n-grams."
            )
        if self.min_new_tokens < 0:
            raise ValueError(f"min_new_tokens={self.min_new_tokens}: must be 0 (off) or a number of tokens.")
        words = self.bad_words_ids
        if not isinstance(words, tuple) or not all(isinstance(word, tuple) and word for word in words):
            raise ValueError(f"bad_words_ids={words!r}: must be a tuple of tuples of token ids, none of them empty.")
        if self.allowed_tokens is not None and not callable(self.allowed_tokens):
            raise ValueError(
                f"allowed_tokens={self.allowed_tokens!r}: must be a function of (prompt, generated), or None."
            )
        if not isinstance(self.custom, tuple):
            raise ValueError(f"custom={self.custom!r}: must be a tuple of logits processors.")
        for index, processor in enumerate(self.custom):
            check_custom(index, processor)

    @property
    def is_empty(self) -> bool:
        """Whether the logits stay as they are."""
        return self == ProcessorParams()


@dataclass(frozen=True)
class _Prefix:
    """The text so far of one row; tensors are made when a step asks for them."""

    prompt: tuple[int, ...]
    generated: tuple[int, ...]
    device: torch.device
    shown: tuple[int, ...]  # the prompt, or the prompt with its padding

    @cached_property
    def text_1T(self) -> Tensor:
        return torch.tensor([self.prompt + self.generated], dtype=torch.long, device=self.device)

    @cached_property
    def shown_1T(self) -> Tensor:
        if self.shown == self.prompt:
            return self.text_1T
        return torch.tensor([self.shown + self.generated], dtype=torch.long, device=self.device)

    @cached_property
    def generated_1T(self) -> Tensor:
        return torch.tensor([self.generated], dtype=torch.long, device=self.device)


_Step = Callable[[_Prefix, Tensor], Tensor]  # (prefix, scores [1, V]) -> scores [1, V], another tensor


class Processors:
    """All that `params` ask for, for one prefix at a time."""

    def __init__(self, params: ProcessorParams, eos_token_ids: Collection[int], vocab_size: int) -> None:
        """Raises ValueError for a bad word that is an EOS id, or out of the vocabulary."""
        for word in params.bad_words_ids:
            if not all(0 <= token < vocab_size for token in word):
                raise ValueError(f"bad_words_ids has {word}: ids of this target are 0 to {vocab_size - 1}.")
            if len(word) == 1 and word[0] in eos_token_ids:
                raise ValueError(
                    f"bad_words_ids has {word}, an EOS id: to go on to the length limit, set eos_token_ids=() instead."
                )
        self.params = params
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = vocab_size
        self._steps = _make_steps(params, list(eos_token_ids))

    @property
    def is_empty(self) -> bool:
        """Whether the logits stay as they are."""
        return not self._steps

    def apply(
        self, logits_V: Tensor, prompt: Sequence[int], generated: Sequence[int], shown: Sequence[int] | None = None
    ) -> Tensor:
        """Processed logits [V] of the token after prompt and generated: a new tensor, float32, float64 for float64.

        shown: the prompt as `ProcessorParams` says that some steps see it; None: as it is.

        Logits without a law (NaN, +inf, or nothing but -inf) come back as they are. ValueError, with the option's name,
        where a processor leaves no token to choose, makes NaN or +inf, or returns anything but scores [1, V].
        """
        assert logits_V.shape == (self.vocab_size,), f"logits {tuple(logits_V.shape)}, not [{self.vocab_size}]"
        scores_1V = widen(logits_V)[None].clone()
        if not scores_1V.amax().isfinite():
            return scores_1V[0]
        return self._apply(self._steps, scores_1V, prompt, generated, shown)

    def allowed(self, prompt: tuple[int, ...], generated: tuple[int, ...]) -> Tensor:
        """What the grammar allows next, bool [V]: a tensor that may be the grammar's own. There must be a grammar."""
        assert self.params.allowed_tokens is not None
        return _as_mask(self.params.allowed_tokens(prompt, generated), self.vocab_size)

    def apply_custom(
        self, scores_V: Tensor, prompt: Sequence[int], generated: Sequence[int], shown: Sequence[int]
    ) -> Tensor:
        """The custom processors alone, which come last: see `apply`. scores_V: what the others made."""
        custom = self._steps[len(self._steps) - len(self.params.custom) :]
        return self._apply(custom, scores_V[None].clone(), prompt, generated, shown)

    def _apply(
        self,
        steps: Sequence[tuple[str, _Step]],
        scores_1V: Tensor,
        prompt: Sequence[int],
        generated: Sequence[int],
        shown: Sequence[int] | None,
    ) -> Tensor:
        shown = prompt if shown is None else shown
        prefix = _Prefix(tuple(prompt), tuple(generated), scores_1V.device, tuple(shown))
        for name, step in steps:
            scores_1V = _checked(name, step(prefix, scores_1V), scores_1V, prefix)
        return scores_1V[0]


def widen(logits: Tensor) -> Tensor:
    """Float32, or float64 as it is."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _make_steps(params: ProcessorParams, eos_token_ids: list[int]) -> list[tuple[str, _Step]]:
    """Named steps in the order of transformers' `generate`; the penalties that it lacks come where vLLM has them."""
    steps: list[tuple[str, _Step]] = []
    if params.repetition_penalty != 1.0:
        repetition = hf.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
        steps.append(("repetition_penalty", lambda prefix, scores_1V: repetition(prefix.text_1T, scores_1V)))
    if params.frequency_penalty or params.presence_penalty:
        counts = _count_penalty(params.frequency_penalty, params.presence_penalty)
        steps.append(("frequency_penalty, presence_penalty", counts))
    if params.no_repeat_ngram_size:
        ngrams = hf.NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size)
        steps.append(("no_repeat_ngram_size", _on_shown(ngrams)))
    if params.bad_words_ids:
        bad_words = hf.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words_ids])
        steps.append(("bad_words_ids", _on_shown(bad_words)))
    if params.min_new_tokens and eos_token_ids:
        steps.append(("min_new_tokens", _min_length(params.min_new_tokens, eos_token_ids)))
    if params.allowed_tokens is not None:
        steps.append(("allowed_tokens", _allowed_only(params.allowed_tokens)))
    for index, processor in enumerate(params.custom):
        steps.append((f"custom[{index}] ({type(processor).__name__})", _on_shown(processor)))
    return steps


def _on_shown(processor: LogitsProcessor) -> _Step:
    return lambda prefix, scores_1V: processor(prefix.shown_1T, scores_1V)


def _count_penalty(frequency: float, presence: float) -> _Step:
    def step(prefix: _Prefix, scores_1V: Tensor) -> Tensor:
        counts_V = torch.bincount(prefix.generated_1T[0], minlength=scores_1V.shape[1]).to(scores_1V.dtype)
        return scores_1V - frequency * counts_V - presence * (counts_V > 0)

    return step


def _min_length(min_new_tokens: int, eos_token_ids: list[int]) -> _Step:
    def step(prefix: _Prefix, scores_1V: Tensor) -> Tensor:
        if len(prefix.generated) >= min_new_tokens:
            return scores_1V  # it would look for the EOS ids in the whole vocabulary first
        # It is given the output alone: prompts differ in length.
        processor = hf.MinNewTokensLengthLogitsProcessor(0, min_new_tokens, eos_token_ids, device=scores_1V.device)
        return processor(prefix.generated_1T, scores_1V)

    return step


def _allowed_only(allowed_tokens: AllowedTokens) -> _Step:
    """Not transformers' PrefixConstrainedLogitsProcessor: that one lifts other bans where no allowed token is left."""

    def step(prefix: _Prefix, scores_1V: Tensor) -> Tensor:
        allowed = allowed_tokens(prefix.prompt, prefix.generated)
        return scores_1V.masked_fill(~_as_mask(allowed, scores_1V.shape[1]).to(scores_1V.device), -torch.inf)

    return step


def _as_mask(allowed: Collection[int] | Tensor, vocab_size: int) -> Tensor:
    """bool [V]."""
    if isinstance(allowed, Tensor):
        if allowed.dtype != torch.bool or allowed.shape != (vocab_size,):
            raise ValueError(
                f"allowed_tokens returned a tensor {allowed.dtype} {tuple(allowed.shape)}: must be a bool mask "
                f"({vocab_size},), or give ids as a list."
            )
        return allowed
    if not isinstance(allowed, Collection):
        raise ValueError(f"allowed_tokens returned {allowed!r}: must be a collection of token ids, or a bool mask.")
    ids = torch.tensor(list(allowed))
    if len(ids) > 0 and (ids.dtype != torch.long or ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(f"allowed_tokens returned {allowed!r}: ids of this target are 0 to {vocab_size - 1}.")
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids.long(), True)


def _checked(name: str, scores: object, before_1V: Tensor, prefix: _Prefix) -> Tensor:
    """What a step gave, if a law can be made of it."""
    where = f"after {len(prefix.prompt)} prompt tokens and {len(prefix.generated)} more"
    if not isinstance(scores, Tensor) or scores.shape != before_1V.shape:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"{name} returned {got} {where}: must be scores {tuple(before_1V.shape)}.")
    best = scores.amax().item()
    if best == -math.inf:
        raise ValueError(f"{name} left no token to choose {where}: allow at least one, such as an EOS id.")
    if not math.isfinite(best):
        raise ValueError(f"{name} made a logit {best} {where}: must be finite, or -inf to forbid the token.")
    return scores.to(before_1V.dtype)
