"""`python -m scripts.generate CHECKPOINT --prompt "..."`: one prompt in, its answer out as it comes.

A drafter without trained heads needs no checkpoint: `--target smollm2 --drafter ngram`. Tokens that were drafted and
that the target accepted are green; yellow are those that only a relaxed rule (`--verifier`, `--ensemble`) accepts. The
last line (stderr) tells the speed, and what a relaxed rule spent.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch
from omegaconf import OmegaConf

from models.checkpoint import load_ensemble, read_config, read_target_name, read_target_quantization
from models.decoding.decoder import Decoder
from models.decoding.length_options import FIXED, LENGTHS, LengthOptions, check_length, make_length
from models.decoding.rows import DecodeResult, GenerationParams, TokenVerdict
from models.decoding.stops import Detokenizer, IncrementalText
from models.drafters.build import make_drafter
from models.drafters.options import (
    KINDS,
    NONE,
    WITH_CHECKPOINT,
    DrafterOptions,
    check_drafter,
    default_draft_tokens,
    needs_checkpoint,
)
from models.processors.prefix import ProcessorParams
from models.sampling import SamplingParams
from models.target.model import AUTO, DTYPES, Target, TargetOptions, load_target
from models.text_files import decode, require_words, tolerate
from models.verification.base import Rule
from models.verification.ensemble import DynamicEnsemble
from models.verification.options import RULES, VerifierOptions, make_rule
from train.data.prompts import render_asked
from train.data.sources.record import Message
from train.data.template_kwargs import parse_kwargs
from train.runtime.presets import CONF, read_preset, read_words

HEADS, LOSSLESS = "heads", "lossless"
GREEN, YELLOW, RESET = "\x1b[32m", "\x1b[33m", "\x1b[0m"
COLOURS: dict[TokenVerdict, str] = {"accepted": GREEN, "relaxed": YELLOW}
INTERRUPTED = 130


class Printer:
    """Writes text as its tokens come, whole characters only; in colour what was drafted and accepted."""

    def __init__(self, tokenizer: Detokenizer, write: Callable[[str], object], is_coloured: bool) -> None:
        self._text = IncrementalText(tokenizer)
        self._write = write
        self._is_coloured = is_coloured

    def __call__(self, index: int, tokens: Sequence[int], verdicts: Sequence[TokenVerdict]) -> None:
        """Take in a block. A character of several tokens has the colour of its last one."""
        for token, verdict in zip(tokens, verdicts, strict=True):
            if piece := self._text.add(token):
                colour = COLOURS.get(verdict) if self._is_coloured else None
                self._write(f"{colour}{piece}{RESET}" if colour else piece)


def wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """For a terminal that shows colours, unless NO_COLOR (no-color.org) says otherwise."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def find_target(name: str) -> TargetOptions:
    """A model of conf/model by its file's name or its own, else a local folder or a name of the hub."""
    for path in sorted((CONF / "model").glob("*.yaml")):
        merged = OmegaConf.merge(OmegaConf.structured(TargetOptions), OmegaConf.load(path))
        if OmegaConf.is_interpolation(merged, "name"):
            continue  # the testbed lies in its commands' work_dir: here it is given as a folder
        options = OmegaConf.to_object(merged)
        assert isinstance(options, TargetOptions)
        if name in (path.stem, options.name):
            return options
    return TargetOptions(name=name)


def find_verifier(words: Sequence[str]) -> VerifierOptions:
    """NAME [option=value ...]: a rule of conf/verifier, with other values for some of its options."""
    return read_preset(VerifierOptions, "verifier", words[0], read_words(words[1:], "--verifier"), "--verifier")


def check_ensemble(arguments: argparse.Namespace) -> None:
    """ValueError, before any model loads, for an ensemble head that is none, or does not go with the other options."""
    if arguments.ensemble is None:
        if arguments.distance_budget is not None:
            raise ValueError(
                "--distance-budget is for --ensemble; a rule has it as an option: --verifier NAME distance_budget=2"
            )
        return
    if arguments.plain or arguments.verifier != [LOSSLESS]:
        other = "--plain" if arguments.plain else f"--verifier {' '.join(arguments.verifier)}"
        raise ValueError(f"--ensemble with {other}: leave out one of them")
    if (budget := arguments.distance_budget) is not None and not budget >= 0:
        raise ValueError(f"--distance-budget {budget:g}: must be at least 0, which is lossless")
    if (kind := read_config(arguments.ensemble).get("kind")) != "ensemble":
        raise ValueError(f"--ensemble {arguments.ensemble} holds {kind!r}; give the folder that rl.diversed wrote")


def find_rule(arguments: argparse.Namespace, target: Target, drafter_record: dict[str, Any]) -> tuple[Rule, float]:
    """The rule that judges this drafter's blocks, and its budget. ValueError for a head of another pair."""
    if arguments.ensemble is None:
        verifier = find_verifier(arguments.verifier)
        return make_rule(verifier), verifier.distance_budget
    head = load_ensemble(arguments.ensemble, target, drafter_record)
    budget = math.inf if arguments.distance_budget is None else arguments.distance_budget
    return DynamicEnsemble(head.weigh), budget


def find_length(words: Sequence[str]) -> LengthOptions:
    """NAME [option=value ...]: a length of conf/length, as a rule is chosen."""
    options = read_preset(LengthOptions, "length", words[0], read_words(words[1:], "--length"), "--length")
    check_length(options)
    return options


def find_drafter(arguments: argparse.Namespace) -> DrafterOptions:
    """NAME [option=value ...]: a drafter of conf/drafter, as a rule is chosen; without a name the checkpoint's heads.

    ValueError for one that lacks its checkpoint, or has a parameter that it does not take.
    """
    if arguments.plain and arguments.drafter:
        raise ValueError(f"--plain with --drafter {' '.join(arguments.drafter)}: leave out one of them")
    name, *values = [NONE] if arguments.plain else arguments.drafter or [HEADS]
    options = read_preset(DrafterOptions, "drafter", name, read_words(values, "--drafter"), "--drafter")
    check_drafter(options)
    if needs_checkpoint(options) and arguments.checkpoint is None:
        raise ValueError(
            f"--drafter {options.kind} needs CHECKPOINT, the folder that train.mtp wrote; give it, or choose one of "
            f"{', '.join(kind for kind in KINDS if kind not in (*WITH_CHECKPOINT, options.kind))}"
        )
    return options


def choose_target(arguments: argparse.Namespace) -> TargetOptions:
    """The target's options, with the draft model among them. ValueError where nothing names a target."""
    if arguments.target is None and arguments.checkpoint is None:
        raise ValueError("no target model is named: give --target NAME, or a CHECKPOINT, which names its own")
    options = find_target(arguments.target or read_target_name(arguments.checkpoint))
    return replace(
        options,
        quantization=read_target_quantization(arguments.checkpoint) if arguments.checkpoint else options.quantization,
        dtype=arguments.dtype or options.dtype,
        device=arguments.device or options.device,
        draft=arguments.draft or options.draft,
        chat_template=arguments.chat_template or options.chat_template,
    )


def describe(result: DecodeResult, seconds: float, is_coloured: bool) -> str:
    """The last line: speed, and what drafting gave."""
    counters = result.counters
    parts = [f"{counters.emitted} tokens in {seconds:.1f} s: {counters.emitted / seconds:.1f} tokens/s"]
    if counters.drafted:
        by_place = " ".join(f"{share:.2f}" for share in counters.acceptance_by_place)
        parts.append(f"mean block length {counters.mean_block_length:.2f}")
        parts.append(f"acceptance {counters.acceptance_rate:.2f} (kept at place 1, 2, ...: {by_place})")
        if result.certificate:
            parts.append(f"{counters.relaxed} relaxed, distance from the target at most {result.certificate:.2f}")
        parts += ["green: drafted and accepted"] * is_coloured
    return "; ".join(parts)


def generate(arguments: argparse.Namespace, prompt: str, stdout: TextIO, stderr: TextIO) -> DecodeResult:
    """Load, decode and print. ValueError for what does not fit."""
    drafter_options = find_drafter(arguments)
    make_rule(find_verifier(arguments.verifier))
    check_ensemble(arguments)
    length_options = find_length(arguments.length)
    asked, template_kwargs = ask(arguments, prompt)
    options = choose_target(arguments)
    target = load_target(options)
    sampling = SamplingParams(arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p)
    processors = ProcessorParams(
        repetition_penalty=arguments.repetition_penalty,
        frequency_penalty=arguments.frequency_penalty,
        presence_penalty=arguments.presence_penalty,
        no_repeat_ngram_size=arguments.no_repeat_ngram_size,
        min_new_tokens=arguments.min_new_tokens,
    )
    params = GenerationParams(arguments.max_new_tokens, sampling, arguments.seed, processors=processors)
    is_coloured = wants_colour(stdout, os.environ)

    def write(text: str) -> None:
        print(text, end="", file=stdout, flush=True)

    drafter, record = make_drafter(drafter_options, options, target, arguments.checkpoint)
    decoder = Decoder(target)
    if drafter is not None:
        count = default_draft_tokens(drafter) if arguments.num_draft_tokens is None else arguments.num_draft_tokens
        rule, budget = find_rule(arguments, target, record)
        drafter, length = make_length(length_options, drafter, count)
        decoder = Decoder(target, drafter, count, rule, budget, length)
    prompt_ids = render_asked(target.tokenizer, asked, template_kwargs)
    if arguments.checkpoint is not None and (note := other_kwargs(arguments.checkpoint, asked, template_kwargs)):
        print(note, file=stderr)
    started = time.perf_counter()
    (result,) = decoder.generate([prompt_ids], params, on_tokens=Printer(target.tokenizer, write, is_coloured))
    seconds = time.perf_counter() - started
    print(file=stdout, flush=True)
    print(describe(result, seconds, is_coloured), file=stderr)
    return result


def ask(arguments: argparse.Namespace, prompt: str) -> tuple[str | list[Message], dict[str, Any]]:
    """Raw text or turns, and what the chat template is told. ValueError for what is of no use to raw text."""
    kwargs = parse_kwargs(arguments.chat_template_kwargs, "--chat-template-kwargs")
    if arguments.raw:
        if kwargs or arguments.system is not None:
            other = "--chat-template-kwargs" if kwargs else "--system"
            raise ValueError(f"{other} with --raw: raw text has no chat template; leave out one of them")
        return prompt, {}
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return [*system, {"role": "user", "content": prompt}], kwargs


def other_kwargs(checkpoint: Path, asked: str | list[Message], kwargs: dict[str, Any]) -> str:
    """A line where the checkpoint was trained on chats that were rendered otherwise, else ""."""
    trained = read_config(checkpoint).get("provenance", {}).get("data", {}).get("chat_template_kwargs")
    if isinstance(asked, str) or trained is None or trained == kwargs:
        return ""
    words = " ".join(f"{name}={json.dumps(value)}" for name, value in trained.items())
    remedy = f"--chat-template-kwargs {words}" if words else "no --chat-template-kwargs"
    return f"note: {checkpoint} was trained with {remedy}; with others drafts fit less well"


def read_prompt(arguments: argparse.Namespace) -> str:
    """From the command line, else from stdin, in UTF-8. ValueError where it is empty, or no UTF-8."""
    if arguments.prompt is None and sys.stdin.isatty():
        print("Prompt, ended by Ctrl-D:", file=sys.stderr)
    prompt = arguments.prompt
    if prompt is None:
        buffer = getattr(sys.stdin, "buffer", None)  # a stream that a caller has put there may hold text alone
        prompt = sys.stdin.read() if buffer is None else decode(buffer.read(), "stdin")
        prompt = prompt.rstrip("\n")
    if not prompt:
        raise ValueError('the prompt is empty; give --prompt "..." or some text on stdin')
    return prompt


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.generate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "checkpoint", type=Path, nargs="?", help="folder that `python -m train.mtp` wrote; it names the target, too"
    )
    parser.add_argument("--prompt", help="what to answer; without it, the prompt is read from stdin")
    parser.add_argument("--system", metavar="TEXT", help="a system turn before the prompt")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--plain", action="store_true", help="decode without a drafter")
    parser.add_argument(
        "--drafter",
        nargs="+",
        metavar=("NAME", "OPTION=VALUE"),
        help=f"what drafts ({', '.join(KINDS)}), and its options, such as min_match=2; else CHECKPOINT's heads",
    )
    parser.add_argument("--draft", metavar="MODEL", help="hub name or local folder of --drafter model's smaller model")
    parser.add_argument("-K", "--num-draft-tokens", type=int, metavar="K", help="drafted tokens in a block")
    parser.add_argument(
        "--length",
        nargs="+",
        default=[FIXED],
        metavar=("NAME", "OPTION=VALUE"),
        help=f"how much of K a block drafts ({', '.join(LENGTHS)}), and its options, such as threshold=0.3",
    )
    parser.add_argument(
        "--verifier",
        nargs="+",
        default=[LOSSLESS],
        metavar=("NAME", "OPTION=VALUE"),
        help=f"the rule that judges drafts ({', '.join(RULES)}), and its options, such as distance_budget=2",
    )
    parser.add_argument(
        "--ensemble", type=Path, metavar="FOLDER", help="trained verifier that judges drafts instead, of rl.diversed"
    )
    parser.add_argument(
        "--distance-budget", type=float, metavar="EPS", help="with --ensemble: most that the certificate may reach"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, help="most tokens of the answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="0 is off")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 is off")
    parser.add_argument("--min-p", type=float, default=0.0, help="0 is off")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="of prompt and output; 1 is off")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, help="per occurrence in the output; 0 is off")
    parser.add_argument("--presence-penalty", type=float, default=0.0, help="for any occurrence there; 0 is off")
    parser.add_argument("--no-repeat-ngram-size", type=int, default=0, metavar="N", help="0 is off")
    parser.add_argument("--min-new-tokens", type=int, default=0, help="tokens before an EOS may come")
    parser.add_argument("--seed", type=int, default=0, help="of a sampled answer")
    parser.add_argument("--target", help="hub name, local folder or file in conf/model, if not the checkpoint's own")
    parser.add_argument("--dtype", choices=(AUTO, *DTYPES), help="of the target")
    parser.add_argument("--device", help="auto, cpu, cuda, ...")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="in place of the tokenizer's own, as model.chat_template"
    )
    parser.add_argument(
        "--chat-template-kwargs",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="what the chat template is told, such as enable_thinking=false, as data.chat_template_kwargs",
    )
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    return parser


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, read."""
    return make_parser().parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = parse_arguments(words)
    try:
        require_words(sys.argv[1:] if words is None else words)
        if arguments.threads is not None:
            if arguments.threads < 1:
                raise ValueError(f"--threads {arguments.threads}: must be at least 1")
            torch.set_num_threads(arguments.threads)
        tolerate(sys.stdout)
        generate(arguments, read_prompt(arguments), sys.stdout, sys.stderr)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
