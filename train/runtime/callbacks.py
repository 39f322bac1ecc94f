"""What every trainer of this project has around its steps: the guards, the stop at Ctrl-C, the early stop."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from train.runtime.checkpoints import WholeCheckpoints
from train.runtime.ranks import any_rank


class NonFinite(ValueError):
    """The loss or a gradient is not a finite number; the head's weights are those of the last good step."""


class NoStepTooMany(WholeCheckpoints):
    """Comes first among a trainer's bases: transformers takes a step when it resumes where training had ended."""

    control: TrainerControl

    def _run_epoch(self, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps or self.control.should_training_stop:
            self.control.should_training_stop = True
            return
        super()._run_epoch(**kwargs)


class GuardGradients(TrainerCallback):
    """Stops before an optimizer step that would write a non-finite gradient into the weights."""

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        bad = [n for n, p in kw["model"].named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()]
        if bad:
            raise NonFinite(f"the gradient of {bad[0]} is not finite at step {state.global_step}")


class StopOnInterrupt(TrainerCallback):
    """First Ctrl-C (or SIGTERM): finish the step, save, stop. Second: stop at once.

    What reaches one of several processes stops all of them after the same step. A launcher that was stopped by Ctrl-C,
    as its processes were, sends them a SIGTERM, which is no second one.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._seen: set[int] = set()
        self._before: dict[int, Any] = {}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Give the signals back to whom they belonged."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._seen:
            self.restore()
            raise KeyboardInterrupt
        self._seen.add(number)
        self.interrupted = True
        print("\nstopping after this step; once more to stop at once", flush=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.interrupted = any_rank(self.interrupted)
        if self.interrupted:
            control.should_save = True
            control.should_training_stop = True


class StopWhenFlat(TrainerCallback):
    """Stop after `patience` evaluations in a row without a larger value of the metric.

    Counts in the log, which checkpoints carry, and not in itself: transformers' own callback counts from zero again
    after a resume.
    """

    def __init__(self, patience: int, metric: str) -> None:
        self.patience = patience
        self.metric = metric

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.on_evaluate(args, state, control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        lengths = [line[self.metric] for line in state.log_history if self.metric in line]
        if lengths and len(lengths) - 1 - lengths.index(max(lengths)) >= self.patience:
            control.should_training_stop = True
