"""`python -m scripts.document`: write the pages of docs/ that are made from the code."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from scripts.document.api import ROOT, render_api
from scripts.document.options import render_options

PAGES: dict[str, Callable[[], str]] = {"options.md": render_options, "api.md": render_api}


def main(folder: Path = ROOT / "docs") -> int:
    """Entry point; returns the exit code."""
    try:
        for name, render in PAGES.items():
            text = render()
            (folder / name).write_text(text, encoding="utf-8")
            print(f"{folder / name}: {len(text.splitlines())} lines")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m scripts.document", description=__doc__).parse_args()
    sys.exit(main())
