"""The target's hidden states on disk: one pass over the text, then every epoch reads them by memory map.

A shard is a safetensors file with `hidden` [tokens, H] in the target's dtype (for heads that read layers of the target,
those behind it: [tokens, (1 + R) H]) and, for heads with a reduced vocabulary,
`log_normaliser` [tokens] (log sum exp of the target's logits, 0 outside answers). The folder's manifest ties it to the
target, the tokenizer, the text and the template that rendered it; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from models.files import atomic_write, require_disk
from models.target.model import Target
from train.data.examples import OnlineRows, Row
from train.data.prompts import Example
from train.runtime.ranks import is_main, is_mine, wait_for_all
from train.runtime.shards import ShardFolder

SUFFIX = ".safetensors"
# Positions whose full logits are held at once while normalisers are made.
NORMALISER_ROWS = 512


@dataclass
class CacheOptions:
    """enabled: keep hidden states on disk (true), or run the target in every epoch (false, the online mode).

    shard_examples: examples a file. batch_tokens: tokens, padding included, in one pass of the target.
    """

    enabled: bool = True
    shard_examples: int = 256
    batch_tokens: int = 8192


def cache_bytes(target: Target, examples: Sequence[Example], with_normaliser: bool, reads: Sequence[int] = ()) -> int:
    """Size on disk of the whole cache."""
    width = target.hidden_size * (1 + len(reads))
    per_token = width * torch.finfo(target.dtype).bits // 8 + (4 if with_normaliser else 0)
    return sum(len(example.input_ids) for example in examples) * per_token


def build_cache(
    target: Target,
    examples: Sequence[Example],
    options: CacheOptions,
    folder: Path,
    text_digest: str,
    with_normaliser: bool,
    reads: Sequence[int] = (),
) -> CachedRows:
    """Fill what is missing of the cache and open it. ValueError for another run's folder or too little disk.

    reads: the target's layers that are kept with the hidden states, see `Target.hidden`.
    """
    manifest = {
        "holds": "hidden states",
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "target_fingerprint": target.fingerprint(),
        "tokenizer_fingerprint": target.tokenizer_fingerprint(),
        "text_fingerprint": text_digest,
        "num_examples": len(examples),
        "shard_examples": options.shard_examples,
        "with_normaliser": with_normaliser,
    }
    if reads:
        manifest["reads"] = list(reads)
    store = ShardFolder(folder, manifest, SUFFIX)
    size = options.shard_examples
    shards = [examples[start : start + size] for start in range(0, len(examples), size)]
    missing = store.missing(len(shards))
    if missing:
        examples_left = [example for index in missing for example in shards[index]]
        needed = cache_bytes(target, examples_left, with_normaliser, reads)
        print(f"hidden-state cache: {needed / 1e6:,.1f} MB to write under {folder}")
        require_disk(
            folder,
            needed,
            "the hidden-state cache",
            "free some, point paths.hidden elsewhere, or set cache.enabled=false",
        )
    mine = [index for index in missing if is_mine(index)]
    total = sum(len(example.input_ids) for example in examples)
    to_do = sum(len(example.input_ids) for index in mine for example in shards[index])
    is_quiet = not mine or not is_main()
    with tqdm(total=total, initial=total - to_do, desc="hidden states", unit="tok", disable=is_quiet) as bar:
        for index in mine:
            tensors = _shard_tensors(target, shards[index], options.batch_tokens, with_normaliser, reads, bar)
            needed = cache_bytes(target, shards[index], with_normaliser, reads)
            with atomic_write(store.path(index), needed) as path:
                save_file(tensors, path)
    wait_for_all()
    return CachedRows(examples, [store.path(index) for index in range(len(shards))], size)


def _shard_tensors(
    target: Target,
    examples: Sequence[Example],
    batch_tokens: int,
    with_normaliser: bool,
    reads: Sequence[int],
    bar: tqdm,
) -> dict[str, Tensor]:
    hidden: list[Tensor] = [torch.empty(0)] * len(examples)
    for batch in _batches_by_length(examples, batch_tokens):
        ids_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(examples[i].input_ids) for i in batch], batch_first=True)
        # Right padding behind a causal mask changes nothing before it, so no mask is needed.
        hidden_BTH = target.hidden(ids_BT.to(target.device), reads=reads)
        for row, i in enumerate(batch):
            hidden[i] = hidden_BTH[row, : len(examples[i].input_ids)].cpu()
            bar.update(len(examples[i].input_ids))
    tensors = {"hidden": torch.cat(hidden).contiguous()}
    if with_normaliser:
        wanted = torch.cat([answer_positions(torch.tensor(example.loss_mask)) for example in examples])
        tensors["log_normaliser"] = log_normalisers(target, target.final(tensors["hidden"]), wanted)
    return tensors


def answer_positions(loss_mask: Tensor) -> Tensor:
    """Positions [..., T] whose next token is an answer token: where a teacher is needed."""
    return torch.nn.functional.pad(loss_mask[..., 1:], (0, 1))


def log_normalisers(target: Target, hidden_TH: Tensor, wanted_T: Tensor) -> Tensor:
    """log sum exp of the target's logits at the wanted positions, 0 elsewhere: [T] float32 on the CPU."""
    out_T = torch.zeros(len(hidden_TH))
    for part in wanted_T.nonzero()[:, 0].split(NORMALISER_ROWS):
        out_T[part] = target.logits(hidden_TH[part].to(target.device)).logsumexp(dim=-1).cpu()
    return out_T


def _batches_by_length(examples: Sequence[Example], batch_tokens: int) -> Iterator[list[int]]:
    """Indices, longest first, in batches of at most batch_tokens padded tokens (at least one example)."""
    batch: list[int] = []
    for index in sorted(range(len(examples)), key=lambda i: (-len(examples[i].input_ids), i)):
        width = len(examples[batch[0]].input_ids) if batch else 0
        if batch and (len(batch) + 1) * width > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def split_rows(
    target: Target,
    train: Sequence[Example],
    selection: Sequence[Example],
    options: CacheOptions,
    folder: Path,
    text_digest: str,
    with_normaliser: bool = False,
    reads: Sequence[int] = (),
) -> tuple[CachedRows | OnlineRows, CachedRows | OnlineRows]:
    """Training and selection rows, from one cache each, or without any where the options say so; as `build_cache`."""
    if not options.enabled:
        return OnlineRows(train), OnlineRows(selection)
    train_rows = build_cache(target, train, options, folder / "train", text_digest, with_normaliser, reads)
    return train_rows, build_cache(
        target, selection, options, folder / "selection", text_digest, with_normaliser, reads
    )


class CachedRows(Dataset[Row]):
    """Examples with their hidden states, read from the shards by memory map."""

    def __init__(self, examples: Sequence[Example], paths: Sequence[Path], shard_examples: int) -> None:
        self.examples = examples
        self.lengths = [len(example.input_ids) for example in examples]
        self.shard_examples = shard_examples
        self._files = [_open(path) for path in paths]
        self._offsets = []
        for first in range(0, len(examples), shard_examples):
            ends = list(accumulate(self.lengths[first : first + shard_examples], initial=0))
            path = paths[first // shard_examples]
            found = self._files[first // shard_examples].get_slice("hidden").get_shape()[0]
            if found != ends[-1]:
                raise ValueError(f"{path} holds {found} hidden states, expected {ends[-1]}; delete it and run again")
            self._offsets += ends[:-1]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Row:
        example, file = self.examples[index], self._files[index // self.shard_examples]
        start, stop = self._offsets[index], self._offsets[index] + self.lengths[index]
        normaliser = file.get_slice("log_normaliser")[start:stop] if "log_normaliser" in file.keys() else None  # noqa: SIM118
        hidden = file.get_slice("hidden")[start:stop]
        return Row(torch.tensor(example.input_ids), torch.tensor(example.loss_mask), hidden, normaliser)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # safetensors raises a type of its own for a file cut short
        raise ValueError(f"{path} is damaged ({error}); delete it and run again") from error
