"""Draft heads: one file a kind, one contract (`base.DraftHead`)."""

from __future__ import annotations

from torch import Tensor

from ..target.model import Target
from .base import DraftHead, HeadOptions
from .eagle3 import Eagle3Head
from .hydra import HydraHeads
from .medusa import MedusaHeads
from .mtp import MTPHead

HEAD_KINDS: dict[str, type[DraftHead]] = {
    "medusa": MedusaHeads,
    "hydra": HydraHeads,
    "mtp": MTPHead,
    "eagle3": Eagle3Head,
}

__all__ = ["HEAD_KINDS", "DraftHead", "HeadOptions", "build_head"]


def build_head(target: Target, options: HeadOptions, draft_vocab: Tensor | None = None) -> DraftHead:
    """A fresh head of the chosen kind for this target. ValueError for an unknown kind."""
    if options.kind not in HEAD_KINDS:
        raise ValueError(f"heads.kind={options.kind!r} is unknown; choose one of {', '.join(HEAD_KINDS)}")
    return HEAD_KINDS[options.kind](target, options, draft_vocab)
