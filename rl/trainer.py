"""The trainer of the ensemble head, on trl's RLOO trainer: its data flow, rewards, logging and checkpoints.

What is ours: rollouts come from our own decoder (`rl.rollout`), the loss from `rl.policy`, lambda from `rl.floor`, and
checkpoints hold the head alone. Target and drafter are held beside the trainer's model, never inside it: they are in no
optimizer, no checkpoint and no device move.
"""

from __future__ import annotations

import copy
import json
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import ProgressCallback
from trl import RLOOTrainer

from models.checkpoint import load_ensemble, save_ensemble
from models.decoding.counters import add_up
from models.decoding.drafters.base import Drafter
from models.decoding.rows import GenerationParams, stream_seed
from models.decoding.sampling import SamplingParams
from models.ensemble import EnsembleHead
from models.files import write_text
from models.target import Target
from rl.floor import RunState
from rl.policy import PolicyOptions, acceptance, baselines, logprobs, surrogate
from rl.rollout import FixedWeight, Rollout, Weigher, sample_rollouts, stack_features, verified_tokens
from rl.trl_parts import EpochSampler, HeadPolicy, ShortProgress, checked_reward
from train.trainer import NoStepTooMany

STATE_NAME = "diversed_state.json"
# Streams of random numbers that no rollout of training uses.
HELDOUT_STREAM, LOSSLESS_STREAM = -1, -2
MAX_ALARMS = 5


@dataclass(frozen=True)
class Pair:
    """Who decodes: a target, a drafter, the longest block, and the drafter's record for checkpoints."""

    target: Target
    drafter: Drafter
    num_draft_tokens: int
    record: dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """One completion as updates use it."""

    rollout: Rollout
    reward: float
    baseline_N: Tensor
    old_logprob_N: Tensor


@dataclass(frozen=True)
class Measured:
    """Means over completions. acceptance: each one's mean of 1 - w TV; rate: accepted over drafted tokens."""

    reward: float
    acceptance: float
    rate: float
    weight: float
    certificate: float


class DiversedTrainer(NoStepTooMany, RLOOTrainer):
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
        """kwargs: args (of `rloo_config`), train_dataset, eval_dataset, callbacks."""
        self.pair = pair
        self.policy_options = policy
        self.run_state = run
        self.rollout_batch_size = rollout_batch_size
        self.provenance = provenance or {}
        self.measured: dict[str, Any] = {}
        self._rollouts: list[Rollout] = []
        self._old_logprob_N = torch.empty(0)
        self._rewards = torch.empty(0)
        self._sampling: tuple[Weigher, int] | None = None  # head and seed in place of those of training
        self._start_weights = copy.deepcopy(head.state_dict())
        tokenizer = copy.deepcopy(pair.target.tokenizer)  # trl may give it a padding token
        super().__init__(
            model=HeadPolicy(head, pair.target),
            reward_funcs=checked_reward(reward, reward_name),
            processing_class=tokenizer,
            **kwargs,
        )
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(ShortProgress())

    @property
    def head(self) -> EnsembleHead:
        """The head in training."""
        return self.accelerator.unwrap_model(self.model).head

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        """trl's, with an order that a resumed run finds again."""
        plain = super()._get_train_sampler(dataset)
        return EpochSampler(
            plain.data_source, plain.mini_repeat_count, plain.batch_size, plain.repeat_count, plain.shuffle, plain.seed
        )

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """Text and messages as trl renders them; token ids as they are."""
        if isinstance(prompts[0], list) and prompts[0] and isinstance(prompts[0][0], int):
            return [list(prompt) for prompt in prompts], None, {}
        return super()._tokenize_prompts(prompts)

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any
    ) -> list[list[int]]:
        """Completions of prompts that come repeated already."""
        started = time.perf_counter()
        number = self._step // (self.args.steps_per_generation * self.num_iterations)  # of this rollout
        stream = number * self.accelerator.num_processes + self.accelerator.process_index
        head, seed = self._sampling or (self.head, stream_seed(self.args.seed, stream))
        params = GenerationParams(self.max_completion_length, SamplingParams(self.temperature))
        self._rollouts = sample_rollouts(
            self.pair.target,
            self.pair.drafter,
            self.pair.num_draft_tokens,
            head,
            prompt_ids,
            1,
            params,
            seed,
            self.rollout_batch_size or None,
        )
        if any(not rollout.tokens for rollout in self._rollouts):
            raise ValueError(f"target {self.pair.target.name!r} gives logits that are no numbers; check its weights")
        self._metrics["train" if self.model.training else "eval"]["time/rollout_s"].append(
            time.perf_counter() - started
        )
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

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Of all processes; kept for the loss."""
        self._rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """trl's rollout, and behind it what the loss needs of each completion."""
        output = super()._generate_and_score_completions(inputs)
        if self._raised_alarm():
            output = super()._generate_and_score_completions(inputs)
        run, rollouts = self.run_state, self._rollouts
        run.floor.update(self._rewards[:, 0].mean().item())
        self.policy_options = replace(self.policy_options, lam=run.floor.present_lam)
        start = self.accelerator.process_index * len(rollouts)
        reward_S = self._rewards[start : start + len(rollouts), 0]
        group_S = torch.arange(len(rollouts), device=reward_S.device) // self.num_generations
        weights_N = torch.cat([rollout.weights_N for rollout in rollouts])
        baseline_N = baselines(weights_N, verified_tokens(rollouts), reward_S, group_S, self.policy_options)
        sizes = [len(rollout.p_N) for rollout in rollouts]
        parts = zip(rollouts, reward_S.tolist(), baseline_N.split(sizes), self._old_logprob_N.split(sizes), strict=True)
        output["stored"] = [Stored(*part) for part in parts]
        self._book(
            "train",
            lam=run.floor.present_lam,
            acceptance_rate=add_up(rollout.counters for rollout in rollouts).acceptance_rate,
            certificate=fmean(rollout.certificate for rollout in rollouts),
        )
        return output

    def _raised_alarm(self) -> bool:
        """Whether the head has collapsed and another one stands in its place now; or it warns, or stops."""
        run = self.run_state
        weight = torch.cat([rollout.weights_N for rollout in self._rollouts]).mean().item()
        reason = run.alarm.observe(weight, self._rewards[:, 0].mean().item(), run.floor.lossless_reward)
        if reason is None:
            return False
        action = run.alarm.options.action
        if action == "restore" and run.alarm.num_alarms > MAX_ALARMS:
            action = "stop"
        what = {"warn": "going on", "stop": "stopping", "restore": "going back to the best head, with half the lambda"}
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

        It averages over completions, and the caller divides by the number of accumulation steps. Adam remembers how
        large gradients were for a thousand steps: without the 1 + lambda, a head that a large lambda has moved would
        hardly move back once lambda gives way.
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
        )
        self._book(
            "train",
            weight=stats.weight.item(),
            acceptance=stats.acceptance.item(),
            entropy=stats.entropy.item(),
            log_ratio=stats.log_ratio.item(),
            **{"clip_ratio/region_mean": stats.clipped.item()},
        )
        return loss / (1.0 + self.policy_options.lam)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """trl's, and the time that the update itself takes."""
        metrics = self._metrics["train"]
        started, sampled = time.perf_counter(), sum(metrics.get("time/rollout_s", []))
        loss = super().training_step(*args, **kwargs)
        sampled = sum(metrics.get("time/rollout_s", [])) - sampled
        self._book("train", **{"time/update_s": time.perf_counter() - started - sampled})
        self.run_state.num_micro_steps = self._step
        return loss

    def _book(self, mode: str, **values: float) -> None:
        for name, value in values.items():
            self._metrics[mode][name].append(value)

    # --- measuring --------------------------------------------------------------------------------------------------

    def require_room(self, rows: Iterable[dict[str, Any]]) -> None:
        """ValueError where a prompt leaves no room for an answer in the target's context."""
        prompt_ids, _, _ = self._tokenize_prompts([row["prompt"] for row in rows])
        longest = max(len(ids) for ids in prompt_ids)
        if longest > (most := self.pair.target.max_context() - 2):
            raise ValueError(
                f"the longest prompt has {longest} tokens, and the context of target {self.pair.target.name!r} allows "
                f"{most}: leave out the longest ones"
            )

    def try_reward(self) -> None:
        """Ask the reward about one completion, an empty one: one that fails is told before anything is sampled."""
        row = self.train_dataset[0]
        is_chat = isinstance(row["prompt"], list) and isinstance(row["prompt"][0], dict)
        completion = [{"role": "assistant", "content": ""}] if is_chat else ""
        ids = list(self.pair.target.eos_token_ids)[:1]
        self._calculate_rewards([row], [row["prompt"]], [completion], [ids])
        self._forget_pending()

    @torch.no_grad()
    def measure(self, dataset: Dataset, head: Weigher, num_samples: int, stream: int) -> Measured:
        """Sample these prompts under a head, with random numbers that are the same at every call."""
        self.model.eval()
        rows = [row for row in dataset for _ in range(num_samples)]
        prompts = [row["prompt"] for row in rows]
        self._sampling = head, stream_seed(self.args.seed, stream)
        try:
            _, completion_ids, completions = self._generate(prompts)
            rewards = self._calculate_rewards(rows, prompts, completions, completion_ids)
        finally:
            self._sampling = None
            self._forget_pending()
        rollouts = [rollout for rollout in self._rollouts if len(rollout.p_N)]
        return Measured(
            reward=rewards[:, 0].mean().item(),
            acceptance=fmean(acceptance(one.weights_N, one.tv_N).mean().item() for one in rollouts),
            rate=add_up(rollout.counters for rollout in rollouts).acceptance_rate,
            weight=torch.cat([rollout.weights_N for rollout in rollouts]).mean().item(),
            certificate=fmean(rollout.certificate for rollout in self._rollouts),
        )

    def _forget_pending(self) -> None:
        """What a reward logged of completions that are no part of training."""
        self._pending_extra_logs.clear()
        self._pending_metrics.clear()

    def measure_lossless(self) -> None:
        """What lossless decoding gets: reward on training prompts, for the floor; and on the held-out ones."""
        run, lossless = self.run_state, FixedWeight(1.0)
        size = min(run.floor.options.prompts, len(self.train_dataset))
        some = self.train_dataset.shuffle(seed=self.args.seed).select(range(size))
        run.floor.lossless_reward = self.measure(some, lossless, self.num_generations, LOSSLESS_STREAM).reward
        if self.eval_dataset is not None:
            heldout = self.measure(self.eval_dataset, lossless, self.num_generations_eval, HELDOUT_STREAM)
            run.lossless_heldout = {"reward": heldout.reward, "acceptance": heldout.acceptance}
        self._metrics["eval"].clear()

    def objective(self, measured: Measured) -> float:
        """What held-out prompts judge a head by: gain over lossless decoding in R + lam A.

        Under a reward floor, acceptance counts only where the floor holds.
        """
        lossless, floor = self.run_state.lossless_heldout, self.run_state.floor
        gain = measured.reward - lossless["reward"]
        if floor.options.max_drop is not None and gain < -floor.options.max_drop:
            return gain
        return gain + floor.lam * (measured.acceptance - lossless["acceptance"])

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Sampled completions of the held-out prompts."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        measured = self.measure(dataset, self.head, self.num_generations_eval, HELDOUT_STREAM)
        values = {
            "objective": self.objective(measured),
            "reward": measured.reward,
            "acceptance": measured.acceptance,
            "acceptance_rate": measured.rate,
            "weight": measured.weight,
            "certificate": measured.certificate,
        }
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in values.items()}
        self.measured = {"step": self.state.global_step, **values, "lossless": self.run_state.lossless_heldout}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        """Training, from a checkpoint where one is named. Measures lossless decoding first."""
        if resume_from_checkpoint is None:
            self.measure_lossless()
        else:
            path = Path(resume_from_checkpoint) / STATE_NAME
            self.run_state.load_json(json.loads(path.read_text(encoding="utf-8")))
            self._step = self.run_state.num_micro_steps
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _write_checkpoint(self, model: nn.Module, trial: Any, folder: Path) -> None:
        write_text(folder / STATE_NAME, json.dumps(self.run_state.to_json(), indent=1) + "\n")
        super()._write_checkpoint(model, trial, folder)

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
