"""The trainer of the ensemble head, on trl's RLOO trainer: its data flow, rewards, logging and checkpoints.

What is ours: rollouts come from our own decoder (`rl.rollout`), the loss from `rl.policy`, lambda from `rl.floor`, and
checkpoints hold the head alone. Target and drafter are held beside the trainer's model, never inside it: they are in no
optimizer, no checkpoint and no device move.

Of several processes each samples a piece of a rollout and adds what its completions give to the gradient. Whatever is
decided is decided by all of them, from what all have sampled (`rl.sharing`).
"""

from __future__ import annotations

import copy
import json
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import ProgressCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from trl import RLOOTrainer

from models.checkpoint import load_ensemble, save_ensemble
from models.decoding.counters import add_up
from models.decoding.drafters.base import Drafter
from models.decoding.rows import GenerationParams, stream_seed
from models.decoding.sampling import SamplingParams
from models.ensemble import EnsembleHead
from models.target import Target
from rl.floor import RunState
from rl.measured import Measured, length_metrics, measured
from rl.policy import PolicyOptions, PolicyStats, baselines, logprobs, surrogate
from rl.rollout import (
    FixedWeight,
    Rollout,
    Weigher,
    require_verified,
    sample_rollouts,
    stack_features,
    verified_tokens,
    without_tokens,
)
from rl.sharing import deal, gather_rollouts, piece
from rl.trl_parts import EpochSampler, HeadPolicy, ShortProgress, checked_reward
from train.ranks import gather_pieces, is_main, wait_for_all
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

    def nothing(self) -> Stored:
        """One that adds nothing to a gradient: of a process that has none of a micro-step's completions."""
        return Stored(without_tokens(self.rollout), 0.0, self.baseline_N[:0], self.old_logprob_N[:0])


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
        self._rollouts: list[Rollout] = []  # this process's
        self._everyones: list[Rollout] = []  # without features
        self._old_logprob_N = torch.empty(0)
        self._rewards = torch.empty(0)
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

    def _sample(self, prompt_ids: list[list[int]], head: Weigher, stream: int, first: int) -> list[Rollout]:
        """A completion of each prompt, and what the other processes sample beside; `first`: number of the first one."""
        started = time.perf_counter()
        rollouts = sample_rollouts(
            self.pair.target,
            self.pair.drafter,
            self.pair.num_draft_tokens,
            head,
            prompt_ids,
            1,
            GenerationParams(self.max_completion_length, SamplingParams(self.temperature)),
            stream_seed(self.args.seed, stream),
            self.rollout_batch_size or None,
            first,
        )
        if any(not rollout.tokens for rollout in rollouts):
            raise ValueError(f"target {self.pair.target.name!r} gives logits that are no numbers; check its weights")
        self._everyones = gather_rollouts(rollouts, first)
        require_verified(self._everyones)
        self._book(self._mode, **{"time/rollout_s": time.perf_counter() - started})
        return rollouts

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

        It averages over completions, and the caller divides by the number of accumulation steps. Several processes add
        up what their completions give, however many of them each has: all divide by the same number, and their gradients
        are averaged. Adam remembers how
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

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

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
        self._ask_reward([self.train_dataset[0]], [list(self.pair.target.eos_token_ids)[:1]], [""])

    def _ask_reward(
        self, rows: Sequence[dict[str, Any]], completion_ids: list[list[int]], texts: list[str]
    ) -> list[float]:
        """What the reward gives these completions, asked as trl asks it. What it logs is forgotten."""
        prompts = [row["prompt"] for row in rows]
        is_chat = isinstance(prompts[0], list) and isinstance(prompts[0][0], dict)
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        (reward,) = self.reward_funcs
        values = reward(
            prompts=prompts,
            completions=[[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts,
            completion_ids=completion_ids,
            **columns,
            trainer_state=self.state,
            log_extra=self._log_completion_extra,
            log_metric=self._log_metric,
        )
        self._forget_pending()
        return values

    @torch.no_grad()
    def measure(self, dataset: Dataset, head: Weigher, num_samples: int, stream: int) -> Measured:
        """Sample these prompts under a head, with random numbers that are the same at every call.

        Several processes share the completions out, and each gets what was measured on all.
        """
        self.model.eval()
        rows = [row for row in dataset for _ in range(num_samples)]
        numbers = piece(len(rows))
        mine = [rows[i] for i in numbers]
        prompt_ids = self._tokenize_prompts([row["prompt"] for row in mine])[0] if mine else []
        ids = [rollout.tokens for rollout in self._sample(prompt_ids, head, stream, numbers.start)]
        texts = self.processing_class.batch_decode(ids, skip_special_tokens=True)
        rewards = self._ask_reward(mine, ids, texts) if mine else []
        self._book_lengths()
        return measured(self._everyones, gather_pieces(dict(zip(numbers, rewards, strict=True))))

    def _book_lengths(self) -> None:
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        lengths_S = torch.tensor([len(rollout.tokens) for rollout in self._everyones])
        is_cut_S = torch.tensor([rollout.tokens[-1] not in ends for rollout in self._everyones])
        self._book(self._mode, **length_metrics(lengths_S, is_cut_S), num_tokens=self.state.num_input_tokens_seen)

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
            folder = Path(resume_from_checkpoint)
            self.run_state.load_json(json.loads((folder / STATE_NAME).read_text(encoding="utf-8")))
            step = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)).global_step
            self._step = step * self.args.gradient_accumulation_steps
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.args.should_save:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            state = json.dumps(self.run_state.to_json(), indent=1) + "\n"
            (folder / STATE_NAME).write_text(state, encoding="utf-8")
        super()._save_checkpoint(model, trial)

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
