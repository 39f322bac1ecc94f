"""Calls in a process with bounds: values come back, and what ends the process ends one call alone."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.rewards.reading.bounded import BoundedProcess, OutOfBounds

HOSTILE = """
import os, sys, time

def echo(*values):
    print("to be ignored")
    return list(values)

def fail(message):
    raise KeyError(message)

def loop():
    while True:
        pass

def power():
    return len(str(9 ** 9 ** 9))

def fill():
    return len(bytearray(64 << 30))

def end():
    os._exit(0)

def identity():
    return os.getpid()

def environment():
    return sorted(os.environ)
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BoundedProcess]:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SECRET_KEY", "x")
    made = BoundedProcess(cpu_s=0.5)
    yield made
    made.close()


def test_values_come_back(process: BoundedProcess) -> None:
    value = ["a\n\ud800", 1, None, {"b": [2.5]}]
    assert process.call("hostile", "echo", *value) == value
    assert process.call("hostile", "identity") == process.call("hostile", "identity") != os.getpid()
    assert "SECRET_KEY" not in process.call("hostile", "environment")


def test_large_values_come_back(process: BoundedProcess) -> None:
    assert process.call("hostile", "echo", "x" * 1_000_000) == ["x" * 1_000_000]


@pytest.mark.parametrize("name", ["loop", "power", "end"])
def test_one_call_ends_and_the_next_is_served(process: BoundedProcess, name: str) -> None:
    before = process.call("hostile", "identity")
    with pytest.raises(OutOfBounds, match=r"could not be read within 0\.5 s"):
        process.call("hostile", name)
    assert process.call("hostile", "identity") != before


def test_what_a_call_raises_is_told(process: BoundedProcess) -> None:
    with pytest.raises(RuntimeError, match=r"hostile\.fail: KeyError: 'x'"):
        process.call("hostile", "fail", "x")
    with pytest.raises(OutOfBounds, match="MemoryError"):
        process.call("hostile", "fill")
    assert process.call("hostile", "echo") == []


def test_threads_get_their_own_values(process: BoundedProcess) -> None:
    found: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        found[number] = process.call("hostile", "echo", number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [number] for number in range(8)}
