"""A real Ctrl-C in the midst of training, at a step of one's choice."""

import os
import signal
from types import ModuleType
from typing import Any

import pytest

from train.runtime.callbacks import GuardGradients


def interrupt_at(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, step: int, times: int = 1, where: str = "on_step_begin"
) -> None:
    """SIGINT in the step that follows `step` finished ones; `module` is the entry point that trains."""

    class Interrupting(GuardGradients):
        pass

    def send(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == step:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    setattr(Interrupting, where, send)
    monkeypatch.setattr(module, "GuardGradients", Interrupting)
