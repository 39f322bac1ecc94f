"""Distilling a draft model on transformers' Trainer: the loss against the target, and the held-out acceptance.

Only the student is the Trainer's model, and only its trained tensors are in optimizer and checkpoints; the target is
read, never moved or written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.decoding.rows import stream_seed
from train.distill.losses import DistillOptions, answer_places, distill_loss
from train.distill.measure import HeldOut
from train.distill.samples import answer_anew
from train.distill.student import Student
from train.heads.trainer import AnswerTrainer
from train.runtime.callbacks import NonFinite


class DistillTrainer(AnswerTrainer):
    """Trainer whose model is a Student and whose metric is the simulated mean block length."""

    def __init__(self, student: Student, heldout: HeldOut, options: DistillOptions, **kwargs: Any) -> None:
        super().__init__(student, eval_dataset=heldout.rows, **kwargs)
        self.student = student
        self.heldout = heldout
        self.target = heldout.target
        self.options = options

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """The optimizer step's batches, some of them with answers of the draft's own."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not self.options.on_policy:
            return batches, num_items
        batches = [self._maybe_anew(batch, index) for index, batch in enumerate(batches)]
        return batches, self._get_num_items_in_batch(batches, device)

    def _maybe_anew(self, batch: dict[str, Tensor], index: int) -> dict[str, Tensor]:
        """Depends on seed, step and place in it alone, so that a resumed run draws what it would have drawn."""
        place = self.state.global_step * self.args.gradient_accumulation_steps + index
        seed = stream_seed(self.args.seed, place * self.args.world_size + self.args.process_index)
        if torch.rand((), generator=torch.Generator().manual_seed(seed)) >= self.options.on_policy:
            return batch
        view, temperature = self.student.view, self.options.on_policy_temperature
        return answer_anew(view, batch, temperature, self.target.eos_token_ids, seed)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        ids_BT = inputs["input_ids"]
        places = answer_places(inputs["loss_mask"])
        count = torch.tensor(float(len(places[0])))
        num_tokens = count if num_items_in_batch is None else num_items_in_batch
        if not count or not num_tokens > 0:
            raise ValueError("a batch has no answer token to learn; check the loss masks and trainer.max_length")
        teacher_BTH = inputs["hidden"] if "hidden" in inputs else self.target.hidden(ids_BT)
        states_BTH = model(ids_BT)
        sums = distill_loss(self.target, self.student.view, teacher_BTH[places], states_BTH[places], self.options)
        if not torch.isfinite(sums.total):
            raise NonFinite(f"the loss is {sums.total.item()} at step {self.state.global_step}")
        self._book(acceptance=sums.overlap, agreement=sums.agreed, count=count)
        # With several processes gradients are averaged, while num_items_in_batch counts all of them.
        return sums.total / num_tokens * (self.accelerator.num_processes if num_items_in_batch is not None else 1)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the acceptance at temperature 1 and the agreement of first guesses since the last line."""
        if "loss" in logs and self._sums:
            for name in ("acceptance", "agreement"):
                logs[name] = round((self._sums[name] / self._sums["count"]).item(), 4)
            self._sums = {}
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """What the held-out answers say."""
        measured = self.heldout.measure(self.student.view)
        metrics = {
            f"{metric_key_prefix}_block_length": measured.mean_block_length,
            f"{metric_key_prefix}_acceptance": measured.acceptance,
            f"{metric_key_prefix}_agreement": measured.agreement,
        }
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
