"""Examples, their batches, the order they are seen in, and the reduced vocabulary."""

from collections import Counter

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from train.answers.answers import Answer
from train.data.examples import (
    BLANK,
    BUCKET_BATCHES,
    BucketSampler,
    OnlineRows,
    Row,
    WithBlanks,
    collate,
    examples_digest,
    from_answers,
    most_frequent_tokens,
    trim,
)
from train.data.prompts import Example


def example(ids: list[int], mask: list[int], name: str = "a", split: str = "train") -> Example:
    return Example(name, "chat", split, ids, [bool(bit) for bit in mask])


def test_from_answers() -> None:
    """Ids as they were read and written, the mask over the answer."""
    answer = Answer("7", "maths", "selection", [5, 6, 7], [8, 2], "eos")
    assert from_answers([answer]) == [Example("7", "maths", "selection", [5, 6, 7, 8, 2], [False] * 3 + [True] * 2)]


@pytest.mark.parametrize(
    ("mask", "max_length", "kept"),
    [
        ([0, 0, 1, 1, 1], 5, 5),
        ([0, 0, 1, 1, 1], 4, 4),
        ([0, 0, 1, 1, 1], 3, 0),  # a root with nothing to draft
        ([0, 0, 1, 1, 1], 99, 5),
        ([0, 1, 0, 1, 0], 5, 0),  # two roots with nothing to draft
        ([1, 1, 0, 0, 0], 5, 0),  # the root has no hidden state before it
        ([1, 1, 1, 0, 0], 5, 5),
        ([0, 0, 0, 0, 0], 5, 0),
    ],
)
def test_trim(mask: list[int], max_length: int, kept: int) -> None:
    got = trim([example([1, 2, 3, 4, 5], mask)], max_length)
    assert got == ([example([1, 2, 3, 4, 5][:kept], mask[:kept])] if kept else [])


def test_digest_hears_of_every_change() -> None:
    base = [example([1, 2, 3], [0, 1, 1]), example([4, 5, 6], [0, 1, 1])]
    others = [
        [example([1, 2, 4], [0, 1, 1]), base[1]],
        [example([1, 2, 3], [0, 0, 1]), base[1]],
        [example([1, 2, 3], [0, 1, 1], split="selection"), base[1]],
        base[:1],
        base[::-1],
        [example([1, 2], [0, 1]), example([3, 4, 5, 6], [1, 0, 1, 1])],
    ]
    digests = {examples_digest(examples) for examples in [base, *others]}
    assert len(digests) == len(others) + 1
    assert examples_digest(list(base)) == examples_digest(base)


def test_most_frequent_tokens() -> None:
    """Counted in answers alone; ties go to the lower id; unseen tokens fill up from the lowest id; sorted."""
    examples = [example([9, 9, 9, 5, 5, 7, 3], [0, 0, 0, 1, 1, 1, 1]), example([9, 7, 5, 3, 4], [0, 1, 1, 1, 1])]
    # Counts: 5 three times, 7 and 3 twice, 4 once, 9 never.
    assert most_frequent_tokens(examples, 1, 20).tolist() == [5]
    assert most_frequent_tokens(examples, 2, 20).tolist() == [3, 5]
    assert most_frequent_tokens(examples, 3, 20).tolist() == [3, 5, 7]
    assert most_frequent_tokens(examples, 6, 20).tolist() == [0, 1, 3, 4, 5, 7]
    assert most_frequent_tokens(examples, 19, 20).tolist() == list(range(19))


@pytest.mark.parametrize("size", [0, -1, 20, 21])
def test_whole_vocabulary(size: int) -> None:
    assert most_frequent_tokens([example([1, 2], [1, 1])], size, 20) is None


def test_online_rows() -> None:
    rows = OnlineRows([example([1, 2, 3], [0, 1, 1]), example([4, 5], [0, 1])])
    assert len(rows) == 2
    assert rows.lengths == [3, 2]
    assert rows[1].input_ids.tolist() == [4, 5]
    assert rows[1].loss_mask.tolist() == [False, True]
    assert rows[1].hidden is None


def test_collate() -> None:
    """Right padding: 0 for ids and hidden states, False for masks, -100 for labels."""
    rows = [
        Row(
            torch.tensor([1, 2, 3]), torch.tensor([False, True, True]), torch.ones(3, 2), torch.tensor([0.5, 1.5, 0.0])
        ),
        Row(torch.tensor([4]), torch.tensor([True]), 2 * torch.ones(1, 2), torch.tensor([2.5])),
    ]
    batch = collate(rows)
    assert set(batch) == {"input_ids", "loss_mask", "labels", "hidden", "log_normaliser"}
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [True, False, False]]
    assert batch["labels"].tolist() == [[-100, 2, 3], [4, -100, -100]]
    assert batch["hidden"].tolist() == [[[1, 1], [1, 1], [1, 1]], [[2, 2], [0, 0], [0, 0]]]
    assert batch["log_normaliser"].tolist() == [[0.5, 1.5, 0.0], [2.5, 0.0, 0.0]]
    assert set(collate([Row(row.input_ids, row.loss_mask) for row in rows])) == {"input_ids", "loss_mask", "labels"}


def lengths_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(1, 200, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 48, 49, 500])
def test_sampler_is_a_permutation(count: int, batch_size: int) -> None:
    sampler = BucketSampler(lengths_of(count), batch_size, seed=0)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert Counter(sampler) == Counter(range(count))
        assert len(sampler) == count


def test_sampler_depends_on_seed_and_epoch_alone() -> None:
    lengths = lengths_of(100)

    def order(seed: int, epoch: int) -> list[int]:
        sampler = BucketSampler(lengths, 4, seed)
        sampler.set_epoch(epoch)
        torch.rand(7)  # the global generator does not matter
        return list(sampler)

    orders = {(seed, epoch): order(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)}
    assert len({tuple(one) for one in orders.values()}) == 6
    assert all(order(*key) == one for key, one in orders.items())
    sampler = BucketSampler(lengths, 4, 0)
    assert list(sampler) == list(sampler) == orders[0, 0]


@pytest.mark.parametrize("count", [66, 130, 1001])
def test_sampler_puts_like_lengths_together(count: int) -> None:
    """Cut by counting, each batch holds neighbours of a sorted run; the short batch is the last."""
    batch_size, lengths = 4, lengths_of(count)
    order = list(BucketSampler(lengths, batch_size, seed=3))
    batches = [order[at : at + batch_size] for at in range(0, count, batch_size)]
    padding = sum(max(lengths[i] for i in batch) * len(batch) - sum(lengths[i] for i in batch) for batch in batches)
    plain = list(torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist())
    unsorted = [plain[at : at + batch_size] for at in range(0, count, batch_size)]
    unsorted_padding = sum(
        max(lengths[i] for i in batch) * len(batch) - sum(lengths[i] for i in batch) for batch in unsorted
    )
    assert padding < 0.25 * unsorted_padding
    for batch in batches:
        assert [lengths[i] for i in batch] == sorted((lengths[i] for i in batch), reverse=True)
    # Long and short batches alternate at random: training does not begin with the longest.
    if count > 2 * batch_size * BUCKET_BATCHES:
        firsts = [lengths[batch[0]] for batch in batches[:-1]]
        assert firsts != sorted(firsts, reverse=True)
        assert firsts != sorted(firsts)


@pytest.mark.parametrize("count", [1, 7, 16, 161])
@pytest.mark.parametrize(("each", "num_ranks", "accumulation"), [(4, 2, 1), (2, 4, 1), (2, 2, 2), (1, 8, 1), (1, 2, 4)])
def test_steps_are_the_same_for_any_number_of_processes(
    count: int, each: int, num_ranks: int, accumulation: int
) -> None:
    """Dealt out as accelerate deals out, every step has the examples that it has for one process, each of them once."""

    def steps(each: int, num_ranks: int, accumulation: int) -> list[Counter[int]]:
        at_once = each * num_ranks
        sampler = BucketSampler(lengths_of(count), 8, 0, at_once if num_ranks > 1 else 1)
        sampler.set_epoch(1)
        dealt = BatchSampler(sampler, each, drop_last=False)
        # Each process its passes; a step is so many of everyone's. A single one's loader is left as it is.
        of_ranks = [BatchSamplerShard(dealt, num_ranks, rank) for rank in range(num_ranks)]
        passes = [list(of_rank) for of_rank in (of_ranks if num_ranks > 1 else [dealt])]
        assert len({len(of_rank) for of_rank in passes}) == 1
        joined = [[index for batch in same for index in batch] for same in zip(*passes, strict=True)]
        return [
            Counter(index for one in joined[at : at + accumulation] for index in one if index != BLANK)
            for at in range(0, len(joined), accumulation)
        ]

    assert steps(each, num_ranks, accumulation) == steps(8, 1, 1)


def test_blank_rows_are_answer_nowhere() -> None:
    examples = [Example("", "", "train", list(range(size)), [False] + [True] * (size - 1)) for size in (5, 3, 4)]
    rows = WithBlanks(OnlineRows(examples))
    assert (len(rows), rows.lengths) == (3, [5, 3, 4])
    for index, example in enumerate(examples):
        assert rows[index].loss_mask.tolist() == example.loss_mask
    blank = rows[BLANK]
    assert blank.input_ids.tolist() == [0, 1, 2]
    assert not blank.loss_mask.any()
    assert examples[1].loss_mask == [False, True, True]
    assert rows[1].loss_mask.any()
