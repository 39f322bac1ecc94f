"""Peak memory of one stretch of work: of the GPU where there is one, else of this process."""

import re
import resource
import sys
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
# Writing 5 here makes Linux forget the process's peak so far (proc(5), since Linux 4.0).
CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """`start`, work, `read`. `kind` says what is measured; everything in memory counts, the model included."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._can_reset = device.type == "cuda" or _forget_peak()
        if device.type == "cuda":
            self.kind = "GPU memory allocated by torch (torch.cuda.max_memory_allocated), per method"
        elif self._can_reset:
            self.kind = "resident memory of the process (VmHWM), per method"
        else:
            self.kind = (
                "resident memory of the process (ru_maxrss), highest so far: it cannot be told apart by method here"
            )

    def start(self) -> None:
        """Forget what was before, where the system can."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self._can_reset:
            _forget_peak()

    def read(self) -> int:
        """Bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        found = re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(), flags=re.M) if self._can_reset else None
        if found:
            return int(found[1]) * 1024
        # Kilobytes, on macOS bytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _forget_peak() -> bool:
    """Whether the system let us."""
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True
