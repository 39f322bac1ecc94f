"""Lenience: q is judged as if it were smaller than it is.

Leviathan et al. 2023 (arXiv 2211.17192), appendix A.5: q is multiplied by l before it is compared with p, and no token
then has a probability above p / l.

Shape suffixes: B rows, K drafted tokens, V vocabulary.
"""

import torch
from torch import Tensor

from .base import Block, acceptance_probs
from .token import AcceptRule, Stats


class Lenience(AcceptRule):
    """Accept with min(1, p / (l q)); a rejected place's token comes from norm((p - q)+), as in the lossless rule.

    lenience: l in (0, 1]; 1 is lossless. ValueError for anything else.
    Law, known: nu = q a + (sum q (1 - a)) norm((p - q)+), never above p / l. p = 0: never accepted, never drawn.
    The paper leaves the residual open; with the lossless one, less lenience never means more distance from p.
    """

    def __init__(self, lenience: float) -> None:
        if not 0.0 < lenience <= 1.0:
            raise ValueError(f"lenience={lenience}: must be in (0, 1]; 1 is lossless, smaller accepts more.")
        self.lenience = lenience

    def accept_stats(self, block: Block, p_BKV: Tensor, q_BKV: Tensor) -> Stats:
        """See `AcceptRule.accept_stats`: nothing."""
        return ()

    def accept(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """See `TokenRule.accept`."""
        return acceptance_probs(p, self.lenience * q)

    def refused(self, p: Tensor, q: Tensor, *stats: Tensor) -> Tensor:
        """See `AcceptRule.refused`: q (1 - min(1, p / (l q))) = (q - p / l)+."""
        return torch.sub(q, p, alpha=1.0 / self.lenience).clamp_(min=0.0)
