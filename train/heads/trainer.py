"""Training draft heads on transformers' Trainer: the loss, the held-out acceptance.

Only the head is the Trainer's model: the target is never in its optimizer, its checkpoints or its device moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import TrainerCallback, TrainingArguments

from models.heads import DraftHead
from models.sampling import SamplingParams
from models.target.model import AUTO, Target, resolve_dtype
from train.data.examples import BucketSampler, Row, WithBlanks, collate
from train.heads.acceptance import Simulated, accept_probabilities, accuracy_by_rank, answer_spans, rank_hits, simulate
from train.heads.hidden_cache import answer_positions, log_normalisers
from train.heads.losses import HeadLoss, LossOptions, supervised_loss
from train.heads.zero import HeadWithLoss, give_dimensions, take_dimensions
from train.runtime.callbacks import NonFinite, NoStepTooMany, StopWhenFlat
from train.runtime.deepspeed_options import SHARDS_WEIGHTS, complete, zero_stage
from train.runtime.jsonl_logger import report_to
from train.runtime.ranks import gather_pieces, is_main, is_mine, num_ranks, sum_over_ranks

BEST_METRIC = "eval_block_length"


@dataclass
class TrainerOptions:
    """What a user sets of transformers' TrainingArguments, by the same names where they have one.

    max_steps: optimizer steps; 0 means num_train_epochs decide. num_train_epochs: passes over the training texts.
    per_device_train_batch_size: texts in a micro-step, on each device. gradient_accumulation_steps: micro-steps in an
    optimizer step. learning_rate: the highest of the schedule. weight_decay: AdamW's. warmup_steps: optimizer steps
    over which the learning rate rises from 0. lr_scheduler_type: how it falls then, a name of transformers'
    SchedulerType. max_grad_norm: gradients are scaled down to this norm, 0 leaves them. logging_steps: optimizer steps
    between two lines of the log. seed: of first weights and of the texts' order. eval_steps: optimizer steps between
    two measurements on held-out texts. save_steps: optimizer steps between two checkpoints, a multiple of eval_steps.
    save_total_limit: most checkpoints that are kept, the best one among them. patience: evaluations without
    a longer held-out block before it stops, 0 never. autocast: bf16 matrix products over float32 master weights, on
    a machine that has them (see `models.target.model.resolve_dtype`).
    max_length: tokens of prompt and answer that are used. start_tokens: training text that the first weights of an mtp
    or eagle3 head are fitted to, 0 for none; they need more of
    it than 4 (mtp) or 16 (eagle3) times the hidden size.
    """

    num_train_epochs: float = 3.0
    max_steps: int = 0
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 50
    lr_scheduler_type: str = "cosine"
    max_grad_norm: float = 1.0
    eval_steps: int = 200
    save_steps: int = 200
    logging_steps: int = 10
    patience: int = 0
    autocast: bool = True
    max_length: int = 1024
    start_tokens: int = 16384
    seed: int = 0
    save_total_limit: int = 2


Measured = TypeVar("Measured")


class AnswerTrainer(NoStepTooMany):
    """Trainer on the rows of `train.data.examples`, whose `compute_loss` is a mean over the answer tokens of a step."""

    def __init__(self, model: nn.Module, train_dataset: Any = None, **kwargs: Any) -> None:
        rows = WithBlanks(train_dataset) if num_ranks() > 1 and train_dataset is not None else train_dataset
        super().__init__(model=model, data_collator=collate, train_dataset=rows, **kwargs)
        # Trainer then counts the answer tokens of the whole optimizer step, which `compute_loss` divides by: gradient
        # accumulation and a larger batch give the same gradient.
        self.model_accepts_loss_kwargs = True
        self._sums: dict[str, Tensor] = {}  # since the last line of the log
        self._sampler: BucketSampler | None = None

    def _get_train_sampler(self, train_dataset: Any = None) -> BucketSampler:
        dataset = train_dataset if train_dataset is not None else self.train_dataset
        # Whole batches of the step, of which each process and each accumulated pass takes its part: how many there are
        # changes nothing.
        at_once = self.args.train_batch_size * num_ranks()
        size = at_once * self.args.gradient_accumulation_steps
        self._sampler = BucketSampler(dataset.lengths, size, self.args.seed, at_once if num_ranks() > 1 else 1)
        return self._sampler

    def _run_epoch(self, **kwargs: Any) -> None:
        # accelerate's loaders do not pass it on where several processes skip what a stopped run had seen.
        if self._sampler is not None:
            self._sampler.set_epoch(kwargs["epoch"])
        super()._run_epoch(**kwargs)

    def _book(self, **sums: Tensor) -> None:
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(value)) + value.detach()


class HeadTrainer(AnswerTrainer):
    """Trainer whose model is a DraftHead and whose metric is the simulated mean block length."""

    def __init__(
        self, head: DraftHead, loss: LossOptions, sampling: SamplingParams, args: TrainingArguments, **kwargs: Any
    ) -> None:
        self.sharded = HeadWithLoss(head, loss) if zero_stage(args.deepspeed or {}) == SHARDS_WEIGHTS else None
        if args.deepspeed:
            give_dimensions(head)
        super().__init__(head if self.sharded is None else self.sharded, args=args, **kwargs)
        self._head = head
        self.loss_options = loss
        self.sampling = sampling

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        hidden_BTH, normaliser_BT = self._teacher(inputs)
        batch = (hidden_BTH, inputs["input_ids"], inputs["loss_mask"], normaliser_BT)
        num_tokens = inputs["loss_mask"].sum() if num_items_in_batch is None else num_items_in_batch
        if self.sharded is None:
            loss = supervised_loss(model, self._head, *batch, self.loss_options)
        else:
            loss = HeadLoss(*model(*batch))
        is_empty = num_ranks() == 1 and not loss.count_K.any()  # one of several may have blank rows alone
        if is_empty or not num_tokens > 0:
            raise ValueError("a batch has no answer token to draft; check the loss masks and trainer.max_length")
        if not torch.isfinite(loss.total):
            raise NonFinite(f"the loss is {loss.total.item()} at step {self.state.global_step}")
        self._book(loss_K=loss.loss_K, correct_K=loss.correct_K, count_K=loss.count_K)
        # With several processes gradients are averaged, while num_items_in_batch counts all of them.
        return loss.total / num_tokens * (self.accelerator.num_processes if num_items_in_batch is not None else 1)

    @property
    def head(self) -> DraftHead:
        """The head with the weights of now; where it is sharded, a copy, for which all processes must ask."""
        return self._head if self.sharded is None else self.sharded.whole()

    def finished(self) -> DraftHead:
        """The head as it is saved, after training. All processes must ask."""
        head = self.head
        take_dimensions(head)
        return head

    def _teacher(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Hidden states [B, T, H] and log normalisers [B, T], from the cache's batch or from the target itself.

        The former with the layers that the head reads.
        """
        if "hidden" in inputs:
            return inputs["hidden"], inputs.get("log_normaliser")
        target = self._head.target.get
        hidden_BTH = target.hidden(inputs["input_ids"], reads=self._head.reads)
        if self._head.draft_vocab is None:
            return hidden_BTH, None
        wanted_BT = answer_positions(inputs["loss_mask"])
        flat = log_normalisers(target, target.final(hidden_BTH).flatten(0, 1), wanted_BT.flatten())
        return hidden_BTH, flat.view(wanted_BT.shape).to(hidden_BTH.device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds loss and top-1 accuracy a head since the last line."""
        if "loss" in logs and self._sums:
            sums = {name: sum_over_ranks(value) for name, value in self._sums.items()}
            count_K = sums["count_K"].clamp(min=1)
            for name, key in (("loss_head", "loss_K"), ("top1_head", "correct_K")):
                for k, value in enumerate((sums[key] / count_K).tolist(), start=1):
                    logs[f"{name}{k}"] = round(value, 4)
            self._sums = {}
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The simulated decoding of held-out answers."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        simulated = self.simulate(dataset)
        metrics = {f"{metric_key_prefix}_block_length": simulated.mean_block_length}
        for k, rate in enumerate(simulated.acceptance_at, start=1):
            metrics[f"{metric_key_prefix}_acceptance{k}"] = rate
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def simulate(self, dataset: Dataset[Row]) -> Simulated:
        """Mean block length and acceptance on these examples."""
        head = self.head.eval()

        def measure(hidden_TH: Tensor, ids_T: Tensor, first: int) -> Tensor:
            return accept_probabilities(head, hidden_TH, ids_T, first, self.sampling)

        return simulate(self._answers(dataset, measure))

    def accuracy_by_rank(self, dataset: Dataset[Row]) -> list[list[float]]:
        """How often each guess of each head is right on these examples; see `acceptance.accuracy_by_rank`."""
        head = self.head.eval()
        return accuracy_by_rank(self._answers(dataset, lambda *text: rank_hits(head, *text)))

    @torch.no_grad()
    def _answers(self, dataset: Dataset[Row], measure: Callable[[Tensor, Tensor, int], Measured]) -> list[Measured]:
        """`measure` of every answer: hidden states [T, H] and ids [T] up to its end, and where it begins.

        Several processes share the examples out, and each gets all that was measured, in order.
        """
        measured: dict[int, list[Measured]] = {}
        mine = [index for index in range(len(dataset)) if is_mine(index)]  # type: ignore[arg-type]
        for index in tqdm(mine, desc="held-out", unit="text", leave=False, disable=not is_main()):
            inputs = self._prepare_inputs(collate([dataset[index]]))
            with self.compute_loss_context_manager():
                hidden_BTH, _ = self._teacher(inputs)
                ids_T = inputs["input_ids"][0]
                spans = answer_spans(inputs["loss_mask"][0])
                measured[index] = [measure(hidden_BTH[0, :end], ids_T[:end], first) for first, end in spans]
        return [one for of_example in gather_pieces(measured) for one in of_example]


def training_arguments(
    options: TrainerOptions, folder: Path, device: str, logger: str, deepspeed: Mapping[str, Any] | None = None
) -> TrainingArguments:
    """TrainingArguments for these options. Evaluation and saving share their steps, so that the best one is kept.

    With deepspeed, whose engine does its own casts, there is no autocast.
    """
    if options.eval_steps < 1 or options.save_steps < 1 or options.save_steps % options.eval_steps:
        raise ValueError(
            f"trainer.save_steps={options.save_steps}: must be a multiple of trainer.eval_steps={options.eval_steps}, "
            "so that the checkpoint that is kept was measured"
        )
    engine = complete(deepspeed or {})
    has_autocast = options.autocast and engine is None and resolve_dtype(AUTO, device) == "bfloat16"
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=options.num_train_epochs,
        max_steps=options.max_steps or -1,
        per_device_train_batch_size=options.per_device_train_batch_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        warmup_steps=options.warmup_steps,
        lr_scheduler_type=options.lr_scheduler_type,
        max_grad_norm=options.max_grad_norm,
        eval_strategy="steps",
        eval_steps=options.eval_steps,
        save_strategy="steps",
        save_steps=options.save_steps,
        save_total_limit=options.save_total_limit,
        load_best_model_at_end=True,
        metric_for_best_model=BEST_METRIC,
        greater_is_better=True,
        logging_steps=options.logging_steps,
        bf16=has_autocast,
        deepspeed=engine,
        use_cpu=device == "cpu",
        seed=options.seed,
        data_seed=options.seed,
        remove_unused_columns=False,
        report_to=report_to(logger),
        dataloader_num_workers=0,
        # Output heads of their own are used behind the model's forward, where the search would count them twice.
        ddp_find_unused_parameters=False,
    )
    # Otherwise each would train by itself, in silence, and write over what the others write.
    found = arguments.world_size
    assert found == num_ranks(), f"{num_ranks()} processes were started, and transformers sees {found}"
    return arguments


def early_stopping(options: TrainerOptions) -> list[TrainerCallback]:
    """The early-stop callback, if patience asks for it."""
    return [StopWhenFlat(options.patience, BEST_METRIC)] if options.patience else []


def require_unchanged(target: Target, fingerprint: str) -> None:
    """AssertionError where the target's weights are no longer those that had this fingerprint."""
    target._fingerprint = None
    if target.fingerprint() != fingerprint:
        raise AssertionError("the target's weights have changed during training")
