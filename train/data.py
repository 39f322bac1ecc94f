"""Prompts from every source, and their rendering to token ids by the tokenizer's own chat template.

Owns the data options and the choice of source; the sources live in `train.prompts`, loss masks in `train.masks`. Nothing
here answers a prompt: that is `train.regenerate`.
"""

from dataclasses import dataclass, field

from train.prompts import instructions
from train.prompts.record import TASKS, Prompt


@dataclass
class DataOptions:
    source: str = "instructions"
    max_prompts: int = 0
    seed: int = 0
    heldout_fraction: float = 0.1
    tasks: list[str] = field(default_factory=list)
    languages: list[str] = field(default_factory=lambda: ["en", "ko"])


def load_prompts(options: DataOptions) -> list[Prompt]:
    prompts = instructions.generate(options.seed, options.heldout_fraction, options.languages)
    if options.tasks:
        prompts = [prompt for prompt in prompts if prompt.task in options.tasks]
    return prompts[: options.max_prompts or None]
