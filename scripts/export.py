"""`python -m scripts.export CHECKPOINT OUT --to vllm|sglang|hf`: trained heads in a format that others load.

vllm: Medusa heads, the recursive mtp head, and EAGLE-3 heads in the speculators format, checked against our own before
it ends; the line that it prints serves them. sglang: the latter two. hf: any heads, with a model card, for
`generate(custom_generate=...)` of a plain transformers script, and for the hub (--push OWNER/NAME).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from models.export.hf import push_folder
from models.export.servers import HF, SERVERS, VLLM, check_exportable, export
from models.target.model import AUTO, DTYPES, load_target
from models.text_files import require_words
from scripts.generate import choose_target


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="folder that `python -m train.mtp` wrote; it names the target")
    parser.add_argument("out", type=Path, help="new folder to write")
    parser.add_argument("--to", required=True, choices=SERVERS, help="who is to load it")
    parser.add_argument("--push", metavar="OWNER/NAME", help="with --to hf: upload it as a private repository, too")
    parser.add_argument(
        "--token-map",
        action="store_true",
        help="with --to vllm: a small output head and a map of a reduced vocabulary, which vLLM 0.32 does not load",
    )
    parser.add_argument("--target", help="hub name, local folder or file in conf/model, if not the checkpoint's own")
    parser.add_argument("--dtype", choices=(AUTO, *DTYPES), help="of the target, and of what a server loads")
    parser.add_argument("--device", help="auto, cpu, cuda, ...")
    parser.add_argument("--chat-template", metavar="FILE", help="that heads were trained with (model.chat_template)")
    parser.set_defaults(draft=None)
    return parser


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, read."""
    return make_parser().parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = parse_arguments(words)
    try:
        require_words(sys.argv[1:] if words is None else words)
        if arguments.push and arguments.to != HF:
            raise ValueError(
                f"--push with --to {arguments.to}: only --to {HF} writes what the hub can show; leave it out"
            )
        if arguments.token_map and arguments.to != VLLM:
            raise ValueError(f"--token-map with --to {arguments.to}: only --to {VLLM} has one; leave it out")
        check_exportable(arguments.checkpoint, arguments.to)
        target = load_target(choose_target(arguments))
        print(export(arguments.checkpoint, arguments.out, arguments.to, target, arguments.token_map))
        if arguments.push:
            print(push_folder(arguments.out, arguments.push))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
