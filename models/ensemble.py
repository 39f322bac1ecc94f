"""The head of the dynamic ensemble (DIVERSED, arXiv 2604.07622): what is known at a place of a block -> w, in (0, 1).

Owns what the head looks at, and its layers. Knows no loss, no rollout and no file. `DynamicEnsemble(head.weigh)` is the
rule that decodes with it.

At place k the head looks at the two hidden states and the two distributions that drafted token k is judged by: all of
them are functions of the tokens before it. It must not look at drafted token k or at anything later, or nu would not be
the law of what is emitted.

Shape suffixes: B rows, K drafted tokens, T = K + 1 places, V vocabulary, H hidden, F features.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .verification.base import Block, total_variation

KINDS = ("linear", "mlp")
NUM_SCALARS = 5  # features of the mlp beside the hidden states
# w stays this far from 0 and 1: at 0 a recovered token has no likelihood, and float32 has no number closer to 1.
MARGIN = 1e-6
TINY = 1e-20


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions:
    """Hyper-parameters that a checkpoint carries.

    kind: linear, the paper's one layer on [h_draft; h_target], or mlp, which has one hidden layer of `width` and also
    reads both entropies, TV(p, q), whether both have the same likeliest token, and the place in the block. draft_size,
    target_size: widths of the hidden states. initial_weight: w of the untrained head, whatever it looks at.
    """

    kind: str = "linear"
    draft_size: int
    target_size: int
    initial_weight: float = 0.9
    width: int = 64

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"ensemble.kind={self.kind!r} is unknown; choose one of {', '.join(KINDS)}")
        for name in ("draft_size", "target_size", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"ensemble.{name}={getattr(self, name)}: must be at least 1")
        if not MARGIN < self.initial_weight < 1.0 - MARGIN:
            raise ValueError(
                f"ensemble.initial_weight={self.initial_weight}: must be above 0 and below 1; a head that starts at "
                "either end cannot learn to leave it"
            )


class EnsembleHead(nn.Module):
    """w = sigmoid of one linear layer, or of a small MLP.

    Parameters stay in float32, whatever the target is in: an update of 1e-4 is lost in bfloat16. `forward` refuses
    narrower ones, and takes no part in autocast.
    """

    def __init__(self, options: EnsembleOptions) -> None:
        super().__init__()
        self.options = options
        self.num_features = options.draft_size + options.target_size
        if options.kind == "mlp":
            self.num_features += NUM_SCALARS
            self.hidden = nn.Sequential(nn.Linear(self.num_features, options.width), nn.SiLU())
            self.output = nn.Linear(options.width, 1)
        else:
            self.hidden = nn.Sequential()
            self.output = nn.Linear(self.num_features, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.constant_(self.output.bias, math.log(options.initial_weight) - math.log1p(-options.initial_weight))
        self.float()  # also where torch's default is another

    def forward(self, features: Tensor) -> Tensor:
        """features [..., F] -> w [...] in (0, 1), in the dtype of the parameters. NaN where a feature is NaN."""
        dtype = self.output.weight.dtype
        if dtype.itemsize < torch.float32.itemsize:
            raise ValueError(f"the ensemble head is in {dtype}, in which its updates are lost; keep it in float32")
        with torch.autocast(features.device.type, enabled=False):
            logits = self.output(self.hidden(features.to(dtype)))[..., 0]
        return logits.sigmoid().clamp(MARGIN, 1.0 - MARGIN)

    @torch.no_grad()
    def weigh(self, block: Block) -> Tensor:
        """w [B, K] for `DynamicEnsemble`. ValueError as `features`."""
        return self(self.features(block))

    @torch.no_grad()
    def features(self, block: Block) -> Tensor:
        """What the head looks at, [B, K, F], float32.

        Linear: [h_draft; h_target], each divided by its root mean square, so that no model's scale matters. The mlp
        further, scaled up to weigh as much: H(p) / log V, H(q) / log V, TV(p, q), 1 where p and q have the same
        likeliest token, 1 / (k + 1).
        ValueError for a drafter without hidden states, or for hidden states of other widths.
        """
        num_draft_tokens = block.num_draft_tokens
        if num_draft_tokens == 0:
            return torch.zeros(len(block.num_drafted_B), 0, self.num_features, device=block.target_probs_BTV.device)
        draft_hidden_BKH, target_hidden_BTH = block.draft_hidden_BKH, block.target_hidden_BTH
        if draft_hidden_BKH is None or target_hidden_BTH is None:
            whose = "drafter" if draft_hidden_BKH is None else "target"
            raise ValueError(
                f"the ensemble head reads hidden states, and the {whose} gave none; use a drafter with a network, such "
                "as drafter=heads or drafter=model"
            )
        found = (draft_hidden_BKH.shape[-1], target_hidden_BTH.shape[-1])
        expected = (self.options.draft_size, self.options.target_size)
        if found != expected:
            raise ValueError(
                f"hidden states of draft and target are {found[0]} and {found[1]} wide, the ensemble head was made for "
                f"{expected[0]} and {expected[1]}; use the pair that it was trained for"
            )
        parts = [unit_rms(draft_hidden_BKH), unit_rms(target_hidden_BTH[:, :num_draft_tokens])]
        if self.options.kind == "mlp":
            # As much of a hidden unit's input as all of the hidden states together: they would drown among hundreds.
            parts.append(scalar_features(block) * math.sqrt(sum(expected) / NUM_SCALARS))
        return torch.cat(parts, dim=-1)


def unit_rms(hidden: Tensor) -> Tensor:
    """Hidden states [..., H] divided by their root mean square, float32; 0 stays 0. Squares do not overflow."""
    hidden = hidden.float()
    scaled = hidden / hidden.abs().amax(dim=-1, keepdim=True).clamp(min=TINY)
    return scaled * torch.rsqrt(scaled.square().mean(dim=-1, keepdim=True).clamp(min=TINY))


def scalar_features(block: Block) -> Tensor:
    """What the mlp reads beside hidden states, [B, K, 5], float32."""
    p_BKV, q_BKV = block.target_probs_BTV[:, :-1], block.dense_draft_probs()
    log_size = math.log(p_BKV.shape[-1])
    agrees_BK = p_BKV.argmax(dim=-1) == q_BKV.argmax(dim=-1)
    place_K = 1.0 / torch.arange(1, p_BKV.shape[1] + 1, device=p_BKV.device)
    scalars = (
        torch.special.entr(p_BKV).sum(dim=-1) / log_size,
        torch.special.entr(q_BKV).sum(dim=-1) / log_size,
        total_variation(p_BKV, q_BKV),
        agrees_BK,
        place_K.expand(agrees_BK.shape),
    )
    return torch.stack([scalar.float() for scalar in scalars], dim=-1)
