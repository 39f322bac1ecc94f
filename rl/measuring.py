"""Sampling and measuring on trl's RLOO trainer: completions of a head by our decoder, and what they are worth.

Owns who samples what, and the judgement of a head by selection prompts. Knows of no update. Several processes share
completions out, and each gets to know what all have sampled.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl import RLOOTrainer

from eval.rewards.loading import ANSWERS
from eval.rewards.reading.thoughts import read_answers
from models.decoding.counters import add_up
from models.decoding.rows import GenerationParams, stream_seed
from models.drafters.base import Drafter
from models.ensemble import EnsembleHead
from models.sampling import SamplingParams
from models.target.model import Target
from rl.floor import RunState
from rl.policy import acceptance
from rl.rollout import FixedWeight, Rollout, Weigher, require_verified, sample_rollouts
from rl.sharing import gather_rollouts, piece
from train.data.prompts import render_asked
from train.runtime.callbacks import NoStepTooMany
from train.runtime.ranks import gather_pieces

# Streams of random numbers that no rollout of training uses.
HELDOUT_STREAM, LOSSLESS_STREAM = -1, -2


@dataclass(frozen=True)
class Pair:
    """Who decodes: a target, a drafter, the longest block, and the drafter's record for checkpoints."""

    target: Target
    drafter: Drafter
    num_draft_tokens: int
    record: dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """Means over completions. acceptance: each one's mean of 1 - w TV; rate: accepted over drafted tokens."""

    reward: float
    acceptance: float
    rate: float
    weight: float
    certificate: float


def measured(rollouts: Sequence[Rollout], rewards: Sequence[float]) -> Measured:
    """Of these completions, of which one at least has verified tokens."""
    judged = [rollout for rollout in rollouts if len(rollout.p_N)]
    return Measured(
        reward=torch.tensor(rewards).mean().item(),
        acceptance=fmean(acceptance(one.weights_N, one.tv_N).mean().item() for one in judged),
        rate=add_up(rollout.counters for rollout in judged).acceptance_rate,
        weight=torch.cat([rollout.weights_N for rollout in judged]).mean().item(),
        certificate=fmean(rollout.certificate for rollout in rollouts),
    )


def length_metrics(lengths_S: Tensor, is_cut_S: Tensor) -> dict[str, float]:
    """Lengths of completions, of all and of those that were not cut off (0 without any), by trl's names."""
    ended_S = lengths_S.new_zeros(1) if is_cut_S.all() else lengths_S[~is_cut_S]
    metrics = {"completions/clipped_ratio": is_cut_S.float().mean().item()}
    for name, values_S in (("length", lengths_S.float()), ("terminated_length", ended_S.float())):
        for statistic in (torch.mean, torch.min, torch.max):
            metrics[f"completions/{statistic.__name__}_{name}"] = statistic(values_S).item()
    return metrics


class MeasuringTrainer(NoStepTooMany, RLOOTrainer):
    """trl's RLOO trainer with completions of our own."""

    def __init__(
        self,
        pair: Pair,
        run: RunState,
        rollout_batch_size: int,
        template_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """template_kwargs: `data.chat_template_kwargs`. kwargs: those of trl's."""
        self.pair = pair
        self.run_state = run
        self.rollout_batch_size = rollout_batch_size
        self.template_kwargs = dict(template_kwargs or {})
        self.measured: dict[str, Any] = {}
        self._everyones: list[Rollout] = []  # what all processes have sampled last, without features
        self._answers: list[str] = []  # of what this process has sampled last, behind the model's thoughts
        super().__init__(**kwargs)

    @property
    def head(self) -> EnsembleHead:
        """The head in training."""
        return self.accelerator.unwrap_model(self.model).head

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _book(self, mode: str, **values: float) -> None:
        for name, value in values.items():
            self._metrics[mode][name].append(value)

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """Text and messages as all of this project renders them; token ids as they are."""
        tokenizer = self.pair.target.tokenizer  # trl's copy may have another padding token, which a template may read

        def render(prompt: Any) -> list[int]:
            is_rendered = isinstance(prompt, list) and isinstance(prompt[0], int)
            return list(prompt) if is_rendered else render_asked(tokenizer, prompt, self.template_kwargs)

        return [render(prompt) for prompt in prompts], None, {}

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
        self._answers = read_answers(self.pair.target.tokenizer, prompt_ids, [rollout.tokens for rollout in rollouts])
        self._everyones = gather_rollouts(rollouts, first)
        require_verified(self._everyones)
        self._book(self._mode, **{"time/rollout_s": time.perf_counter() - started})
        return rollouts

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
        self._ask_reward([self.train_dataset[0]], [list(self.pair.target.eos_token_ids)[:1]], [""], [""])

    def _ask_reward(
        self, rows: Sequence[dict[str, Any]], completion_ids: list[list[int]], texts: list[str], answers: list[str]
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
            **columns | {ANSWERS: answers},
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
        rewards = self._ask_reward(mine, ids, texts, self._answers) if mine else []
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
        """What lossless decoding gets: reward on training prompts, for the floor; and on the selection's."""
        run, lossless = self.run_state, FixedWeight(1.0)
        size = min(run.floor.options.prompts, len(self.train_dataset))
        some = self.train_dataset.shuffle(seed=self.args.seed).select(range(size))
        run.floor.lossless_reward = self.measure(some, lossless, self.num_generations, LOSSLESS_STREAM).reward
        if self.eval_dataset is not None:
            heldout = self.measure(self.eval_dataset, lossless, self.num_generations_eval, HELDOUT_STREAM)
            run.lossless_heldout = {"reward": heldout.reward, "acceptance": heldout.acceptance}
        self._metrics["eval"].clear()

    def objective(self, measured: Measured) -> float:
        """What selection prompts judge a head by: gain over lossless decoding in R + lam A.

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
        """Sampled completions of the selection prompts."""
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
