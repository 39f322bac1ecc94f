"""Peak memory belongs to the stretch of work since `start`."""

import pytest
import torch

from eval.speed.memory import PeakMemory

MEBIBYTE = 2**20


def test_peak_is_of_this_stretch() -> None:
    memory = PeakMemory(torch.device("cpu"))
    if "VmHWM" not in memory.kind:
        pytest.skip("this system cannot reset the peak")
    memory.start()
    before = memory.read()
    block = torch.ones(64 * MEBIBYTE, dtype=torch.uint8)  # touched, so resident
    assert memory.read() - before > 60 * MEBIBYTE
    del block
    memory.start()
    assert memory.read() - before < 30 * MEBIBYTE
