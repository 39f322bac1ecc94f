"""One sequence on its way through the decoder: what was asked, what was emitted, its random stream, and its result."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..processors.history import History
from ..processors.prefix import ProcessorParams
from ..sampling import SamplingParams
from .counters import Counters
from .stops import Detokenizer, FinishReason, StopChecker, TokenBytes

# How a token came to be: from the prompt's own pass; drafted and accepted; drafted, accepted, and lossless token
# verification would have rejected it under the same random number; drawn in place of a rejected one; drawn from p after
# a block that was accepted whole (or was empty).
TokenVerdict = Literal["prefill", "accepted", "relaxed", "recovered", "bonus"]


ACCEPTED: tuple[TokenVerdict, ...] = ("accepted", "relaxed")


class TokenLogprobs(NamedTuple):
    """Natural logarithms of one emitted token's probability, each under a distribution of its own.

    model: softmax of the target's logits as they are. target: p, after penalties, temperature, top-k, top-p and min-p.
    verify: nu, what the rule emits at this place; None where the rule does not know it.
    """

    model: float
    target: float
    verify: float | None


@dataclass(frozen=True)
class GenerationParams:
    """What to generate for every prompt of a call.

    stop_strings: the token in which one of them ends is the last, wherever it began: in the prompt as well, or in a
    special token's name (see `stops`).
    first_stream: prompt i draws from random stream first_stream + i of the seed, so that calls can share prompts out.
    """

    max_new_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    stop_strings: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] | None = None  # None: the target's own; (): go on to the length limit
    processors: ProcessorParams = field(default_factory=ProcessorParams)
    logprobs: bool = False
    first_stream: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: must be at least 1.")
        if (least := self.processors.min_new_tokens) > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={least}: must be at most max_new_tokens={self.max_new_tokens}.")
        if isinstance(self.stop_strings, str) or not all(self.stop_strings):
            raise ValueError(f"stop_strings={self.stop_strings!r}: must be a tuple of strings that are not empty.")
        for stop in self.stop_strings:
            if not stop.isascii() and any("\ud800" <= character <= "\udfff" for character in stop):
                raise ValueError(f"stop_strings has {stop!r}: half a character (a lone surrogate) is never written.")


@dataclass(frozen=True)
class Emission:
    """What one pass gives one row, before the first stop cuts it: the accepted tokens and one more.

    is_invalid: the target's logits where that one more belongs were no numbers, and it is missing. met_ill: they were
    none at some place of the pass, kept or not. distances: what each token adds to the certificate.
    """

    tokens: list[int]
    verdicts: list[TokenVerdict]
    num_drafted: int = 0
    num_accepted: int = 0
    distances: Sequence[float] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    is_invalid: bool = False
    met_ill: bool = False


@dataclass(frozen=True)
class DecodeResult:
    """What became of one prompt.

    certificate: sum over tokens of the distance between what the rule emitted there and the target's own distribution.
    Its mean over many runs bounds the total variation between the two output laws; 0 for a lossless rule.
    """

    tokens: list[int]  # a closing EOS included, as transformers' generate has it
    verdicts: list[TokenVerdict]  # per token
    text: str  # without special tokens, cut before the stop string
    finish_reason: FinishReason
    counters: Counters
    certificate: float = 0.0
    logprobs: list[TokenLogprobs] | None = None  # per token, where they were asked for

    @property
    def accepted(self) -> list[bool]:
        """Per token: drafted and accepted (True), or drawn from the target's own pass."""
        return [verdict in ACCEPTED for verdict in self.verdicts]


class Row:
    """State of one sequence."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        params: GenerationParams,
        limit: int,
        eos_token_ids: Collection[int],
        tokenizer: Detokenizer,
        token_bytes: TokenBytes | None = None,
        shown_prompt: Sequence[int] | None = None,
    ) -> None:
        """`index`: place of the prompt in the call. `limit`: most tokens to emit.

        token_bytes: the tokenizer's, needed for stop strings. shown_prompt: see `Decoder.generate`.
        """
        self.index = index
        self.prompt = list(prompt)
        self.shown_prompt = self.prompt if shown_prompt is None else list(shown_prompt)
        self.history = History(self.prompt, self.shown_prompt)  # for processors; it lags behind until it is asked
        self.tokens: list[int] = []
        self.verdicts: list[TokenVerdict] = []
        self.logprobs: list[TokenLogprobs] = []
        self.certificate = 0.0
        self.counters = Counters()
        self._tokenizer = tokenizer
        self.wants_logprobs = params.logprobs
        self._stop = StopChecker(limit, eos_token_ids, params.stop_strings, token_bytes, self.shown_prompt)
        self._generator = torch.Generator().manual_seed(stream_seed(params.seed, params.first_stream + index))

    @property
    def remaining(self) -> int:
        """Tokens it may still emit."""
        return self._stop.remaining

    @property
    def is_finished(self) -> bool:
        return self._stop.reason is not None

    def uniforms(self, count: int) -> Tensor:
        """The next numbers in [0, 1) of the row's own stream, float64 on the CPU."""
        return torch.rand(count, generator=self._generator, dtype=torch.float64)

    def emit_first(self, emission: Emission) -> int:
        """Take in what the prompt's own pass gave. Returns the number of tokens emitted, 1 or 0."""
        num_emitted = self._emit(emission)
        self.counters.emitted += num_emitted
        self.counters.sequences += num_emitted
        return num_emitted

    def emit_block(self, emission: Emission) -> int:
        """Take in one block, up to the first stop. Returns how many tokens were emitted."""
        num_emitted = self._emit(emission)
        is_cut = num_emitted <= emission.num_accepted  # a drafted token ended it: those behind were never judged
        num_drafted = num_emitted if is_cut else emission.num_drafted
        num_relaxed = emission.verdicts[:num_emitted].count("relaxed")
        self.counters.record_block(num_drafted, min(emission.num_accepted, num_emitted), num_emitted, num_relaxed)
        return num_emitted

    def _emit(self, emission: Emission) -> int:
        num_emitted = 0
        for token in emission.tokens:
            num_emitted += 1
            if self._stop.add(token):
                break
        else:
            if emission.is_invalid:
                self._stop.reason = "invalid"
        self.tokens += emission.tokens[:num_emitted]
        self.verdicts += emission.verdicts[:num_emitted]
        self.logprobs += emission.logprobs[:num_emitted]
        self.certificate += sum(emission.distances[:num_emitted])
        return num_emitted

    def result(self) -> DecodeResult:
        """The finished sequence."""
        reason = self._stop.reason
        assert reason is not None
        text = self._stop.text(self.tokens, self._tokenizer)
        logprobs = self.logprobs if self.wants_logprobs else None
        return DecodeResult(self.tokens, self.verdicts, text, reason, self.counters, self.certificate, logprobs)


def stream_seed(seed: int, index: int) -> int:
    """Seed of a prompt's own random stream: it depends on nothing else, so neighbours in the batch change nothing."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
