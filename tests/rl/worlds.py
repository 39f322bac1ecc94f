"""Worlds small enough to list every run of a decoder: which tokens, with which verdicts, from which place of a block.

The law of the runs and the objective are written here from the definitions, in float64, and not with the code under
test; the estimate of the policy gradient is the code's, weighted with that law, and so an expectation without noise.

A run decodes block by block as `models.decoding.Decoder` does: up to K drafted tokens, never more than could be
emitted, then a recovered or a bonus token; it ends with EOS (token 0) or at the length limit.

Shape suffixes: N verified tokens of all runs, S runs, V vocabulary.
"""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl.policy import PolicyOptions

EOS = 0
NUM_FEATURES = 3
EXACT = 1e-12  # float64, sums of some thousand terms
REQUIRED = 1e-6  # relative error of a gradient; what is reached is below 1e-10
WRONG = 5e-3  # a biased estimate is off by more than this, relatively
THETA = torch.tensor([0.3, -0.5, 0.8], dtype=torch.float64)
THETA_LATER = torch.tensor([0.5, -0.2, 0.4], dtype=torch.float64)
UNCLIPPED = PolicyOptions(lam=0.7, entropy=0.2, clip_low=math.inf, clip_high=math.inf)
TOKENS_ALONE = replace(UNCLIPPED, likelihood="tokens")

# Where the likelihood of tokens alone holds: nothing that follows a token depends on its verdict.
FREE_OF_VERDICTS = {"has_bonus": False}
WORLDS = ({}, {"by_place": True}, {"vocab_size": 4, "length": 3}, {"num_draft_tokens": 1, "seed": 1}, FREE_OF_VERDICTS)

Text = tuple[int, ...]


class Event(NamedTuple):
    """One emitted token: the text before it, its place in the block, and how it came to be."""

    text: Text
    place: int
    token: int
    verdict: str  # accepted, recovered or bonus


class World:
    """Random p, q, features of w and rewards for every text of up to `length` tokens, and all runs.

    by_place: q and w depend on the place in the block too, not on the text alone. has_bonus: False is a decoder that
    draws no bonus token, and starts the next block instead.
    """

    def __init__(
        self,
        vocab_size: int = 3,
        length: int = 4,
        num_draft_tokens: int = 2,
        seed: int = 0,
        by_place: bool = False,
        has_bonus: bool = True,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.vocab_size, self.length, self.num_draft_tokens = vocab_size, length, num_draft_tokens
        self.has_bonus = has_bonus
        self.p: dict[Text, np.ndarray] = {}
        self.q: dict[tuple[Text, int], np.ndarray] = {}
        self.features: dict[tuple[Text, int], np.ndarray] = {}
        for size in range(length + 1):
            for text in itertools.product(range(vocab_size), repeat=size):
                self.p[text] = rng.dirichlet(np.ones(vocab_size))
                for place in range(num_draft_tokens):
                    source = (text, place if by_place else 0)
                    self.q.setdefault(source, rng.dirichlet(np.ones(vocab_size)))
                    self.features.setdefault(source, rng.normal(size=NUM_FEATURES))
                    self.q[text, place], self.features[text, place] = self.q[source], self.features[source]
        self.runs: list[tuple[Event, ...]] = []
        self._start_block((), ())
        self._make_tensors(rng)

    def num_drafted(self, text: Text) -> int:
        """Tokens that a block after this text drafts."""
        left = self.length - len(text)
        return min(self.num_draft_tokens, left - 1 if self.has_bonus else left)

    def _start_block(self, text: Text, events: tuple[Event, ...]) -> None:
        if len(text) == self.length or text[-1:] == (EOS,):
            self.runs.append(events)
        else:
            self._judge(text, events, 0, self.num_drafted(text))

    def _judge(self, text: Text, events: tuple[Event, ...], place: int, num_drafted: int) -> None:
        if place == num_drafted and not self.has_bonus:
            return self._start_block(text, events)
        for token in range(self.vocab_size):
            longer = (*text, token)
            if place == num_drafted:
                self._start_block(longer, (*events, Event(text, place, token, "bonus")))
                continue
            accepted = (*events, Event(text, place, token, "accepted"))
            if token == EOS:
                self._start_block(longer, accepted)
            else:
                self._judge(longer, accepted, place + 1, num_drafted)
            if self.p[text][token] > self.q[text, place][token]:
                self._start_block(longer, (*events, Event(text, place, token, "recovered")))

    def _make_tensors(self, rng: np.random.Generator) -> None:
        texts = [tuple(event.token for event in run) for run in self.runs]
        rewards = {text: rng.random() for text in sorted(set(texts))}
        self.reward_S = torch.tensor([rewards[text] for text in texts], dtype=torch.float64)
        self.bonus_logprob_S = torch.tensor(
            [sum(math.log(self.p[e.text][e.token]) for e in run if e.verdict == "bonus") for run in self.runs],
            dtype=torch.float64,
        )
        verified = [(index, e) for index, run in enumerate(self.runs) for e in run if e.verdict != "bonus"]
        self.sequence_N = torch.tensor([index for index, _ in verified])
        self.token_N = torch.tensor([e.token for _, e in verified])
        self.is_accepted_N = torch.tensor([e.verdict == "accepted" for _, e in verified])
        self.p_NV = torch.tensor(np.array([self.p[e.text] for _, e in verified]))
        self.q_NV = torch.tensor(np.array([self.q[e.text, e.place] for _, e in verified]))
        self.features_NF = torch.tensor(np.array([self.features[e.text, e.place] for _, e in verified]))
        self.p_N, self.q_N = (x_NV.gather(1, self.token_N[:, None])[:, 0] for x_NV in (self.p_NV, self.q_NV))
        self.tv_N = (self.p_NV - self.q_NV).abs().sum(dim=1) / 2
        self.count_S = self.sums(torch.ones_like(self.p_N))

    def sums(self, values_N: Tensor) -> Tensor:
        """Sum [S] over each run's verified tokens."""
        return torch.zeros(len(self.runs), dtype=torch.float64).index_add(0, self.sequence_N, values_N)

    def weights(self, theta: Tensor) -> Tensor:
        """w [N]."""
        return torch.sigmoid(self.features_NF @ theta)

    def law(self, theta: Tensor) -> Tensor:
        """Probability [S] of each run, differentiable."""
        w_N = self.weights(theta)
        nu_N = w_N * self.p_N + (1.0 - w_N) * self.q_N
        outcome_N = torch.where(self.is_accepted_N, torch.minimum(self.q_N, nu_N), nu_N - self.q_N)
        return (self.bonus_logprob_S + self.sums(outcome_N.log())).exp()

    def mean_bonus(self, theta: Tensor, lam: float, entropy: float) -> Tensor:
        """A [S]."""
        rejected_N = self.weights(theta) * self.tv_N
        entropy_N = -rejected_N * rejected_N.log() - (1.0 - rejected_N) * (1.0 - rejected_N).log()
        return self.sums(lam * (1.0 - rejected_N) + entropy * entropy_N) / self.count_S

    def objective(self, theta: Tensor, lam: float, entropy: float = 0.0, reward_share: float = 1.0) -> Tensor:
        """J = E[R + A]."""
        return (self.law(theta) * (reward_share * self.reward_S + self.mean_bonus(theta, lam, entropy))).sum()

    def gradient(self, theta: Tensor, options: PolicyOptions) -> Tensor:
        """grad J, through every outcome."""
        theta = theta.clone().requires_grad_()
        return torch.autograd.grad(self.objective(theta, options.lam, options.entropy), theta)[0]

    def tokens(self, code: SimpleNamespace, kept_N: Tensor | None = None) -> SimpleNamespace:
        """All verified tokens, or those kept, as the code wants them."""
        columns = (self.p_N, self.q_N, self.tv_N, self.is_accepted_N, self.sequence_N)
        return code.VerifiedTokens(*(x_N if kept_N is None else x_N[kept_N] for x_N in columns))


def chain(w_N: Tensor, gradient_N: Tensor, theta: Tensor) -> Tensor:
    """Gradient with respect to theta from that with respect to w."""
    return torch.autograd.grad(w_N, theta, gradient_N)[0]


def expected_gradient(
    code: SimpleNamespace,
    world: World,
    theta: Tensor,
    options: PolicyOptions,
    theta_old: Tensor | None = None,
    kept_N: Tensor | None = None,
) -> Tensor:
    """Expectation of the code's estimate, without baseline, over runs drawn under theta_old (default: theta).

    kept_N: the tokens that the code is shown.
    """
    theta = theta.clone().requires_grad_()
    tokens = world.tokens(code, kept_N)
    all_w_N = world.weights(theta)
    w_N = all_w_N if kept_N is None else all_w_N[kept_N]
    leaf_N = w_N.detach().requires_grad_()
    old_logprob_N = None
    if theta_old is not None:
        old_logprob_N = code.logprobs(world.weights(theta_old), tokens, options)
    loss, _ = code.surrogate(leaf_N, tokens, world.reward_S, torch.zeros_like(w_N), options, old_logprob_N)
    (gradient_N,) = torch.autograd.grad(loss, leaf_N)
    law_S = world.law(theta.detach() if theta_old is None else theta_old) * len(world.runs)
    return chain(w_N, -gradient_N * law_S[tokens.sequence_N], theta)


class Pairs:
    """All pairs of runs, as a prompt's group of two independent samples. Sequences 2 i and 2 i + 1 are pair i."""

    def __init__(self, code: SimpleNamespace, world: World, theta: Tensor) -> None:
        num_runs = len(world.runs)
        run_S = torch.cartesian_prod(torch.arange(num_runs), torch.arange(num_runs)).flatten()
        tokens_of = [torch.nonzero(world.sequence_N == run)[:, 0] for run in range(num_runs)]
        self.pick_N = torch.cat([tokens_of[run] for run in run_S.tolist()])
        sizes_S = world.count_S.long()[run_S]
        sequence_N = torch.repeat_interleave(torch.arange(len(run_S)), sizes_S)
        columns = (world.p_N, world.q_N, world.tv_N, world.is_accepted_N)
        self.tokens = code.VerifiedTokens(*(x_N[self.pick_N] for x_N in columns), sequence_N)
        self.reward_S = world.reward_S[run_S]
        self.group_S = torch.arange(len(run_S)) // 2
        law_S = world.law(theta)[run_S]
        self.law_P = law_S[0::2] * law_S[1::2]
        self.world = world

    def moments(
        self, code: SimpleNamespace, theta: Tensor, options: PolicyOptions, with_baseline: bool = True
    ) -> tuple[Tensor, float]:
        """Expectation of a pair's estimate, and the sum of its components' variances."""
        theta = theta.clone().requires_grad_()
        w_N = self.world.weights(theta)[self.pick_N]
        leaf_N = w_N.detach().requires_grad_()
        if with_baseline:
            baseline_N = code.baselines(leaf_N, self.tokens, self.reward_S, self.group_S, options)
        else:
            others_S = code.leave_one_out(
                code.returns(leaf_N.detach(), self.tokens, self.reward_S, options), self.group_S
            )
            baseline_N = others_S[self.tokens.sequence_N]
        loss, _ = code.surrogate(leaf_N, self.tokens, self.reward_S, baseline_N, options)
        (gradient_N,) = torch.autograd.grad(loss, leaf_N)
        slopes_NF = (w_N * (1.0 - w_N)).detach()[:, None] * self.world.features_NF[self.pick_N]  # dw / dtheta
        num_pairs = len(self.law_P)
        estimate_PF = torch.zeros(num_pairs, NUM_FEATURES, dtype=torch.float64)
        estimate_PF.index_add_(0, self.tokens.sequence_N // 2, -gradient_N[:, None] * slopes_NF * num_pairs)
        mean_F = (self.law_P[:, None] * estimate_PF).sum(dim=0)
        variance = (self.law_P[:, None] * (estimate_PF - mean_F).square()).sum()
        return mean_F, float(variance)


def gap(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())
