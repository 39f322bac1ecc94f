"""`python -m rl.diversed +model=NAME drafter=model|heads reward=NAME lam=0.1`: train the dynamic ensemble verifier.

Samples under the present head, rewards, updates, and keeps the head that does best on the prompts for selection. The
same command goes on where a stopped run was. Several processes (`torchrun -m`) share the completions out, and end as
one process with as many completions an optimizer step would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import MISSING
from transformers import set_seed

from eval.rewards.loading import RewardOptions, load_reward
from models.checkpoint import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    heads_record,
    load_ensemble,
    load_heads,
    model_record,
    read_config,
    save_ensemble,
)
from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.drafters.heads import HeadsDrafter
from models.drafters.model import ModelDrafter, load_model_drafter
from models.ensemble import EnsembleHead, EnsembleOptions
from models.sampling import SamplingParams
from models.target.model import TargetOptions, load_target, resolve_device
from rl.floor import CollapseAlarm, CollapseOptions, FloorOptions, RewardFloor, RunState
from rl.measuring import Pair
from rl.options import RLOptions, rloo_config
from rl.policy import PolicyOptions
from rl.prompts import load_datasets, load_testbed_datasets, prompts_record
from rl.resume import STATE_NAME, flat, require_same_batch, require_same_run
from rl.rollout import require_temperature_alone
from rl.sharing import require_same_options
from rl.trainer import DiversedTrainer
from rl.trl_parts import StopAfterRollout
from train.data.prompts import DataOptions
from train.data.testbed import ensure_testbed
from train.heads.folder import find_heads
from train.heads.trainer import require_unchanged
from train.runtime.callbacks import GuardGradients
from train.runtime.checkpoints import STATE_NAME as TRAINER_STATE_NAME
from train.runtime.checkpoints import last_whole, remove_unfinished
from train.runtime.config import entry, exit_interrupted
from train.runtime.jsonl_logger import check_logger, log_callbacks
from train.runtime.provenance import origin
from train.runtime.ranks import is_main, join, main_first, told_of_lost_peers
from train.runtime.wandb_run import log_artifact

DRAFTERS = ("model", "heads")
DEFAULT_DRAFT_TOKENS = 4
# What a sweeper may be given, of the selection prompts.
METRICS = ("objective", "reward", "acceptance")
TESTBED = "testbed"


@dataclass
class DrafterOptions:
    """Where drafted tokens come from."""

    kind: str = "model"


@dataclass
class HeadOptions:
    """What the head is, see `models.ensemble.EnsembleOptions`."""

    kind: str = "linear"
    initial_weight: float = 0.9
    width: int = 64


@dataclass
class DiversedConfig:
    """Everything that conf/diversed.yaml and the command line may set; the file says what each means."""

    model: TargetOptions = MISSING
    work_dir: str = MISSING
    data: DataOptions = field(default_factory=DataOptions)
    drafter: DrafterOptions = field(default_factory=DrafterOptions)
    reward: RewardOptions = field(default_factory=RewardOptions)
    checkpoint: str = ""
    num_draft_tokens: int = 0
    ensemble: HeadOptions = field(default_factory=HeadOptions)
    start_from: str = ""
    lam: float = 0.1
    entropy: float = 0.0
    likelihood: str = "verdicts"
    ratio: str = "sequence"
    floor: FloorOptions = field(default_factory=FloorOptions)
    collapse: CollapseOptions = field(default_factory=CollapseOptions)
    heldout_prompts: int = 32
    trainer: RLOptions = field(default_factory=RLOptions)
    logger: str = "jsonl"
    log_checkpoint: bool = False
    metric: list[str] = field(default_factory=lambda: ["objective"])
    output_dir: str = MISSING


def train_verifier(config: DiversedConfig) -> float | tuple[float, ...]:
    """Run it all; returns what `metric` names of the best head, for sweeps, or 0 without selection prompts."""
    policy = check_options(config)
    reward, reward_name = load_reward(config.reward.spec, config.reward.options)
    folder = Path(config.output_dir)
    load = load_testbed_datasets if config.model.source == TESTBED else load_datasets
    train, heldout = load(config.data, config.heldout_prompts)
    if len(train) < config.trainer.prompts_of_a_rollout:
        raise ValueError(
            f"there are {len(train)} training prompts, and a rollout takes {config.trainer.prompts_of_a_rollout}: use "
            "more (data.max_prompts), or lower trainer.per_device_train_batch_size"
        )
    join(resolve_device(config.model.device))
    require_same_options(flat(asdict(config)))
    set_seed(config.trainer.seed)
    with main_first():
        pair = load_pair(config)
    head = make_head(config, pair)
    fingerprint = pair.target.fingerprint()
    made_from = {"holds": "ensemble head", "target": fingerprint, "drafter_fingerprint": pair.record}
    require_same_run(folder, made_from, defining_options(config))
    remove_unfinished(folder, (STATE_NAME, TRAINER_STATE_NAME))
    interrupt = StopAfterRollout(config.trainer.updates_of_a_rollout)
    trainer = DiversedTrainer(
        head,
        pair,
        policy,
        RunState(RewardFloor(config.lam, config.floor), CollapseAlarm(config.collapse)),
        reward,
        reward_name,
        config.trainer.rollout_batch_size,
        provenance(config) | {"prompts": prompts_record(train, heldout)},
        template_kwargs=config.data.chat_template_kwargs,
        args=rloo_config(config.trainer, folder, pair.target.device.type, heldout is not None, config.logger),
        train_dataset=train,
        eval_dataset=heldout,
        callbacks=[GuardGradients(), interrupt, *log_callbacks(config.logger, folder)],
    )
    trainer.require_room(train if heldout is None else [*train, *heldout])
    trainer.try_reward()
    last = last_whole(folder, (STATE_NAME,))
    if last is not None:
        print(f"going on from {last}")
    try:
        trainer.train(resume_from_checkpoint=last)
    finally:
        interrupt.restore()
    if interrupt.interrupted:
        exit_interrupted(trainer.state.global_step)
    require_unchanged(pair.target, fingerprint)
    measured = finish(trainer, folder)
    if config.log_checkpoint:
        log_artifact("verifier", f"verifier-{folder.name}", [folder / CONFIG_NAME, folder / WEIGHTS_NAME])
    found = tuple(measured.get(f"eval_{name}", 0.0) for name in config.metric)
    return found if len(found) > 1 else found[0]


def check_options(config: DiversedConfig) -> PolicyOptions:
    """The policy's options. ValueError for an option out of range, before anything is loaded."""
    check_logger(config.logger, config.log_checkpoint)
    check_metric(config.metric, config.heldout_prompts)
    if config.drafter.kind not in DRAFTERS:
        raise ValueError(
            f"drafter.kind={config.drafter.kind!r}: the head weighs target against proposal, so drafter must be one of "
            f"{', '.join(DRAFTERS)}"
        )
    if config.drafter.kind == "model" and config.checkpoint:
        raise ValueError(f"checkpoint={config.checkpoint!r} is for drafter=heads; name a draft model with model.draft")
    if config.drafter.kind == "heads" and config.likelihood == "tokens":
        raise ValueError(
            "likelihood=tokens with drafter=heads: what heads draft depends on the place in the block, so tokens alone "
            "have no likelihood; use likelihood=verdicts"
        )
    for name in ("num_draft_tokens", "heldout_prompts"):
        if getattr(config, name) < 0:
            raise ValueError(f"{name}={getattr(config, name)}: must be at least 0")
    config.floor.check()
    config.collapse.check()
    config.trainer.check_sizes()
    # Before the rest: with another number of processes some of it may not hold, and this says what to set.
    require_same_batch(Path(config.output_dir), config.trainer)
    config.trainer.check()
    require_temperature_alone(GenerationParams(sampling=SamplingParams(config.trainer.temperature)))
    EnsembleOptions(**asdict(config.ensemble), draft_size=1, target_size=1)
    if config.drafter.kind == "heads":
        read_config(heads_folder(config))
    if config.start_from:
        read_config(Path(config.start_from))
    return PolicyOptions(
        lam=config.lam,
        entropy=config.entropy,
        likelihood=config.likelihood,
        ratio=config.ratio,
        clip_low=config.trainer.epsilon,
        clip_high=config.trainer.epsilon_high or config.trainer.epsilon,
    )


def check_metric(names: Sequence[str], num_prompts: int) -> None:
    """ValueError for a metric that is not measured."""
    if not names or any(name not in METRICS for name in names):
        raise ValueError(f"metric={list(names)}: must name one or more of {', '.join(METRICS)}")
    if names != ["objective"] and not num_prompts:
        raise ValueError(f"metric={list(names)} is measured on selection prompts; set heldout_prompts above 0")


def heads_folder(config: DiversedConfig) -> Path:
    """The draft heads that were named, else those of the work_dir."""
    return find_heads(config.checkpoint, config.work_dir)


def load_pair(config: DiversedConfig) -> Pair:
    """Target and drafter. ValueError where they do not fit each other."""
    if config.model.source == TESTBED:
        if config.drafter.kind != "model":
            raise ValueError(f"drafter={config.drafter.kind}: the testbed has no draft heads; use drafter=model")
        device = resolve_device(config.model.device)
        bed = ensure_testbed(Path(config.model.name).parent, config.model.seed, device=device)
        target, drafter = bed.target, ModelDrafter(bed.draft, bed.target)
    else:
        target = load_target(config.model)
        if config.drafter.kind == "heads":
            heads = load_heads(heads_folder(config), target)
            count = config.num_draft_tokens or heads.num_draft_tokens
            return _checked(Pair(target, HeadsDrafter(heads), count, heads_record(heads_folder(config))))
        drafter = load_model_drafter(config.model, target)
    return _checked(Pair(target, drafter, config.num_draft_tokens or DEFAULT_DRAFT_TOKENS, model_record(drafter.draft)))


def _checked(pair: Pair) -> Pair:
    Decoder(pair.target, pair.drafter, pair.num_draft_tokens)  # refuses what does not fit
    return pair


def make_head(config: DiversedConfig, pair: Pair) -> EnsembleHead:
    """A fresh head, or the one to start from. ValueError for one of another pair."""
    if config.start_from:
        return load_ensemble(Path(config.start_from), pair.target, pair.record).requires_grad_(True)
    drafter = pair.drafter
    draft_size = drafter.draft.hidden_size if isinstance(drafter, ModelDrafter) else pair.target.hidden_size
    options = EnsembleOptions(**asdict(config.ensemble), draft_size=draft_size, target_size=pair.target.hidden_size)
    return EnsembleHead(options).to(pair.target.device)


def defining_options(config: DiversedConfig) -> dict[str, Any]:
    """What makes a run that run; how many processes do it is no part of it."""
    options = asdict(replace(config, trainer=config.trainer.as_one_process()))
    for name in ("work_dir", "output_dir", "logger", "log_checkpoint", "metric", "model"):
        options.pop(name)
    return options


def finish(trainer: DiversedTrainer, folder: Path) -> dict[str, float]:
    """Measure the best head, export it, and say what came out; returns what was measured."""
    measured = trainer.evaluate() if trainer.eval_dataset is not None else {}
    if is_main():
        target, record = trainer.pair.target, trainer.pair.record
        save_ensemble(folder, trainer.head, target, record, trainer.provenance, trainer.measured)
    print(f"the head is in {folder} (best of step {trainer.state.best_global_step or trainer.state.global_step})")
    if measured:
        lossless = trainer.run_state.lossless_heldout
        print(
            f"selection prompts: reward {measured['eval_reward']:.3f} (lossless {lossless['reward']:.3f}), acceptance "
            f"{measured['eval_acceptance']:.3f} (lossless {lossless['acceptance']:.3f})"
        )
    if cost := update_cost(trainer.state.log_history, trainer.args.steps_per_generation):
        print(cost)
    return measured


def update_cost(log: list[dict[str, float]], steps_of_a_rollout: int) -> str:
    """What an update epoch took, beside sampling; "" where nothing was trained."""
    updates = [line["time/update_s"] for line in log if "time/update_s" in line]
    rollouts = [line["time/rollout_s"] for line in log if "time/rollout_s" in line]
    if not updates or not rollouts:
        return ""
    epoch_s, rollout_s = median(updates) * steps_of_a_rollout, median(rollouts)
    return f"an update epoch took {epoch_s:.3f} s, {epoch_s / rollout_s:.1%} of the {rollout_s:.3f} s of its rollout"


def provenance(config: DiversedConfig) -> dict[str, Any]:
    """How a head came about: command, commit, versions and settings."""
    return {**origin("rl.diversed", ("transformers", "trl")), "config": asdict(config)}


@entry(DiversedConfig, "diversed", many_processes=True)
def main(config: DiversedConfig) -> float | tuple[float, ...]:
    """Entry point."""
    with told_of_lost_peers():
        return train_verifier(config)


if __name__ == "__main__":
    main()
