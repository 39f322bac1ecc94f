"""Key-value cache whose rows have lengths of their own. The one place that appends to KV state and rolls it back.

A batch of sequences that accept different numbers of drafted tokens becomes ragged. Here every row is left-aligned:
slot index == position id, and only `lengths` says how much of a row counts. A pass over T new entries writes row b at
slots lengths[b] .. lengths[b] + T - 1 and moves no length. Afterwards `advance(counts)` keeps the first counts[b] of
them; what lies behind is hidden by the masks and overwritten by the next pass, so rolling back costs nothing.
Sliding-window layers keep every entry too and get their window from the mask: they can always roll back.

Must not do: choose tokens, or know about drafting.

Shape suffixes: B rows, T new entries, C slots, D head width.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, get_layer_types_and_kwargs

from .attention import PACKED

# None inside the dict as well: that layer type needs no mask in this pass.
AttentionMasks = Tensor | dict[str, Any] | None

SUPPORTED_LAYER_TYPES = ("full_attention", "sliding_attention")
SUPPORTED_ATTENTION = ("sdpa", "eager", PACKED)
MIN_SLOTS = 64
GROWTH = 1.5  # a buffer that is full grows by this factor, so that appending costs O(1) copies a token


class _RaggedLayer:
    """Buffers of one attention layer, [rows, kv_heads, slots, head_dim], allocated for more than is in use."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, is_sliding: bool) -> None:
        self.is_sliding = is_sliding
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def parts(self) -> tuple[Tensor, Tensor]:
        """Keys and values, once there are some."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values


class RaggedCache(Cache):
    """A transformers cache with per-row lengths.

    One pass: `masks = cache.attention_masks(T)`, `positions_BT = cache.positions(T)`, run the model with both and the
    cache, then `cache.advance(counts)`.
    """

    layers: list[Any]

    def __init__(
        self,
        config: PreTrainedConfig,
        batch_size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        layer_types: Sequence[str] | None = None,
        finite: bool = False,
    ) -> None:
        """`config` is the text model's; `layer_types` (default: the config's own) serves parts that have fewer layers.

        finite: write 0 for what is no number, so that a draft that went wrong is no part of the next one. A target's
        cache must not: there it would hide that the row is ill.

        `dtype` is that of the additive masks an eager attention takes; keys and values keep the model's own.
        Raises ValueError for a config whose layers cannot be rolled back, or whose attention takes no 4D mask.
        """
        types = list(layer_types) if layer_types is not None else _layer_types(config)
        unknown = sorted(set(types) - set(SUPPORTED_LAYER_TYPES))
        if unknown or getattr(config, "num_attention_heads", None) is None:
            found = ", ".join(unknown) if unknown else "no attention heads at all"
            raise ValueError(
                f"model type {config.model_type!r} has layers this decoder's cache cannot roll back: {found}; "
                f"choose a target with only {' and '.join(SUPPORTED_LAYER_TYPES)} layers."
            )
        attention = getattr(config, "_attn_implementation", None) or "sdpa"
        if attention not in SUPPORTED_ATTENTION:
            raise ValueError(
                f"attn_implementation={attention!r} takes no 4D mask, which ragged rows need; load the target "
                f"with one of {', '.join(SUPPORTED_ATTENTION[:2])}."
            )
        super().__init__(layers=[_RaggedLayer(t == "sliding_attention") for t in types])
        window = getattr(config, "sliding_window", None) if "sliding_attention" in types else None
        if "sliding_attention" in types and window is None:
            raise ValueError(f"model type {config.model_type!r} has sliding_attention layers but no sliding_window.")
        self.sliding_window: int | None = window
        self.mask_types = list(dict.fromkeys(types))
        self.eager = attention == "eager"
        self.device = torch.device(device)
        self.dtype = dtype
        self.finite = finite
        self._set_lengths([0] * batch_size)

    # Lengths: the whole of appending and rolling back.

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.longest = max(lengths, default=0)
        self.equal = min(lengths, default=0) == self.longest
        self._positions_BT: Tensor | None = None

    def advance(self, counts: Sequence[int]) -> None:
        """Keep the first counts[b] entries that the last pass wrote to row b."""
        self._set_lengths([length + count for length, count in zip(self.lengths, counts, strict=True)])

    def rollback(self, counts: Sequence[int]) -> None:
        """Forget the last counts[b] entries of row b. ValueError where a row holds fewer."""
        lengths = [length - count for length, count in zip(self.lengths, counts, strict=True)]
        if min(lengths, default=0) < 0:
            raise ValueError(f"rollback counts {list(counts)} exceed the row lengths {self.lengths}.")
        self._set_lengths(lengths)

    def positions(self, num_new: int) -> Tensor:
        """Position ids [B, T] of the next num_new entries; also the slots they are written to."""
        if self._positions_BT is None or self._positions_BT.shape[1] != num_new:
            starts = self.lengths[:1] if self.equal else self.lengths
            steps_T = torch.arange(num_new, device=self.device)
            starts_B1 = torch.tensor(starts, device=self.device)[:, None]
            self._positions_BT = (starts_B1 + steps_T).expand(self.batch_size, -1)
        return self._positions_BT

    # What the model's forward calls.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, Hkv, T, D] at each row's end; returns views [B, Hkv, longest + T, D] over all that may be read."""
        layer = self.layers[layer_idx]
        if self.finite:
            key_states = key_states.nan_to_num(0.0, 0.0, 0.0)
            value_states = value_states.nan_to_num(0.0, 0.0, 0.0)
        start, end = self.longest, self.longest + key_states.shape[2]
        rows = len(self.lengths)
        if layer.keys is None or layer.keys.shape[0] < rows or layer.keys.shape[2] < end:
            _allocate(layer, key_states, value_states, rows, end, used=start)
        keys, values = layer.keys[:rows, :, :end], layer.values[:rows, :, :end]
        if self.equal:
            keys[:, :, start:] = key_states
            values[:, :, start:] = value_states
        else:
            rows_B1 = torch.arange(rows, device=self.device)[:, None]
            slots_BT = self.positions(end - start)
            keys[rows_B1, :, slots_BT] = key_states.transpose(1, 2)
            values[rows_B1, :, slots_BT] = value_states.transpose(1, 2)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.longest

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.longest + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def attention_masks(self, num_new: int) -> AttentionMasks:
        """Masks of a pass over num_new entries a row: one for all layers, or a dict where the layer types differ.

        Query i of row b sees slot j iff j <= lengths[b] + i, and j > lengths[b] + i - window in sliding layers. Boolean
        [B or 1, 1, T, C], C = longest + T (additive for eager attention); None where attention does the same without.
        """
        masks: dict[str, Any] = {layer_type: self._mask(layer_type, num_new) for layer_type in self.mask_types}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, layer_type: str, num_new: int) -> Tensor | None:
        num_slots = self.longest + num_new
        window = self.sliding_window if layer_type == "sliding_attention" else None
        if window is not None and num_slots <= window:
            window = None
        # sdpa without a mask is causal from the upper left corner: right only for an empty cache.
        is_plain = self.equal and (num_new == 1 or (self.longest == 0 and not self.eager))
        if is_plain and window is None:
            return None
        positions_BT1 = self.positions(num_new)[: 1 if self.equal else None, :, None]
        slots_C = torch.arange(num_slots, device=self.device)
        visible_BTC = slots_C <= positions_BT1
        if window is not None:
            visible_BTC &= slots_C > positions_BT1 - window
        return self.as_mask(visible_BTC[:, None])

    def as_mask(self, visible_B1TC: Tensor) -> Tensor:
        """What the model's attention takes for it: bool as it is, or additive where attention is eager."""
        if not self.eager:
            return visible_B1TC
        hidden = torch.finfo(self.dtype).min
        return torch.zeros(visible_B1TC.shape, dtype=self.dtype, device=self.device).masked_fill(~visible_B1TC, hidden)

    def move(self, sources_BT: Tensor, slots_BT: Tensor) -> None:
        """Copy the entries of each row at `sources_BT` to its `slots_BT`; slots of one row differ."""
        rows_B1 = torch.arange(self.batch_size, device=self.device)[:, None]
        for layer in self.layers:
            if layer.keys is not None:
                layer.keys[rows_B1, :, slots_BT] = layer.keys[rows_B1, :, sources_BT]
                layer.values[rows_B1, :, slots_BT] = layer.values[rows_B1, :, sources_BT]

    def copy_of(self, row: int) -> "RaggedCache":
        """A cache of this row alone, of what counts of it."""
        alone = copy.copy(self)
        alone.layers = []
        for layer in self.layers:
            new = _RaggedLayer(layer.is_sliding)
            if layer.keys is not None:
                new.keys, new.values = (part[row : row + 1, :, : self.lengths[row]].clone() for part in layer.parts())
            alone.layers.append(new)
        alone._set_lengths([self.lengths[row]])
        return alone

    def wipe(self, row: int) -> None:
        """Zero what lies behind a row's length."""
        for layer in self.layers:
            if layer.keys is not None:
                for part in layer.parts():
                    part[row, :, self.lengths[row] :] = 0

    def take(self, row: int, slot: int, other: "RaggedCache", other_slot: int) -> None:
        """Copy the entry in a slot of other's only row into a slot of a row."""
        for layer, source in zip(self.layers, other.layers, strict=True):
            for part, from_part in zip(layer.parts(), source.parts(), strict=True):
                part[row, :, slot] = from_part[0, :, other_slot]

    # Rows come and go.

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order. Only rows that change place are copied.

        What rows that leave or were in a moved row's place have written is wiped: a NaN there would reach the next row
        that gets the place, or grows into it, for 0 * NaN is NaN.
        """
        moves = [(new, old) for new, old in enumerate(rows) if new != old]
        if moves:
            new_rows, old_rows = (torch.tensor(part, device=self.device) for part in zip(*moves, strict=True))
            for layer in self.layers:
                if layer.keys is not None:
                    layer.keys[new_rows, :, : self.longest] = layer.keys[old_rows, :, : self.longest]
                    layer.values[new_rows, :, : self.longest] = layer.values[old_rows, :, : self.longest]
                    layer.keys[new_rows, :, self.longest :] = 0
                    layer.values[new_rows, :, self.longest :] = 0
        for layer in self.layers:
            if layer.keys is not None:
                layer.keys[len(rows) : self.batch_size].zero_()
                layer.values[len(rows) : self.batch_size].zero_()
        self._set_lengths([self.lengths[row] for row in rows])

    def copy_rows(self, rows: Sequence[int]) -> None:
        """Make a batch of these rows, in this order; a row may come several times, each with entries of its own."""
        rows_B = torch.tensor(rows, device=self.device)
        for layer in self.layers:
            if layer.keys is not None:
                layer.keys, layer.values = layer.keys[rows_B], layer.values[rows_B]
        self._set_lengths([self.lengths[row] for row in rows])

    def extend(self, other: "RaggedCache") -> None:
        """Append other's rows. `other` must come from the same model; it is left as it was."""
        rows, used = self.batch_size, max(self.longest, other.longest)
        total = rows + other.batch_size
        for layer, added in zip(self.layers, other.layers, strict=True):
            if added.keys is None:
                continue
            if layer.keys is None or layer.keys.shape[0] < total or layer.keys.shape[2] < used:
                _allocate(layer, added.keys, added.values, total, used, used=self.longest)
            layer.keys[rows:total, :, : other.longest] = added.keys[: other.batch_size, :, : other.longest]
            layer.values[rows:total, :, : other.longest] = added.values[: other.batch_size, :, : other.longest]
        self._set_lengths(self.lengths + other.lengths)

    # transformers' own ways to change a cache, as `DynamicCache` has them.

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove entries of every row, all of a shorter one. ValueError above 0."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give -n to remove the last n entries of every row.")
        self.rollback([min(-tokens_to_remove, length) for length in self.lengths])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make a batch of these rows, [B]."""
        self.copy_rows(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one beside the other."""
        self.copy_rows([row for row in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Make a batch of the rows at these indices: integers, below 0 from the end, or a Boolean [B]."""
        self.copy_rows(torch.arange(self.batch_size, device=indices.device)[indices].tolist())

    def reset(self) -> None:
        """Empty every row; the buffers stay."""
        self._set_lengths([0] * self.batch_size)


def _layer_types(config: PreTrainedConfig) -> list[str]:
    if getattr(config, "num_attention_heads", None) is None:
        return []
    return list(get_layer_types_and_kwargs(config)[0])


def _allocate(layer: _RaggedLayer, keys: Tensor, values: Tensor, rows: int, slots: int, used: int) -> None:
    """Give the layer room for `rows` rows and `slots` slots, keeping the first `used` slots of what it holds.

    Zeros, not uninitialised memory: a masked slot still meets a weight of zero, and 0 * NaN is NaN.
    """
    old_rows, old_slots = (0, 0) if layer.keys is None else (layer.keys.shape[0], layer.keys.shape[2])
    new_rows = max(rows, old_rows)
    new_slots = old_slots if slots <= old_slots else max(MIN_SLOTS, slots, int(old_slots * GROWTH))
    for name, like in (("keys", keys), ("values", values)):
        buffer = like.new_zeros(new_rows, like.shape[1], new_slots, like.shape[3])
        old = getattr(layer, name)
        if old is not None:
            buffer[:old_rows, :, :used] = old[:, :, :used]
        setattr(layer, name, buffer)
