"""The prompt record, its split by content, and the two things every source does with it: a stable id and a fair order.

Three splits: prompts that are trained on, those that choose a checkpoint (selection), and those that it is reported on
(test). Sources return prompts, they never tokenise: rendering belongs to `train.data.prompts`.
"""

import hashlib
import random
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, str]
Split = Literal["train", "selection", "test"]
TASKS = ("chat", "chat_ko", "code", "summarise", "maths", "rewrite")


@dataclass(frozen=True)
class Prompt:
    """One prompt: either chat `messages` that end in a user turn, or raw `text` to be continued.

    `answer` is the dataset's own answer, if it has one; heads are normally trained on the target's answer instead.
    `columns` holds the other columns of its row, as they are: what a reward may ask for. `place` is where it was read,
    as "file:line"; empty where it was generated.
    """

    id: str
    task: str
    messages: tuple[Message, ...] = ()
    text: str | None = None
    split: Split = "train"
    answer: str | None = None
    columns: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    place: str = field(default="", compare=False, repr=False)

    def content(self) -> str:
        """All the words of the prompt, for comparison and hashing (not what the model reads)."""
        return content_of(self.text if self.text is not None else self.messages)


def content_of(prompt: str | Sequence[Message]) -> str:
    """All the words of a text, or of messages."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def loosened(content: str) -> str:
    """The same for contents that differ in case, spaces or the form of their characters alone."""
    return " ".join(unicodedata.normalize("NFKC", content).casefold().split())


def digest(*parts: str) -> str:
    """Forty bits of SHA-256, as ten hex digits: the same on every machine and in every run, unlike `hash`."""
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:10]


def hash_split(key: str, heldout_fraction: float) -> Split:
    """Split by content alone: copies of a prompt fall on one side, and no seed or limit moves a prompt across.

    heldout_fraction: share that is not for training, half of it for selection and half for the test.
    """
    return halve(key) if int(digest("split", key), 16) < heldout_fraction * 16**10 else "train"


def halve(key: str) -> Split:
    """Selection or test, for a prompt that is held out. Contents that are nearly the same fall into the same half."""
    return "selection" if int(digest("half", loosened(key)), 16) < 16**10 // 2 else "test"


def old_split(split: Split) -> str:
    """The split's name when there were two: what is held out was one set, of which all was used for everything."""
    return "train" if split == "train" else "heldout"


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
    """`mix` with one group for each task, of its training and of its held-out prompts."""
    groups: dict[tuple[str, str], list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault((prompt.task, old_split(prompt.split)), []).append(prompt)
    return mix((groups[key] for key in sorted(groups)), seed)
