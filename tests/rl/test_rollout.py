"""What a rollout records, against a fresh forward of both models over the text, and against the decoder's counts."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.drafters.base import Drafter
from models.drafters.heads import HeadsDrafter
from models.drafters.model import ModelDrafter
from models.ensemble import EnsembleHead, EnsembleOptions
from models.heads import HeadOptions, build_head
from models.processors.prefix import ProcessorParams
from models.sampling import SamplingParams
from models.target.model import Target
from models.target.tiny import make_tiny_target
from rl import rollout as rollout_module
from rl.rollout import (
    FixedWeight,
    Rollout,
    require_temperature_alone,
    require_verified,
    sample_rollouts,
    stack_features,
    verified_tokens,
    without_features,
    without_tokens,
)
from tests.models.decoding.scripted import random_prompts

NUM_DRAFTED = 3
TEMPERATURE = 0.8
NUM_SAMPLES = 2
PROMPTS = random_prompts(4, longest=12)
# EOS ids: a few of 259 ids, so that many completions end early, accepted EOS among them. 0 is the padding token.
EOS = tuple(range(0, 259, 12))
PARAMS = GenerationParams(20, SamplingParams(TEMPERATURE), eos_token_ids=EOS)
# float32 forwards of hidden 32 in batches of other shapes, and what a softmax makes of that.
TOLERANCE = 2e-4
Module = Any


def make_target() -> Target:
    return make_tiny_target(seed=0)


def make_drafter(kind: str, target: Target) -> Drafter:
    if kind == "model":
        return ModelDrafter(make_tiny_target(seed=1, hidden_size=16), target)
    torch.manual_seed(0)
    head = build_head(target, HeadOptions(kind=kind, num_draft_tokens=NUM_DRAFTED))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return HeadsDrafter(head.eval())


def make_ensemble(kind: str, draft_size: int) -> EnsembleHead:
    """Not at its start, so that w varies over all of (0, 1)."""
    torch.manual_seed(3)
    head = EnsembleHead(EnsembleOptions(kind=kind, draft_size=draft_size, target_size=32, initial_weight=0.5, width=8))
    with torch.no_grad():
        head.output.weight.normal_(std=0.4)
    return head


def sample(
    kind: str, ensemble: str = "linear", code: Module = rollout_module, **changes: Any
) -> tuple[list[Rollout], Target, Drafter, EnsembleHead]:
    target = make_target()
    drafter = make_drafter(kind, target)
    head = make_ensemble(ensemble, 16 if kind == "model" else 32)
    arguments = {"params": PARAMS, "seed": 5, "max_batch_size": 3, "num_samples": NUM_SAMPLES, **changes}
    rollouts = code.sample_rollouts(target, drafter, NUM_DRAFTED, head, PROMPTS, **arguments)
    return rollouts, target, drafter, head


def blocks_of(rollout: Rollout) -> list[list[int]]:
    """Entries of each block: it ends with a recovered token, or before a token that was not verified."""
    blocks: list[list[int]] = [[]]
    for n, place in enumerate(rollout.places_N.tolist()):
        last = blocks[-1]
        if last and (not rollout.is_accepted_N[last[-1]] or place != rollout.places_N[last[-1]] + 1):
            blocks.append(last := [])
        last.append(n)
    return [block for block in blocks if block]


def fresh_draft(drafter: Drafter, target: Target, text: list[int], drafted: list[int]) -> tuple[Tensor, Tensor]:
    """The drafter's last hidden state and q after `text` and `drafted`, computed anew."""
    if isinstance(drafter, ModelDrafter):
        hidden_H = drafter.draft.hidden(torch.tensor([text + drafted]))[0, -1]
        logits_V = drafter.draft.logits(hidden_H)
    else:
        assert isinstance(drafter, HeadsDrafter)
        state = drafter.start([text])
        hidden_BTH = target.hidden(torch.tensor([text[:-1]]), reads=drafter.reads)
        drafter.absorb(state, hidden_BTH, torch.tensor([text[1:]]), [len(text) - 1])
        drafter.read(state)
        hidden_BH, logits_BV = drafter.head.draft_step(state.head, None)
        for token in drafted:
            hidden_BH, logits_BV = drafter.head.draft_step(state.head, torch.tensor([token]))
        hidden_H, logits_V = hidden_BH[0], logits_BV[0]
    return hidden_H, (target.hide_padding(logits_V.clone()) / TEMPERATURE).softmax(dim=-1)


def expected_features(ensemble: str, hidden_q: Tensor, hidden_p: Tensor, p: Tensor, q: Tensor, place: int) -> Tensor:
    features = [hidden / hidden.square().mean().sqrt() for hidden in (hidden_q, hidden_p)]
    if ensemble == "mlp":
        entropies = [-(probs * probs.clamp(min=1e-30).log()).sum() / torch.tensor(264.0).log() for probs in (p, q)]
        others = [(p - q).abs().sum() / 2, (p.argmax() == q.argmax()).float(), torch.tensor(1.0 / (place + 1))]
        features.append(torch.stack([*entropies, *others]) * (sum(map(len, features)) / 5) ** 0.5)
    return torch.cat(features)


def check_against_fresh_forward(kind: str, ensemble: str, code: Module = rollout_module) -> None:
    """p, q, TV, features and w of every entry, from the text alone."""
    rollouts, target, drafter, head = sample(kind, ensemble, code)
    for index, rollout in enumerate(rollouts):
        prompt = PROMPTS[index // NUM_SAMPLES]
        hidden_TH = target.hidden(torch.tensor([prompt + rollout.tokens]))[0]
        p_TV = (target.hide_padding(target.logits(hidden_TH)) / TEMPERATURE).softmax(dim=-1)
        for block in blocks_of(rollout):
            start = int(rollout.places_N[block[0]])
            for place, n in enumerate(block):
                assert rollout.places_N[n] == start + place
                text, drafted = prompt + rollout.tokens[:start], rollout.tokens[start : start + place]
                hidden_H, q_V = fresh_draft(drafter, target, text, drafted)
                at = len(prompt) + start + place - 1
                p_V, token = p_TV[at], rollout.tokens[start + place]
                features_F = expected_features(ensemble, hidden_H, hidden_TH[at], p_V, q_V, place)
                expected = torch.stack([p_V[token], q_V[token], (p_V - q_V).abs().sum() / 2])
                found = torch.stack([rollout.p_N[n], rollout.q_N[n], rollout.tv_N[n].float()])
                torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
                torch.testing.assert_close(rollout.features_NF[n], features_F, atol=2e-3, rtol=2e-3)
                # Whatever was not verified under nu gives itself away: a recovered token has p > q, up to rounding.
                assert bool(rollout.is_accepted_N[n]) or p_V[token] > q_V[token] - TOLERANCE
        torch.testing.assert_close(rollout.weights_N, head(rollout.features_NF).detach(), atol=1e-5, rtol=1e-5)


def check_counts(kind: str, code: Module = rollout_module) -> None:
    """Every token is the prompt's own, verified, or a bonus; verdicts add up to the counters; and so does the cost."""
    rollouts, *_ = sample(kind, code=code)
    seen = {"bonus": 0, "accepted EOS": 0, "cut at the limit": 0}
    for rollout in rollouts:
        counters, places = rollout.counters, rollout.places_N.tolist()
        assert counters.accepted == int(rollout.is_accepted_N.sum())
        assert counters.drafted >= len(places)
        assert places == sorted(set(places))
        assert all(0 < place < len(rollout.tokens) for place in places)
        blocks = blocks_of(rollout)
        others = set(range(1, len(rollout.tokens))) - set(places)
        for place in others:  # bonus: behind a block accepted whole, or alone where there was no room to draft
            block = next((block for block in blocks if rollout.places_N[block[-1]] == place - 1), None)
            assert block is None or bool(rollout.is_accepted_N[block].all())
            assert block is not None or place == len(rollout.tokens) - 1
        is_accepted = dict(zip(places, rollout.is_accepted_N.tolist(), strict=True))
        last = len(rollout.tokens) - 1
        seen["bonus"] += len(others)
        seen["accepted EOS"] += rollout.tokens[last] in EOS and is_accepted.get(last, False)
        seen["cut at the limit"] += len(rollout.tokens) == PARAMS.max_new_tokens
        assert not any(token in EOS for token in rollout.tokens[:last])
        cost = ((1 - rollout.weights_N.double()) * rollout.tv_N.double()).sum().item()
        assert rollout.certificate == pytest.approx(cost, abs=1e-5)
        assert len(rollout.weights_N) == len(rollout.features_NF) == len(places)
    assert all(seen.values()), seen


@pytest.mark.parametrize(
    ("kind", "ensemble"), [("model", "mlp"), ("mtp", "linear"), ("medusa", "mlp"), ("eagle3", "linear")]
)
def test_entries_equal_a_fresh_forward(kind: str, ensemble: str) -> None:
    check_against_fresh_forward(kind, ensemble)


@pytest.mark.parametrize("kind", ["model", "mtp"])
def test_counts_and_certificate(kind: str) -> None:
    check_counts(kind)


def faulty(right: str, wrong: str) -> ModuleType:
    """The module with a fault in it."""
    source = inspect.getsource(rollout_module)
    assert right in source, right
    module = ModuleType("faulty_rollout")
    module.__dict__["__name__"] = "rl.rollout"
    exec(compile(source.replace(right, wrong, 1), "faulty rollout", "exec"), module.__dict__)
    return module


FAULTS = [
    ("the bonus is recorded", "+ (~verdict.is_bonus_B).long()", "+ 1"),
    ("the recovered token is not", "+ (~verdict.is_bonus_B).long()", "+ 0"),
    ("tokens behind a stop are recorded", ", num_emitted_B)", ", num_emitted_B + 9)"),
    ("the recovered token is the drafted one", "verdict.next_token_B[:, None])", "block.draft_tokens_BK)"),
    ("p and q change places", "p_NV.gather(1, tokens_N1)[:, 0],", "q_NV.gather(1, tokens_N1)[:, 0],"),
    ("TV of p with itself", "total_variation(p_NV, q_NV)", "total_variation(p_NV, p_NV)"),
    ("places are off by one", "starts_B[rows_N] + steps_N,", "starts_B[rows_N] + steps_N + 1,"),
    ("a block's length is forgotten", "self._lengths[index] += num_emitted", "self._lengths[index] += 1"),
    ("rows of the batch taken for prompts", "torch.tensor(record.indices, device=device)[rows_N]", "rows_N"),
    ("everything counts as accepted", "is_accepted_BK[rows_N, steps_N],", "is_accepted_BK[rows_N, steps_N] | True,"),
    ("features of the next place", "features_BKF[rows_N, steps_N]", "features_BKF.roll(-1, 1)[rows_N, steps_N]"),
    ("rows are mixed up", "argsort(stable=True)", "argsort(descending=True)"),
    ("p of another place", "block.target_probs_BTV[rows_N, steps_N]", "block.target_probs_BTV[rows_N, steps_N + 1]"),
]


@pytest.mark.parametrize(("right", "wrong"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_planted_faults_are_caught(right: str, wrong: str) -> None:
    code = faulty(right, wrong)
    assert fails(lambda: check_counts("model", code)) or fails(
        lambda: check_against_fresh_forward("model", "mlp", code)
    )


def fails(check: Callable[[], None]) -> bool:
    try:
        check()
    except (AssertionError, IndexError, RuntimeError, ValueError):
        return True
    return False


def test_rollouts_do_not_depend_on_the_batch() -> None:
    """Rows that leave and join change nothing, nor does asking for more samples; another seed does."""
    alone, *_ = sample("model", max_batch_size=1)
    for max_batch_size in (3, None):
        together, *_ = sample("model", max_batch_size=max_batch_size)
        assert [rollout.tokens for rollout in together] == [rollout.tokens for rollout in alone]
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one.places_N, other.places_N)
            torch.testing.assert_close(one.p_N, other.p_N, atol=TOLERANCE, rtol=TOLERANCE)
    assert [rollout.tokens for rollout in sample("model", seed=6)[0]] != [rollout.tokens for rollout in alone]


def test_tensors_are_copies_without_a_graph() -> None:
    """The head's parameters require gradients; nothing of a forward stays alive behind a record."""
    rollouts, *_ = sample("mtp")
    for rollout in rollouts:
        for name in ("features_NF", "p_N", "q_N", "tv_N", "is_accepted_N", "places_N", "weights_N"):
            tensor = getattr(rollout, name)
            assert not tensor.requires_grad
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert rollout.features_NF.dtype == rollout.p_N.dtype == torch.float32


@pytest.mark.parametrize("kind", ["model", "mtp"])
def test_weight_one_is_lossless_decoding(kind: str) -> None:
    target = make_target()
    drafter = make_drafter(kind, target)
    rollouts = sample_rollouts(target, drafter, NUM_DRAFTED, FixedWeight(1.0), PROMPTS, 1, PARAMS, 7)
    lossless = Decoder(target, drafter, NUM_DRAFTED).generate(PROMPTS, replace(PARAMS, seed=7))
    assert [rollout.tokens for rollout in rollouts] == [result.tokens for result in lossless]
    assert [rollout.text for rollout in rollouts] == [result.text for result in lossless]
    assert all(rollout.certificate == 0.0 and bool((rollout.weights_N == 1.0).all()) for rollout in rollouts)
    assert all(rollout.features_NF.shape == (len(rollout.p_N), 0) for rollout in rollouts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": SamplingParams(0.0)}, "temperature=0: a greedy rollout has no likelihood"),
        ({"sampling": SamplingParams(1.0, top_k=20)}, "top_k=20.*leave it at 0"),
        ({"sampling": SamplingParams(1.0, top_p=0.9)}, "top_p=0.9.*leave it at 1.0"),
        ({"sampling": SamplingParams(1.0, min_p=0.1)}, "min_p=0.1.*leave it at 0"),
        ({"processors": ProcessorParams(repetition_penalty=1.1)}, "processors.*leave them out"),
    ],
)
def test_other_sampling_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        require_temperature_alone(replace(PARAMS, **changes))
    with pytest.raises(ValueError, match=message):
        sample("model", params=replace(PARAMS, **changes))


def test_rollouts_without_a_drafted_token_are_refused() -> None:
    """Once nobody has any: a process may be left with a few completions that end at once, and has nothing to add."""
    rollouts, _, _, head = sample("mtp", params=replace(PARAMS, max_new_tokens=1))
    tokens, features = verified_tokens(rollouts), stack_features(rollouts)
    assert features.shape == (0, head.num_features)
    assert (len(tokens.p_N), len(tokens.sequence_N)) == (0, 0)
    assert head(features).shape == (0,)
    with pytest.raises(ValueError, match=r"raise trainer\.max_completion_length"):
        require_verified(rollouts)
    some, *_ = sample("mtp")
    require_verified([*rollouts, *some])


def test_calls_that_share_completions_out_sample_what_one_does() -> None:
    """Also where a prompt's completions fall into two calls; and what is told of them has all but the features."""
    target = make_target()
    drafter, head = make_drafter("model", target), make_ensemble("mlp", 16)
    repeated = [prompt for prompt in PROMPTS for _ in range(3)]

    def call(start: int, stop: int, first: int) -> list[Rollout]:
        return sample_rollouts(target, drafter, NUM_DRAFTED, head, repeated[start:stop], 1, PARAMS, 5, None, first)

    whole, parts = call(0, 12, 0), [*call(0, 4, 0), *call(4, 5, 4), *call(5, 12, 5)]
    assert [one.tokens for one in whole] == [one.tokens for one in parts]
    assert [one.tokens for one in call(4, 12, 0)] != [one.tokens for one in whole[4:]]
    assert call(4, 4, 4) == []
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one.is_accepted_N, other.is_accepted_N)
        torch.testing.assert_close(one.p_N, other.p_N, atol=TOLERANCE, rtol=TOLERANCE)
        told, nothing = without_features(other), without_tokens(other)
        assert told.features_NF.shape == (len(other.p_N), 0)
        assert torch.equal(told.weights_N, other.weights_N)
        assert (told.tokens, told.counters, told.certificate) == (other.tokens, other.counters, other.certificate)
        assert nothing.features_NF.shape == (0, head.num_features)
        assert len(nothing.weights_N) == len(nothing.places_N) == 0
