"""Training examples: token ids with the mask of the answer, their batches, and the order they are seen in."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from models.target.model import Target
from models.target.tokens import require_known
from train.answers.answers import Answer
from train.data.prompts import Example
from train.heads.targets import supervised

# Batches are cut from runs of this many batches' worth of examples sorted by length: little padding, and still random.
BUCKET_BATCHES = 16
# What the sampler gives where an epoch's examples do not fill the last batches of all processes.
BLANK = -1


def from_answers(answers: Sequence[Answer]) -> list[Example]:
    """prompt_ids + answer_ids, exactly as the target read and wrote them."""
    return [
        Example(
            answer.id,
            answer.task,
            answer.split,
            answer.prompt_ids + answer.answer_ids,
            [False] * len(answer.prompt_ids) + [True] * len(answer.answer_ids),
        )
        for answer in answers
    ]


def require_known_tokens(target: Target, examples: Sequence[Example]) -> None:
    """ValueError, before any training, for a text with a token that the target has no embedding for."""
    for example in examples:
        require_known(target.tokenizer, example.input_ids, target.num_usable, f"example {example.id!r}")


def trim(examples: Sequence[Example], max_length: int) -> list[Example]:
    """Cut at max_length, and drop what leaves nothing to draft: a draft needs a root and one answer token after it."""
    cut = [
        replace(example, input_ids=example.input_ids[:max_length], loss_mask=example.loss_mask[:max_length])
        for example in examples
    ]
    return [example for example in cut if bool(supervised(torch.tensor([example.loss_mask]), 1).any())]


def first_texts(examples: Sequence[Example], num_tokens: int) -> list[Tensor]:
    """The first examples' ids, as many as are needed for num_tokens tokens."""
    texts: list[Tensor] = []
    while examples[len(texts) :] and sum(map(len, texts)) < num_tokens:
        texts.append(torch.tensor(examples[len(texts)].input_ids))
    return texts


def examples_digest(examples: Sequence[Example]) -> str:
    """Hash of every token and mask: what a hidden-state cache and a checkpoint were made from."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr((example.split, example.input_ids, example.loss_mask)).encode())
    return digest.hexdigest()[:16]


def most_frequent_tokens(examples: Sequence[Example], size: int, vocab_size: int) -> Tensor | None:
    """Sorted ids of the `size` tokens met most often in the answers (ties by id); None when that is all of them.

    Where fewer occur, the lowest ids that do not occur fill up.
    """
    if size <= 0 or size >= vocab_size:
        return None
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(token for token, is_answer in zip(example.input_ids, example.loss_mask, strict=True) if is_answer)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


@dataclass(frozen=True)
class Row:
    """One example as tensors; hidden [T, H] and log_normaliser [T] only where a cache holds them."""

    input_ids: Tensor
    loss_mask: Tensor
    hidden: Tensor | None = None
    log_normaliser: Tensor | None = None


class OnlineRows(Dataset[Row]):
    """Examples without hidden states: the trainer asks the target for them, in every epoch anew."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples
        self.lengths = [len(example.input_ids) for example in examples]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Row:
        example = self.examples[index]
        return Row(torch.tensor(example.input_ids), torch.tensor(example.loss_mask))


class WithBlanks(Dataset[Row]):
    """Rows, and at index BLANK one that is answer nowhere: what it is put in to fill up adds nothing to a loss."""

    def __init__(self, rows: OnlineRows | Dataset[Row]) -> None:
        self.rows = rows
        self.lengths: list[int] = rows.lengths  # type: ignore[union-attr]
        self._shortest = min(range(len(self.lengths)), key=self.lengths.__getitem__)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Row:
        if index != BLANK:
            return self.rows[index]
        row = self.rows[self._shortest]
        return replace(row, loss_mask=torch.zeros_like(row.loss_mask))


def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Right-padded batch.

    Input_ids, loss_mask, labels (-100 outside answers), and hidden states where the rows have them.
    """

    def pad(tensors: Sequence[Tensor], value: float = 0) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True, padding_value=value)

    batch = {"input_ids": pad([row.input_ids for row in rows]), "loss_mask": pad([row.loss_mask for row in rows])}
    batch["labels"] = batch["input_ids"].masked_fill(~batch["loss_mask"], -100)
    hidden = [row.hidden for row in rows if row.hidden is not None]
    normalisers = [row.log_normaliser for row in rows if row.log_normaliser is not None]
    if hidden:
        batch["hidden"] = pad(hidden)
    if normalisers:
        batch["log_normaliser"] = pad(normalisers)
    return batch


class BucketSampler(Sampler[int]):
    """A random order in which neighbours have like lengths. Depends on batch size, seed and epoch alone, so that a
    resumed run sees exactly what an uninterrupted one would have seen.

    batch_size: examples of an optimizer step. multiple: the epoch is filled up with BLANK to whole batches of so many,
    which several processes need; otherwise they would be filled up with examples, and these seen twice.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, multiple: int = 1) -> None:
        self.lengths = list(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.num_blanks = -len(self.lengths) % multiple
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths) + self.num_blanks

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        bucket = self.batch_size * BUCKET_BATCHES
        batches: list[list[int]] = []
        for start in range(0, len(order), bucket):
            run = sorted(order[start : start + bucket], key=lambda index: -self.lengths[index])
            batches += [run[at : at + self.batch_size] for at in range(0, len(run), self.batch_size)]
        # A short batch stays last: the loader cuts batches by counting.
        tail = [batches.pop()] if batches and len(batches[-1]) < self.batch_size else []
        shuffled = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
        return (index for batch in [*shuffled, *tail, [BLANK] * self.num_blanks] for index in batch)
