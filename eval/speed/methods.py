"""The rows of the bench: every way of decoding behind one small contract, on the same model in memory.

Runs models; does not time the rows (`eval.speed.timing`) and does not judge them (`eval.speed.acceptance`).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import DynamicCache, GenerationConfig

from eval.speed.passes import count_passes, shown_to
from eval.speed.timing import wait_for
from models.decoding.counters import Counters, Timings
from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.sampling import SamplingParams
from models.target.model import Target

PLAIN = "plain"
GENERATE = "transformers generate"
BARE = "bare forward"
# Passes of the bare forward in one turn.
BARE_PASSES = 8


@dataclass(frozen=True)
class Outcome:
    """New tokens of each prompt, and what the method tells of itself; counters: one for each prompt, or none."""

    tokens: list[list[int]]
    counters: list[Counters] = field(default_factory=list)
    timings: Timings | None = None
    certificates: list[float] = field(default_factory=list)  # of a relaxed rule; see `DecodeResult.certificate`


class Method(Protocol):
    """One way of decoding."""

    @property
    def name(self) -> str: ...

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Outcome:
        """Answer all prompts; the same seed gives the same answers."""
        ...


@dataclass(frozen=True)
class DecoderMethod:
    """This project's decoder, plain or with a drafter."""

    name: str
    decoder: Decoder
    sampling: SamplingParams
    batch_size: int

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Outcome:
        """See `Method.run`. A drafter that remembers answers forgets them first: earlier rounds gave the very same."""
        if forget := getattr(self.decoder.drafter, "forget", None):
            forget()
        params = GenerationParams(max_new_tokens, self.sampling, seed)
        results = self.decoder.generate(prompts, params, self.batch_size)
        certificates = [] if self.decoder.judge.rule.is_lossless else [r.certificate for r in results]
        return Outcome([r.tokens for r in results], [r.counters for r in results], self.decoder.timings, certificates)


class WaitingDecoder(Decoder):
    """Waits for the device at the end of each part, so that a GPU's work is booked on the part that asked for it.

    Slower for it: its timings tell the parts' shares, and its speed is not reported.
    """

    def _book(self, part: str, since: float) -> float:
        wait_for(self.target.device)
        return super()._book(part, since)


@dataclass(frozen=True)
class GenerateMethod:
    """transformers' own `generate`, with its default cache, and its prompt lookup where tokens for it are given.

    Only prompt lookup is counted, by its passes (see `eval.speed.passes`).
    """

    name: str
    target: Target
    sampling: SamplingParams
    batch_size: int
    prompt_lookup_tokens: int = 0

    def __post_init__(self) -> None:
        if self.prompt_lookup_tokens and self.batch_size > 1:
            raise ValueError(
                f"prompt_lookup_tokens={self.prompt_lookup_tokens} with batch_size={self.batch_size}: transformers' "
                "assisted decoding takes one prompt at a time; set prompt_lookup_tokens=0 or batch_size=1"
            )

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Outcome:
        """See `Method.run`."""
        outcome = Outcome([])
        with torch.random.fork_rng(), _no_defaults(self.target):
            torch.manual_seed(seed)
            for first in range(0, len(prompts), self.batch_size):
                batch = prompts[first : first + self.batch_size]
                with shown_to(self.target.model) as shown:
                    outcome.tokens.extend(self._run_batch(batch, max_new_tokens))
                if self.prompt_lookup_tokens:
                    outcome.counters.append(count_passes(shown, len(batch[0]), outcome.tokens[-1]))
        return outcome

    def _run_batch(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        longest = max(len(prompt) for prompt in prompts)
        padding = [longest - len(prompt) for prompt in prompts]
        pad = self._pad_token_id()
        device = self.target.device
        ids_BT = torch.tensor([[pad] * n + list(p) for n, p in zip(padding, prompts, strict=True)], device=device)
        mask_BT = torch.tensor([[0] * n + [1] * (longest - n) for n in padding], device=device)
        config = GenerationConfig(**self._settings(max_new_tokens))
        output_BT = self.target.model.generate(ids_BT, attention_mask=mask_BT, generation_config=config)
        return [cut_at_eos(row, self.target.eos_token_ids) for row in output_BT[:, longest:].tolist()]

    def _settings(self, max_new_tokens: int) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "do_sample": not self.sampling.is_greedy,
            "pad_token_id": self._pad_token_id(),
            "eos_token_id": list(self.target.eos_token_ids) or None,
        }
        if not self.sampling.is_greedy:
            settings |= {
                "temperature": self.sampling.temperature,
                "top_k": self.sampling.top_k,
                "top_p": self.sampling.top_p,
                "min_p": self.sampling.min_p or None,
            }
        if self.target.num_tokens < self.target.vocab_size:  # as ours: rows that pad the output head are no tokens
            settings["suppress_tokens"] = list(range(self.target.num_tokens, self.target.vocab_size))
        if self.prompt_lookup_tokens:
            settings["prompt_lookup_num_tokens"] = self.prompt_lookup_tokens
        return settings

    def _pad_token_id(self) -> int:
        if self.target.tokenizer.pad_token_id is not None:
            return self.target.tokenizer.pad_token_id
        return self.target.eos_token_ids[0] if self.target.eos_token_ids else 0


@contextmanager
def _no_defaults(target: Target) -> Iterator[None]:
    """Without the penalties and filters that a model's own generation config would slip in: no other row has them."""
    own = target.model.generation_config
    target.model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        target.model.generation_config = own


@dataclass(frozen=True)
class BareForward:
    """The yardstick of a target pass: transformers' own forward of one token a row, after a prompt. Emits nothing."""

    target: Target
    batch_size: int
    name: str = BARE

    @torch.no_grad()
    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Outcome:
        """`target_s` and `target_passes` of the timings cover the single-token passes and nothing else."""
        batch = prompts[: self.batch_size]
        shortest = min(len(prompt) for prompt in batch)
        ids_BT = torch.tensor([list(prompt[:shortest]) for prompt in batch], device=self.target.device)
        cache = DynamicCache(config=self.target.config)
        started = 0.0
        for number in range(1 + min(BARE_PASSES, max_new_tokens)):
            output = self.target.model(input_ids=ids_BT, cache=cache, use_cache=True, logits_to_keep=1)
            ids_BT = output.logits[:, -1:].argmax(dim=-1)
            if number == 0:  # the prompt's own pass
                wait_for(self.target.device)
                started = time.perf_counter()
        wait_for(self.target.device)
        return Outcome([], timings=Timings(target_s=time.perf_counter() - started, target_passes=number))


def cut_at_eos(tokens: Sequence[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Up to the first EOS, which stays; behind it a batch has padding."""
    end = next((place + 1 for place, token in enumerate(tokens) if token in eos_token_ids), len(tokens))
    return list(tokens[:end])
