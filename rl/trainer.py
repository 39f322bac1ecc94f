"""The trainer of the ensemble head, on trl's RLOO trainer: its data flow, rewards, logging and checkpoints.

What is ours: rollouts come from our own decoder (`rl.measuring`), the loss from `rl.policy`, lambda from `rl.floor`,
and checkpoints hold the head alone. Target and drafter are held beside the trainer's model, never inside it: they are
in no optimizer, no checkpoint and no device move.

Of several processes each samples a piece of a rollout and adds what its completions give to the gradient. Whatever is
decided is decided by all of them, from what all have sampled (`rl.sharing`).
"""

from __future__ import annotations

import copy
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from transformers import ProgressCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from eval.rewards.loading import ANSWERS
from models.checkpoint import load_ensemble, save_ensemble
from models.decoding.counters import add_up
from models.ensemble import EnsembleHead
from models.files import write_text
from rl.floor import RunState
from rl.measuring import MeasuringTrainer, Pair
from rl.policy import PolicyOptions, PolicyStats, baselines, logprobs, surrogate
from rl.resume import STATE_NAME
from rl.rollout import Rollout, stack_features, verified_tokens, without_tokens
from rl.sharing import deal
from rl.trl_parts import EpochSampler, HeadPolicy, ShortProgress, checked_reward
from train.runtime.ranks import is_main, wait_for_all

MAX_ALARMS = 5


@dataclass(frozen=True)
class Stored:
    """One completion as updates use it."""

    rollout: Rollout
    reward: float
    baseline_N: Tensor
    old_logprob_N: Tensor

    def nothing(self) -> Stored:
        """One that adds nothing to a gradient: of a process that has none of a micro-step's completions."""
        return Stored(without_tokens(self.rollout), 0.0, self.baseline_N[:0], self.old_logprob_N[:0])


class DiversedTrainer(MeasuringTrainer):
    """trl's RLOO trainer for a head that weighs target against proposal."""

    def __init__(
        self,
        head: EnsembleHead,
        pair: Pair,
        policy: PolicyOptions,
        run: RunState,
        reward: Callable[..., Any],
        reward_name: str,
        rollout_batch_size: int = 0,
        provenance: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """kwargs: template_kwargs, args (of `rloo_config`), train_dataset, eval_dataset, callbacks."""
        self.policy_options = policy
        self.provenance = provenance or {}
        self._rollouts: list[Rollout] = []  # this process's, the last ones of training
        self._buffered_inputs: list[dict[str, Any]] | None  # trl's: the present rollout, a micro-step each
        self._old_logprob_N = torch.empty(0)
        self._rewards = torch.empty(0)
        self._start_weights = copy.deepcopy(head.state_dict())
        tokenizer = copy.deepcopy(pair.target.tokenizer)  # trl may give it a padding token
        super().__init__(
            pair,
            run,
            rollout_batch_size,
            model=HeadPolicy(head, pair.target),
            reward_funcs=checked_reward(reward, reward_name),
            processing_class=tokenizer,
            **kwargs,
        )
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(ShortProgress())

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        """trl's, with an order that a resumed run finds again."""
        plain = super()._get_train_sampler(dataset)
        return EpochSampler(
            plain.data_source, plain.mini_repeat_count, plain.batch_size, plain.repeat_count, plain.shuffle, plain.seed
        )

    @property
    def _number(self) -> int:
        """Of the present rollout, from 0."""
        return self._step // (self.args.steps_per_generation * self.num_iterations)

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any
    ) -> list[list[int]]:
        """Completions of this process's prompts, which come repeated already."""
        first = self.accelerator.process_index * len(prompt_ids)
        self._rollouts = self._sample(prompt_ids, self.head, self._number, first)
        return [rollout.tokens for rollout in self._rollouts]

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None, None]:
        """log pi of the last rollouts' tokens [B, T], 0 where nothing was verified; trl asks when they are fresh."""
        tokens = verified_tokens(self._rollouts)
        weights_N = model(stack_features(self._rollouts))
        self._old_logprob_N = logprobs(weights_N, tokens, self.policy_options)
        places_N = torch.cat([rollout.places_N for rollout in self._rollouts])
        logps_BT = self._old_logprob_N.new_zeros(len(self._rollouts), logits_to_keep)
        logps_BT[tokens.sequence_N, places_N] = self._old_logprob_N
        return logps_BT, None, None

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Tensor:
        """Of all processes; kept for the loss. trl passes what a row has by name: here the completion's answer, too."""
        rows = [{**row, ANSWERS: answer} for row, answer in zip(inputs, self._answers, strict=True)]
        self._rewards = super()._calculate_rewards(rows, *args, **kwargs)
        return self._rewards

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """This process's completions of the present micro-step; their rollout is sampled where it begins."""
        if self._buffered_inputs is None or self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            stored = self._generate_and_score_completions(generation_batch)["stored"]
            first = self.accelerator.process_index * len(stored)
            steps = deal(len(self._everyones), self.args.steps_per_generation, self.args.seed, self._number)
            mine = [[stored[i - first] for i in step if 0 <= i - first < len(stored)] for step in steps]
            self._buffered_inputs = [{"stored": of_step or [stored[0].nothing()]} for of_step in mine]
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """trl's rollout, and behind it what the loss needs of each completion."""
        output = super()._generate_and_score_completions(inputs)
        if self._raised_alarm():
            output = super()._generate_and_score_completions(inputs)
        run, rollouts, everyones = self.run_state, self._rollouts, self._everyones
        run.floor.update(self._rewards[:, 0].mean().item())
        self.policy_options = replace(self.policy_options, lam=run.floor.present_lam)
        mine = slice(start := self.accelerator.process_index * len(rollouts), start + len(rollouts))
        parts = zip(
            rollouts,
            self._rewards[mine, 0].tolist(),
            self._baselines()[mine],
            self._old_logprob_N.split([len(rollout.p_N) for rollout in rollouts]),
            strict=True,
        )
        output["stored"] = [Stored(*part) for part in parts]
        self._book(
            "train",
            lam=run.floor.present_lam,
            acceptance_rate=add_up(rollout.counters for rollout in everyones).acceptance_rate,
            certificate=fmean(rollout.certificate for rollout in everyones),
        )
        return output

    def _baselines(self) -> list[Tensor]:
        """Of each completion of all processes: its group may lie in several."""
        everyones = self._everyones
        reward_S = self._rewards[:, 0].cpu()
        group_S = torch.arange(len(everyones)) // self.num_generations
        weights_N = torch.cat([rollout.weights_N for rollout in everyones])
        baseline_N = baselines(weights_N, verified_tokens(everyones), reward_S, group_S, self.policy_options)
        return list(baseline_N.to(self.accelerator.device).split([len(rollout.p_N) for rollout in everyones]))

    def _raised_alarm(self) -> bool:
        """Whether the head has collapsed and another one stands in its place now; or it warns, or stops."""
        run = self.run_state
        weight = torch.cat([rollout.weights_N for rollout in self._everyones]).mean().item()
        reason = run.alarm.observe(weight, self._rewards[:, 0].mean().item(), run.floor.lossless_reward)
        if reason is None:
            return False
        action = run.alarm.options.action
        if action == "restore" and run.alarm.num_alarms > MAX_ALARMS:
            action = "stop"
        what = {"warn": "going on", "stop": "stopping", "restore": "going back to the best head, with half the lambda"}
        if is_main():
            warnings.warn(
                f"the head has collapsed at step {self.state.global_step}: {reason}; {what[action]}. Lower lam, set a "
                "reward floor (floor.max_drop), or lower trainer.learning_rate",
                stacklevel=2,
            )
        if action == "stop":
            self.control.should_training_stop = True
        if action != "restore":
            return False
        self._restore_best()
        run.floor.hold_back(2.0)
        return True

    def _restore_best(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None:
            self.head.load_state_dict(self._start_weights)
        else:
            self._load_from_checkpoint(best)
        self.optimizer.optimizer.state.clear()  # moments of the way into the collapse

    # --- loss -------------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The surrogate of `rl.policy` in place of trl's loss, over 1 + lambda.

        It averages over completions, and the caller divides by the number of accumulation steps. All processes divide
        by the same number, however many completions of the micro-step each has, and their gradients are averaged. Adam
        remembers how large gradients were for a thousand steps: without the 1 + lambda, a head that a large lambda has
        moved would hardly move back once lambda gives way.
        """
        stored: list[Stored] = inputs["stored"]
        rollouts = [one.rollout for one in stored]
        loss, stats = surrogate(
            model(stack_features(rollouts)),
            verified_tokens(rollouts),
            torch.tensor([one.reward for one in stored], device=self.accelerator.device),
            torch.cat([one.baseline_N for one in stored]),
            self.policy_options,
            torch.cat([one.old_logprob_N for one in stored]),
            num_sequences=self.args.per_device_train_batch_size,
        )
        self._book_stats(stats)
        return loss / (1.0 + self.policy_options.lam)

    def _book_stats(self, stats: PolicyStats) -> None:
        """Means over the tokens of all processes, of which each has another number."""
        means = torch.stack([stats.weight, stats.acceptance, stats.entropy, stats.log_ratio, stats.clipped])
        sums = torch.cat([means * stats.num_tokens, means.new_tensor([stats.num_tokens])])
        *totals, num_tokens = self.accelerator.reduce(sums, reduction="sum").tolist()
        names = ("weight", "acceptance", "entropy", "log_ratio", "clip_ratio/region_mean")
        values = (total / max(num_tokens, 1.0) for total in totals)
        self._book("train", **dict(zip(names, values, strict=True)))

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """trl's, and the time that the update itself takes."""
        metrics = self._metrics["train"]
        started, sampled = time.perf_counter(), sum(metrics.get("time/rollout_s", []))
        loss = super().training_step(*args, **kwargs)
        sampled = sum(metrics.get("time/rollout_s", [])) - sampled
        self._book("train", **{"time/update_s": time.perf_counter() - started - sampled})
        return loss

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        """Training, from a checkpoint where one is named. Measures lossless decoding first."""
        if resume_from_checkpoint is None:
            self.measure_lossless()
        else:
            folder = Path(resume_from_checkpoint)
            self.run_state.load_json(json.loads((folder / STATE_NAME).read_text(encoding="utf-8")))
            step = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)).global_step
            self._step = step * self.args.gradient_accumulation_steps
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _write_checkpoint(self, model: nn.Module, trial: Any, folder: Path) -> None:
        if self.args.should_save:
            write_text(folder / STATE_NAME, json.dumps(self.run_state.to_json(), indent=1) + "\n")
        super()._write_checkpoint(model, trial, folder)

    def _save_rng_state(self, output_dir: str) -> None:
        """Of each process; the file that makes a checkpoint a whole one comes behind those of all."""
        super()._save_rng_state(output_dir)
        wait_for_all()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            save_ensemble(folder, self.head, self.pair.target, self.pair.record, self.provenance, self.measured)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        saved = load_ensemble(Path(resume_from_checkpoint), self.pair.target, self.pair.record)
        self.head.load_state_dict(saved.state_dict())

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None: a checkpoint's config.json says how it came about."""

    def _send_telemetry(self) -> None:
        """None: nothing is told to anyone."""
