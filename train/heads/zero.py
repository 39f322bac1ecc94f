"""Draft heads under deepspeed: what they must look like for its engine, and how the whole head is had again.

Under ZeRO stage 3 no process holds all weights. deepspeed gathers a module's around its forward and its backward. A
head's loss reads its output weights behind its forward, so here the loss is inside another one; and held-out decoding,
whose calls differ from process to process, has a whole copy.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from models.heads import DraftHead
from train.heads.losses import LossOptions, supervised_loss

GIVEN = "_given_dimensions"


class HeadWithLoss(nn.Module):
    """The head as deepspeed shards it: batch in, loss out. `whole` is a copy that no hook of deepspeed is on."""

    def __init__(self, head: DraftHead, options: LossOptions) -> None:
        from deepspeed import zero

        super().__init__()
        # What is the target's is held by reference there, too.
        of_target = {id(part): part for part in (head.target, head._frozen_weight)}
        # In a list, where it is not registered and neither sharded nor saved.
        self._whole = [copy.deepcopy(head, of_target).requires_grad_(False)]
        give_dimensions(head)
        self.head = head
        self.options = options
        # They are no module's that is called, so that deepspeed would gather them nowhere.
        for weight in head.output_heads:
            zero.register_external_parameter(self, weight)

    def forward(
        self, hidden_BTH: Tensor, input_ids_BT: Tensor, loss_mask_BT: Tensor, normaliser_BT: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        loss = supervised_loss(
            self.head, self.head, hidden_BTH, input_ids_BT, loss_mask_BT, normaliser_BT, self.options
        )
        return loss.total, loss.loss_K, loss.correct_K, loss.count_K

    @torch.no_grad()
    def whole(self) -> DraftHead:
        """The copy with the weights of now. All processes must ask."""
        from deepspeed import zero

        copied = self._whole[0]
        for shard, weight in zip(self.head.parameters(), copied.parameters(), strict=True):
            with zero.GatheredParameters([shard]):
                weight.copy_(shard.view_as(weight))
        return copied


def give_dimensions(module: nn.Module) -> None:
    """Make each single number among the weights a vector of one, which multiplies as it did.

    deepspeed 0.19 sends weights as bytes, and a tensor without dimensions cannot be seen as such.
    """
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            if weight.dim() == 0:
                part.__dict__.setdefault(GIVEN, []).append(name)
                setattr(part, name, nn.Parameter(weight.detach().view(1), weight.requires_grad))


def take_dimensions(module: nn.Module) -> None:
    """Undo `give_dimensions` where training is over: a checkpoint holds single numbers."""
    for part in module.modules():
        for name in getattr(part, GIVEN, ()):
            weight = part.get_parameter(name)
            setattr(part, name, nn.Parameter(weight.detach().view(()), weight.requires_grad))
        part.__dict__.pop(GIVEN, None)
