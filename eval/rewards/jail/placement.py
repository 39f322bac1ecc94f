"""What model-written code has to see of this machine to run at all: system libraries, interpreter, installed packages.

Worked out once, by the trainer: their real places, wherever those lie, and the symbolic links that lead there. Folders
with anything else in them (a home folder, the temporary folder) are refused, since all below them could be read.
Editable installs and the project itself are not shown: they are somebody's sources, and no installed package.
"""

import errno
import functools
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eval.rewards.jail.linux import is_within

SYSTEM_PATHS = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/nix/store")
# Of the interpreter's prefix only these: it may be a home folder, or ~/.local, with much beside them.
PREFIX_PATHS = ("bin", "lib", "lib32", "lib64", "share/zoneinfo")
MAX_LINKS = 40  # as the kernel


@dataclass(frozen=True)
class View:
    """readable: paths without symbolic links, none below another. links: (place, target) of links that lead to them.
    packages: what the answer's sys.path gets beside the standard library."""

    readable: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    packages: tuple[str, ...]


@functools.cache
def find_view(shown: tuple[str, ...] = ()) -> View:
    """What this process's interpreter needs, and the folders `shown`."""
    packages = package_paths()
    return arrange([*SYSTEM_PATHS, *interpreter_paths(), *packages, *library_paths(), *shown], packages)


def package_paths() -> list[str]:
    """The entries of sys.path that hold installed packages."""
    return [os.path.abspath(path) for path in sys.path if path and os.path.isdir(path) and holds_packages(path)]


def interpreter_paths() -> list[str]:
    """The interpreter's libraries and programs, and the standard library, which may lie elsewhere or be archived."""
    standard = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)]
    standard += [path for path in sys.path if path.endswith(("lib-dynload", ".zip"))]
    return [os.path.join(sys.base_prefix, name) for name in PREFIX_PATHS] + standard


def library_paths() -> list[str]:
    """Where the dynamic loader was told to look."""
    return [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path.startswith("/")]


def holds_packages(path: str) -> bool:
    """Whether an installer filled this folder: by its name, or by its metadata."""
    return path.endswith(("site-packages", "dist-packages")) or any(Path(path).glob("*.dist-info"))


def require_own_folders() -> None:
    """ValueError where a folder that has to be shown holds the user's home or the temporary folder."""
    origins = {"sys.path": package_paths(), "LD_LIBRARY_PATH": library_paths(), "the interpreter": interpreter_paths()}
    for origin, paths in origins.items():
        for path in map(os.path.realpath, paths):
            for kept in (os.path.expanduser("~"), tempfile.gettempdir()):
                if is_within(os.path.realpath(kept), path) and not is_system(path):
                    raise ValueError(
                        f"{origin} holds {path}, and {kept} lies in it, which model-written code must not read: "
                        "install into a folder of its own, or set TMPDIR to another"
                    )


def is_system(real: str) -> bool:
    """Whether a path is shown in any case."""
    return any(is_within(real, os.path.realpath(path)) for path in SYSTEM_PATHS)


def arrange(paths: Iterable[str], packages: Iterable[str] = ()) -> View:
    """The view with these paths in it, those that exist."""
    folders: set[str] = set()
    links: dict[str, str] = {}
    for path in paths:
        if os.path.exists(path):
            real, passed = resolve(os.path.abspath(path))
            folders.add(real)
            links |= passed
    kept: list[str] = []
    for folder in sorted(folders):  # a folder comes before all that lies in it
        if not any(is_within(folder, above) for above in kept):
            kept.append(folder)
    return View(tuple(kept), tuple(links.items()), tuple(packages))


def resolve(path: str) -> tuple[str, dict[str, str]]:
    """A path without its symbolic links, and each link that was passed on the way, with its target."""
    place, links, passed = "/", {}, 0
    names = path.split("/")[::-1]
    while names:
        name = names.pop()
        if name in ("", "."):
            continue
        step = os.path.dirname(place) if name == ".." else os.path.join(place, name)
        if not os.path.islink(step):
            place = step
            continue
        passed += 1
        if passed > MAX_LINKS:
            raise OSError(errno.ELOOP, f"{path}: too many symbolic links")
        links[step] = os.readlink(step)
        place = "/" if links[step].startswith("/") else place
        names += links[step].split("/")[::-1]
    return place, links
