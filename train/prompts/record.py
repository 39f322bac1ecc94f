"""The prompt record, and the two things every source does with it: a stable id and a fair mixing order.

Sources return prompts, they never tokenise: rendering belongs to `train.data`.
"""

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, str]
Split = Literal["train", "heldout"]
TASKS = ("chat", "chat_ko", "code", "summarise", "maths", "rewrite")


@dataclass(frozen=True)
class Prompt:
    """One prompt: either chat `messages` that end in a user turn, or raw `text` to be continued.

    `answer` is the dataset's own answer, if it has one; heads are normally trained on the target's answer instead.
    `columns` holds the other columns of its row, as they are: what a reward may ask for.
    """

    id: str
    task: str
    messages: tuple[Message, ...] = ()
    text: str | None = None
    split: Split = "train"
    answer: str | None = None
    columns: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def content(self) -> str:
        """All the words of the prompt, for comparison and hashing (not what the model reads)."""
        return self.text if self.text is not None else "\n".join(message["content"] for message in self.messages)


def digest(*parts: str) -> str:
    """Forty bits of SHA-256, as ten hex digits: the same on every machine and in every run, unlike `hash`."""
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:10]


def hash_split(key: str, heldout_fraction: float) -> Split:
    """Split by content alone: copies of a prompt fall on one side, and no seed or limit moves a prompt across."""
    return "heldout" if int(digest("split", key), 16) < heldout_fraction * 16**10 else "train"


def mix(groups: Iterable[Sequence[Prompt]], seed: int) -> list[Prompt]:
    """Interleave the groups in proportion to their sizes, each shuffled: any prefix is a balanced sample.

    Prompt i of n in a group gets the place (i + u) / n with u uniform in [0, 1), and places are sorted.
    """
    rng = random.Random(f"mix {seed}")
    placed: list[tuple[float, Prompt]] = []
    for group in groups:
        order = rng.sample(group, len(group))
        placed += [((index + rng.random()) / len(order), prompt) for index, prompt in enumerate(order)]
    return [prompt for _, prompt in sorted(placed, key=lambda pair: (pair[0], pair[1].id))]


def mix_by_task(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    """`mix` with one group for each task and split."""
    groups: dict[tuple[str, str], list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault((prompt.task, prompt.split), []).append(prompt)
    return mix((groups[key] for key in sorted(groups)), seed)
