"""`python -m train.regenerate +model=NAME`: let the target answer the prompts, sharded and resumable.

`train.mtp` does this itself where it is missing; alone it serves to make the text once and train many heads on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING

from models.target.model import TargetOptions, load_target, resolve_device
from train.answers.answers import AnswerOptions, answer_prompts, read_answers
from train.data.prompts import DataOptions, load_prompts
from train.runtime.config import entry
from train.runtime.ranks import join, main_first


@dataclass
class OutputOptions:
    """Where the answers go."""

    answers: str = MISSING


@dataclass
class RegenerateConfig:
    """Everything that conf/regenerate.yaml and the command line may set."""

    model: TargetOptions = MISSING
    work_dir: str = MISSING
    data: DataOptions = field(default_factory=DataOptions)
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    paths: OutputOptions = field(default_factory=OutputOptions)


@entry(RegenerateConfig, "regenerate", many_processes=True)
def main(config: RegenerateConfig) -> None:
    """Entry point."""
    join(resolve_device(config.model.device))
    with main_first():
        target = load_target(config.model)
    folder = Path(config.paths.answers)
    answer_prompts(target, load_prompts(config.data), config.data, config.answers, folder)
    answers = read_answers(folder)
    num_tokens = sum(len(answer.answer_ids) for answer in answers)
    cut = sum(answer.finish_reason == "length" for answer in answers)
    print(f"{len(answers)} answers, {num_tokens} tokens ({cut} cut at answers.max_new_tokens) are in {folder}")


if __name__ == "__main__":
    main()
