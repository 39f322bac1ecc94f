"""Which token each head predicts where: compared with plain loops over the definition."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from train.heads import targets as targets_module
from train.heads.targets import HeadTargets, draft_bases, line_up, supervised

LENGTH, HIDDEN = 12, 3

MASKS = {
    "one answer": [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "padded behind": [0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
    "several turns": [0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0],
    "answer from the first token": [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0],
    "alternating": [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1],
    "two tokens at the end": [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1],
    "nothing": [0] * LENGTH,
    "everything": [1] * LENGTH,
}


def mask_of(*names: str) -> Tensor:
    return torch.tensor([MASKS[name] for name in names]).bool()


def is_supervised(mask: list[bool], t: int, k: int) -> bool:
    """Head k at t: the root t + 1 and every drafted token up to t + 1 + k exist and are answer tokens."""
    return t + 1 + k < len(mask) and all(mask[t + 1 : t + 2 + k])


def every_mask(length: int) -> Tensor:
    return torch.tensor(list(itertools.product([False, True], repeat=length)))


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5])
def test_supervised(num_draft_tokens: int) -> None:
    """Every mask of 7 tokens there is."""
    masks = every_mask(7)
    got = supervised(masks, num_draft_tokens)
    expected = [
        [[is_supervised(mask, t, k) for t in range(7)] for mask in masks.tolist()]
        for k in range(1, num_draft_tokens + 1)
    ]
    assert got.tolist() == expected


def test_draft_bases() -> None:
    """Every pair of a mask with the longest one: all bases, in order, then zeros."""
    masks = every_mask(7)
    for mask in masks:
        for batch in (mask[None], torch.stack([mask, masks[-1]])):
            bases = draft_bases(batch)
            for row, found in zip(batch.tolist(), bases.tolist(), strict=True):
                wanted = [t for t in range(7) if is_supervised(row, t, 1)]
                assert found == wanted + [0] * (len(found) - len(wanted))
            widths = [sum(is_supervised(row, t, 1) for t in range(7)) for row in batch.tolist()]
            assert bases.shape[1] == max(1, *widths)


def loop_line_up(states_KBSH: Tensor, bases: Tensor, hidden: Tensor, ids: Tensor, mask: Tensor) -> dict:
    """{(row, s): (teacher, label, {k: state})} by the definition."""
    found: dict = {}
    num_steps = states_KBSH.shape[0]
    for b, row in enumerate(mask.tolist()):
        for t in range(len(row)):
            for k in range(1, num_steps + 1):
                if is_supervised(row, t, k):
                    assert t in bases[b].tolist()
                    place = bases[b].tolist().index(t)
                    entry = found.setdefault((b, t + k), (hidden[b, t + k], ids[b, t + k + 1], {}))
                    entry[2][k] = states_KBSH[k - 1, b, place]
    return found


def check_line_up(mask: Tensor, num_steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, length = mask.shape
    ids = torch.randint(0, 1000, mask.shape, generator=generator)
    hidden = torch.randn(rows, length, HIDDEN, generator=generator)
    normaliser = torch.randn(rows, length, generator=generator)
    bases = draft_bases(mask)
    states = torch.randn(num_steps, rows, bases.shape[1], HIDDEN, generator=generator)
    # Repeats of position 0 are one position, and have one state.
    for b in range(rows):
        for i in (bases[b] == 0).nonzero()[:, 0].tolist():
            states[:, b, i] = states[:, b, bases[b].tolist().index(0)]
    expected = loop_line_up(states, bases, hidden, ids, mask)
    got = line_up(states, bases, hidden, ids, mask, normaliser)
    assert got.labels_N.shape[0] == len(expected)
    assert got.valid_KN.shape == (num_steps, len(expected))
    assert got.log_normaliser_N is not None
    # nonzero() goes row by row and forwards.
    for n, (b, s) in enumerate(sorted(expected)):
        teacher, label, by_step = expected[b, s]
        assert torch.equal(got.teacher_NH[n], teacher)
        assert got.labels_N[n] == label
        assert got.log_normaliser_N[n] == normaliser[b, s]
        assert {k for k in range(1, num_steps + 1) if got.valid_KN[k - 1, n]} == set(by_step)
        for k, state in by_step.items():
            assert torch.equal(got.states_KNH[k - 1, n], state)
    assert line_up(states, bases, hidden, ids, mask).log_normaliser_N is None


@pytest.mark.parametrize("num_steps", [1, 2, 4])
@pytest.mark.parametrize("name", MASKS)
def test_line_up_of_one_row(name: str, num_steps: int) -> None:
    check_line_up(mask_of(name), num_steps)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_line_up_of_ragged_batches(num_steps: int) -> None:
    for names in itertools.permutations(MASKS, 3):
        check_line_up(mask_of(*names), num_steps)


def test_line_up_passes_gradients_to_the_right_states() -> None:
    """d sum(valid states) / d states is 1 exactly where a head is supervised."""
    mask = mask_of("several turns", "one answer")
    bases = draft_bases(mask)
    states = torch.randn(3, 2, bases.shape[1], HIDDEN, requires_grad=True)
    got = line_up(states, bases, torch.zeros(2, LENGTH, HIDDEN), torch.zeros(2, LENGTH, dtype=torch.long), mask)
    got.states_KNH[got.valid_KN].sum().backward()
    for b, row in enumerate(mask.tolist()):
        first_places = {t: bases[b].tolist().index(t) for t in set(bases[b].tolist())}
        for t, place in first_places.items():
            for k in range(1, 4):
                # Position 0 may stand at several places, of which any one serves.
                places = [i for i, base in enumerate(bases[b].tolist()) if base == t] if t == 0 else [place]
                assert states.grad[k - 1, b, places].sum() == HIDDEN * is_supervised(row, t, k)


def test_planted_shift_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels, teachers or masks one position off are caught by the loops."""

    def shifted(change: str) -> Callable[..., HeadTargets]:
        def wrong(*args: Tensor) -> HeadTargets:
            got = targets_module.line_up(*args)
            parts = dict(vars(got))
            parts[change] = parts[change].roll(1, dims=-1 if change != "teacher_NH" else 0)
            return HeadTargets(**parts)

        return wrong

    for change in ("labels_N", "teacher_NH", "valid_KN"):
        monkeypatch.setitem(globals(), "line_up", shifted(change))
        with pytest.raises(AssertionError):
            check_line_up(mask_of("several turns", "one answer"), 3)
        monkeypatch.undo()
    monkeypatch.setattr(
        targets_module,
        "supervised",
        lambda mask, steps: supervised(torch.nn.functional.pad(mask[:, 1:], (0, 1)), steps),
    )
    with pytest.raises(AssertionError):
        check_line_up(mask_of("several turns"), 3)
