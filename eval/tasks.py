"""The bench's prompts: none that was trained on, by task, with short and long answers apart.

Chooses and renders prompts; the prompts themselves, their split and the chat template belong to `train.data.prompts`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.data.prompts import DataOptions, Prompt, fresh_prompts, load_prompts, render_prompt
from train.data.sources.seen import leave_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Raw text that is continued (functions of the standard library), whatever the task of its source.
COMPLETION = "completion"
TASKS = ("chat", "chat_ko", COMPLETION, "summarise", "maths")
# test, selection: the data's held-out splits. fresh: new prompts about what the training prompts are about.
TEST = "test"
SPLITS = (TEST, "selection", "fresh")


@dataclass(frozen=True)
class BenchGroup:
    """Prompts of one task (token ids), to be answered with at most `max_new_tokens` tokens."""

    task: str
    length: str
    max_new_tokens: int
    prompts: list[list[int]]
    split: str = TEST

    @property
    def name(self) -> str:
        return f"{self.task} {self.length}{'' if self.split == TEST else f', {self.split}'}"


def bench_task(prompt: Prompt) -> str:
    """The bench's word for the prompt's task."""
    return COMPLETION if prompt.text is not None else prompt.task


def by_task(prompts: Iterable[Prompt]) -> dict[str, list[Prompt]]:
    """Prompts of each task, in their order."""
    found: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        found.setdefault(bench_task(prompt), []).append(prompt)
    return found


def unseen_prompts(data: DataOptions, split: str) -> list[Prompt]:
    """The data's prompts of this split, none of which training with the same data options has seen."""
    if split == "fresh":
        return fresh_prompts(data)
    return [prompt for prompt in load_prompts(data) if prompt.split == split]


def make_groups(
    tokenizer: "PreTrainedTokenizerBase",
    data: DataOptions,
    tasks: Sequence[str],
    prompts_per_task: int,
    max_new_tokens: Mapping[str, int],
    context_length: int,
    split: str = TEST,
    seen: Collection[str] = (),
) -> list[BenchGroup]:
    """One group for each task and each length of answers, {"short": 64, "long": 256} say; the same prompts for both.

    A prompt that would leave no room in the context for the longest answer is passed over. No tasks: all that the data
    has. seen: fingerprints of prompts that are left out. Raises ValueError for a task that the data lacks, or with too
    few prompts.
    """
    found = by_task(leave_out(unseen_prompts(data, split), seen))
    if not found:
        raise ValueError(
            f"data.source={data.source} has no {split} prompt (data.heldout_fraction={data.heldout_fraction}); "
            "raise the fraction, use more prompts, or another source"
        )
    groups = []
    for task in tasks or sorted(found):
        if task not in found:
            has = ", ".join(sorted(found))
            raise ValueError(f"tasks names {task!r}: the {split} prompts of data.source={data.source} are {has}")
        room = context_length - max(max_new_tokens.values())
        rendered: list[list[int]] = []
        for prompt in found[task]:
            ids = render_prompt(tokenizer, prompt, data.chat_template_kwargs)
            if len(ids) <= room:
                rendered.append(ids)
            if len(rendered) == prompts_per_task:
                break
        else:
            raise ValueError(
                f"prompts_per_task={prompts_per_task}: task {task!r} has {len(found[task])} {split} prompts, "
                f"of which {len(rendered)} have at most {room} tokens; ask for fewer, or leave out the task "
                "(tasks=[...])"
            )
        groups += [BenchGroup(task, length, limit, rendered, split) for length, limit in max_new_tokens.items()]
    return groups
