"""Attention over a long cache for few new tokens, with grouped key-value heads: without copying the cache.

transformers repeats keys and values for every query head before it calls torch (or lets torch do so), so that each pass
copies the whole cache several times. The query heads that share a key-value head can instead stand behind one another
as more queries: the same products, and one read of the cache. Values are those of transformers' own function.

Shape suffixes: B rows, T new tokens, C slots, D head width; Hq query heads, Hkv key-value heads, G = Hq / Hkv.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED = "foretoken_packed_sdpa"  # the name that transformers knows it by


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[B, Hq, T, D] queries, [B, Hkv, C, D] keys and values, mask [B or 1, 1, T, C] -> [B, T, Hq, D].

    A pass without a mask over more than one token is a causal prefill, which transformers' own function does well.
    """
    batch, num_heads, num_new, width = query.shape
    num_kv_heads = key.shape[1]
    groups = num_heads // num_kv_heads
    is_prefill = attention_mask is None and num_new > 1
    is_per_head = attention_mask is not None and attention_mask.shape[1] != 1
    is_special = kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None
    if groups == 1 or is_prefill or is_per_head or is_special:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    packed = query.reshape(batch, num_kv_heads, groups * num_new, width)
    if attention_mask is not None and num_new > 1:
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    output = F.scaled_dot_product_attention(
        packed, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return output.reshape(batch, num_heads, num_new, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED, packed_sdpa)
AttentionMaskInterface.register(PACKED, sdpa_mask)


@contextmanager
def packed_attention(*networks: nn.Module | None) -> Iterator[None]:
    """Within it, every part of these networks whose attention is "sdpa" uses `packed_sdpa`; after it, none does."""
    parts = (part for network in networks if network is not None for part in network.modules())
    configs = {id(part.config): part.config for part in parts if hasattr(part, "config")}
    changed: list[Any] = [c for c in configs.values() if getattr(c, "_attn_implementation", None) == "sdpa"]
    try:
        for config in changed:
            config._attn_implementation = PACKED
        yield
    finally:
        for config in changed:
            config._attn_implementation = "sdpa"
