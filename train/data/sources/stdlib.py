"""Code to be completed: beginnings of functions from the running interpreter's own standard library.

Raw text, no chat template. A prompt is the source from a little above a function down to a line inside its body; the
rest of the function is the dataset's answer. Split by module, so that no prompt has a sibling in another split.
"""

import ast
import random
import sysconfig
import tokenize
from pathlib import Path

from train.data.sources.record import Prompt, digest, hash_split

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__", "_pyrepl"}
SKIPPED_PREFIXES = ("encodings/", "pydoc_data/", "config-", "_sysconfigdata", "idlelib/")
MAX_FILE_BYTES = 200_000
MIN_FUNCTION_LINES, MAX_FUNCTION_LINES = 6, 80
MAX_CONTEXT_LINES = 12
MAX_PROMPTS_PER_FILE = 25


def source_files(root: Path) -> list[tuple[str, Path]]:
    """(name relative to the library, path), sorted; without tests, generated tables and installed packages."""
    found = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        skipped = not SKIPPED_FOLDERS.isdisjoint(name.split("/")) or name.startswith(SKIPPED_PREFIXES)
        if not skipped and path.stat().st_size <= MAX_FILE_BYTES:
            found.append((name, path))
    return sorted(found)


def load(seed: int, heldout_fraction: float, root: Path | None = None) -> list[Prompt]:
    """Completion prompts of every module, the same for the same interpreter and seed. `root` replaces the library."""
    folder = root or Path(sysconfig.get_paths()["stdlib"])
    files = source_files(folder)
    if not files:
        raise ValueError(
            f"data.path={folder}: no Python source files; leave it empty for this interpreter's own library"
        )
    prompts: dict[str, Prompt] = {}
    for name, path in files:
        split = hash_split(module_of(name), heldout_fraction)
        for text, rest in _cut_functions(name, path, random.Random(f"{name} {seed}")):
            prompt_id = f"stdlib-{digest(name, text)}"
            prompts.setdefault(text, Prompt(prompt_id, "code", text=text, split=split, answer=rest))
    return list(prompts.values())


def module_of(name: str) -> str:
    """The top-level module of a file; a pure-Python twin (_pydecimal, _strptime) counts as the module it stands for."""
    return name.split("/")[0].removesuffix(".py").removeprefix("_py").lstrip("_")


def _cut_functions(name: str, path: Path, rng: random.Random) -> list[tuple[str, str]]:
    """(prompt, rest of the function) for some functions of the file.

    The prompt ends at a line's end, without the newline, since tokenizers join a newline with the indentation after it.
    """
    source = _read_source(path)
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        place = f"{path}:{error.lineno}" if error.lineno else path
        raise ValueError(f"{place}: not Python of this interpreter's version ({error.msg})") from None
    except (ValueError, RecursionError, MemoryError) as error:  # nested too deep; NUL bytes, before Python 3.11.4
        raise ValueError(
            f"{path}: Python cannot read it ({str(error) or type(error).__name__}); leave it out"
        ) from None
    lines = source.splitlines()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    functions = [node for node in functions if MIN_FUNCTION_LINES <= _num_lines(node) <= MAX_FUNCTION_LINES]
    cuts = []
    for node in rng.sample(functions, min(len(functions), MAX_PROMPTS_PER_FILE)):
        end = node.end_lineno or node.lineno
        has_docstring = ast.get_docstring(node) is not None
        # The first line that may be left to the model, and the last one, which leaves it two lines to write.
        first = (node.body[0].end_lineno or node.lineno) if has_docstring else node.body[0].lineno - 1
        last = max(first, min(end - 2, first + (end - first) // 2))
        if end - first < 2:
            continue
        cut = rng.randint(first, last)
        start = max(0, node.lineno - 1 - rng.randint(0, MAX_CONTEXT_LINES))
        prompt, rest = "\n".join(lines[start:cut]).strip("\n"), "\n" + "\n".join(lines[cut:end])
        cuts.append((prompt, rest))
    return cuts


def _read_source(path: Path) -> str:
    """In the encoding that the file names itself (PEP 263), else UTF-8."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except UnicodeDecodeError as error:
        number = path.read_bytes().count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}:{number}: not {error.encoding} (byte {error.object[error.start]:#04x}); write it as UTF-8, or "
            "name its encoding in the first line: # -*- coding: ENCODING -*-"
        ) from None
    except SyntaxError as error:  # an encoding that does not exist, or is none of the file's
        raise ValueError(f"{path}:1: {error.msg}; write it as UTF-8, or name its encoding in the first line") from None


def _num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1
