"""The head trainer by itself: it can learn a batch, and accumulation, order and guards are what they should be."""

import os
import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.decoding.decoder import Decoder
from models.decoding.reference import decode_plainly
from models.decoding.rows import GenerationParams
from models.drafters.heads import HeadsDrafter
from models.heads import HEAD_KINDS, DraftHead, HeadOptions, build_head
from models.sampling import SamplingParams
from models.target.model import Target
from models.target.tiny import make_tiny_target
from tests.models.decoding.scripted import random_prompts
from train.data.examples import OnlineRows
from train.data.prompts import Example
from train.heads.losses import LossOptions, head_loss
from train.heads.targets import draft_bases, line_up
from train.heads.trainer import BEST_METRIC, HeadTrainer, TrainerOptions, early_stopping, training_arguments
from train.runtime.callbacks import StopOnInterrupt, StopWhenFlat

K = 3
# Float32 gradients summed in another order, after a few plain steps.
WEIGHT_TOLERANCE = 1e-5


def make_head(target: Target, kind: str = "mtp", **options: Any) -> DraftHead:
    torch.manual_seed(0)
    return build_head(target, HeadOptions(**{"kind": kind, "num_draft_tokens": K, **options}))


def own_answers(target: Target, count: int, new_tokens: int, longest: int = 12) -> list[Example]:
    """Prompts with the target's greedy answers, of different lengths."""
    examples = []
    for i, prompt in enumerate(random_prompts(count, longest=longest, seed=5)):
        answer = decode_plainly(target, prompt, new_tokens - i % 5, eos_token_ids=())
        mask = [False] * len(prompt) + [True] * len(answer)
        examples.append(Example(f"e{i}", "chat", "train", [*prompt, *answer], mask))
    return examples


class InOrder(HeadTrainer):
    """Sees the examples in the order they stand in, whatever the batch size."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def make_trainer(
    head: DraftHead, examples: Sequence[Example], folder: Path, cls: type[HeadTrainer] = HeadTrainer, **options: Any
) -> HeadTrainer:
    settings = {"warmup_steps": 0, "autocast": False, "eval_steps": 1000, "save_steps": 1000, "logging_steps": 1}
    arguments = training_arguments(TrainerOptions(**{**settings, **options}), folder, "cpu", "none")
    rows = OnlineRows(examples)
    loss = LossOptions(ce=0.5, kl=0.5)
    return cls(head, loss, SamplingParams(), args=arguments, train_dataset=rows, eval_dataset=rows)


@pytest.mark.parametrize("is_native", [True, False])
def test_autocast_only_where_the_machine_has_bfloat16(
    is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_native)
    assert training_arguments(TrainerOptions(autocast=True), tmp_path, "cpu", "none").bf16 == is_native
    assert not training_arguments(TrainerOptions(autocast=False), tmp_path, "cpu", "none").bf16


@pytest.mark.parametrize(("eval_steps", "save_steps"), [(100, 150), (0, 0), (200, 100)])
def test_what_is_saved_was_measured(eval_steps: int, save_steps: int, tmp_path: Path) -> None:
    options = TrainerOptions(eval_steps=eval_steps, save_steps=save_steps)
    with pytest.raises(
        ValueError, match=rf"trainer\.save_steps={save_steps}: must be a multiple of trainer\.eval_steps"
    ):
        training_arguments(options, tmp_path, "cpu", "none")


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_learns_one_batch_by_heart(kind: str, tmp_path: Path) -> None:
    """The loss falls to its floor, drafts are then kept to the end, and the decoder says the same."""
    target = make_tiny_target()
    examples = own_answers(target, 4, 20)
    head = make_head(target, kind, num_layers=1, own_output_head=True)
    trainer = make_trainer(
        head,
        examples,
        tmp_path,
        max_steps=100,
        per_device_train_batch_size=4,
        learning_rate=2e-2,
        weight_decay=0.0,
        logging_steps=10,
    )
    trainer.loss_options = LossOptions(ce=1.0, kl=0.0)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.1 * losses[0]
    accuracy = [line["top1_head1"] for line in trainer.state.log_history if "top1_head1" in line]
    assert accuracy[-1] > 0.95
    simulated = trainer.simulate(OnlineRows(examples))
    assert simulated.mean_block_length > 3.0
    first = examples[0]
    prompt = first.input_ids[: first.loss_mask.index(True)]
    answer = first.input_ids[len(prompt) :]
    result = Decoder(target, HeadsDrafter(head.eval()), K).generate(
        [prompt], GenerationParams(len(answer), eos_token_ids=())
    )[0]
    assert result.tokens == answer
    assert result.counters.mean_block_length == trainer.simulate(OnlineRows(examples[:1])).mean_block_length


def test_simulates_answers_alone(tmp_path: Path) -> None:
    """A conversation counts like its answers one by one; what stands between and after them is nobody's draft."""
    target = make_tiny_target()
    text = random_prompts(1, longest=60, seed=9)[0] + list(range(40, 80))
    spans = [(3, 9), (12, 13), (20, 31)]
    mask = [any(start <= at < end for start, end in spans) for at in range(len(text))]
    apart = [
        Example(f"a{i}", "chat", "selection", text[:end], [at >= start for at in range(end)])
        for i, (start, end) in enumerate(spans)
    ]
    head = make_head(target, "medusa")
    trainer = make_trainer(head, apart, tmp_path)
    trainer.sampling = SamplingParams(temperature=1.0)
    together = trainer.simulate(OnlineRows([Example("a", "chat", "selection", text, mask)]))
    alone = trainer.simulate(OnlineRows(apart))
    assert together.mean_block_length == pytest.approx(alone.mean_block_length, rel=1e-5)
    assert together.acceptance_at == pytest.approx(alone.acceptance_at, rel=1e-5)


def train_few_steps(folder: Path, num_rows: int, accumulation: int) -> tuple[DraftHead, list[dict[str, float]]]:
    target = make_tiny_target()
    head = make_head(target)
    # Rows of unlike lengths: batches hold different numbers of answer tokens, so a mean of means would show.
    trainer = make_trainer(
        head,
        own_answers(target, 24, 20),
        folder,
        InOrder,
        max_steps=3,
        per_device_train_batch_size=num_rows,
        gradient_accumulation_steps=accumulation,
        learning_rate=0.05,
        max_grad_norm=0.0,
    )
    trainer.optimizer = torch.optim.SGD(head.parameters(), lr=0.05)
    trainer.train()
    return head, [line for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize(("num_rows", "accumulation"), [(4, 2), (2, 4), (1, 8)])
def test_accumulation_equals_a_larger_batch(num_rows: int, accumulation: int, tmp_path: Path) -> None:
    """Weights, and the losses that are logged."""
    whole, whole_log = train_few_steps(tmp_path / "whole", 8, 1)
    parts, parts_log = train_few_steps(tmp_path / "parts", num_rows, accumulation)
    start = make_head(make_tiny_target())
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(whole.parameters(), start.parameters(), strict=True))
    for (name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(other, one, atol=WEIGHT_TOLERANCE, rtol=0, msg=name)
    for one, other in zip(whole_log, parts_log, strict=True):
        assert {key: other[key] for key in one if key not in ("grad_norm", "epoch")} == pytest.approx(
            {key: value for key, value in one.items() if key not in ("grad_norm", "epoch")}, rel=1e-4
        )


def test_logged_loss_is_the_loss_an_answer_token(tmp_path: Path) -> None:
    """One step without movement: loss, loss a head and accuracy a head, from the loss itself."""
    target = make_tiny_target()
    examples = own_answers(target, 4, 20)
    trainer = make_trainer(
        make_head(target), examples, tmp_path, max_steps=1, per_device_train_batch_size=4, learning_rate=0.0
    )
    trainer.train()
    logged = next(line for line in trainer.state.log_history if "loss" in line)
    batch = trainer.data_collator([OnlineRows(examples)[i] for i in range(4)])
    ids, mask = batch["input_ids"], batch["loss_mask"]
    head, hidden, bases = make_head(target), target.hidden(ids), draft_bases(mask)
    loss = head_loss(head, line_up(head(hidden, ids, bases), bases, hidden, ids, mask), LossOptions(ce=0.5, kl=0.5))
    assert logged["loss"] == pytest.approx(loss.total.item() / mask.sum().item(), rel=1e-5)
    for k in range(K):
        assert logged[f"loss_head{k + 1}"] == pytest.approx((loss.loss_K / loss.count_K)[k].item(), abs=1e-4)
        assert logged[f"top1_head{k + 1}"] == pytest.approx((loss.correct_K / loss.count_K)[k].item(), abs=1e-4)


def test_every_example_is_seen_once_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the last, short batch; another order in the second epoch."""
    target = make_tiny_target()
    examples = own_answers(target, 11, 8)
    trainer = make_trainer(
        make_head(target), examples, tmp_path, num_train_epochs=2, per_device_train_batch_size=4, learning_rate=0.0
    )
    seen: list[tuple[int, ...]] = []
    original = HeadTrainer.compute_loss

    def note(self: HeadTrainer, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        seen.extend(tuple(row.tolist()) for row in inputs["input_ids"])
        return original(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(HeadTrainer, "compute_loss", note)
    trainer.train()
    assert trainer.state.global_step == 6

    def index_of(row: tuple[int, ...]) -> int:
        return next(i for i, e in enumerate(examples) if row[: len(e.input_ids)] == tuple(e.input_ids))

    epochs = [[index_of(row) for row in seen[:11]], [index_of(row) for row in seen[11:]]]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(11))
    assert epochs[0] != epochs[1]


def test_batch_without_labels_is_an_error(tmp_path: Path) -> None:
    target = make_tiny_target()
    examples = [Example("a", "chat", "train", [5, 6, 7, 8], [False, False, False, True])]
    trainer = make_trainer(make_head(target), examples, tmp_path, max_steps=1)
    with pytest.raises(ValueError, match=r"a batch has no answer token to draft; check the loss masks"):
        trainer.train()


def test_weights_are_clipped_and_scheduled(tmp_path: Path) -> None:
    """Warm-up from zero, then a cosine to zero, at the options' peak."""
    target = make_tiny_target()
    trainer = make_trainer(
        make_head(target),
        own_answers(target, 4, 8),
        tmp_path,
        max_steps=10,
        warmup_steps=4,
        learning_rate=1e-3,
        per_device_train_batch_size=4,
    )
    trainer.train()
    rates = [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]
    assert rates[:5] == pytest.approx([0.0, 2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert trainer.args.max_grad_norm == 1.0


def test_only_the_head_is_in_optimizer_and_checkpoint(tmp_path: Path) -> None:
    target = make_tiny_target()
    head = make_head(target, own_output_head=True)
    trainer = make_trainer(head, own_answers(target, 4, 8), tmp_path, max_steps=1, save_steps=1, eval_steps=1)
    trainer.train()
    trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in head.parameters()}
    assert load_file(tmp_path / "checkpoint-1" / "model.safetensors").keys() == head.state_dict().keys()


class FakeState:
    def __init__(self, lengths: Sequence[float]) -> None:
        self.log_history = [{"loss": 1.0}, *({BEST_METRIC: length} for length in lengths)]


class FakeControl:
    should_training_stop = False
    should_save = False


@pytest.mark.parametrize(
    ("patience", "lengths", "stops"),
    [
        (1, [], False),
        (1, [1.0], False),
        (1, [1.0, 1.1], False),
        (1, [1.0, 1.0], True),
        (2, [1.0, 1.2, 1.1], False),
        (2, [1.0, 1.2, 1.1, 1.2], True),
        (2, [1.0, 1.2, 1.1, 1.3], False),
        (3, [2.0, 1.0, 1.1, 1.2], True),
    ],
)
def test_stops_when_flat(patience: int, lengths: list[float], stops: bool) -> None:
    for event in ("on_evaluate", "on_train_begin"):
        control = FakeControl()
        getattr(StopWhenFlat(patience, BEST_METRIC), event)(None, FakeState(lengths), control)
        assert control.should_training_stop == stops


def test_patience_zero_never_stops() -> None:
    assert early_stopping(TrainerOptions()) == []
    assert [callback.patience for callback in early_stopping(TrainerOptions(patience=4))] == [4]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_saves_and_stops_second_raises(number: int) -> None:
    """And the handlers that were there before come back."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    stop = StopOnInterrupt()
    stop.on_train_begin()
    try:
        control = FakeControl()
        stop.on_step_end(None, None, control)
        assert not control.should_training_stop
        os.kill(os.getpid(), number)
        stop.on_step_end(None, None, control)
        assert control.should_save
        assert control.should_training_stop
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    finally:
        stop.restore()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
