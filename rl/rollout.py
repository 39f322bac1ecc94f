"""Rollouts: completions sampled by our own decoder under the present head, with all that an update will need of them.

Target and drafter are frozen. Of a token that the ensemble verified, an update needs its features, p(y), q(y), TV(p, q)
and whether it was accepted, and never runs a language model again. Tokens of the prompt's own pass and bonus tokens
come from p whatever the head says: nothing is recorded of them.

Shape suffixes: B rows, K drafted tokens, V vocabulary, N verified tokens of a completion, F features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from models.decoding.counters import Counters
from models.decoding.decoder import BlockRecord, Decoder
from models.decoding.rows import DecodeResult, GenerationParams
from models.drafters.base import Drafter
from models.target.model import Target
from models.verification.base import Block, total_variation
from models.verification.ensemble import DynamicEnsemble
from rl.policy import VerifiedTokens


class Weigher(Protocol):
    """What gives each drafted place its weight w: `models.ensemble.EnsembleHead`, or `FixedWeight`."""

    num_features: int  # F

    def features(self, block: Block) -> Tensor:
        """What w depends on, [B, K, F]; entry k knows nothing of drafted token k or what follows it."""
        ...

    def __call__(self, features: Tensor) -> Tensor:
        """[..., F] -> w [...], in [0, 1]."""
        ...


class FixedWeight:
    """The same w everywhere, and no features; w = 1 is lossless."""

    num_features = 0

    def __init__(self, target_weight: float) -> None:
        self.target_weight = target_weight

    def features(self, block: Block) -> Tensor:
        """[B, K, 0]."""
        return torch.empty(*block.draft_tokens_BK.shape, 0, device=block.draft_tokens_BK.device)

    def __call__(self, features: Tensor) -> Tensor:
        """w [...]."""
        return features.new_full(features.shape[:-1], self.target_weight)


@dataclass(frozen=True)
class Rollout:
    """One completion. Entry n of the tensors belongs to its n-th verified token, accepted or recovered.

    text: without special tokens. p_N, q_N: probability of that token under target and proposal. tv_N: TV(p, q) there.
    weights_N: w under which it was sampled. places_N: its index in `tokens`. certificate: see `DecodeResult`; the sum
    of (1 - w) TV over the entries.
    """

    tokens: list[int]
    text: str
    features_NF: Tensor
    p_N: Tensor
    q_N: Tensor
    tv_N: Tensor
    is_accepted_N: Tensor
    places_N: Tensor
    weights_N: Tensor
    counters: Counters
    certificate: float


def require_temperature_alone(params: GenerationParams) -> None:
    """ValueError for params under which three scalars a token do not tell what an update changes."""
    sampling = params.sampling
    if sampling.is_greedy:
        raise ValueError(
            "temperature=0: a greedy rollout has no likelihood to differentiate; sample with a temperature above 0, "
            "such as 1"
        )
    filters = {"top_k": (sampling.top_k, 0), "top_p": (sampling.top_p, 1.0), "min_p": (sampling.min_p, 0.0)}
    reason = (
        "p and q then differ in support, and p(y), q(y) and TV(p, q) no longer tell what another weight would have "
        "emitted; rollouts use temperature alone"
    )
    for name, (value, off) in filters.items():
        if value != off:
            raise ValueError(f"{name}={value}: {reason}, so leave it at {off}")
    if not params.processors.is_empty:
        raise ValueError(f"penalties, grammars and other processors: {reason}, so leave them out")


def sample_rollouts(
    target: Target,
    drafter: Drafter,
    num_draft_tokens: int,
    head: Weigher,
    prompts: Sequence[Sequence[int]],
    num_samples: int,
    params: GenerationParams,
    seed: int,
    max_batch_size: int | None = None,
    first: int = 0,
) -> list[Rollout]:
    """num_samples completions of each prompt, those of one prompt side by side, at most max_batch_size at a time.

    Completion i depends on its prompt, the params, and (seed, first + i) alone: by `first`, calls that share a list of
    completions out sample what one call would. Tensors are copies on the target's device.
    ValueError for params other than a temperature above 0 (see `require_temperature_alone`), and as `Decoder` has it.
    """
    require_temperature_alone(params)
    repeated = [list(prompt) for prompt in prompts for _ in range(num_samples)]
    recorder = _Recorder(head, len(repeated), target.device)
    decoder = Decoder(target, drafter, num_draft_tokens, DynamicEnsemble(recorder.weigh))
    params = replace(params, seed=seed, first_stream=first)
    results = decoder.generate(repeated, params, max_batch_size, on_block=recorder.on_block)
    return recorder.rollouts(results)


@dataclass(frozen=True)
class _Verified:
    """Verified tokens of one block, of all rows; fields as in `Rollout`."""

    rows_N: Tensor
    features_NF: Tensor
    p_N: Tensor
    q_N: Tensor
    tv_N: Tensor
    is_accepted_N: Tensor
    places_N: Tensor
    weights_N: Tensor

    @classmethod
    def nothing(cls, num_features: int, device: torch.device) -> "_Verified":
        """Of a call in which no token was drafted."""
        none_N, floats_N = torch.empty(0, dtype=torch.long, device=device), torch.empty(0, device=device)
        features_NF = torch.empty(0, num_features, device=device)
        return cls(none_N, features_NF, floats_N, floats_N, floats_N, none_N.bool(), none_N, floats_N)


class _Recorder:
    """Gives the decoder its weights, and keeps what belongs to every verified token that was emitted."""

    def __init__(self, head: Weigher, num_rows: int, device: torch.device) -> None:
        self.head = head
        self.device = device
        self._lengths = [1] * num_rows  # tokens emitted before the row's next block: the prompt's own pass gave one
        self._weighed: tuple[Block, Tensor, Tensor] | None = None
        self._blocks: list[_Verified] = []

    def weigh(self, block: Block) -> Tensor:
        """w [B, K], see `DynamicEnsemble`."""
        features_BKF = self.head.features(block)
        weights_BK = self.head(features_BKF)
        self._weighed = block, features_BKF, weights_BK
        return weights_BK

    def on_block(self, record: BlockRecord) -> None:
        """See `Decoder.generate`."""
        block, verdict = record.block, record.verdict
        if block.num_draft_tokens > 0:
            assert self._weighed is not None
            weighed, features_BKF, weights_BK = self._weighed
            assert weighed is block
            device = block.draft_tokens_BK.device
            steps_K = torch.arange(block.num_draft_tokens, device=device)
            num_emitted_B = torch.tensor(record.num_emitted, device=device)
            # The recovered token is verified too, the bonus is not; nothing behind a stop was emitted.
            num_verified_B = torch.minimum(verdict.num_accepted_B + (~verdict.is_bonus_B).long(), num_emitted_B)
            is_accepted_BK = steps_K < verdict.num_accepted_B[:, None]
            tokens_BK = torch.where(is_accepted_BK, block.draft_tokens_BK, verdict.next_token_B[:, None])
            rows_N, steps_N = (steps_K < num_verified_B[:, None]).nonzero(as_tuple=True)
            p_NV, q_NV = block.target_probs_BTV[rows_N, steps_N], block.dense_draft_probs()[rows_N, steps_N]
            tokens_N1 = tokens_BK[rows_N, steps_N][:, None]
            starts_B = torch.tensor([self._lengths[index] for index in record.indices], device=device)
            self._blocks.append(
                _Verified(
                    torch.tensor(record.indices, device=device)[rows_N],
                    features_BKF[rows_N, steps_N].detach(),
                    p_NV.gather(1, tokens_N1)[:, 0],
                    q_NV.gather(1, tokens_N1)[:, 0],
                    total_variation(p_NV, q_NV),
                    is_accepted_BK[rows_N, steps_N],
                    starts_B[rows_N] + steps_N,
                    weights_BK[rows_N, steps_N].detach(),
                )
            )
        for index, num_emitted in zip(record.indices, record.num_emitted, strict=True):
            self._lengths[index] += num_emitted

    def rollouts(self, results: Sequence[DecodeResult]) -> list[Rollout]:
        """One for each result, in their order."""
        if not self._blocks:
            self._blocks.append(_Verified.nothing(self.head.num_features, self.device))
        names = [name for name in _Verified.__dataclass_fields__ if name != "rows_N"]
        rows_N = torch.cat([block.rows_N for block in self._blocks])
        order_N = rows_N.argsort(stable=True)
        sizes = torch.bincount(rows_N, minlength=len(results)).tolist()
        # Clones: a slice would keep the tensor of all rollouts alive.
        columns = {
            name: [
                part.clone()
                for part in torch.cat([getattr(block, name) for block in self._blocks])[order_N].split(sizes)
            ]
            for name in names
        }
        return [
            Rollout(
                tokens=result.tokens,
                text=result.text,
                counters=result.counters,
                certificate=result.certificate,
                **{name: columns[name][row] for name in names},
            )
            for row, result in enumerate(results)
        ]


def without_tokens(rollout: Rollout) -> Rollout:
    """The completion without anything verified: an update takes nothing from it."""
    return _map_tensors(rollout, lambda tensor: tensor[:0])


def without_features(rollout: Rollout) -> Rollout:
    """The completion without what the head saw, the bulk of it, on the CPU: what other processes get to know."""
    # A new tensor: with a slice, all that it is a slice of would be sent.
    none_NF = rollout.features_NF.new_empty(len(rollout.p_N), 0)
    return _map_tensors(replace(rollout, features_NF=none_NF), Tensor.cpu)


def _map_tensors(rollout: Rollout, change: Callable[[Tensor], Tensor]) -> Rollout:
    tensors: dict[str, Any] = {
        name: change(value) for name, value in vars(rollout).items() if isinstance(value, Tensor)
    }
    return replace(rollout, **tensors)


def require_verified(rollouts: Sequence[Rollout]) -> None:
    """ValueError where the ensemble had nothing to judge in any of these."""
    if not any(len(rollout.p_N) for rollout in rollouts):
        raise ValueError(
            "no rollout drafted a single token: each completion ended with its first or second one; raise "
            "trainer.max_completion_length, or check the prompts"
        )


def stack_features(rollouts: Sequence[Rollout]) -> Tensor:
    """Features [N, F] of the verified tokens of all rollouts, one rollout after another."""
    return torch.cat([rollout.features_NF for rollout in rollouts])


def verified_tokens(rollouts: Sequence[Rollout]) -> VerifiedTokens:
    """The same tokens as the policy gradient takes them; sequence i is rollout i."""
    sizes = torch.tensor([len(rollout.p_N) for rollout in rollouts])
    p_N = torch.cat([rollout.p_N for rollout in rollouts])
    return VerifiedTokens(
        p_N,
        torch.cat([rollout.q_N for rollout in rollouts]),
        torch.cat([rollout.tv_N for rollout in rollouts]).to(p_N.dtype),
        torch.cat([rollout.is_accepted_N for rollout in rollouts]),
        torch.arange(len(rollouts)).repeat_interleave(sizes).to(p_N.device),
    )
