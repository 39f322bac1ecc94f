"""`python -m eval.verification_cost +model=NAME`: what a verdict costs beside the target pass that it judges.

Every rule of conf/verifier judges the same blocks in turns with the target's own pass over them; medians are told.
"verdict": the rule alone, from p and q to accepted tokens. "judge": all that stands between the pass and the emitted
tokens, so also the probabilities and the way to the CPU.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from omegaconf import MISSING
from torch import Tensor
from tqdm import tqdm

from eval.provenance import describe_run
from eval.speed.report import align, write_json
from eval.speed.timing import device_clock, measure, schedule, spread
from models.cache.attention import packed_attention
from models.cache.ragged import RaggedCache
from models.decoding.judge import Judge
from models.decoding.rows import GenerationParams, Row
from models.drafters.base import Draft
from models.files import write_text
from models.sampling import SamplingParams, sample_from, transform_logits
from models.target.model import Target, TargetOptions, load_target
from models.verification.base import Block, Rule
from models.verification.options import RULES, VerifierOptions, make_rule
from train.runtime.config import entry
from train.runtime.presets import read_preset

CONTEXT_TOKENS = 128
WARMUP_ROUNDS = 3
NOISE = 1.0  # standard deviation of what is added to the target's logits to make a draft's
PASS = "target pass"
HEADER = ("rule", "batch", "verdict ms", "judge ms", "pass ms", "verdict / pass", "judge / pass")


@dataclass
class CostConfig:
    """What conf/verification_cost.yaml and the command line may set."""

    model: TargetOptions = MISSING
    num_draft_tokens: int = 4
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8])
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    rounds: int = 30
    threads: int = 0
    output_dir: str = "outputs/verification_cost"


@dataclass(frozen=True)
class Cost:
    """Median milliseconds of one rule at one batch size."""

    rule: str
    batch_size: int
    verdict_ms: float
    judge_ms: float
    pass_ms: float


def shipped_rules() -> dict[str, Rule]:
    """Every rule of conf/verifier with the options that it has there."""
    return {kind: make_rule(read_preset(VerifierOptions, "verifier", kind, {}, "verifier")) for kind in RULES}


class Blocks:
    """One block a row on random text, and the target pass that gives its logits."""

    def __init__(self, target: Target, batch_size: int, config: CostConfig) -> None:
        generator = torch.Generator().manual_seed(0)
        self.target = target
        self.sampling = SamplingParams(config.temperature, config.top_k, config.top_p)
        shape = (batch_size, CONTEXT_TOKENS + config.num_draft_tokens + 1)
        ids_BT = torch.randint(0, target.num_tokens, shape, generator=generator).to(target.device)
        self._context_BT, self._new_BT = ids_BT[:, :CONTEXT_TOKENS], ids_BT[:, CONTEXT_TOKENS:]
        self._cache = RaggedCache(target.config, batch_size, target.device, target.dtype)
        self._pass(self._context_BT)
        self._cache.advance([CONTEXT_TOKENS] * batch_size)
        self.logits_BTV = self.run_target()
        noise = torch.randn(self.logits_BTV.shape, generator=generator).to(target.device) * NOISE
        q_BTV = transform_logits(self.logits_BTV + noise, self.sampling)
        uniforms = torch.rand(batch_size, 2 * config.num_draft_tokens + 1, generator=generator, dtype=torch.float64)
        uniforms = uniforms.to(target.device)
        first = config.num_draft_tokens
        self.draft = Draft(sample_from(q_BTV[:, :-1], uniforms[:, :first]), q_BTV[:, :-1].contiguous())
        self._uniforms_BU = uniforms[:, first:]
        self._num_drafted = [first] * batch_size
        params = GenerationParams(sampling=self.sampling)
        self._rows = [Row(index, [1], params, 100, (), target.tokenizer) for index in range(batch_size)]

    @property
    def block(self) -> Block:
        """With p as it comes from the logits."""
        return Block(
            transform_logits(self.logits_BTV, self.sampling),
            self.draft.probs_BKV,
            self.draft.tokens_BK,
            torch.tensor(self._num_drafted, device=self.logits_BTV.device),
            self._uniforms_BU[:, :-1],
            self._uniforms_BU[:, -1],
        )

    def run_target(self) -> Tensor:
        """One pass over the block, output head included; the cache stays where it is."""
        return self.target.logits(self._pass(self._new_BT))

    def run_judge(self, rule: Rule) -> None:
        """From logits to emissions on the CPU."""
        Judge(rule).judge(
            self._rows,
            self.logits_BTV,
            self.logits_BTV,
            self.draft,
            self._num_drafted,
            self._uniforms_BU,
            self.sampling,
            self.logits_BTV[..., :0],
        )

    @torch.no_grad()
    def _pass(self, ids_BT: Tensor) -> Tensor:
        num_new = ids_BT.shape[1]
        masks, positions_BT = self._cache.attention_masks(num_new), self._cache.positions(num_new)
        with packed_attention(self.target.model):
            return self.target.hidden(ids_BT, masks, positions_BT, self._cache)


def measure_costs(target: Target, config: CostConfig) -> list[Cost]:
    """All rules at all batch sizes."""
    rules = shipped_rules()
    costs = []
    for batch_size in config.batch_sizes:
        ms = _measure_batch(Blocks(target, batch_size, config), rules, config.rounds, f"batch {batch_size}")
        costs += [Cost(name, batch_size, ms[f"{name} verdict"], ms[f"{name} judge"], ms[PASS]) for name in rules]
    return costs


def _measure_batch(blocks: Blocks, rules: dict[str, Rule], rounds: int, title: str) -> dict[str, float]:
    """Median milliseconds of everything, by name."""
    block = blocks.block
    runs: dict[str, Callable[[], object]] = {PASS: blocks.run_target}
    for name, rule in rules.items():
        runs[f"{name} verdict"] = partial(rule.verify, block)
        runs[f"{name} judge"] = partial(blocks.run_judge, rule)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    turns = schedule(list(runs), rounds, WARMUP_ROUNDS)
    clock = device_clock(blocks.target.device)
    with tqdm(total=len(turns), desc=title, unit="turn") as bar:
        for turn, took, _ in measure(turns, lambda turn: runs[turn.name](), clock):
            bar.update()
            if not turn.is_warmup:
                seconds[turn.name].append(took)
    return {name: 1e3 * spread(values).median for name, values in seconds.items()}


def render(costs: list[Cost]) -> str:
    """A Markdown table."""
    lines = [
        (
            cost.rule,
            str(cost.batch_size),
            f"{cost.verdict_ms:.2f}",
            f"{cost.judge_ms:.2f}",
            f"{cost.pass_ms:.1f}",
            f"{cost.verdict_ms / cost.pass_ms:.1%}",
            f"{cost.judge_ms / cost.pass_ms:.1%}",
        )
        for cost in costs
    ]
    return align(HEADER, lines)


def run_costs(config: CostConfig) -> None:
    """Check, measure, and write the table and its JSON into `output_dir`. ValueError for an option out of range."""
    counts = {
        "num_draft_tokens": [config.num_draft_tokens],
        "rounds": [config.rounds],
        "batch_sizes": config.batch_sizes,
    }
    for name, values in counts.items():
        if not values or min(values) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 1")
    if config.temperature <= 0:
        raise ValueError(f"temperature={config.temperature} must be above 0: at 0 nothing but token ids is compared")
    if config.threads:
        torch.set_num_threads(config.threads)
    target = load_target(config.model)
    costs = measure_costs(target, config)
    run = describe_run("eval.verification_cost", target.device)
    dtype = str(target.dtype).removeprefix("torch.")
    text = "\n".join(
        [
            render(costs),
            "",
            f"{target.name}, {dtype}, vocabulary {target.vocab_size}, K = {config.num_draft_tokens}; medians of "
            f"{config.rounds} rounds. verdict: from p and q to a verdict. judge: from logits to emitted tokens.",
            f"{run['command']}",
            f"commit {run['commit']}; {run['hardware']}, {run['threads']} threads",
        ]
    )
    folder = Path(config.output_dir)
    record = {"run": run, "config": asdict(config), "costs": [asdict(cost) for cost in costs]}
    write_json(folder / "verification_cost.json", record)
    write_text(folder / "verification_cost.md", text + "\n")
    print(f"\n{text}\nwritten to {folder}/verification_cost.json and .md")


@entry(CostConfig, "verification_cost")
def main(config: CostConfig) -> None:
    """Entry point."""
    run_costs(config)


if __name__ == "__main__":
    main()
