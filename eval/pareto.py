"""`python -m eval.pareto +model=NAME drafter=heads reward=NAME checkpoints=[FOLDER]`: acceptance against reward.

Lossless, static and other relaxed rules, and trained ensemble heads answer the same prompts with the same seeds; a
table, a plot and the files behind them tell what each rule gives up for what it gains.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING
from tqdm import tqdm

from eval.frontier.decisive import find_weights, render_weights
from eval.frontier.frontier import Frontier, FrontierOptions, analyse
from eval.frontier.pairs import load_dynamics, load_pair, name_checkpoints
from eval.frontier.plots import draw_frontier, require_matplotlib, save_figure
from eval.frontier.points import DYNAMIC, LOSSLESS, PEER, STATIC, Pair, Point, expand_all, make_points
from eval.frontier.questions import SPLITS, TESTBED, Question, load_questions, load_testbed_questions, task_name
from eval.frontier.report import frontier_record, legend, points_csv, render_cost, render_families, render_quality
from eval.frontier.samples import SamplingPlan, Sitting, run_sitting
from eval.frontier.scoring import Reward, load
from eval.frontier.tokens_html import TracedText, render_page, trace
from eval.frontier.transfer import cells_of, read_run, render_transfer, require_same_pair, transfer_csv
from eval.provenance import describe_run
from eval.rewards.loading import RewardOptions
from eval.seen import seen_by
from eval.speed.report import finite, write_json
from eval.speed.timing import device_clock
from models.decoding.rows import GenerationParams, stream_seed
from models.decoding.stops import Detokenizer
from models.drafters.options import KINDS, NONE, WITH_CHECKPOINT, DrafterOptions, check_drafter, needs_checkpoint
from models.files import write_text
from models.sampling import SamplingParams
from models.target.model import Target, TargetOptions
from train.data.prompts import DataOptions
from train.heads.folder import find_heads
from train.runtime.config import INTERRUPTED, entry
from train.runtime.jsonl_logger import NO_LOGGER, WANDB, check_logger
from train.runtime.wandb_run import log_artifact, log_table


@dataclass
class ParetoConfig:
    """Everything that conf/pareto.yaml and the command line may set; the file says what each means."""

    model: TargetOptions = MISSING
    work_dir: str = MISSING
    data: DataOptions = field(default_factory=DataOptions)
    drafter: DrafterOptions = field(default_factory=lambda: DrafterOptions("heads"))
    reward: RewardOptions = field(default_factory=RewardOptions)
    checkpoint: str = ""
    num_draft_tokens: int = 0
    checkpoints: list[str] = field(default_factory=list)
    rules: dict[str, Any] = field(default_factory=dict)
    peer_weights: list[float] = field(default_factory=list)
    split: str = "test"
    num_prompts: int = 32
    samples: int = 4
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    batch_size: int = 8
    prompts_per_turn: int = 4
    threads: int = 0
    reward_floor: float = 0.025
    reference: list[float] = field(default_factory=lambda: [0.0, 0.0])
    confidence: float = 0.95
    num_resamples: int = 2000
    shown_prompts: int = 3
    shown_points: list[str] = field(default_factory=list)
    plot: bool = True
    task: str = ""
    transfer: list[str] = field(default_factory=list)
    logger: str = NO_LOGGER
    output_dir: str = "outputs/pareto"

    @property
    def task_name(self) -> str:
        """Of these prompts, in tables."""
        return self.task or task_name(self.model.source, self.data.source, self.data.path)

    @property
    def heads_folder(self) -> Path | None:
        """The draft heads, where the drafter takes any: those that were named, else those of the work_dir."""
        return find_heads(self.checkpoint, self.work_dir) if needs_checkpoint(self.drafter) else None


def check_options(config: ParetoConfig) -> None:
    """ValueError for an option out of range, before any model loads."""
    check_drafter(config.drafter)
    if config.drafter.kind == NONE:
        drafting = ", ".join(kind for kind in KINDS if kind != NONE)
        raise ValueError(f"drafter={NONE}: rules judge drafts; choose one of {drafting}")
    if config.checkpoint and not needs_checkpoint(config.drafter):
        raise ValueError(
            f"checkpoint={config.checkpoint!r} is for drafter={' or '.join(WITH_CHECKPOINT)}; leave it out (a draft "
            "model is named with model.draft)"
        )
    if config.model.source == TESTBED and config.drafter.kind != "model":
        raise ValueError(f"drafter={config.drafter.kind}: the testbed has no draft heads; use drafter=model")
    if config.split not in SPLITS:
        raise ValueError(f"split={config.split!r} is unknown; choose {', '.join(SPLITS[:-1])} or {SPLITS[-1]}")
    if not config.temperature > 0:
        raise ValueError(f"temperature={config.temperature}: greedy decoding leaves nothing to relax; set it above 0")
    at_least = {"num_prompts": 1, "samples": 1, "max_new_tokens": 2, "batch_size": 1, "prompts_per_turn": 1}
    at_least |= {"num_resamples": 100, "threads": 0, "num_draft_tokens": 0, "reward_floor": 0, "shown_prompts": 0}
    for name, least in at_least.items():
        if not (value := getattr(config, name)) >= least:
            raise ValueError(f"{name}={value} must be at least {least}")
    if not 0.0 < config.confidence < 1.0:
        raise ValueError(f"confidence={config.confidence} must be between 0 and 1, such as 0.95")
    if len(config.reference) != 2:
        raise ValueError(f"reference={config.reference} must be two numbers, an acceptance and a reward")
    if bad := [weight for weight in config.peer_weights if not 0.0 < weight <= 1.0]:
        raise ValueError(f"peer_weights names {bad[0]}: transformers takes weights above 0, and at most 1")
    if config.logger not in (NO_LOGGER, WANDB):
        raise ValueError(f"logger={config.logger!r} is unknown here; choose {NO_LOGGER} or {WANDB}")
    check_logger(config.logger)
    if config.plot:
        require_matplotlib()
    sampling_of(config)


def sampling_of(config: ParetoConfig) -> SamplingParams:
    """How p and q are made from logits."""
    return SamplingParams(config.temperature, config.top_k, config.top_p, config.min_p)


def run_pareto(config: ParetoConfig) -> Sitting:
    """Load, measure, and write everything into `output_dir`."""
    check_options(config)
    families, checkpoints = expand_all(config.rules), name_checkpoints(config.checkpoints)
    heads = config.heads_folder
    seen = seen_by([*checkpoints.values(), *([heads] if heads else [])], config.data, config.split)
    earlier = {Path(folder): read_run(Path(folder)) for folder in config.transfer}
    reward = load(config.reward)
    if config.threads:
        torch.set_num_threads(config.threads)
    pair, drafter_record = load_pair(
        config.model, config.drafter, heads, config.num_draft_tokens, Path(config.work_dir)
    )
    about = describe(config, pair, drafter_record, reward)
    for folder, record in earlier.items():
        require_same_pair(about, record, folder)
    dynamics = load_dynamics(checkpoints, pair, drafter_record)
    points = make_points(pair, families, dynamics, config.peer_weights, sampling_of(config), config.batch_size)
    shown = choose_shown(points, config.shown_points) if config.shown_prompts else []
    target = pair.target
    questions = questions_for(target, config, seen)
    plan = SamplingPlan(config.samples, config.prompts_per_turn, config.max_new_tokens, config.seed)
    sitting = run_sitting(points, questions, reward, target.tokenizer, plan, device_clock(target.device))
    options = FrontierOptions(
        (config.reference[0], config.reference[1]),
        config.reward_floor,
        config.num_resamples,
        config.confidence,
        config.seed,
    )
    frontier = analyse(sitting, points, options)
    write_figures(frontier, sitting, points, about, config)
    if earlier:
        write_transfer([*earlier.values(), about | {"frontier": frontier_record(frontier, points)}], config)
    if sitting.is_complete and shown:
        write_page(shown, questions[: config.shown_prompts], reward, target.tokenizer, config)
    if sitting.is_complete and config.model.source == TESTBED:
        write_weights(points, questions, config)
    log_frontier(frontier, config)
    print(f"written to {config.output_dir}")
    if isinstance(sitting.stopped_by, Exception):
        raise sitting.stopped_by
    return sitting


def questions_for(target: Target, config: ParetoConfig, seen: Collection[str] = ()) -> list[Question]:
    """The prompts to measure on, none of those in `seen`.

    ValueError where they, or answers to them, do not fit the target's context.
    """
    longest = target.max_context() - config.max_new_tokens
    if longest < 1:
        raise ValueError(
            f"max_new_tokens={config.max_new_tokens} leaves no room for a prompt: the context of target "
            f"{target.name!r} has {target.max_context()} tokens"
        )
    if config.model.source == TESTBED:
        return load_testbed_questions(target.tokenizer, config.data.seed, config.split, config.num_prompts)
    return load_questions(target.tokenizer, config.data, config.split, config.num_prompts, longest, seen)


def describe(config: ParetoConfig, pair: Pair, drafter_record: dict[str, Any], reward: Reward) -> dict[str, Any]:
    """What the figures are of, and where they come from."""
    target = pair.target
    return {
        "run": describe_run("eval.pareto", target.device),
        "task": config.task_name,
        "split": config.split,
        "reward": reward.name,
        "target": {"name": target.name, "dtype": str(target.dtype), "fingerprint": target.fingerprint()},
        "drafter": drafter_record | {"num_draft_tokens": pair.num_draft_tokens},
        "config": asdict(config),
    }


def choose_shown(points: Sequence[Point], names: Sequence[str]) -> list[Point]:
    """The points on the page. [] names lossless token verification and the dynamic ones (static ones where none is)."""
    decoders = {point.name: point for point in points if point.decoder is not None}
    if unknown := [name for name in names if name not in decoders]:
        raise ValueError(f"shown_points names {unknown[0]!r}; choose among {'; '.join(decoders)}")
    if names:
        return [decoders[name] for name in names]
    families = {point.family for point in points}
    relaxed = DYNAMIC if DYNAMIC in families else STATIC
    lossless = [point for point in points if point.family == LOSSLESS][:1]
    return lossless + [point for point in points if point.family == relaxed]


def write_figures(
    frontier: Frontier, sitting: Sitting, points: Sequence[Point], about: Mapping[str, Any], config: ParetoConfig
) -> None:
    """JSON, samples, CSV, Markdown and plot, each whole or not at all."""
    folder = Path(config.output_dir)
    counts = {"is_complete": sitting.is_complete, "num_prompts": sitting.num_prompts}
    turns = [asdict(turn) for turn in sitting.turns]
    record = frontier_record(frontier, points)
    write_json(folder / "pareto.json", {**about, **counts, "frontier": record, "turns": turns})
    lines = [json.dumps(finite(asdict(sample)), ensure_ascii=False, allow_nan=False) for sample in sitting.samples]
    write_text(folder / "samples.jsonl", "\n".join(lines) + "\n")
    write_text(folder / "pareto.csv", points_csv(frontier.points))
    table = "\n".join(
        [
            render_quality(frontier.points),
            "",
            render_families(frontier.families),
            "",
            render_cost(frontier.points),
            "",
            *legend(
                any(point.family == PEER for point in points), config.reward_floor, config.reference, config.confidence
            ),
            *_origin(about, sitting, config),
        ]
    )
    write_text(folder / "pareto.md", table + "\n")
    print(f"\n{table}\n")
    if config.plot:
        title = f"{config.model.label}, {Path(about['drafter']['name']).name} drafting, {config.task_name}"
        save_figure(draw_frontier(frontier, title), folder / "pareto")


def log_frontier(frontier: Frontier, config: ParetoConfig) -> None:
    """The points as a table and the files as an artifact, in the run of Weights & Biases where one is open."""
    figures = ("acceptance", "reward", "certificate", "tokens_per_s")
    rows = [(point.name, point.family, *(getattr(point, name).value for name in figures)) for point in frontier.points]
    log_table("frontier", ("rule", "family", *figures), rows)
    log_artifact("frontier", f"frontier-{config.task_name}", sorted(Path(config.output_dir).glob("pareto.*")))


def _origin(about: Mapping[str, Any], sitting: Sitting, config: ParetoConfig) -> list[str]:
    """Where the figures come from."""
    run = about["run"]
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    lines = [
        f"{about['target']['name']}, {about['target']['dtype'].removeprefix('torch.')}; drafter "
        f"{about['drafter']['name']}, K = {about['drafter']['num_draft_tokens']}; {sitting.num_prompts} "
        f"{config.split} prompts of {config.task_name}, {config.samples} completions each, temperature "
        f"{config.temperature:g}, batch size {config.batch_size}; reward {about['reward']}.",
        f"{run['command']}",
        f"commit {run['commit']}; {run['hardware']}, {run['threads']} threads; {versions}",
    ]
    if not sitting.is_complete:
        lines.append(f"Stopped before its end: {sitting.num_prompts} of {config.num_prompts} prompts.")
    return lines


def write_transfer(records: Sequence[Mapping[str, Any]], config: ParetoConfig) -> None:
    """The cross-task table of these runs, this one among them."""
    cells = cells_of(records)
    table = render_transfer(cells)
    write_text(Path(config.output_dir) / "transfer.md", table + "\n")
    write_text(Path(config.output_dir) / "transfer.csv", transfer_csv(cells))
    print(f"{table}\n")


def write_weights(points: Sequence[Point], questions: Sequence[Question], config: ParetoConfig) -> None:
    """w of trained heads over the testbed's decisive and free tokens, where any head is measured."""
    params = GenerationParams(config.max_new_tokens, sampling_of(config), stream_seed(config.seed, 0))
    found = find_weights(points, [one.ids for one in questions], params, config.batch_size)
    if found:
        table = render_weights(found)
        write_text(Path(config.output_dir) / "weights.md", table + "\n")
        print(f"{table}\n")


def write_page(
    points: Sequence[Point],
    questions: Sequence[Question],
    reward: Reward,
    tokenizer: Detokenizer,
    config: ParetoConfig,
) -> None:
    """One completion of each prompt under each of the points, decoded anew: measuring is not slowed by looking."""
    params = GenerationParams(config.max_new_tokens, sampling_of(config), stream_seed(config.seed, 0))
    texts: list[list[TracedText]] = [[] for _ in questions]
    for point in tqdm(points, desc="page of tokens", unit="point", dynamic_ncols=True):
        assert point.decoder is not None
        traced = trace(point.decoder, [one.ids for one in questions], params, config.batch_size)
        tokens = [result.tokens for result, _ in traced]
        rewards = reward.score(questions, [result.text for result, _ in traced], tokens, tokenizer)
        for of_prompt, (result, found), value in zip(texts, traced, rewards, strict=True):
            of_prompt.append(TracedText(point.name, found, result, value))
    prompts = [tokenizer.decode(question.ids) for question in questions]
    write_text(Path(config.output_dir) / "tokens.html", render_page(f"Tokens, {config.task_name}", prompts, texts))


@entry(ParetoConfig, "pareto")
def main(config: ParetoConfig) -> None:
    """Entry point."""
    try:
        sitting = run_pareto(config)
    except KeyboardInterrupt:
        print("\nstopped before the first turn was done, or while writing: what is written is whole", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if not sitting.is_complete:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
