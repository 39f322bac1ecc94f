"""Several processes at one run: each has its part, what all get to know, and that two end as one does."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.decoding.counters import Counters
from rl import sharing
from rl.measuring import length_metrics, measured
from rl.options import RLOptions
from rl.policy import PolicyOptions, PolicyStats, VerifiedTokens, baselines, logprobs, surrogate
from rl.resume import require_same_batch
from rl.rollout import Rollout
from rl.sharing import deal, piece, require_same_options
from train.runtime.presets import CONF
from train.runtime.ranks import told_of_lost_peers

# Sums of the same float64 numbers in another order.
EXACT = 1e-12


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, num_ranks: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))


# --- who does what ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 7, 12])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_pieces_are_even_and_whole(monkeypatch: pytest.MonkeyPatch, count: int, num_ranks: int) -> None:
    pieces = []
    for rank in range(num_ranks):
        as_rank(monkeypatch, rank, num_ranks)
        pieces.append(list(piece(count)))
    assert list(chain(*pieces)) == list(range(count))
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_each_completion_is_dealt_once() -> None:
    """To micro-steps that differ from rollout to rollout; finer ones cut the same optimizer steps."""
    coarse, fine = deal(24, 2, 5, 3), deal(24, 6, 5, 3)
    assert sorted(chain(*coarse)) == sorted(chain(*fine)) == list(range(24))
    assert [sorted(chain(*fine[:3])), sorted(chain(*fine[3:]))] == coarse
    assert all(len(step) == 4 and step == sorted(step) for step in fine)
    assert deal(24, 2, 5, 3) == coarse
    assert len({str(deal(24, 2, seed, rollout)) for seed in (5, 6) for rollout in (3, 4)}) == 4
    assert deal(6, 1, 0, 0) == [list(range(6))]


# --- gradients and baselines ------------------------------------------------------------------------------------------


def random_batch(seed: int, counts: Sequence[int]) -> tuple[VerifiedTokens, Tensor, Tensor, Tensor]:
    """Tokens, w, rewards and older log-probabilities of sequences with these numbers of tokens; float64."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(counts)
    p_N, q_N, tv_N, w_N = torch.rand(4, num_tokens, generator=generator, dtype=torch.float64)
    sequence_N = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    tokens = VerifiedTokens(p_N, q_N, tv_N, (p_N <= q_N) | (p_N < 0.6), sequence_N)
    old_N = logprobs(w_N, tokens, PolicyOptions()) + 0.1 * torch.randn(num_tokens, generator=generator)
    return tokens, w_N, torch.randn(len(counts), generator=generator, dtype=torch.float64), old_N


def part_of(tokens: VerifiedTokens, numbers: Sequence[int]) -> tuple[VerifiedTokens, Tensor]:
    """The tokens of these sequences, and which of all they are."""
    at_N = torch.isin(tokens.sequence_N, torch.tensor(numbers, dtype=torch.long)).nonzero()[:, 0]
    renumbered = {number: i for i, number in enumerate(numbers)}
    sequence_N = torch.tensor([renumbered[int(s)] for s in tokens.sequence_N[at_N]], dtype=torch.long)
    names = ("p_N", "q_N", "tv_N", "is_accepted_N")
    return VerifiedTokens(*(getattr(tokens, name)[at_N] for name in names), sequence_N), at_N


COUNTS = (3, 0, 7, 1, 2, 9, 4, 1)  # tokens of sequences
PARTS = {
    "halves": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "halves in disorder": [[1, 3, 4, 6], [0, 2, 5, 7]],
    "uneven": [[2], [0, 1, 3, 4, 5, 6, 7]],
    "one has nothing": [[], [0, 1, 2, 3, 4, 5, 6, 7]],
    "one has no tokens": [[1], [0, 2], [3, 4, 5, 6, 7]],
}


def gradient_of(
    w_N: Tensor, tokens: VerifiedTokens, reward_S: Tensor, old_N: Tensor, baseline_N: Tensor, size: float | None
) -> tuple[Tensor, PolicyStats]:
    w_N = w_N.clone().requires_grad_()
    options = PolicyOptions(lam=0.5, entropy=0.1, clip_low=0.1, clip_high=0.1)
    loss, stats = surrogate(w_N, tokens, reward_S, baseline_N, options, old_N, size)
    return torch.autograd.grad(loss, w_N)[0], stats


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())
def test_mean_of_the_parts_gradients_is_the_wholes(parts: list[list[int]]) -> None:
    """What averaging over processes gives, where each divides by the mean size of a part; and the means of the log."""
    tokens, w_N, reward_S, old_N = random_batch(0, COUNTS)
    baseline_N = torch.randn(len(w_N), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole_N, stats = gradient_of(w_N, tokens, reward_S, old_N, baseline_N, None)
    mean_N, by_own_sizes_N = torch.zeros_like(w_N), torch.zeros_like(w_N)
    sums: dict[str, float] = dict.fromkeys(vars(stats), 0.0)
    size = len(COUNTS) / len(parts)
    for numbers in parts:
        part, at_N = part_of(tokens, numbers)
        given = (w_N[at_N], part, reward_S[numbers], old_N[at_N], baseline_N[at_N])
        gradient_N, of_part = gradient_of(*given, size)
        mean_N[at_N] += gradient_N / len(parts)
        if numbers:
            by_own_sizes_N[at_N] += gradient_of(*given, None)[0] / len(parts)
        for name, value in vars(of_part).items():
            sums[name] += float(value) * (1 if name == "num_tokens" else of_part.num_tokens)
    torch.testing.assert_close(mean_N, whole_N, atol=EXACT, rtol=EXACT)
    assert sums.pop("num_tokens") == stats.num_tokens == sum(COUNTS)
    for name, value in sums.items():
        assert value / sum(COUNTS) == pytest.approx(float(getattr(stats, name)), abs=1e-6)  # clipped is float32
    if len({len(numbers) for numbers in parts}) > 1:  # a mean of means is something else
        assert not torch.allclose(by_own_sizes_N, whole_N, atol=1e-3)


def test_baselines_of_a_part_are_no_baselines() -> None:
    """A group that lies in two processes: those of each one's own samples differ, so they are taken over all."""
    tokens, w_N, reward_S, _ = random_batch(2, COUNTS)
    group_S, options = torch.arange(len(COUNTS)) // 4, PolicyOptions(lam=0.5)
    whole_N = baselines(w_N, tokens, reward_S, group_S, options)
    for numbers, is_whole in (([0, 1, 2, 3], True), ([0, 1, 2, 3, 4, 5], False)):
        part, at_N = part_of(tokens, numbers)
        part_N = baselines(w_N[at_N], part, reward_S[numbers], group_S[numbers], options)
        assert torch.allclose(part_N, whole_N[at_N], atol=EXACT) == is_whole


# --- what is measured -------------------------------------------------------------------------------------------------


def make_rollout(tokens: list[int], weights: Sequence[float], tv: float, counters: Counters) -> Rollout:
    weights_N = torch.tensor(weights)
    ones_N = torch.ones_like(weights_N)
    places_N = torch.arange(len(weights))
    bits_N = ones_N.bool()
    return Rollout(
        tokens, "", ones_N[:, None], ones_N, ones_N, tv * ones_N, bits_N, places_N, weights_N, counters, sum(weights)
    )


def test_measured_by_hand() -> None:
    """Acceptance is a mean over completions that have any, weight one over tokens, rate one over drafted tokens."""
    rollouts = [
        make_rollout([5, 6, 7], [0.5, 1.0], 0.5, Counters(drafted=4, accepted=1)),
        make_rollout([5], [], 0.0, Counters()),
        make_rollout([5, 2], [0.2], 1.0, Counters(drafted=1, accepted=1)),
    ]
    found = measured(rollouts, [1.0, 0.0, 0.5])
    assert found.reward == pytest.approx(0.5)
    assert found.acceptance == pytest.approx((0.625 + 0.8) / 2)
    assert found.weight == pytest.approx(1.7 / 3)
    assert found.rate == pytest.approx(2 / 5)
    assert found.certificate == pytest.approx(1.7 / 3)


def test_lengths_by_hand() -> None:
    metrics = length_metrics(torch.tensor([3, 8, 5]), torch.tensor([False, True, False]))
    assert {name.removeprefix("completions/"): value for name, value in metrics.items()} == {
        "clipped_ratio": pytest.approx(1 / 3),
        "mean_length": pytest.approx(16 / 3),
        "min_length": 3.0,
        "max_length": 8.0,
        "mean_terminated_length": 4.0,
        "min_terminated_length": 3.0,
        "max_terminated_length": 5.0,
    }
    cut = length_metrics(torch.tensor([8, 8]), torch.tensor([True, True]))
    assert (cut["completions/mean_terminated_length"], cut["completions/clipped_ratio"]) == (0.0, 1.0)


# --- options ----------------------------------------------------------------------------------------------------------


OPTIONS = RLOptions(per_device_train_batch_size=12, steps_per_generation=2, num_generations=4)


def test_runs_that_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same completions an update, by processes, by accumulation, or both: one run; a process has a part of it."""
    assert OPTIONS.as_one_process() == OPTIONS
    accumulated = replace(OPTIONS, per_device_train_batch_size=4, gradient_accumulation_steps=3, steps_per_generation=6)
    assert accumulated.as_one_process() == OPTIONS
    plain = RLOptions()
    assert plain.as_one_process() == plain
    as_rank(monkeypatch, 1, 2)
    halved = replace(OPTIONS, per_device_train_batch_size=6, rollout_batch_size=3)
    assert halved.as_one_process() == OPTIONS
    assert halved.prompts_of_a_rollout == 6
    both = replace(OPTIONS, per_device_train_batch_size=2, gradient_accumulation_steps=3, steps_per_generation=6)
    assert both.as_one_process() == OPTIONS
    assert both.updates_of_a_rollout == 2
    both.check()
    once = replace(OPTIONS, per_device_train_batch_size=6, steps_per_generation=0)
    assert once.as_one_process() == replace(OPTIONS, steps_per_generation=0)


def test_group_needs_room_in_all_processes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(OPTIONS, per_device_train_batch_size=2, steps_per_generation=1)
    with pytest.raises(ValueError, match=r"steps_per_generation = 2 completions: must be a multiple"):
        options.check()
    as_rank(monkeypatch, 0, 2)
    options.check()
    as_rank(monkeypatch, 0, 3)
    with pytest.raises(ValueError, match=r"steps_per_generation \* 3 processes = 6 completions: must be a multiple"):
        options.check()


def write_manifest(folder: Path, options: RLOptions) -> None:
    known = {f"trainer.{name}": value for name, value in vars(options.as_one_process()).items()}
    (folder / "manifest.json").write_text(json.dumps(known))


@pytest.mark.parametrize(
    ("num_ranks", "changes", "remedy"),
    [
        (2, {}, "set trainer.per_device_train_batch_size=6 trainer.steps_per_generation=2"),
        (1, {"per_device_train_batch_size": 6}, "set trainer.per_device_train_batch_size=12 "),
        (2, {"per_device_train_batch_size": 6, "steps_per_generation": 4}, "trainer.steps_per_generation=2"),
        (1, {"steps_per_generation": 0}, "trainer.steps_per_generation=2"),
        (2, {"gradient_accumulation_steps": 3, "steps_per_generation": 6}, "size=2 trainer.steps_per_generation=6"),
        (5, {}, "a number of processes that, times gradient_accumulation_steps=1, divides 12"),
    ],
)
def test_other_batch_is_told_with_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, changes: dict[str, Any], remedy: str
) -> None:
    require_same_batch(tmp_path, OPTIONS)
    write_manifest(tmp_path, OPTIONS)
    require_same_batch(tmp_path, OPTIONS)
    as_rank(monkeypatch, 0, num_ranks)
    with pytest.raises(
        ValueError, match="takes 12 completions an optimizer step and 2 such steps for a rollout"
    ) as caught:
        require_same_batch(tmp_path, replace(OPTIONS, **changes))
    assert remedy in str(caught.value)
    assert f"{num_ranks} processes" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_remedy_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the message says to set is taken."""
    write_manifest(tmp_path, OPTIONS)
    as_rank(monkeypatch, 0, 2)
    for steps in (1, 2, 3, 6):
        wrong = replace(OPTIONS, gradient_accumulation_steps=steps, steps_per_generation=6 * steps)
        with pytest.raises(ValueError, match="set trainer") as caught:
            require_same_batch(tmp_path, wrong)
        words = str(caught.value).rpartition("set ")[2].partition(",")[0].split()
        values = {word.partition("=")[0].removeprefix("trainer."): int(word.partition("=")[2]) for word in words}
        right = replace(wrong, **values)
        right.check()
        require_same_batch(tmp_path, right)


def test_processes_with_other_options_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_same_options({"lam": 0.1})
    monkeypatch.setattr(sharing, "gather_pieces", lambda mine: [{"lam": 0.1}, {"lam": 0.3}])
    with pytest.raises(ValueError, match=r"lam is 0\.1 in process 0 and 0\.3 in process 1: start all"):
        require_same_options({"lam": 0.1})


def test_lost_peers_are_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and of any other error, nothing is changed."""
    lost = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:13226. GLHF!")
    with pytest.raises(RuntimeError, match="GLHF"), told_of_lost_peers():
        raise lost
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ConnectionError, match="another process of this job has ended"), told_of_lost_peers():
        raise lost
    with pytest.raises(RuntimeError, match="shapes"), told_of_lost_peers():
        raise RuntimeError("shapes")


# --- processes --------------------------------------------------------------------------------------------------------


# Float32 weights whose gradients were summed in another order, from features of batches of other shapes, after 16
# steps of Adam at a rate of 0.02; weights are up to 2.
WEIGHT_TOLERANCE = 1e-5
# Means of float32 numbers of order 1, after the same.
LOG_TOLERANCE = 1e-4
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
PROMPT_SECONDS = 60.0  # a launcher waits for 30 seconds before it ends by force what does not end by itself
NUM_TRAIN, MAX_STEPS = 18, 16
REWARD = """
import json, os, signal, time
from pathlib import Path

RANK = os.environ.get("RANK", "0")

def toy(completion_ids, answer, trainer_state, **kwargs):
    with open(f"seen-{RANK}.jsonl", "a") as file:
        for ids, one in zip(completion_ids, answer):
            file.write(json.dumps([trainer_state.global_step, one, ids]) + "\\n")
    plan = Path("plan.json")
    if plan.exists():
        what, rank, step = json.loads(plan.read_text())
        if (rank, step) == (RANK, trainer_state.global_step):
            plan.unlink()
            Path("done.json").write_text(json.dumps(time.time()))
            if what == "raise":
                raise RuntimeError("no such luck")
            os.kill(os.getpid(), getattr(signal, what))
    return [len(set(ids)) / len(ids) - len(ids) / 50 for ids in completion_ids]
"""


def words_of(folder: Path, size: int, steps: int = 1, rollout: int = 2) -> list[str]:
    """5 prompts of 4 samples a rollout, 2 updates an epoch of it, 2 epochs; 15 completions of held-out prompts."""
    folder.mkdir(exist_ok=True)
    rows = [
        {"prompt": f"Say {i}." * (1 + i % 3), "answer": str(i), "split": "train" if i < NUM_TRAIN else "selection"}
        for i in range(NUM_TRAIN + 5)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "toy_reward.py").write_text(REWARD)
    return [
        "rl.diversed",
        "+model=tiny",
        "drafter=model",
        "data=jsonl",
        "data.path=prompts.jsonl",
        "reward=function",
        "reward.spec=toy_reward:toy",
        "num_draft_tokens=2",
        "lam=0.5",
        "floor.max_drop=0.01",
        "floor.prompts=3",
        "collapse.weight=0.0",
        "heldout_prompts=5",
        "ensemble.kind=mlp",
        "ensemble.width=4",
        f"trainer.per_device_train_batch_size={size}",
        f"trainer.gradient_accumulation_steps={steps}",
        f"trainer.steps_per_generation={rollout}",
        "trainer.num_generations=4",
        "trainer.num_generations_eval=3",
        "trainer.num_iterations=2",
        "trainer.max_completion_length=10",
        "trainer.learning_rate=0.02",
        f"trainer.max_steps={MAX_STEPS}",
        "trainer.eval_steps=4",
        "trainer.save_steps=4",
        "work_dir=work",
        "output_dir=out",
    ]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    apart = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    paths = [str(folder), str(CONF.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**apart, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def finished(folder: Path, *words: str) -> str:
    """What a command printed that has to end well."""
    ended = run(folder, *words)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    folder = tmp_path_factory.mktemp("single")
    finished(folder, *words_of(folder, 10))
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run of two processes: three of the five groups of a rollout lie in one of them, one in both."""
    folder = tmp_path_factory.mktemp("pair")
    printed = finished(folder, *TORCHRUN, *words_of(folder, 5))
    assert printed.count("the head is in") == 1
    return folder


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def seen(folder: Path) -> list[Any]:
    """Every completion that a reward was asked about, those of held-out prompts too, with step and prompt."""
    return sorted(line for path in folder.glob("seen-*.jsonl") for line in read_lines(path) if line[2] != [2])


def measurements(folder: Path) -> list[dict[str, float]]:
    """The log without clocks, and without the line of averages since the start of a command."""
    return [
        {key: value for key, value in line.items() if "time" not in key and "per_second" not in key}
        for line in read_lines(folder / "out" / "log.jsonl")
        if "train_runtime" not in line
    ]


def assert_same_head(folder: Path, other: Path) -> None:
    one, two = (load_file(path / "out" / "model.safetensors") for path in (folder, other))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=WEIGHT_TOLERANCE)


@pytest.mark.slow
def test_two_processes_end_as_one(single: Path, pair: Path) -> None:
    """The same completions to the token, the same head and the same log; one process writes."""
    assert_same_head(single, pair)
    assert seen(single) == seen(pair)
    assert len(seen(pair)) > 150
    logs = measurements(single), measurements(pair)
    assert [line.keys() for line in logs[0]] == [line.keys() for line in logs[1]]
    assert len(logs[0]) == MAX_STEPS + MAX_STEPS // 4 + 1
    for one, two in zip(*logs, strict=True):
        assert two == pytest.approx(one, abs=LOG_TOLERANCE)
    assert any(line.get("lam", 0.5) < 0.5 for line in logs[1])  # the floor was at work
    configs = [json.loads((folder / "out" / "config.json").read_text()) for folder in (single, pair)]
    assert configs[1]["measured"]["step"] == configs[0]["measured"]["step"]
    weights = load_file(pair / "out" / "model.safetensors")
    start = load_file(pair / "out" / "checkpoint-16" / "model.safetensors")
    assert weights.keys() == start.keys()
    assert max(tensor.abs().max().item() for tensor in weights.values()) > 0.1


@pytest.mark.slow
def test_micro_steps_in_which_a_process_has_nothing(tmp_path: Path, single: Path) -> None:
    """One completion each, five accumulated: the same head still."""
    owners = [{i >= 10 for i in step} for step in deal(20, 10, 0, 0)]
    assert {True} in owners
    assert {False} in owners
    finished(tmp_path, *TORCHRUN, *words_of(tmp_path, 1, steps=5, rollout=10))
    assert_same_head(single, tmp_path)
    assert seen(single) == seen(tmp_path)


@pytest.mark.slow
def test_killed_process_ends_the_job_and_it_goes_on(tmp_path: Path, single: Path, pair: Path) -> None:
    """kill -9 of one, before the second checkpoint: the job ends soon and not well, and the same command ends as if
    nothing had happened, to the bit; so does one process with the whole batch, and one with a part of it says what to
    set."""
    words = words_of(tmp_path, 5)
    (tmp_path / "plan.json").write_text(json.dumps(["SIGKILL", "1", 8]))
    ended = run(tmp_path, *TORCHRUN, *words)
    took_s = time.time() - json.loads((tmp_path / "done.json").read_text())
    assert ended.returncode != 0
    assert "Signal 9 (SIGKILL)" in ended.stderr
    assert took_s < PROMPT_SECONDS
    assert not (tmp_path / "out" / "model.safetensors").exists()
    alone = tmp_path / "alone"
    shutil.copytree(tmp_path, alone)

    assert "going on from out/checkpoint-4" in finished(tmp_path, *TORCHRUN, *words)
    heads = [folder / "out" / "model.safetensors" for folder in (tmp_path, pair)]
    assert heads[0].read_bytes() == heads[1].read_bytes()
    assert measurements(tmp_path) == measurements(pair)

    refused = run(alone, *words_of(alone, 5))
    assert refused.returncode == 2
    assert "set trainer.per_device_train_batch_size=10 trainer.steps_per_generation=2" in refused.stderr
    assert "going on from out/checkpoint-4" in finished(alone, *words_of(alone, 10))
    assert_same_head(single, alone)


@pytest.mark.slow
def test_run_of_one_process_goes_on_in_two(tmp_path: Path, single: Path) -> None:
    shutil.copytree(single, tmp_path / "two")
    folder = tmp_path / "two"
    for name in ("out/model.safetensors", "out/config.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "out" / "checkpoint-16")
    kept = sorted(path.name for path in (folder / "out").glob("checkpoint-*"))
    assert len(kept) == 1
    printed = finished(folder, *TORCHRUN, *words_of(folder, 5))
    assert f"going on from out/{kept[0]}" in printed
    assert_same_head(single, folder)


@pytest.mark.slow
def test_collapse_is_seen_by_all(tmp_path: Path) -> None:
    """Both processes go back to the best checkpoint, which one of them wrote, and sample anew under it."""
    folders = tmp_path / "one", tmp_path / "two"
    alarm = ("collapse.weight=0.88", "collapse.patience=1")
    told = []
    for folder, launcher, size in zip(folders, ((), TORCHRUN), (10, 5), strict=True):
        ended = run(folder, *launcher, *words_of(folder, size), *alarm)
        assert ended.returncode == 0, ended.stderr
        told.append(
            [line.partition("the head has")[2] for line in ended.stderr.splitlines() if "has collapsed" in line]
        )
    assert told[0] == told[1]
    assert any("going back to the best head" in line for line in told[0])
    assert_same_head(*folders)
    assert seen(folders[0]) == seen(folders[1])


@pytest.mark.slow
def test_signal_to_one_stops_all_at_a_rollouts_end(tmp_path: Path, pair: Path) -> None:
    words = words_of(tmp_path, 5)
    (tmp_path / "plan.json").write_text(json.dumps(["SIGINT", "1", 4]))
    ended = run(tmp_path, *TORCHRUN, *words)
    assert "stopped at step 8; the same command goes on from there" in ended.stdout
    assert ended.stdout.count("stopped at step") == 1
    assert ended.returncode != 0
    finished(tmp_path, *TORCHRUN, *words)
    heads = [folder / "out" / "model.safetensors" for folder in (tmp_path, pair)]
    assert heads[0].read_bytes() == heads[1].read_bytes()


@pytest.mark.slow
def test_error_of_one_process_is_told(tmp_path: Path) -> None:
    words = words_of(tmp_path, 5)
    (tmp_path / "plan.json").write_text(json.dumps(["raise", "1", 4]))
    ended = run(tmp_path, *TORCHRUN, *words)
    assert ended.returncode != 0
    assert "rank 1: error: reward 'toy' raised RuntimeError: no such luck" in ended.stderr
    # Of the other one nothing but a line; the launcher ends it at once, and what it says may come first.
    assert "gloo" not in ended.stderr
    assert math.isfinite(measurements(tmp_path)[-1]["step"])
