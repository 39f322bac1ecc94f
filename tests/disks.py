"""A real disk of a few megabytes that a test can fill: a tmpfs, where this machine lets one be mounted."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SIZE_BYTES = 8 * 2**20
PAGE_BYTES = 4096
BALLAST = ".ballast"


class SmallDisk:
    """The folder that it is mounted on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def leave(self, num_bytes: int) -> None:
        """Fill it up to so many bytes, in whole pages."""
        self.clear()
        (self.folder / BALLAST).touch()
        free = shutil.disk_usage(self.folder).free - num_bytes // PAGE_BYTES * PAGE_BYTES
        assert free >= 0
        with (self.folder / BALLAST).open("wb") as file:
            file.write(bytes(free))

    def clear(self) -> None:
        """Make room again."""
        (self.folder / BALLAST).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """What else it holds, at the top."""
        return sorted(path.name for path in self.folder.iterdir() if path.name != BALLAST)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Unmounted at the end; skips where mounting is not allowed."""
    if os.name != "posix" or shutil.which("mount") is None:
        pytest.skip("there is no mount here")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted: {done.stderr.strip() or done.returncode}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
