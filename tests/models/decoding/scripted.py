"""Drafters for tests: one that knows the answer and errs on purpose, and one with a distribution that fits badly."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.drafters.base import Draft
from models.processors.block import BlockProcessor
from models.sampling import SamplingParams, sample_from, transform_logits
from models.target.model import Target

HIDDEN_TOLERANCE = 2e-4  # float32 hidden states of order 1..10, computed in batches of different shapes


@dataclass
class ScriptedState:
    texts: list[list[int]]  # prompt and all that was emitted
    num_blocks: list[int] = field(default_factory=list)


class ScriptedDrafter:
    """Proposes j tokens of the known continuation and wrong ones after; j runs through 0 .. K, rows starting apart.

    It checks everything that the decoder hands it against a fresh forward of the target.
    """

    max_draft_tokens = None
    network = None

    def __init__(self, target: Target, continuations: dict[tuple[int, ...], list[int]]) -> None:
        self.target = target
        self.vocab_size = target.vocab_size
        self.continuations = continuations

    def start(self, prompts: Sequence[Sequence[int]]) -> ScriptedState:
        return ScriptedState([[prompt[0]] for prompt in prompts], [len(prompt) for prompt in prompts])

    def absorb(self, state: ScriptedState, hidden_BTH: Tensor, next_tokens_BT: Tensor, counts: Sequence[int]) -> None:
        assert hidden_BTH.shape[:2] == next_tokens_BT.shape
        assert len(counts) == len(state.texts)
        for b, text in enumerate(state.texts):
            start = len(text) - 1
            text += next_tokens_BT[b, : counts[b]].tolist()
            expected_TH = self.target.hidden(torch.tensor([text[:-1]]))[0, start:]
            assert (hidden_BTH[b, : counts[b]] - expected_TH).abs().max() < HIDDEN_TOLERANCE

    def propose(
        self,
        state: ScriptedState,
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
    ) -> Draft:
        rows = []
        for b, text in enumerate(state.texts):
            num_right = state.num_blocks[b] % (num_draft_tokens + 1)
            state.num_blocks[b] += 1
            known = self._continuation(text)[:num_draft_tokens]
            known += [0] * (num_draft_tokens - len(known))
            rows.append([t if k < num_right else (t + 1) % self.vocab_size for k, t in enumerate(known)])
        return Draft(torch.tensor(rows))

    def _continuation(self, text: list[int]) -> list[int]:
        for prompt, tokens in self.continuations.items():
            whole = [*prompt, *tokens]
            if len(text) > len(prompt) and whole[: len(text)] == text:
                return whole[len(text) :]
        raise AssertionError("the decoder left the reference's path")

    def select_rows(self, state: ScriptedState, rows: Sequence[int]) -> None:
        state.texts = [state.texts[row] for row in rows]
        state.num_blocks = [state.num_blocks[row] for row in rows]

    def extend(self, state: ScriptedState, other: ScriptedState) -> None:
        state.texts += other.texts
        state.num_blocks += other.num_blocks


class BigramDrafter:
    """q depends on the last token alone, through a table of random logits: a real distribution that fits badly."""

    max_draft_tokens = None
    network = None

    def __init__(self, vocab_size: int, seed: int = 0, scale: float = 1.5) -> None:
        self.vocab_size = vocab_size
        generator = torch.Generator().manual_seed(seed)
        self.table_VV = torch.randn(vocab_size, vocab_size, generator=generator) * scale

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        return [prompt[-1] for prompt in prompts]

    def absorb(self, state: list[int], hidden_BTH: Tensor, next_tokens_BT: Tensor, counts: Sequence[int]) -> None:
        state[:] = [next_tokens_BT[b, count - 1].item() for b, count in enumerate(counts)]

    def propose(
        self,
        state: list[int],
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
    ) -> Draft:
        tokens, probs = [torch.tensor(state)], []
        for k in range(num_draft_tokens):
            logits_BV = self.table_VV[tokens[-1]]
            if processor is not None:
                logits_BV = processor.draft(logits_BV, tokens[1:])
            probs.append(transform_logits(logits_BV, params))
            uniform_B = torch.zeros(len(state)) if uniforms_BK is None else uniforms_BK[:, k]
            tokens.append(sample_from(probs[-1], uniform_B))
        return Draft(torch.stack(tokens[1:], dim=1), torch.stack(probs, dim=1))

    def select_rows(self, state: list[int], rows: Sequence[int]) -> None:
        state[:] = [state[row] for row in rows]

    def extend(self, state: list[int], other: list[int]) -> None:
        state += other


def random_prompts(count: int, longest: int, vocab_size: int = 259, seed: int = 0) -> list[list[int]]:
    """Ragged prompts of 1 .. longest tokens, special tokens left out."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def transformers_generate(target: Target, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Greedy tokens by transformers' own loop, attention and cache."""
    ids_1T = torch.tensor([prompt])
    padding_rows = list(range(target.num_tokens, target.vocab_size)) or None  # ours never emits these
    output = target.model.generate(
        ids_1T, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0, suppress_tokens=padding_rows
    )
    return output[0, len(prompt) :].tolist()
