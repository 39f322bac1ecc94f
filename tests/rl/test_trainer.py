"""Training the head through trl: the gradient is `rl.policy`'s, nothing else moves, a resumed run ends the same."""

import copy
import hashlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback

from models.checkpoint import heads_record, load_ensemble, model_record, save_heads
from models.drafters.heads import HeadsDrafter
from models.drafters.model import ModelDrafter
from models.ensemble import EnsembleHead, EnsembleOptions
from models.heads import HeadOptions, build_head
from models.target.model import Target
from models.target.tiny import make_tiny_target
from rl import measuring
from rl import trainer as trainer_module
from rl.floor import CollapseAlarm, CollapseOptions, FloorOptions, RewardFloor, RunState
from rl.measuring import Pair
from rl.options import RLOptions, rloo_config
from rl.policy import PolicyOptions, baselines, logprobs, surrogate
from rl.rollout import Rollout, stack_features, verified_tokens
from rl.trainer import DiversedTrainer

Code = Any
# Sums of the same float64 numbers in another order.
EXACT = 1e-12
NUM_PROMPTS = 6
SMALL = {
    "max_steps": 2,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "num_generations_eval": 2,
    "max_completion_length": 10,
    "eval_steps": 2,
    "save_steps": 2,
    "learning_rate": 0.05,
    "max_grad_norm": 0.0,  # no clipping, so that gradients are as they come
}


def distinct(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Share of tokens that occur once: something that differs from sample to sample."""
    return [len(set(ids)) / len(ids) - len(ids) / 50 for ids in completion_ids]


def make_pair(kind: str = "model", folder: Path | None = None, sharpness: float = 1.0) -> Pair:
    """sharpness: factor on the draft model's logits."""
    target = make_tiny_target(seed=0)
    if kind == "model":
        draft = make_tiny_target(seed=1, hidden_size=16)
        draft.model.get_decoder().norm.weight.mul_(sharpness)
        return Pair(target, ModelDrafter(draft, target), 3, model_record(draft))
    torch.manual_seed(0)
    heads = build_head(target, HeadOptions(kind="mtp", num_draft_tokens=3)).eval()
    assert folder is not None
    save_heads(folder / "heads", heads)
    return Pair(target, HeadsDrafter(heads), 3, heads_record(folder / "heads"))


def make_head(pair: Pair, weight: float = 0.6) -> EnsembleHead:
    torch.manual_seed(3)
    size = pair.drafter.draft.hidden_size if isinstance(pair.drafter, ModelDrafter) else pair.target.hidden_size
    head = EnsembleHead(EnsembleOptions(draft_size=size, target_size=pair.target.hidden_size, initial_weight=weight))
    with torch.no_grad():
        head.output.weight.normal_(std=0.1)
    return head


def make_trainer(
    folder: Path,
    code: Code = trainer_module,
    pair: Pair | None = None,
    head: EnsembleHead | None = None,
    reward: Callable[..., Any] = distinct,
    policy: PolicyOptions | None = None,
    floor: FloorOptions | None = None,
    collapse: CollapseOptions | None = None,
    has_heldout: bool = False,
    callbacks: Any = (),
    **options: Any,
) -> DiversedTrainer:
    pair = pair or make_pair()
    policy = policy or PolicyOptions(lam=0.3)
    rl_options = RLOptions(**{**SMALL, **options})
    rl_options.check()
    rows = [{"prompt": f"Say {i}.", "answer": str(i)} for i in range(NUM_PROMPTS)]
    run = RunState(
        RewardFloor(policy.lam, floor or FloorOptions(prompts=2)),
        CollapseAlarm(collapse or CollapseOptions(weight=0.0, reward=0.0)),
    )
    trainer: DiversedTrainer = code.DiversedTrainer(
        head or make_head(pair),
        pair,
        policy,
        run,
        reward,
        "toy",
        args=quiet_args(rl_options, folder, has_heldout),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:2]) if has_heldout else None,
        callbacks=[Silent(), *callbacks],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def quiet_args(options: RLOptions, folder: Path, has_heldout: bool) -> Any:
    args = rloo_config(options, folder, "cpu", has_heldout, "none")
    args.disable_tqdm = True
    return args


class Silent(TrainerCallback):
    """Keeps the head's weights and gradients at each optimizer step."""

    def __init__(self) -> None:
        self.gradients: list[list[Tensor]] = []
        self.weights: list[list[Tensor]] = []

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self.gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        self.weights.append([parameter.detach().clone() for parameter in model.parameters()])


def watch(trainer: DiversedTrainer) -> Silent:
    return next(one for one in trainer.callback_handler.callbacks if isinstance(one, Silent))


def capture(monkeypatch: pytest.MonkeyPatch) -> list[list[Rollout]]:
    """Every batch of rollouts that is sampled from here on."""
    batches: list[list[Rollout]] = []
    sample = measuring.sample_rollouts

    def sample_and_keep(*args: Any, **kwargs: Any) -> list[Rollout]:
        batches.append(sample(*args, **kwargs))
        return batches[-1]

    monkeypatch.setattr(measuring, "sample_rollouts", sample_and_keep)
    return batches


def own_gradient(
    head: EnsembleHead, weights: list[Tensor], rollouts: list[Rollout], old: list[Tensor], policy: PolicyOptions
) -> list[Tensor]:
    """The gradient of `rl.policy` on all rollouts at once, at these weights; `old`: those that sampled them."""
    tokens, features = verified_tokens(rollouts), stack_features(rollouts)
    rewards_S = torch.tensor(distinct([rollout.tokens for rollout in rollouts]))
    group_S = torch.arange(len(rollouts)) // SMALL["num_generations"]
    at: list[EnsembleHead] = []
    for values in (old, weights):
        at.append(copy.deepcopy(head))
        with torch.no_grad():
            for parameter, value in zip(at[-1].parameters(), values, strict=True):
                parameter.copy_(value)
    with torch.no_grad():
        old_w_N = at[0](features)
        old_logprob_N = logprobs(old_w_N, tokens, policy)
        baseline_N = baselines(old_w_N, tokens, rewards_S, group_S, policy)
    loss, _ = surrogate(at[1](features), tokens, rewards_S, baseline_N, policy, old_logprob_N)
    return list(torch.autograd.grad(loss, list(at[1].parameters())))


def check_gradient(folder: Path, monkeypatch: pytest.MonkeyPatch, code: Code = trainer_module, **changes: Any) -> None:
    """Every optimizer step's gradient, over accumulation, several updates a rollout and several epochs."""
    policy = changes.pop("policy", PolicyOptions(lam=0.3, entropy=0.05))
    pair = make_pair(changes.pop("kind", "model"), folder)
    trainer = make_trainer(folder, code, pair, make_head(pair).double(), policy=policy, **changes)
    with monkeypatch.context() as patch:
        batches = capture(patch)
        trainer.train()
    seen = watch(trainer)
    args = trainer.args
    updates = args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps
    whole = args.steps_per_generation == args.gradient_accumulation_steps  # one update sees all of a rollout
    batches = batches[1:]  # the first one is lossless
    assert len(batches) == args.max_steps // updates
    for step in range(args.max_steps) if whole else ():
        rollouts, old = batches[step // updates], seen.weights[step - step % updates]
        expected = own_gradient(trainer.head, seen.weights[step], rollouts, old, policy)
        for ours, theirs in zip(expected, seen.gradients[step], strict=True):
            torch.testing.assert_close(theirs * (1.0 + policy.lam), ours, atol=EXACT, rtol=EXACT)
        assert expected[0].abs().max() > 1e-4


GRADIENTS: dict[str, dict[str, Any]] = {
    "on policy": {},
    "heads": {"kind": "mtp"},
    "tokens": {"policy": PolicyOptions(lam=1.0, likelihood="tokens")},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "three epochs": {"num_iterations": 3, "max_steps": 6, "save_steps": 6, "eval_steps": 6, "learning_rate": 0.2},
    "three epochs, a ratio a token": {
        "num_iterations": 3,
        "max_steps": 3,
        "save_steps": 3,
        "eval_steps": 3,
        "learning_rate": 0.2,
        "policy": PolicyOptions(lam=0.3, ratio="token", clip_low=0.05, clip_high=0.05),
    },
}


@pytest.mark.parametrize("changes", GRADIENTS.values(), ids=GRADIENTS.keys())
def test_gradient_is_the_policys_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    check_gradient(tmp_path, monkeypatch, **changes)


def test_accumulation_changes_nothing(tmp_path: Path) -> None:
    """Eight completions at once, or two at a time; and two updates a rollout differ from one."""
    ends = []
    for name, options in {
        "whole": {},
        "cut": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        "two updates": {"per_device_train_batch_size": 4, "steps_per_generation": 2},
    }.items():
        pair = make_pair()
        trainer = make_trainer(tmp_path / name, pair=pair, head=make_head(pair).double(), **options)
        trainer.train()
        ends.append(trainer.head.output.weight.detach())
    torch.testing.assert_close(ends[0], ends[1], atol=1e-9, rtol=1e-9)
    assert not torch.allclose(ends[0], ends[2], atol=1e-3)


def check_fresh_samples(folder: Path, monkeypatch: pytest.MonkeyPatch, code: Code = trainer_module) -> None:
    """The same prompts under the same head: every rollout is another, and so are the samples of a prompt."""
    trainer = make_trainer(folder, code, per_device_train_batch_size=24, learning_rate=0.0, max_steps=2)
    with monkeypatch.context() as patch:
        batches = [[tuple(rollout.tokens) for rollout in batch] for batch in run_captured(trainer, patch)]
    assert len(batches) == 3
    texts = [text for batch in batches for text in batch]
    assert len(set(texts)) == len(texts)


def run_captured(trainer: DiversedTrainer, patch: pytest.MonkeyPatch) -> list[list[Rollout]]:
    batches = capture(patch)
    trainer.train()
    return batches


def test_every_rollout_is_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_fresh_samples(tmp_path, monkeypatch)
    code = faulty("self.head, self._number, first)", "self.head, 0, first)")
    assert fails(lambda: check_fresh_samples(tmp_path, monkeypatch, code))


def digest(target: Target) -> str:
    total = hashlib.sha256()
    for name, tensor in target.model.state_dict().items():
        total.update(name.encode() + tensor.numpy().tobytes())
    return total.hexdigest()


def test_only_the_head_moves_and_is_saved(tmp_path: Path) -> None:
    pair = make_pair()
    assert isinstance(pair.drafter, ModelDrafter)
    before = digest(pair.target), digest(pair.drafter.draft)
    trainer = make_trainer(tmp_path, pair=pair, has_heldout=True)
    start = {name: tensor.clone() for name, tensor in trainer.head.state_dict().items()}
    trainer.train()
    assert (digest(pair.target), digest(pair.drafter.draft)) == before
    assert all(not torch.equal(start[name], tensor) for name, tensor in trainer.head.state_dict().items())
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert saved.keys() == start.keys()
    assert {f"head.{name}" for name in start} == set(trainer.model.state_dict())
    assert sum(len(group["params"]) for group in trainer.optimizer.param_groups) == len(start)
    loaded = load_ensemble(tmp_path / "checkpoint-2", pair.target, pair.record)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in trainer.head.state_dict().items())
    config = json.loads((tmp_path / "checkpoint-2" / "config.json").read_text())
    assert config["measured"]["step"] == 2
    assert config["measured"]["lossless"] == trainer.run_state.lossless_heldout
    assert not list(tmp_path.rglob("README.md"))


def check_resume(folder: Path, code: Code = trainer_module) -> None:
    """Stopped after the first of two rollouts an epoch, in the second epoch; floor, alarm and optimizer in motion."""
    options: dict[str, Any] = {
        "max_steps": 10,
        "num_iterations": 2,
        "per_device_train_batch_size": 12,
        "save_steps": 2,
        "floor": FloorOptions(max_drop=0.0, prompts=2, rate=20.0),
        "collapse": CollapseOptions(weight=0.9, reward=0.0, patience=100),
        "policy": PolicyOptions(lam=2.0),
        "has_heldout": True,
        "save_total_limit": 9,
    }
    ends = []
    for name, resume in (("whole", None), ("again", str(folder / "whole" / "checkpoint-6"))):
        trainer = make_trainer(folder / name, code, **options)
        trainer.train(resume_from_checkpoint=resume)
        losses = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
        evals = [line["eval_objective"] for line in trainer.state.log_history if "eval_objective" in line]
        ends.append((trainer.head.state_dict(), trainer.run_state.to_json(), losses, evals))
    (weights, state, losses, evals), (weights_2, state_2, losses_2, evals_2) = ends
    assert state["multiplier"] > 0.0
    assert state["collapse_count"] > 0
    assert (state, losses, evals) == (state_2, losses_2, evals_2)
    assert all(torch.equal(weights[name], weights_2[name]) for name in weights)


def test_resumed_run_ends_the_same(tmp_path: Path) -> None:
    check_resume(tmp_path)


# --- what training does -----------------------------------------------------------------------------------------------


def draft_favours(pair: Pair) -> Tensor:
    """Tokens [V] that the draft gives more mass than the target, on average over random texts."""
    assert isinstance(pair.drafter, ModelDrafter)
    ids_BT = torch.randint(3, 259, (8, 16), generator=torch.Generator().manual_seed(0))
    p, q = (
        model.hide_padding(model.logits(model.hidden(ids_BT))).softmax(dim=-1).mean(dim=(0, 1))
        for model in (pair.target, pair.drafter.draft)
    )
    return q > p


def train_towards(folder: Path, sign: float, lam: float, start: float = 0.5, **changes: Any) -> DiversedTrainer:
    """Reward: share of tokens that the draft favours, times `sign`."""
    pair = make_pair(sharpness=2.0)
    is_favoured_V = draft_favours(pair)

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [sign * is_favoured_V[torch.tensor(ids)].float().mean().item() for ids in completion_ids]

    head = EnsembleHead(EnsembleOptions(draft_size=16, target_size=32, initial_weight=start))
    options = {"max_steps": 8, "per_device_train_batch_size": 24, "learning_rate": 0.05, **changes}
    options |= {"save_steps": options["max_steps"], "eval_steps": options["max_steps"]}
    policy = PolicyOptions(lam=lam)
    trainer = make_trainer(folder, pair=pair, head=head, reward=reward, policy=policy, has_heldout=True, **options)
    trainer.train()
    return trainer


def last(trainer: DiversedTrainer, name: str) -> float:
    return next(line[name] for line in reversed(trainer.state.log_history) if name in line)


def test_reward_moves_the_weight_towards_it(tmp_path: Path) -> None:
    """Without lambda, w falls where the draft's tokens are rewarded, and rises where they are punished."""
    down, up = (train_towards(tmp_path / str(sign), sign, lam=0.0) for sign in (1.0, -1.0))
    assert last(down, "weight") < 0.45 < 0.55 < last(up, "weight")
    assert last(down, "eval_objective") > 0.0
    assert last(up, "eval_reward") > -last(down, "eval_reward")


def test_more_lambda_more_acceptance(tmp_path: Path) -> None:
    """Where the reward punishes the draft's tokens, lambda decides how many of them are taken."""
    runs = [train_towards(tmp_path / str(lam), -1.0, lam) for lam in (0.0, 0.5, 5.0)]
    acceptances = [last(run, "eval_acceptance") for run in runs]
    assert acceptances[0] + 0.02 < acceptances[1]
    assert acceptances[1] + 0.02 < acceptances[2]


def test_floor_holds_the_reward(tmp_path: Path) -> None:
    """A lambda that would buy acceptance with half of the reward is held back, and no further than it must be."""
    free, held = (
        train_towards(
            tmp_path / str(drop),
            -1.0,
            5.0,
            max_steps=14,
            floor=FloorOptions(drop, rate=20.0, prompts=6),
            start=0.9,
            per_device_train_batch_size=48,
            num_generations=8,
        )
        for drop in (None, 0.03)
    )
    floor = held.run_state.floor
    assert floor.floor is not None
    assert free.run_state.floor.multiplier == 0.0
    assert last(free, "lam") == 5.0
    print([(line["lam"], line["reward"], line["weight"]) for line in held.state.log_history if "lam" in line], floor)
    assert last(free, "reward") < floor.floor - 0.1
    assert last(held, "lam") < 2.0
    assert last(held, "reward") > last(free, "reward") + 0.1
    assert last(held, "weight") > last(free, "weight") + 0.1


def collapsed_trainer(folder: Path, code: Code = trainer_module, **collapse: Any) -> DiversedTrainer:
    """Its head is at w = 0 all over; the one that it began with is not."""
    options = CollapseOptions(**{"weight": 0.01, "reward": 0.0, "patience": 2, **collapse})
    trainer = make_trainer(folder, code, collapse=options, max_steps=4, save_steps=4, eval_steps=4)
    with torch.no_grad():
        trainer.head.output.weight.zero_()
        trainer.head.output.bias.fill_(-12.0)
    return trainer


def check_restore(folder: Path, code: Code = trainer_module) -> None:
    trainer = collapsed_trainer(folder, code)
    with pytest.warns(UserWarning, match="collapsed at step 1: the mean weight of the target is .* going back"):
        trainer.train()
    log = {line["step"]: line for line in trainer.state.log_history if "weight" in line}
    assert log[1]["weight"] < 0.01
    assert log[2]["weight"] > 0.3  # the rollout was sampled anew, under the head that was put back
    assert log[1]["lam"] == pytest.approx(0.3)
    assert log[2]["lam"] == pytest.approx(0.15)
    steps = {int(state["step"]) for state in trainer.optimizer.optimizer.state.values()}
    assert steps == {3}  # moments of the way into the collapse are gone


def test_collapse_goes_back(tmp_path: Path) -> None:
    check_restore(tmp_path)


@pytest.mark.parametrize(("action", "num_steps"), [("warn", 4), ("stop", 2)])
def test_collapse_warns_or_stops(tmp_path: Path, action: str, num_steps: int) -> None:
    trainer = collapsed_trainer(tmp_path, action=action)
    with pytest.warns(UserWarning, match="the head has collapsed"):
        trainer.train()
    assert trainer.state.global_step == num_steps
    assert last(trainer, "weight") < 0.01


def test_collapsed_best_is_the_validated_one(tmp_path: Path) -> None:
    """Once there is a best checkpoint, that is what a collapsed run goes back to."""
    trainer = make_trainer(
        tmp_path, has_heldout=True, max_steps=4, collapse=CollapseOptions(weight=0.01, reward=0.0, patience=1)
    )

    class Break(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                with torch.no_grad():
                    trainer.head.output.weight.zero_()
                    trainer.head.output.bias.fill_(-12.0)

    trainer.add_callback(Break())
    with pytest.warns(UserWarning, match="collapsed at step 2"):
        trainer.train()
    best = load_ensemble(tmp_path / "checkpoint-2", trainer.pair.target, trainer.pair.record)
    after_restore = watch(trainer).weights[2]
    assert all(torch.equal(a, b) for a, b in zip(best.parameters(), after_restore, strict=True))


# --- rewards, columns, logs -------------------------------------------------------------------------------------------


def test_reward_sees_columns_and_its_logs_arrive(tmp_path: Path) -> None:
    seen: list[tuple[list[Any], list[Any]]] = []

    def reward(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **kwargs: Any) -> list[float]:
        assert [f"Say {one}." for one in answer] == prompts
        assert all(isinstance(text, str) for text in completions)
        assert {"trainer_state", "log_extra", "log_metric"} <= kwargs.keys()
        assert kwargs["completion_answers"] == completions  # there are no thoughts in them
        kwargs["log_metric"]("toy_metric", 7.0)
        kwargs["log_extra"]("note", ["x"] * len(prompts))
        seen.append((prompts, completion_ids))
        return [1.0] * len(prompts)

    trainer = make_trainer(tmp_path, reward=reward)
    trainer.try_reward()
    trainer.train()
    assert [len(prompts) for prompts, _ in seen] == [1, 8, 8, 8]
    prompts, _ = seen[-1]
    assert len(set(prompts)) == 2
    assert prompts == sorted(prompts, key=prompts.index)  # completions of a prompt stand together
    assert last(trainer, "toy_metric") == 7.0
    assert last(trainer, "rewards/toy/mean") == 1.0
    names = {"reward", "weight", "acceptance", "acceptance_rate", "certificate", "lam", "entropy", "log_ratio"}
    names |= {"clip_ratio/region_mean", "completions/mean_length", "time/rollout_s", "time/update_s", "loss"}
    assert all(isinstance(last(trainer, name), float) for name in names)


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda n: [None] * n, "reward 'toy'.*None"),
        (lambda n: [float("nan")] * n, "reward 'toy'.*nan"),
        (lambda n: [1.0] * (n + 1), "reward 'toy' returned 2 values for 1 completions"),
        (lambda n: 1.0, "reward 'toy' returned a float"),
        (lambda n: ["1"] * n, "reward 'toy'.*not a number"),
        (lambda n: 1 / 0, "reward 'toy' raised ZeroDivisionError: division by zero; make it return"),
    ],
)
def test_bad_rewards_are_refused_before_anything_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, give: Callable[[int], Any], message: str
) -> None:
    trainer = make_trainer(tmp_path, reward=lambda prompts, **kwargs: give(len(prompts)))
    batches = capture(monkeypatch)
    with pytest.raises(ValueError, match=message) as caught:
        trainer.try_reward()
    assert "\n" not in str(caught.value)
    assert batches == []


def test_prompt_as_long_as_the_context_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.require_room([{"prompt": [5] * 510}])
    with pytest.raises(ValueError, match=r"the longest prompt has 511 tokens.*allows 510"):
        trainer.require_room([{"prompt": [5] * 511}])
    with pytest.raises(ValueError, match="the longest prompt has 600 tokens"):
        trainer.require_room([{"prompt": "a" * 600}])


def test_a_thought_that_the_prompt_opened_and_nothing_ends_is_no_answer(tmp_path: Path) -> None:
    """In training and in measuring alike: what was sampled behind such a prompt has no answer."""
    seen: list[tuple[list[str], list[str]]] = []

    def reward(completions: list[str], completion_answers: list[str], **kwargs: Any) -> list[float]:
        seen.append((completions, completion_answers))
        return [1.0] * len(completions)

    trainer = make_trainer(tmp_path, reward=reward)
    trainer.train_dataset = trainer.train_dataset.map(lambda row: {"prompt": row["prompt"] + "<think>\n"})
    trainer.train()
    assert [len(completions) for completions, _ in seen] == [8, 8, 8]  # the first of lossless decoding
    for completions, answers in seen:
        assert answers == [""] * 8
        assert any(completions)


def test_prompts_may_be_ids_or_messages(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert trainer._tokenize_prompts([[5, 6], [7]])[0] == [[5, 6], [7]]
    messages = [[{"role": "user", "content": "Hi"}]]
    expected = trainer.pair.target.tokenizer.apply_chat_template(messages[0], add_generation_prompt=True)["input_ids"]
    assert trainer._tokenize_prompts(messages)[0] == [expected]


# --- planted faults ---------------------------------------------------------------------------------------------------


def faulty(right: str, wrong: str) -> ModuleType:
    """The trainer's module with a fault in it."""
    source = inspect.getsource(trainer_module)
    assert right in source, right
    module = ModuleType("faulty_trainer")
    sys.modules["faulty_trainer"] = module  # dataclasses look their module up
    exec(compile(source.replace(right, wrong, 1), "faulty trainer", "exec"), module.__dict__)
    return module


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
    sys.modules.pop("faulty_trainer", None)


GRADIENT_FAULTS = [
    ("divided by accumulation twice", "return loss / (", "return loss / 4 / (", "accumulated"),
    ("a group is every fourth", "// self.num_generations\n", "% self.num_generations\n", "on policy"),
    (
        "rewards in another order",
        "self._rewards[mine, 0].tolist()",
        "self._rewards[:, 0].flip(0).tolist()",
        "on policy",
    ),
    ("no old log-probability", "torch.cat([one.old_logprob_N for one in stored]),", "None,", "three epochs"),
    ("no baseline", "cat([one.baseline_N for one in stored])", "zeros(sum(len(r.p_N) for r in rollouts))", "on policy"),
    ("lambda is lost", "lam=run.floor.present_lam)", "lam=0.0)", "on policy"),
    ("another rollout's baselines", "self._baselines()[mine]", "self._baselines()[::-1]", "on policy"),
    (
        "sampled without the head",
        "self.head, self._number, first)",
        "type(self.head)(self.head.options), self._number, first)",
        "on policy",
    ),
]


@pytest.mark.parametrize(
    ("right", "wrong", "case"), [fault[1:] for fault in GRADIENT_FAULTS], ids=[fault[0] for fault in GRADIENT_FAULTS]
)
def test_faults_in_the_gradient_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str, case: str
) -> None:
    code = faulty(right, wrong)
    assert fails(lambda: check_gradient(tmp_path, monkeypatch, code, **GRADIENTS[case]))


RESUME_FAULTS = [
    ("state not read", "self.run_state.load_json(", "str("),
    ("counts rollouts from 0", "self._step = step * self.args.gradient_accumulation_steps", "pass"),
    ("weights not read", "self.head.load_state_dict(saved.state_dict())", "pass"),
    ("trl's order of prompts", "return EpochSampler(", "return type(plain)("),
]


@pytest.mark.parametrize(
    ("right", "wrong"), [fault[1:] for fault in RESUME_FAULTS], ids=[fault[0] for fault in RESUME_FAULTS]
)
def test_faults_in_resuming_are_caught(tmp_path: Path, right: str, wrong: str) -> None:
    assert fails(lambda: check_resume(tmp_path, faulty(right, wrong)))


RESTORE_FAULTS = [
    ("weights stay", "self.head.load_state_dict(self._start_weights)", "pass"),
    ("moments stay", "self.optimizer.optimizer.state.clear()", "pass"),
    ("lambda stays", "run.floor.hold_back(2.0)", "pass"),
]


@pytest.mark.parametrize(
    ("right", "wrong"), [fault[1:] for fault in RESTORE_FAULTS], ids=[fault[0] for fault in RESTORE_FAULTS]
)
def test_faults_in_restoring_are_caught(tmp_path: Path, right: str, wrong: str) -> None:
    assert fails(lambda: check_restore(tmp_path, faulty(right, wrong)))


def fails(check: Callable[[], None]) -> bool:
    try:
        check()
    except (AssertionError, IndexError, KeyError, RuntimeError, ValueError, TypeError, pytest.fail.Exception):
        return True
    return False
