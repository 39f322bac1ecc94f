"""Attention over a drafted tree: what each new entry of a cache sees, where it stands, and which entries stay.

The nodes of a tree are appended to a `RaggedCache` in order, slot after slot, but a node's position id is that of its
depth. It sees what is settled, the root, and its own ancestors. After the verdict the entries on the accepted path move
to the row's first free slots; keys are rotated by position id, and there the slot is the position id again.

Shape suffixes: B rows, Q new entries of a pass, T entries of a tree (root first), C slots, N nodes, D depth.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .ragged import AttentionMasks, RaggedCache


def lineage(parents_BN: Tensor) -> tuple[Tensor, Tensor]:
    """(which entries each one sees [B, T, T] bool, depths [B, T]) of the root and N nodes below it, T = N + 1.

    parents_BN: of each node, -1 for the root's children; a node comes after its parent.
    """
    num_rows, num_entries = len(parents_BN), parents_BN.shape[1] + 1
    up_BT = torch.cat([parents_BN.new_zeros(num_rows, 1), parents_BN + 1], dim=1)
    at_BT = torch.arange(num_entries, device=parents_BN.device).expand(num_rows, -1)
    depths_BT = torch.zeros_like(up_BT)
    sees_BTT = torch.eye(num_entries, dtype=torch.bool, device=parents_BN.device).repeat(num_rows, 1, 1)
    while (at_BT > 0).any():
        depths_BT = depths_BT + (at_BT > 0)
        at_BT = up_BT.gather(1, at_BT)
        sees_BTT.scatter_(2, at_BT[..., None], True)
    return sees_BTT, depths_BT


def tree_positions(cache: RaggedCache, depths_BQ: Tensor, num_pending: int = 0) -> Tensor:
    """Position ids [B, Q] of entries at these depths. num_pending: entries of the same tree that the cache has."""
    starts_B = torch.tensor(cache.lengths, device=depths_BQ.device) - num_pending
    return starts_B[:, None] + depths_BQ


def tree_masks(cache: RaggedCache, sees_BQT: Tensor, depths_BT: Tensor) -> AttentionMasks:
    """Masks of a pass over Q entries, the last ones of a tree whose others the cache has; see `attention_masks`.

    sees_BQT: which entries of the tree each new one sees, itself included. depths_BT: of all entries.
    """
    num_new, num_entries = sees_BQT.shape[1:]
    starts_B1 = torch.tensor(cache.lengths, device=cache.device)[:, None] - (num_entries - num_new)
    slots_C = torch.arange(cache.longest + num_new, device=cache.device)
    entries_BC = slots_C - starts_B1
    is_tree_BC = (entries_BC >= 0) & (entries_BC < num_entries)
    entries_BC = entries_BC.clamp(0, num_entries - 1)
    sees_BQC = sees_BQT.gather(2, entries_BC[:, None].expand(-1, num_new, -1))
    visible_BQC = torch.where(is_tree_BC[:, None], sees_BQC, (slots_C < starts_B1)[:, None])
    # How far each slot lies behind the entry that looks, in position ids.
    positions_BC = torch.where(is_tree_BC, starts_B1 + depths_BT.gather(1, entries_BC), slots_C)
    behind_BQC = (starts_B1 + depths_BT[:, -num_new:])[..., None] - positions_BC[:, None]
    masks: dict[str, Any] = {}
    for layer_type in cache.mask_types:
        is_near_BQC = visible_BQC
        if layer_type == "sliding_attention" and cache.sliding_window is not None:
            is_near_BQC = visible_BQC & (behind_BQC < cache.sliding_window)
        masks[layer_type] = cache.as_mask(is_near_BQC[:, None])
    return masks if len(masks) > 1 else next(iter(masks.values()))


def keep_path(cache: RaggedCache, path_BT: Tensor, counts: Sequence[int]) -> None:
    """Move the first counts[b] entries of row b's path to its first free slots; `advance(counts)` then keeps them.

    path_BT: entries of the last pass, 0 the root, ascending in each row; behind counts[b] anything.
    """
    steps_T = torch.arange(path_BT.shape[1], device=cache.device)
    counts_B1 = torch.tensor(counts, device=cache.device)[:, None]
    starts_B1 = torch.tensor(cache.lengths, device=cache.device)[:, None]
    sources_BT = starts_B1 + torch.where(steps_T < counts_B1, path_BT, steps_T)
    cache.move(sources_BT, starts_B1 + steps_T)
