"""`python -m eval.bench +model=NAME [drafter=NAME others=[NAME,...]]`: ways of decoding, side by side in one run.

Every method answers the same test prompts with the same limits, in turns; a table and the JSON behind it tell how
fast each was and what it wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING

from eval.drafters import Drafting, choose_drafters, load_drafters
from eval.provenance import describe_run
from eval.seen import seen_by
from eval.speed.methods import GENERATE, PLAIN, BareForward, DecoderMethod, GenerateMethod, Method
from eval.speed.report import render_groups, render_table, row_record, write_json
from eval.speed.session import Session, SessionOptions, make_parts, run_session
from eval.speed.timing import device_clock
from eval.tasks import SPLITS, TASKS, TEST, make_groups
from models.checkpoint import read_config
from models.decoding.decoder import Decoder
from models.decoding.length_options import FIXED, LengthOptions, check_length, make_length, name_length
from models.drafters.options import KINDS, NONE, WITH_CHECKPOINT, DrafterOptions, needs_checkpoint
from models.files import write_text
from models.sampling import SamplingParams
from models.target.model import Target, TargetOptions, load_target
from models.verification.options import VerifierOptions, make_rule
from train.data.prompts import DataOptions
from train.heads.folder import find_heads
from train.runtime.config import INTERRUPTED, entry

LOSSLESS = "lossless"
ADD_DRAFTER = f"add drafter=NAME, with NAME one of {', '.join(kind for kind in KINDS if kind != NONE)}"


@dataclass
class BenchConfig:
    """Everything that conf/bench.yaml and the command line may set; the file says what each means."""

    model: TargetOptions = MISSING
    work_dir: str = MISSING
    data: DataOptions = field(default_factory=DataOptions)
    drafter: DrafterOptions = field(default_factory=DrafterOptions)
    others: list[Any] = field(default_factory=list)
    verifier: VerifierOptions = field(default_factory=VerifierOptions)
    length: LengthOptions = field(default_factory=LengthOptions)
    checkpoint: str = ""
    num_draft_tokens: Any = 0  # a number or a list of numbers
    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    splits: list[str] = field(default_factory=lambda: [TEST])
    prompts_per_task: int = 4
    short_tokens: int = 48
    long_tokens: int = 192
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    batch_size: int = 1
    rounds: int = 3
    warmup_rounds: int = 1
    with_generate: bool = True
    prompt_lookup_tokens: Any = 4  # a number or a list of numbers
    threads: int = 0
    output_dir: str = "outputs/bench"


def check_options(config: BenchConfig) -> dict[str, int]:
    """The lengths of answers that are asked for. ValueError for an option out of range, before any model loads."""
    drafters = choose_drafters(config.drafter, config.others)
    rule = make_rule(config.verifier)
    if not rule.is_lossless and config.temperature == 0:
        raise ValueError(
            f"verifier={config.verifier.kind} with temperature=0: greedy decoding leaves nothing to relax; set a "
            "temperature above 0, or verifier=lossless"
        )
    if config.verifier.kind != LOSSLESS and not drafters:
        raise ValueError(
            f"verifier={config.verifier.kind} has no drafts to judge; {ADD_DRAFTER}, or leave out verifier"
        )
    check_length(config.length)
    if config.length.kind != FIXED and not drafters:
        raise ValueError(f"length={config.length.kind} has no drafts to cut; {ADD_DRAFTER}, or leave out length")
    draft_token_counts(config.num_draft_tokens)
    draft_token_counts(config.prompt_lookup_tokens, "prompt_lookup_tokens", "no such row")
    if not config.splits or set(config.splits) - set(SPLITS) or len(set(config.splits)) < len(config.splits):
        raise ValueError(f"splits={config.splits} must name each of {', '.join(SPLITS)} at most once, and one of them")
    if config.num_draft_tokens and not drafters:
        raise ValueError(f"num_draft_tokens={config.num_draft_tokens} is for a drafter; {ADD_DRAFTER}, or leave it out")
    if any(map(needs_checkpoint, drafters.values())):
        _require_same_seed(read_config(checkpoint_folder(config)), config)
    elif config.checkpoint:
        raise ValueError(
            f"checkpoint={config.checkpoint!r} is for drafter={' or '.join(WITH_CHECKPOINT)}; add that, or leave it out"
        )
    at_least = {"prompts_per_task": 1, "batch_size": 1, "rounds": 1, "warmup_rounds": 0}
    for name, least in {**at_least, "threads": 0, "short_tokens": 0, "long_tokens": 0}.items():
        if (value := getattr(config, name)) < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    lengths = {"short": config.short_tokens, "long": config.long_tokens}
    if not any(lengths.values()):
        raise ValueError(
            "short_tokens=0 and long_tokens=0 leave nothing to measure; give one of them a number of tokens"
        )
    _sampling(config)
    return {name: limit for name, limit in lengths.items() if limit}


def checkpoint_folder(config: BenchConfig) -> Path:
    """The heads to measure: those that were named, else those of the work_dir."""
    return find_heads(config.checkpoint, config.work_dir)


def draft_token_counts(
    value: Any, option: str = "num_draft_tokens", of_zero: str = "the number that a drafter has by itself"
) -> list[int]:
    """One K or several, in their order; [] for 0, which means `of_zero`. ValueError for anything else."""
    counts = value if isinstance(value, list) else [] if value == 0 and not isinstance(value, bool) else [value]
    if any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in counts) or len(set(counts)) < len(counts):
        raise ValueError(
            f"{option}={value!r} must be a number of at least 1, a list of different ones such as [1,3], or 0 for "
            f"{of_zero}"
        )
    return counts


def make_methods(target: Target, drafters: Mapping[str, Drafting], config: BenchConfig) -> list[Method]:
    """Every row of the table in the order of their turns, and the bare forward behind them."""
    sampling, batch_size = _sampling(config), config.batch_size
    methods: list[Method] = [DecoderMethod(PLAIN, Decoder(target), sampling, batch_size)]
    if config.with_generate:
        methods.append(GenerateMethod(GENERATE, target, sampling, batch_size))
    for count in draft_token_counts(config.prompt_lookup_tokens) if batch_size == 1 else ():
        name = f"transformers prompt lookup, {count} tokens"
        methods.append(GenerateMethod(name, target, sampling, batch_size, count))
    for label, drafting in drafters.items():
        for verifier, length, count in _variants(drafting, config):
            try:
                drafter, chooser = make_length(length, drafting.drafter, count)
                rule = make_rule(verifier)
                decoder = Decoder(target, drafter, count, rule, verifier.distance_budget, chooser)
            except ValueError as error:
                raise ValueError(f"drafter {label}: {error}") from error
            name = f"{label} {verifier.kind}, {name_length(length, count)}"
            methods.append(DecoderMethod(name, decoder, sampling, batch_size))
    return [*methods, BareForward(target, batch_size)]


def _variants(drafting: Drafting, config: BenchConfig) -> list[tuple[VerifierOptions, LengthOptions, int]]:
    """A drafter's rows: every K fixed, and the other length within the longest; lossless, and by the other rule."""
    counts = draft_token_counts(config.num_draft_tokens) or [drafting.num_draft_tokens]
    lengths = [(LengthOptions(), count) for count in counts]
    if config.length.kind != FIXED:
        lengths.append((config.length, max(counts)))
    # Lossless token verification is the yardstick of every other rule.
    verifiers = [VerifierOptions()] + [config.verifier] * (config.verifier.kind != LOSSLESS)
    return [(verifier, length, count) for length, count in lengths for verifier in verifiers]


def run_bench(config: BenchConfig) -> Session:
    """Load, measure, and write the table and its JSON into `output_dir`."""
    lengths = check_options(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.prompt_lookup_tokens and config.batch_size > 1:
        print(f"no row for prompt lookup: transformers' takes one prompt at a time, and batch_size={config.batch_size}")
    chosen = choose_drafters(config.drafter, config.others)
    heads = checkpoint_folder(config) if any(map(needs_checkpoint, chosen.values())) else None
    seen = {split: seen_by([heads] if heads else [], config.data, split) for split in config.splits}
    target = load_target(config.model)
    drafters = load_drafters(chosen, config.model, target, heads)
    methods = make_methods(target, drafters, config)
    groups = [
        group
        for split in config.splits
        for group in make_groups(
            target.tokenizer,
            config.data,
            config.tasks,
            config.prompts_per_task,
            lengths,
            target.max_context(),
            split,
            seen[split],
        )
    ]
    options = SessionOptions(
        config.rounds, config.warmup_rounds, config.batch_size, config.seed, config.temperature == 0
    )
    parts = make_parts(methods) if target.device.type == "cuda" else []
    session = run_session(target, groups, methods, parts, options, device_clock(target.device))
    _write(session, target, {name: drafting.record for name, drafting in drafters.items()}, config)
    return session


def _write(session: Session, target: Target, drafters: Mapping[str, dict[str, Any]], config: BenchConfig) -> None:
    run = describe_run("eval.bench", target.device)
    by_group = {name: session.rows(name) for name in session.groups}
    folder = Path(config.output_dir)
    record = {
        "run": run,
        "is_complete": session.is_complete,
        "target": {"name": target.name, "dtype": str(target.dtype), "fingerprint": target.fingerprint()},
        "drafters": drafters,
        "config": asdict(config),
        "memory": session.memory_kind,
        "methods": [row_record(row) for row in session.rows()],
        "groups": {name: [row_record(row) for row in rows] for name, rows in by_group.items()},
        "runs": [asdict(one) for one in session.runs],
    }
    write_json(folder / "bench.json", record)
    lines = [
        render_table(session.rows()),
        "",
        render_groups(by_group),
        "",
        *_legend(session, target, drafters, config, run),
    ]
    if not session.is_complete:
        lines.append(f"Stopped before its end: only {', '.join(session.groups)}.")
    text = "\n".join(lines) + "\n"
    write_text(folder / "bench.md", text)
    print(f"\n{text}\nwritten to {folder / 'bench.json'} and bench.md")


def _legend(
    session: Session, target: Target, drafters: Mapping[str, Any], config: BenchConfig, run: dict[str, Any]
) -> list[str]:
    """What the columns mean, and where the figures come from."""
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    how = "greedy" if config.temperature == 0 else f"sampled at temperature {config.temperature:g}"
    return [
        f"{target.name}, {str(target.dtype).removeprefix('torch.')}, batch size {config.batch_size}, {how}.",
        *(f"{name}: {record['name']}, {record['fingerprint']}." for name, record in drafters.items()),
        f"tokens/s: median (lowest–highest) of {config.rounds} rounds, the prompts' own passes included.",
        "pass / bare: the row's target pass over a bare forward of one token. draft / pass: drafting over that pass.",
        "fresh: new prompts about what training prompts are about. selection: those that chose the "
        "checkpoint. Other groups: test prompts, which neither trained nor chose it.",
        "prompt lookup: counted by its passes; its first, over the prompt, is a block already.",
        "gap: furthest, in logits, that one of two differing tokens lay below the target's best one.",
        f"peak: {session.memory_kind}.",
        "distance / token: bound on the total variation between a relaxed rule's output law and the target's, a token.",
        f"{run['command']}",
        f"commit {run['commit']}; {run['hardware']}, {run['threads']} threads; {versions}",
    ]


def _sampling(config: BenchConfig) -> SamplingParams:
    return SamplingParams(config.temperature, config.top_k, config.top_p, config.min_p)


def _require_same_seed(checkpoint: dict[str, Any], config: BenchConfig) -> None:
    """A prompt that is fresh here must have been so in training."""
    data = checkpoint.get("provenance", {}).get("data", {})
    if "fresh" in config.splits and data.get("seed", config.data.seed) != config.data.seed:
        raise ValueError(
            f"splits names fresh, and data.seed={config.data.seed}: {checkpoint_folder(config)} was trained with "
            f"data.seed={data['seed']}, and only with the same one it is known which prompts are new"
        )


@entry(BenchConfig, "bench")
def main(config: BenchConfig) -> None:
    """Entry point."""
    try:
        session = run_bench(config)
    except KeyboardInterrupt:
        print("\nstopped before any group of prompts was done: nothing is written", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if not session.is_complete:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
