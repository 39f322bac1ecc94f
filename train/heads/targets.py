"""Which token each head must predict where, and against which teacher distribution: the one place that shifts.

Head k's state at position t predicts token t + 1 + k. The target itself predicts that token from its hidden state at
position s = t + k, so everything is lined up by s: the K heads that predict token s + 1 share one teacher.

Shape suffixes: B batch, T time, K draft, N supervised positions, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadTargets:
    """N positions s whose next token some head must predict.

    states_KNH: what head k said of it, k steps earlier. teacher_NH: the target's hidden state at s. labels_N: token s
    + 1. valid_KN: whether head k's entry is supervised. log_normaliser_N: log sum exp of the target's logits at s, if
    known.
    """

    states_KNH: Tensor
    teacher_NH: Tensor
    labels_N: Tensor
    valid_KN: Tensor
    log_normaliser_N: Tensor | None


def supervised(loss_mask_BT: Tensor, num_draft_tokens: int) -> Tensor:
    """[B, T] answer mask -> [K, B, T]: entry [k-1, b, t] says whether tokens t+1 .. t+1+k of row b are all answer.

    Token t + 1 is the root of the block, which the target itself emitted; a draft never starts inside a prompt.
    """
    padded = torch.nn.functional.pad(loss_mask_BT, (0, num_draft_tokens + 1))
    length = loss_mask_BT.shape[1]
    valid = padded[:, 1 : 1 + length]
    rows = []
    for step in range(1, num_draft_tokens + 1):
        valid = valid & padded[:, 1 + step : 1 + step + length]
        rows.append(valid)
    return torch.stack(rows)


def draft_bases(loss_mask_BT: Tensor) -> Tensor:
    """Positions [B, S] from which any head is supervised, row by row and in order; short rows repeat position 0."""
    starts_BT = supervised(loss_mask_BT, 1)[0]
    width = max(1, int(starts_BT.sum(dim=1).max()))
    order_BT = torch.argsort((~starts_BT).to(torch.int8), dim=1, stable=True)[:, :width]
    return order_BT * starts_BT.gather(1, order_BT)


def line_up(
    states_KBSH: Tensor,
    bases_BS: Tensor,
    hidden_BTH: Tensor,
    input_ids_BT: Tensor,
    loss_mask_BT: Tensor,
    log_normaliser_BT: Tensor | None = None,
) -> HeadTargets:
    """Gather the supervised entries of all heads by the position of their teacher; bases as `draft_bases` gives."""
    num_steps, length = states_KBSH.shape[0], input_ids_BT.shape[1]
    valid_KBT = supervised(loss_mask_BT, num_steps)
    # Shift head k's column t to its teacher's column s = t + k.
    by_teacher_KBT = torch.stack(
        [torch.nn.functional.pad(valid_KBT[k], (k + 1, 0))[:, :length] for k in range(num_steps)]
    )
    rows_N, columns_N = by_teacher_KBT.any(dim=0).nonzero(as_tuple=True)
    steps_K1 = torch.arange(1, num_steps + 1, device=columns_N.device)[:, None]
    # Where head k has no entry the column would be negative; any will do, since it is not valid.
    base_KN = (columns_N - steps_K1).clamp(min=0)
    place_BT = torch.zeros_like(input_ids_BT)
    places_S = torch.arange(bases_BS.shape[1], device=bases_BS.device)
    # Short rows repeat position 0; whichever of the repeats is found, its state is that of position 0.
    place_BT.scatter_(1, bases_BS, places_S.expand(bases_BS.shape))
    return HeadTargets(
        states_KNH=states_KBSH[steps_K1 - 1, rows_N, place_BT[rows_N, base_KN]],
        teacher_NH=hidden_BTH[rows_N, columns_N],
        labels_N=input_ids_BT[rows_N, columns_N + 1],
        valid_KN=by_teacher_KBT[:, rows_N, columns_N],
        log_normaliser_N=None if log_normaliser_BT is None else log_normaliser_BT[rows_N, columns_N],
    )
