"""Packed attention == transformers' own, for every shape that decoding has; switched on and off without a trace."""

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from models.cache.attention import PACKED, packed_attention, packed_sdpa
from models.target.tiny import make_tiny_target

TOLERANCE = 1e-5  # float32 sums of a few dozen terms of order 1, in another order


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 2), (9, 3), (5, 1)])
@pytest.mark.parametrize("num_new", [1, 2, 5])
@pytest.mark.parametrize("mask_kind", ["none", "shared", "by row", "by head"])
def test_equals_transformers(num_heads: int, num_kv_heads: int, num_new: int, mask_kind: str) -> None:
    batch, num_slots, width = 3, 20, 8
    generator = torch.Generator().manual_seed(num_heads)
    query = torch.randn(batch, num_new, num_heads, width, generator=generator).transpose(1, 2)
    key, value = torch.randn(2, batch, num_kv_heads, num_slots + 9, width, generator=generator)[..., :num_slots, :]
    mask = None
    if mask_kind != "none":
        shape = {"shared": (1, 1), "by row": (batch, 1), "by head": (batch, num_heads)}[mask_kind]
        mask = torch.rand(*shape, num_new, num_slots, generator=generator) < 0.6
        mask[..., 0] = True
    module = nn.Module()
    module.num_key_value_groups = num_heads // num_kv_heads
    got, _ = packed_sdpa(module, query, key, value, mask, scaling=0.3)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    assert got.shape == expected.shape == (batch, num_new, num_heads, width)
    assert got.is_contiguous()
    assert (got - expected).abs().max() < TOLERANCE


def test_is_on_only_inside() -> None:
    target = make_tiny_target()
    other = make_tiny_target(family="gemma2")  # eager: left alone
    configs = (target.config, other.config)
    with pytest.raises(KeyError), packed_attention(target.model, other.model, None):  # noqa: PT012
        assert [config._attn_implementation for config in configs] == [PACKED, "eager"]
        raise KeyError
    assert [config._attn_implementation for config in configs] == ["sdpa", "eager"]
