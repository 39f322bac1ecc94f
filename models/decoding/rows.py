"""One sequence on its way through the decoder: what was asked, what was emitted, its random stream, and its result."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.decoding.counters import Counters
from models.decoding.sampling import SamplingParams
from models.decoding.stops import Detokenizer, FinishReason, StopChecker


@dataclass(frozen=True)
class GenerationParams:
    """What to generate for every prompt of a call."""

    max_new_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    stop_strings: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] | None = None  # None: the target's own; (): go on to the length limit

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: must be at least 1.")
        if isinstance(self.stop_strings, str) or not all(self.stop_strings):
            raise ValueError(f"stop_strings={self.stop_strings!r}: must be a tuple of strings that are not empty.")


@dataclass(frozen=True)
class DecodeResult:
    """What became of one prompt."""

    tokens: list[int]  # a closing EOS included, as transformers' generate has it
    accepted: list[bool]  # per token: drafted and accepted (True), or drawn from the target's own pass
    text: str  # without special tokens, cut before the stop string
    finish_reason: FinishReason
    counters: Counters


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
    ) -> None:
        """`index`: place of the prompt in the call. `limit`: most tokens to emit."""
        self.index = index
        self.prompt = list(prompt)
        self.tokens: list[int] = []
        self.accepted: list[bool] = []
        self.counters = Counters(sequences=1)
        self._tokenizer = tokenizer
        self._stop = StopChecker(limit, eos_token_ids, params.stop_strings, tokenizer)
        self._generator = torch.Generator().manual_seed(stream_seed(params.seed, index))

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

    def emit_first(self, token: int) -> int:
        """Take in the token that the prefill gave. Returns 1, the number emitted."""
        self.counters.emitted += 1
        return self._emit([token], num_accepted=0)

    def emit_block(self, drafted: Sequence[int], num_accepted: int, next_token: int) -> int:
        """Take in one verdict: the accepted tokens and the one after them, up to the first stop. Returns how many."""
        num_emitted = self._emit([*drafted[:num_accepted], next_token], num_accepted)
        is_cut = num_emitted <= num_accepted  # a drafted token ended it: those behind were never judged
        num_drafted = num_emitted if is_cut else len(drafted)
        self.counters.record_block(num_drafted, min(num_accepted, num_emitted), num_emitted)
        return num_emitted

    def _emit(self, tokens: Sequence[int], num_accepted: int) -> int:
        for place, token in enumerate(tokens):
            self.tokens.append(token)
            self.accepted.append(place < num_accepted)
            if self._stop.add(token):
                return place + 1
        return len(tokens)

    def result(self) -> DecodeResult:
        """The finished sequence."""
        reason = self._stop.reason
        assert reason is not None
        if self._stop.text is not None and self._stop.stop_at is not None:
            text = self._stop.text.text[: self._stop.stop_at]
        else:
            text = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        return DecodeResult(self.tokens, self.accepted, text, reason, self.counters)


def stream_seed(seed: int, index: int) -> int:
    """Seed of a prompt's own random stream: it depends on nothing else, so neighbours in the batch change nothing."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
