"""The text that a trainer reads: prompts with the target's answers or the data's own, cut and split."""

from __future__ import annotations

from pathlib import Path

from models.target import Target
from train.answers import AnswerOptions, answer_prompts, read_answers
from train.data import DataOptions, Example, load_prompts, render_example
from train.examples import examples_digest, from_answers, trim


def load_texts(
    target: Target, data: DataOptions, answers: AnswerOptions, folder: Path, max_length: int
) -> tuple[list[Example], list[Example], str]:
    """Training and held-out examples, and the digest of all; answers that are not in `folder` are made first.

    ValueError where a split is empty.
    """
    prompts = load_prompts(data)
    if answers.engine == "data":
        answered = [render_example(target.tokenizer, prompt, data.chat_template_kwargs) for prompt in prompts]
    else:
        answer_prompts(target, prompts, data, answers, folder)
        answered = from_answers(read_answers(folder))
    examples = trim(answered, max_length)
    train = [example for example in examples if example.split == "train"]
    heldout = [example for example in examples if example.split == "heldout"]
    if not train or not heldout:
        raise ValueError(
            f"data.source={data.source} gives {len(train)} training and {len(heldout)} held-out examples with "
            "an answer to draft, and both are needed; use more prompts (data.max_prompts), or another "
            "data.heldout_fraction"
        )
    return train, heldout, examples_digest(examples)
