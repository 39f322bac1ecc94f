"""What the target has settled and a drafter has not taken in yet, over several blocks.

Shape suffixes: B rows, T positions, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """The arguments of one `Drafter.absorb`: row b has counts[b] pairs, and padding behind them."""

    hidden_BTH: Tensor
    next_tokens_BT: Tensor
    counts: Sequence[int]


def join_pairs(parts: Sequence[Pairs]) -> Pairs:
    """The pairs of all parts, one behind the other in each row, with all padding at the end."""
    if len(parts) == 1:
        return parts[0]
    counts = [sum(of_row) for of_row in zip(*(part.counts for part in parts), strict=True)]
    is_pair_BT = torch.cat([_is_pair(part) for part in parts], dim=1)
    # A stable sort moves the padding behind the pairs, which keep their order.
    order_BT = is_pair_BT.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, : max(counts)]
    rows_B1 = torch.arange(len(counts), device=order_BT.device)[:, None]
    hidden_BTH = torch.cat([part.hidden_BTH for part in parts], dim=1)[rows_B1, order_BT]
    next_tokens_BT = torch.cat([part.next_tokens_BT for part in parts], dim=1)[rows_B1, order_BT]
    return Pairs(hidden_BTH, next_tokens_BT, counts)


def _is_pair(part: Pairs) -> Tensor:
    device = part.next_tokens_BT.device
    counts_B1 = torch.tensor(part.counts, device=device)[:, None]
    return torch.arange(part.next_tokens_BT.shape[1], device=device) < counts_B1
