"""Contents of prompts compared, and the record of those that a checkpoint has seen: what evaluation leaves out.

Two contents that differ in case, spaces or the form of their characters alone count as one. Knows nothing of
checkpoints' files.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from train.data.sources.record import Message, Prompt, Split, content_of, digest, loosened

DIGEST_BYTES = 5
# Which splits' prompts a checkpoint must not have seen, to be measured on this one. fresh: see `train.data.prompts`.
SEEN_BEFORE: dict[str, tuple[Split, ...]] = {
    "train": (),
    "selection": ("train",),
    "test": ("train", "selection"),
    "fresh": ("train", "selection"),
}


def fingerprint(content: str) -> str:
    """Of a content, the same for all that differ from it in case or spaces alone."""
    return digest("content", loosened(content))


def seen_record(prompts: Iterable[tuple[Split, str | Sequence[Message]]]) -> dict[str, Any]:
    """The contents of training and selection prompts, for a checkpoint's provenance: 40 bits each, in base64."""
    found: dict[str, set[str]] = {"train": set(), "selection": set()}
    for split, prompt in prompts:
        if split in found:
            found[split].add(fingerprint(content_of(prompt)))
    return {split: _packed(digests) for split, digests in found.items()}


def seen_in(provenance: Mapping[str, Any], split: str) -> set[str]:
    """Fingerprints of what must not be asked of a split, as `seen_record` noted it; none where nothing is noted."""
    record: Mapping[str, str] = provenance.get("prompts", {})
    return {one for name in SEEN_BEFORE[split] for one in _unpacked(record.get(name, ""))}


def leave_out(prompts: Sequence[Prompt], seen: Collection[str]) -> list[Prompt]:
    """The prompts that are not among these; says how many are."""
    kept = [prompt for prompt in prompts if not seen or fingerprint(prompt.content()) not in seen]
    if len(kept) < len(prompts):
        print(
            f"left out {len(prompts) - len(kept)} of {len(prompts)} prompts: a checkpoint was trained or chosen on them"
        )
    return kept


def one_split_each(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Without copies of a prompt in another split: what is in the test is in no other, and what selects in no training.

    Copies: contents that differ in case or spaces alone, or the same content twice.
    """
    strictness: tuple[Split, ...] = ("train", "selection", "test")
    ranks = {prompt.split: strictness.index(prompt.split) for prompt in prompts}
    if len(ranks) < 2:
        return list(prompts)
    keys = [fingerprint(prompt.content()) for prompt in prompts]
    best: dict[str, int] = {}
    for key, prompt in zip(keys, prompts, strict=True):
        best[key] = max(best.get(key, 0), ranks[prompt.split])
    kept = [prompt for key, prompt in zip(keys, prompts, strict=True) if ranks[prompt.split] == best[key]]
    if len(kept) < len(prompts):
        print(f"left out {len(prompts) - len(kept)} prompts that occur again in a split that is further held out")
    return kept


def _packed(digests: Iterable[str]) -> str:
    return base64.b64encode(b"".join(bytes.fromhex(one) for one in sorted(digests))).decode()


def _unpacked(text: str) -> set[str]:
    data = base64.b64decode(text)
    return {data[at : at + DIGEST_BYTES].hex() for at in range(0, len(data), DIGEST_BYTES)}
