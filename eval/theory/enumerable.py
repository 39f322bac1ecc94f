"""Worlds small enough to list every text: p and q after each one, and the drafter whose q is such a table.

Owns how texts are numbered, and the block that holds every draft at once. Knows nothing of what is computed from them.

Shape suffixes: M models (or prompts), N = V**d texts of d tokens, V vocabulary; B = M * N rows, K drafted tokens,
T = K + 1 places. Text x_1 .. x_d has the number that its tokens spell in base V, so the texts that go on from number n
are n V .. n V + V - 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.drafters.base import Draft
from models.processors.block import BlockProcessor
from models.sampling import SamplingParams, sample_from, transform_logits
from models.target.model import Target
from models.verification.base import Block

MAX_TEXTS = 2**20  # a model of more texts than this is a mistake in the arguments, not a small world


@dataclass(frozen=True)
class EnumerableModel:
    """Target and drafter by their tables: p[d], q[d] of shape [M, V**d, V], float64, given each text of d tokens.

    tells_q: whether rules see q. Where they do not, a drafted token is judged as if it had been certain (q = one-hot),
    as with a drafter that has no distribution; it is drawn from q all the same.
    """

    p: tuple[Tensor, ...]
    q: tuple[Tensor, ...]
    tells_q: bool = True

    @property
    def num_models(self) -> int:
        """M."""
        return self.p[0].shape[0]

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.p[0].shape[2]

    @property
    def depth(self) -> int:
        """Longest text [tokens] whose law the tables give."""
        return len(self.p)

    def require_depth(self, length: int) -> None:
        """Raises ValueError where the tables do not reach texts of `length` tokens."""
        if not 0 <= length <= self.depth:
            raise ValueError(
                f"texts of {length} tokens were asked of tables that give the law of {self.depth}: make the model with "
                f"depth={length} or more, or ask for fewer tokens."
            )

    def target_law(self, length: int) -> Tensor:
        """The target's law [M, V**length] of its first `length` tokens."""
        self.require_depth(length)
        law_MN = torch.ones(self.num_models, 1, dtype=torch.float64)
        for p_MNV in self.p[:length]:
            law_MN = (law_MN[..., None] * p_MNV).flatten(1)
        return law_MN


def random_model(
    num_models: int, vocab_size: int, depth: int, generator: torch.Generator, zero_share: float = 0.0
) -> EnumerableModel:
    """Random tables, from nearly flat to nearly one-hot and from q = p to q unrelated, each model in its own measure.

    zero_share: chance that a token has probability 0, in p and in q; the likeliest token never has.
    """
    _require_small(vocab_size, depth)
    width = torch.rand(num_models, 1, 1, generator=generator, dtype=torch.float64) * 3.0
    distance = torch.rand(num_models, 1, 1, generator=generator, dtype=torch.float64)

    def probs(logits_MNV: Tensor) -> Tensor:
        is_zero_MNV = torch.rand(logits_MNV.shape, generator=generator, dtype=torch.float64) < zero_share
        is_zero_MNV.scatter_(2, logits_MNV.argmax(dim=2, keepdim=True), False)
        return logits_MNV.masked_fill(is_zero_MNV, -torch.inf).softmax(dim=2)

    p, q = [], []
    for length in range(depth):
        shape = (num_models, vocab_size**length, vocab_size)
        logits, noise = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        p.append(probs(width * logits))
        q.append(probs(width * ((1.0 - distance) * logits + distance * noise)))
    return EnumerableModel(tuple(p), tuple(q))


class TableDrafter:
    """Proposes from a table [V, V] of logits: row x is of the token that follows x. See `drafters.base.Drafter`."""

    max_draft_tokens: int | None = None
    network: nn.Module | None = None

    def __init__(self, table_VV: Tensor) -> None:
        self.table_VV = table_VV
        self.vocab_size = table_VV.shape[0]

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """The state is each row's last token."""
        return [prompt[-1] for prompt in prompts]

    def absorb(self, state: list[int], hidden_BTH: Tensor, next_tokens_BT: Tensor, counts: Sequence[int]) -> None:
        """The last settled token is all that is kept."""
        last_B = torch.tensor(counts, device=next_tokens_BT.device) - 1
        state[:] = next_tokens_BT.gather(1, last_B[:, None])[:, 0].tolist()

    def propose(
        self,
        state: list[int],
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
    ) -> Draft:
        """Draw one token after another."""
        last_B = torch.tensor(state, device=self.table_VV.device)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for place in range(num_draft_tokens):
            logits_BV = self.table_VV[last_B]
            if processor is not None:
                logits_BV = processor.draft(logits_BV, tokens)
            probs.append(transform_logits(logits_BV, params))
            last_B = probs[-1].argmax(dim=1) if uniforms_BK is None else sample_from(probs[-1], uniforms_BK[:, place])
            tokens.append(last_B)
        return Draft(torch.stack(tokens, dim=1), torch.stack(probs, dim=1))

    def select_rows(self, state: list[int], rows: Sequence[int]) -> None:
        """See `Drafter.select_rows`."""
        state[:] = [state[row] for row in rows]

    def extend(self, state: list[int], other: list[int]) -> None:
        """See `Drafter.extend`."""
        state += other


def from_target(
    target: Target, drafter: TableDrafter, prompts: Sequence[Sequence[int]], depth: int, sampling: SamplingParams
) -> EnumerableModel:
    """What a real target and a table drafter say after each of M prompts, and every text of up to depth - 1 tokens.

    The target runs over all V**(depth - 1) continuations; its logits are transformed in float64.
    """
    vocab_size = target.vocab_size
    _require_small(vocab_size, depth)
    numbers_N = torch.arange(vocab_size ** (depth - 1), device=target.device)
    texts_NT = _spell(numbers_N, vocab_size, depth - 1)
    p: list[list[Tensor]] = [[] for _ in range(depth)]
    for prompt in prompts:
        prompt_NT = torch.tensor(prompt, device=target.device).expand(len(numbers_N), -1)
        hidden_NTH = target.hidden(torch.cat([prompt_NT, texts_NT], dim=1))[:, len(prompt) - 1 :]
        for length in range(depth):
            first_of_each = slice(None, None, vocab_size ** (depth - 1 - length))
            logits_NV = target.logits(hidden_NTH[first_of_each, length])
            p[length].append(transform_logits(logits_NV.double().cpu(), sampling))
    q_VV = transform_logits(drafter.table_VV.double().cpu(), sampling)
    q = [q_VV[[prompt[-1] for prompt in prompts]][:, None]]
    q += [q_VV.repeat(len(prompts), vocab_size ** (length - 1), 1) for length in range(1, depth)]
    return EnumerableModel(tuple(torch.stack(place) for place in p), tuple(q))


def every_draft(model: EnumerableModel, start: int, num_draft_tokens: int) -> Block:
    """Every draft of num_draft_tokens after every text of `start` tokens: B = M * V**(start + K) rows.

    Uniforms are 0: it is for asking a rule what it would do, not for a verdict.
    """
    end = start + num_draft_tokens
    model.require_depth(end + 1)
    num_models, vocab_size = model.num_models, model.vocab_size

    def places(tables: Sequence[Tensor]) -> Tensor:
        rows = [table.repeat_interleave(vocab_size ** (end - start - k), dim=1) for k, table in enumerate(tables)]
        return torch.stack([place_MNV.flatten(0, 1) for place_MNV in rows], dim=1)

    numbers_N = torch.arange(vocab_size**end)
    draft_NK = _spell(numbers_N, vocab_size, num_draft_tokens)
    num_rows = num_models * len(numbers_N)
    uniforms_BT = torch.zeros(num_rows, num_draft_tokens + 1, dtype=torch.float64)
    return Block(
        target_probs_BTV=places(model.p[start : end + 1]),
        draft_probs_BKV=places(model.q[start:end]) if model.tells_q else None,
        draft_tokens_BK=draft_NK.repeat(num_models, 1),
        num_drafted_B=torch.full((num_rows,), num_draft_tokens),
        uniforms_BK=uniforms_BT[:, 1:],
        final_uniform_B=uniforms_BT[:, 0],
    )


def _spell(numbers_N: Tensor, vocab_size: int, count: int) -> Tensor:
    """The last `count` tokens [N, count] of the texts with these numbers."""
    places = torch.arange(count - 1, -1, -1, device=numbers_N.device)
    return numbers_N[:, None] // vocab_size**places % vocab_size


def _require_small(vocab_size: int, depth: int) -> None:
    if depth < 1 or vocab_size < 2 or vocab_size**depth > MAX_TEXTS:
        raise ValueError(
            f"vocab_size={vocab_size}, depth={depth}: needs at least 2 tokens, depth 1, and at most {MAX_TEXTS} texts "
            f"(vocab_size ** depth)."
        )
