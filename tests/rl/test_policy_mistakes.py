"""Where estimates of the gradient are biased, by the published code's mistakes among others, and that ours is not."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from models.decoding.decoder import BlockRecord, Decoder
from models.decoding.rows import GenerationParams
from models.drafters.heads import HeadsDrafter
from models.heads import HeadOptions, build_head
from models.sampling import SamplingParams
from models.target.tiny import make_tiny_target
from models.verification.ensemble import StaticEnsemble
from rl import policy
from rl.policy import PolicyOptions
from tests.rl.worlds import (
    EOS,
    EXACT,
    FREE_OF_VERDICTS,
    REQUIRED,
    THETA,
    THETA_LATER,
    TOKENS_ALONE,
    UNCLIPPED,
    WRONG,
    Pairs,
    World,
    expected_gradient,
    gap,
)

REAL = SimpleNamespace(**vars(policy))


@pytest.mark.parametrize(
    "world", [{"by_place": True}, {"by_place": True, "has_bonus": False}, {}], ids=["place", "place alone", "bonus"]
)
@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_tokens_alone_are_biased_where_verdicts_matter(world: dict, lam: float) -> None:
    """Where q depends on the place in the block; and, with q of the text alone, because of the bonus token."""
    world, options = World(**world), replace(TOKENS_ALONE, lam=lam, entropy=0.0)
    expected = world.gradient(THETA, options)
    assert gap(expected_gradient(REAL, world, THETA, options), expected) > WRONG
    assert gap(expected_gradient(REAL, world, THETA, UNCLIPPED), world.gradient(THETA, UNCLIPPED)) < REQUIRED


def test_ratio_of_tokens_is_biased_once_w_has_moved() -> None:
    world, options = World(by_place=True), replace(UNCLIPPED, ratio="token")
    got = expected_gradient(REAL, world, THETA_LATER, options, theta_old=THETA)
    assert gap(got, world.gradient(THETA_LATER, options)) > WRONG


def test_leaving_the_past_out_of_the_return_saves_noise() -> None:
    """Variance of a pair's estimate where the acceptance term rules."""
    world, options = World(seed=1), replace(UNCLIPPED, lam=2.0, entropy=0.0)
    pairs = Pairs(REAL, world, THETA)
    (_, plain), (_, without_past) = (pairs.moments(REAL, THETA, options, luck) for luck in (False, True))
    assert without_past < 0.8 * plain


# ---- the published code's mistakes ----


def test_mixed_logits_are_not_what_is_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """nu mixes probabilities: it sums to one, and its overlap with q is the acceptance. Mixed logits give a bias."""
    world = World(**FREE_OF_VERDICTS)
    w_N = world.weights(THETA)
    nu_NV = REAL.token_logprob(w_N[:, None], world.p_NV, world.q_NV).exp()
    assert (nu_NV.sum(dim=1) - 1.0).abs().max() < EXACT
    overlap_N = torch.minimum(nu_NV, world.q_NV).sum(dim=1)
    assert (overlap_N - REAL.acceptance(w_N, world.tv_N)).abs().max() < EXACT

    def mixed_logits(w: Tensor, p_y: Tensor, q_y: Tensor) -> Tensor:
        logits_NV = w[:, None] * world.p_NV.log() + (1.0 - w[:, None]) * world.q_NV.log()
        return logits_NV.log_softmax(dim=1).gather(1, world.token_N[:, None])[:, 0]

    expected = world.gradient(THETA, TOKENS_ALONE)
    assert gap(expected_gradient(REAL, world, THETA, TOKENS_ALONE), expected) < REQUIRED
    monkeypatch.setattr(policy, "token_logprob", mixed_logits)
    assert gap(expected_gradient(REAL, world, THETA, TOKENS_ALONE), expected) > WRONG


def test_a_step_along_the_regulariser_raises_acceptance() -> None:
    """With every reward alike, descending the loss accepts more, in the enumerated mean; lam = 0 does nothing."""
    world = World(by_place=True)
    world.reward_S = torch.full_like(world.reward_S, 0.5)
    step = 0.01 * expected_gradient(REAL, world, THETA, PolicyOptions(lam=1.0))
    before, after = (world.objective(theta, lam=1.0, reward_share=0.0) for theta in (THETA, THETA + step))
    assert after > before
    assert expected_gradient(REAL, world, THETA, PolicyOptions(lam=0.0)).norm() < EXACT


def test_a_dropped_closing_eos_biases_the_gradient() -> None:
    """Tokens are told by where they stand. A mask made of ids, where pad = EOS, loses the token that ends a text."""
    world = World(by_place=True)
    assert (world.token_N == EOS).any()
    expected = world.gradient(THETA, UNCLIPPED)
    assert gap(expected_gradient(REAL, world, THETA, UNCLIPPED), expected) < REQUIRED
    kept_N = torch.nonzero(world.token_N != EOS)[:, 0]
    assert gap(expected_gradient(REAL, world, THETA, UNCLIPPED, kept_N=kept_N), expected) > WRONG


def test_greedy_rollouts_teach_nothing() -> None:
    """A score has mean zero over what is sampled, not at the likeliest token; and greedy samples of a prompt are all
    alike, so that none is better than the others: no gradient from the reward is left."""
    world = World()
    w_N = world.weights(THETA).requires_grad_()
    logprob_NV = REAL.token_logprob(w_N[:, None], world.p_NV, world.q_NV)
    (sampled_N,) = torch.autograd.grad((logprob_NV.exp().detach() * logprob_NV).sum(), w_N, retain_graph=True)
    (greedy_N,) = torch.autograd.grad(logprob_NV.amax(dim=1).sum(), w_N)
    assert sampled_N.abs().max() < EXACT
    assert greedy_N.abs().mean() > 0.1

    run = torch.nonzero(world.sequence_N == 5)[:, 0]
    columns = (x_N[run].repeat(4) for x_N in (world.p_N, world.q_N, world.tv_N, world.is_accepted_N))
    tokens = policy.VerifiedTokens(*columns, torch.arange(4).repeat_interleave(len(run)))
    leaf_N = torch.full_like(tokens.p_N, 0.5).requires_grad_()
    reward_S, options = torch.full((4,), 0.9, dtype=torch.float64), PolicyOptions(lam=0.0)
    baseline_N = policy.baselines(leaf_N, tokens, reward_S, torch.zeros(4, dtype=torch.long), options)
    loss, _ = policy.surrogate(leaf_N, tokens, reward_S, baseline_N, options)
    loss.backward()
    assert leaf_N.grad.abs().max() < EXACT


@pytest.mark.filterwarnings("ignore:temperature=0 leaves the target one token")
def test_a_greedy_decoder_gives_no_blocks_to_learn_from() -> None:
    """At temperature 0 no rule is asked and no block is told of; above it, each is."""
    target = make_tiny_target()
    drafter = HeadsDrafter(build_head(target, HeadOptions(num_draft_tokens=2)))
    decoder = Decoder(target, drafter, 2, StaticEnsemble(0.5))
    for temperature in (0.0, 1.0):
        heard: list[BlockRecord] = []
        params = GenerationParams(max_new_tokens=6, sampling=SamplingParams(temperature), eos_token_ids=())
        decoder.generate([[5, 6, 7]], params, on_block=heard.append)
        assert bool(heard) == (temperature > 0.0)
