"""What deepspeed needs of a head, and that it is taken back."""

import pytest
import torch

from models.heads import HEAD_KINDS, HeadOptions, build_head
from models.target.tiny import make_tiny_target
from train.heads.zero import give_dimensions, take_dimensions


@pytest.mark.parametrize("kind", sorted(HEAD_KINDS))
def test_no_weight_is_without_dimensions(kind: str) -> None:
    """deepspeed sends weights as bytes; the head computes what it did, and is itself again afterwards."""
    target = make_tiny_target()
    head = build_head(target, HeadOptions(kind, 3))
    before = {name: weight.clone() for name, weight in head.state_dict().items()}
    ids_BT = torch.arange(20).view(2, 10)
    hidden_BTX = target.hidden(ids_BT, reads=head.reads)
    states = head(hidden_BTX, ids_BT)
    give_dimensions(head)
    for weight in head.parameters():
        assert weight.requires_grad
        weight.data.view(torch.uint8)
    assert torch.equal(head(hidden_BTX, ids_BT), states)
    take_dimensions(head)
    after = head.state_dict()
    assert after.keys() == before.keys()
    assert all(
        after[name].shape == weight.shape and torch.equal(after[name], weight) for name, weight in before.items()
    )
    assert all(weight.requires_grad for weight in head.parameters())
    take_dimensions(head)
    assert head.state_dict().keys() == before.keys()
