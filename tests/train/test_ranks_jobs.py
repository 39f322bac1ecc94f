"""Whole jobs of several processes, as launchers start them: they end as one process does, killed on the way or not.

The task is such that what goes wrong shows: the last step of an epoch has fewer examples than the others, training goes
over into a second epoch, gradients are clipped (so that one that is averaged twice moves another way), and every step's
loss and gradient norm is compared, since Adam's steps by themselves do not depend on the gradient's size.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.train.launched import (
    LOG_TOLERANCE,
    NUM_HELDOUT,
    NUM_TRAIN,
    ON_CPU,
    WEIGHT_TOLERANCE,
    deepspeed,
    files_of,
    finish,
    kill_when,
    last_step,
    require_same,
    run,
    start,
    torchrun,
    words,
)
from train.runtime.checkpoints import last_whole
from train.runtime.resume import MARK

# A launcher looks at its processes every tenth of a second, and gives the others time to end.
PROMPTLY_S = 30.0
HEADS = Path("work") / "medusa"
SHARDS = ("work/answers/shard-*", "work/hidden/*/shard-*")


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a single process makes of the task, undisturbed."""
    folder = tmp_path_factory.mktemp("one")
    code, out, err = run(folder, [*torchrun(1), "train.mtp", *words(folder, 1)])
    assert code == 0, err
    assert out.count("heads are in") == 1
    return folder


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two make of it."""
    folder = tmp_path_factory.mktemp("two")
    code, out, err = run(folder, [*torchrun(2), "train.mtp", *words(folder, 2)])
    assert code == 0, err
    assert out.count("heads are in") == 1
    return folder


def require_same_shards(one: Path, two: Path) -> None:
    """Answers and hidden states to the byte, none lost and none left half written."""
    found = [{name: data for pattern in SHARDS for name, data in files_of(of, pattern).items()} for of in (one, two)]
    assert found[0] == found[1]
    assert len(found[0]) == -(-(NUM_TRAIN + NUM_HELDOUT) // 4) + NUM_TRAIN + NUM_HELDOUT
    assert not list(two.glob("work/**/.*.partial"))


@pytest.mark.slow
def test_two_processes_end_as_one(by_one: Path, by_two: Path) -> None:
    """With output heads of their own, which are used behind the forward that is watched for gradients."""
    require_same_shards(by_one, by_two)
    require_same(by_one / HEADS, by_two / HEADS, WEIGHT_TOLERANCE, LOG_TOLERANCE)


@pytest.mark.slow
def test_only_the_first_writes(by_one: Path, by_two: Path) -> None:
    """File for file what one process leaves; beside each checkpoint's random state, which is each process's own."""

    def names(folder: Path) -> set[str]:
        files = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".out", ".err"))
        return {str(path.relative_to(folder)) for path in files if not path.name.startswith("rng_state")}

    assert names(by_one) == names(by_two)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "accumulation"), [(2, 2), (4, 1)])
def test_other_ways_to_the_same_global_batch(by_one: Path, tmp_path: Path, num_ranks: int, accumulation: int) -> None:
    """Two passes a step, or four processes: the steps have the same examples in them."""
    parts = [f"trainer.gradient_accumulation_steps={accumulation}"]
    command = [*torchrun(num_ranks), "train.mtp", *words(tmp_path, num_ranks * accumulation, *parts)]
    code, _, err = run(tmp_path, command)
    assert code == 0, err
    require_same_shards(by_one, tmp_path)
    require_same(by_one / HEADS, tmp_path / HEADS, WEIGHT_TOLERANCE, LOG_TOLERANCE)


def answering(folder: Path) -> bool:
    return any((folder / "work" / "answers").glob("shard-*"))


def caching(folder: Path) -> bool:
    return any((folder / "work" / "hidden" / "train").glob("shard-*"))


def training(folder: Path) -> bool:
    """In the second epoch, behind the checkpoint of step 30."""
    return last_step(folder / HEADS) >= 33


def unfinished(folder: Path, stage: str) -> bool:
    """What shows that a job was killed in the midst of a stage."""
    if stage == "train":
        return (folder / HEADS / "checkpoint-30").is_dir() and not (folder / HEADS / "checkpoint-40").exists()
    total = {"answers": -(-(NUM_TRAIN + NUM_HELDOUT) // 4), "hidden/train": NUM_TRAIN}[stage]
    return 0 < len(list((folder / "work" / stage).glob("shard-*"))) < total


STAGES = (("answers", answering), ("hidden/train", caching), ("train", training))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "killed"),
    [((2, 2, 2, 2), 1), ((2, 1, 2, 1), 0), ((1, 2, 1, 2), 0)],
    ids=["as many each time", "two first", "one first"],
)
def test_killed_in_every_stage(
    by_one: Path, by_two: Path, tmp_path: Path, counts: tuple[int, ...], killed: int
) -> None:
    """SIGKILL to one process in each stage; the job ends, and the next start goes on, also as another number.

    As many processes each time end with the very heads of an undisturbed run.
    """
    for num_ranks, (stage, began) in zip(counts, STAGES, strict=False):
        process = start(tmp_path, [*torchrun(num_ranks), "train.mtp", *words(tmp_path, num_ranks)])
        took_s = kill_when(process, lambda began=began: began(tmp_path), killed, num_ranks)
        code, _, err = finish(tmp_path, process)
        assert unfinished(tmp_path, stage), "the job was killed too late to show anything"
        assert code != 0
        assert took_s < PROMPTLY_S
        assert num_ranks == 1 or "SIGKILL" in err
    code, out, err = run(tmp_path, [*torchrun(counts[-1]), "train.mtp", *words(tmp_path, counts[-1])])
    assert code == 0, err
    assert "going on from work/medusa/checkpoint-30" in out
    require_same_shards(by_one, tmp_path)
    if set(counts) == {2}:
        require_same(by_two / HEADS, tmp_path / HEADS)
    else:
        require_same(by_one / HEADS, tmp_path / HEADS, WEIGHT_TOLERANCE, LOG_TOLERANCE)


has_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
# Weights are gathered as they are in large heads, and not kept because they are small.
ZERO3 = ("deepspeed=zero3", "+deepspeed.zero_optimization.stage3_param_persistence_threshold=0")
MTP = Path("work") / "mtp"
ZERO_STEPS = 24  # an epoch has 21


def zero_words(folder: Path, num_ranks: int, *more: str) -> list[str]:
    return ["train.mtp", *words(folder, num_ranks, *more, kind="mtp", max_steps=ZERO_STEPS)]


@pytest.fixture(scope="module")
def mtp_by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recursive head, which has a weight that is a single number, by one process without deepspeed."""
    folder = tmp_path_factory.mktemp("mtp")
    code, _, err = run(folder, [*torchrun(1), *zero_words(folder, 1)])
    assert code == 0, err
    return folder


@has_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    [("deepspeed=zero1",), ("deepspeed=zero2",), ("deepspeed=zero2_offload",), ZERO3],
    ids=["zero1", "zero2", "zero2_offload", "zero3"],
)
def test_zero_ends_as_one_process(mtp_by_one: Path, tmp_path: Path, choice: tuple[str, ...]) -> None:
    """By deepspeed's own launcher, with what the stage splits split over two processes; the file is a plain one's."""
    code, out, err = run(tmp_path, [*deepspeed(2), *zero_words(tmp_path, 2, *choice)], **ON_CPU)
    assert code == 0, err
    assert out.count("heads are in") == 1
    require_same_shards(mtp_by_one, tmp_path)
    require_same(mtp_by_one / MTP, tmp_path / MTP, WEIGHT_TOLERANCE, LOG_TOLERANCE)
    parts = (tmp_path / MTP).glob(f"checkpoint-{ZERO_STEPS}/global_step{ZERO_STEPS}/*zero_pp_rank_*optim_states.pt")
    assert len(list(parts)) == 2


@has_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("choice", [("deepspeed=zero2",), ZERO3], ids=["zero2", "zero3"])
def test_zero_killed_and_gone_on(mtp_by_one: Path, tmp_path: Path, choice: tuple[str, ...]) -> None:
    """Ends as it would have; and says at once, with one line, that another number of processes cannot take it up."""
    command = [*deepspeed(2), *zero_words(tmp_path, 2, *choice)]
    process = start(tmp_path, command, **ON_CPU)
    took_s = kill_when(process, lambda: last_step(tmp_path / MTP) >= 22, 1, 2)
    assert finish(tmp_path, process)[0] != 0
    assert took_s < PROMPTLY_S
    assert last_whole(tmp_path / MTP, (MARK,)) == str(tmp_path / MTP / "checkpoint-20")
    code, _, err = run(tmp_path, [*torchrun(1), *zero_words(tmp_path, 1, *choice)], RANK="0", WORLD_SIZE="1")
    assert code == 2
    assert "checkpoint-20 was saved by 2 processes, now 1" in err
    code, out, err = run(tmp_path, command, **ON_CPU)
    assert code == 0, err
    assert "going on from work/mtp/checkpoint-20" in out
    require_same(mtp_by_one / MTP, tmp_path / MTP, WEIGHT_TOLERANCE, LOG_TOLERANCE)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("submitit") is None, reason="hydra-submitit-launcher is not installed")
def test_submitit_ends_as_one_process(by_one: Path, tmp_path: Path) -> None:
    """Hydra's launcher for Slurm, whose local sibling starts the tasks of a job here: two are two processes."""
    launcher = ["--multirun", "hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2"]
    sweep = ["hydra.sweep.dir=sweep", "hydra.launcher.cpus_per_task=1"]
    code, _, err = run(tmp_path, [*torchrun(1), "train.mtp", *launcher, *sweep, *words(tmp_path, 2)])
    assert code == 0, err
    require_same_shards(by_one, tmp_path)
    require_same(by_one / HEADS, tmp_path / HEADS, WEIGHT_TOLERANCE, LOG_TOLERANCE)
    outputs = [path.read_text() for path in (tmp_path / "sweep").glob(".submitit/*/*_log.out")]
    assert len(outputs) == 2
    assert sum("heads are in" in output for output in outputs) == 1


@pytest.mark.slow
def test_accelerate_launch(by_one: Path, tmp_path: Path) -> None:
    """As it launches several GPUs, which works on CPUs, too; as it launches CPUs it would start one, and is refused."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines=1", "--num_processes=2"]
    rest = ["--dynamo_backend=no", "-m", "train.mtp", *words(tmp_path, 2)]
    code, _, err = run(tmp_path, [*launcher, "--cpu", "--mixed_precision=no", *rest])
    assert code != 0
    assert "error: accelerate launch starts one process on CPUs" in err
    code, _, err = run(tmp_path, [*launcher, "--multi_gpu", "--mixed_precision=bf16", *rest])
    assert code != 0
    assert "error: ACCELERATE_MIXED_PRECISION=bf16 comes from accelerate's settings" in err
    assert not (tmp_path / "work").exists()
    code, _, err = run(tmp_path, [*launcher, "--multi_gpu", "--mixed_precision=no", *rest])
    assert code == 0, err
    require_same(by_one / HEADS, tmp_path / HEADS, WEIGHT_TOLERANCE, LOG_TOLERANCE)
