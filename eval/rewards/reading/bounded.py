"""Reading a model's text with parsers that it may crash, hold up or make eat memory: in a process of its own.

Nothing of the text is run there. The process starts with the first call, serves all that follow, and is started anew
where a call has ended it. Bounds are on processor time and memory, so that a busy machine changes no reward.
"""

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

CPU_S = 5.0  # a call
MEMORY_BYTES = 2 << 30
WALL_S = 120.0  # a call: only a process that waits for something comes to this
ROOT = Path(__file__).resolve().parents[3]
START = "import sys; sys.path.insert(0, {root!r}); from eval.rewards.reading.bounded import serve; serve()"


class OutOfBounds(RuntimeError):
    """A call took more time or memory than it may, or ended its process."""


class BoundedProcess:
    """Calls functions by name. Safe to share between threads, which wait for one another."""

    def __init__(self, cpu_s: float = CPU_S) -> None:
        self.cpu_s = cpu_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def call(self, module: str, function: str, *arguments: Any) -> Any:
        """module.function(*arguments), arguments and value as JSON. OutOfBounds; RuntimeError for what it raised."""
        request = json.dumps([module, function, arguments, self.cpu_s]).encode() + b"\n"
        with self._lock:
            reply = self._ask(request)
        if "unbounded" in reply:
            raise OutOfBounds(f"{module}.{function}: {reply['unbounded']}")
        if "raised" in reply:
            raise RuntimeError(f"{module}.{function}: {reply['raised']}")
        return reply["value"]

    def _ask(self, request: bytes) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = read_line(process.stdout.fileno(), time.monotonic() + WALL_S)
        except BrokenPipeError:
            line = b""
        if not line:
            self.close()
            raise OutOfBounds(f"a text could not be read within {self.cpu_s:g} s and {MEMORY_BYTES >> 20} MB")
        return json.loads(line)

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


def start() -> subprocess.Popen[bytes]:
    """The other process; it ends when this one does, since its input then ends."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", START.format(root=str(ROOT))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH") if key in os.environ},
        start_new_session=True,  # Ctrl-C is for the trainer
    )


def read_line(descriptor: int, deadline: float) -> bytes:
    """One line; nothing where the pipe ends, or the deadline passes, before it is whole."""
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(descriptor, 1 << 16) if ready else b""
        if not piece:
            return b""
        line += piece
    return line


def serve() -> None:
    """The other process's life: a line with a request, a line with its reply."""
    with contextlib.suppress(ValueError, OSError):  # not every system can bound memory
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no reply
    importlib.import_module("eval.rewards")
    for line in sys.stdin:
        module, function, arguments, cpu_s = json.loads(line)
        try:
            called = getattr(importlib.import_module(module), function)
            # Its default action ends the process, and does so within a computation in C.
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            reply = {"value": called(*arguments)}
        except (MemoryError, RecursionError) as error:
            reply = {"unbounded": type(error).__name__}
        except Exception as error:
            reply = {"raised": f"{type(error).__name__}: {error}"[:1000]}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
