"""The text that a trainer reads: prompts with the target's answers or the data's own, cut and split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from models.target.model import Target
from train.answers.answers import AnswerOptions, answer_prompts, read_answers
from train.data.examples import examples_digest, from_answers, require_known_tokens, trim
from train.data.prompts import DataOptions, Example, load_prompts, render_example
from train.data.sources.record import Prompt
from train.data.sources.seen import seen_record


class Texts(NamedTuple):
    """Training and selection examples, the digest of both, and the record of their prompts for a checkpoint."""

    train: list[Example]
    selection: list[Example]
    digest: str
    prompts: dict[str, Any]


def load_texts(target: Target, data: DataOptions, answers: AnswerOptions, folder: Path, max_length: int) -> Texts:
    """What is trained on and what chooses among checkpoints; answers that are not in `folder` are made first.

    The test's prompts are answered like the others, for those who read the folder, and left out here. ValueError where
    a split is empty.
    """
    prompts = load_prompts(data)
    if answers.engine == "data":
        answered = [render_example(target.tokenizer, prompt, data.chat_template_kwargs) for prompt in prompts]
    else:
        answer_prompts(target, prompts, data, answers, folder)
        answered = in_their_split(from_answers(read_answers(folder)), prompts)
    examples = [example for example in trim(answered, max_length) if example.split != "test"]
    require_known_tokens(target, examples)
    train = [example for example in examples if example.split == "train"]
    selection = [example for example in examples if example.split == "selection"]
    if not train or not selection:
        raise ValueError(
            f"data.source={data.source} gives {len(train)} training and {len(selection)} selection examples with "
            "an answer to draft, and both are needed; use more prompts (data.max_prompts), or another "
            "data.heldout_fraction"
        )
    seen = seen_record((prompt.split, prompt.text or prompt.messages) for prompt in prompts)
    return Texts(train, selection, examples_digest(examples), seen)


def in_their_split(examples: Sequence[Example], prompts: Sequence[Prompt]) -> list[Example]:
    """Examples in the split of the prompt with their id: files of when there were two splits say `heldout`."""
    splits = {prompt.id: prompt.split for prompt in prompts}
    return [replace(example, split=splits[example.id]) for example in examples]
