"""The most acceptance that a given distance from the target buys: at one context, and over a whole text.

One context: acceptance <= 1 - TV(p, q) + distance for every rule, and a static ensemble reaches it, so there a weight w
that knows the text gains nothing. It can gain by choosing *where* distance is spent: an accepted token early in a
block lets those behind it count. How much, `dynamic_point` says.

Let w depend on all that has been settled: text and place in the block (where K = 1, the text alone). All is linear in
it, where q's support lies in p's:

    kept = q - w (q - p)+,    recovered = w (p - q)+,    distance = (1 - w) TV(p, q).

So the choice of all w at once is a linear program over occupancies (the probability that a place is verified, and that
times 1 - w), with one constraint, on the expected certificate. For a price on distance its optimum has w = 0 or 1
everywhere, and dynamic programming from the text's end finds it; the frontier is the upper hull of these optima.

Shape suffixes: M prompts, N = V**d texts of d tokens (see `enumerable`), V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.theory.enumerable import EnumerableModel
from models.verification.base import total_variation

# (value of w = 1 and of w = 0 at a place [M, N, 2]) -> w [M, N, 1], or one for all
Choice = Callable[[Tensor, Tensor], Tensor | float]
TOLERANCE = 1e-12  # a point less than this above the line between two others counts as lying on it


@dataclass(frozen=True)
class Point:
    """Expectations a sequence: its certificate, and drafted tokens accepted.

    A block emits one token more than it accepts, so `length` tokens take length - accepted blocks.
    """

    distance: float
    accepted: float

    def worth(self, price: float) -> float:
        """Accepted tokens less what their distance costs."""
        return self.accepted - price * self.distance


def best_acceptance(p: Tensor, q: Tensor, distance: Tensor | float) -> Tensor:
    """Highest acceptance [...] of any rule within `distance` of p, for p, q [..., V] at one context.

    min(1 - TV(p, q) + distance, q(support of p)), since a token with p = 0 is never accepted. A static ensemble attains
    it where q's support lies in p's; elsewhere its restricted q is further from p than the best law need be.
    """
    within = torch.where(p > 0, q, 0.0).sum(dim=-1)
    return torch.minimum(1.0 - total_variation(p, q) + distance, within)


def static_point(model: EnumerableModel, length: int, num_draft_tokens: int, weight: float) -> Point:
    """The same w everywhere, over `length` tokens after M equally likely prompts."""
    _require_support(model)
    return _follow(model, length, num_draft_tokens, lambda strict, loose: weight)


def dynamic_point(model: EnumerableModel, length: int, num_draft_tokens: int, distance: float) -> Point:
    """The most accepted tokens that any w has at this expected distance (or at most that of w = 0 everywhere).

    Exact: the frontier's corners to the left and right are sought, and the point between them is attained by the w that
    mixes their occupancies. Raises ValueError for a negative distance.
    """
    if distance < 0:
        raise ValueError(f"distance={distance}: must be at least 0; 0 is lossless.")
    left, right = (static_point(model, length, num_draft_tokens, weight) for weight in (1.0, 0.0))
    if distance >= right.distance:
        return right
    while True:
        price = (right.accepted - left.accepted) / (right.distance - left.distance)
        best = _best_point(model, length, num_draft_tokens, price)
        if best.worth(price) <= left.worth(price) + TOLERANCE:  # nothing above the line: it is the frontier here
            return Point(distance, left.accepted + price * (distance - left.distance))
        left, right = (best, right) if best.distance <= distance else (left, best)


def _best_point(model: EnumerableModel, length: int, num_draft_tokens: int, price: float) -> Point:
    """The w of highest worth at this price of distance: at each place w = 1 or w = 0, whichever is worth more."""
    worth_2 = torch.tensor([1.0, -price], dtype=torch.float64)

    def choose(strict: Tensor, loose: Tensor) -> Tensor:
        return (strict @ worth_2 >= loose @ worth_2).double()[..., None]

    return _follow(model, length, num_draft_tokens, choose)


def _follow(model: EnumerableModel, length: int, num_draft_tokens: int, choose: Choice) -> Point:
    """Expected accepted tokens and certificate of a text by the w that `choose` takes, backwards from the text's end.

    values[k]: (accepted, certificate) [M, N, 2] from a text on, k drafted tokens of the running block being kept; a
    bonus comes next where k = K. As in the decoder no drafted token is the last: that place is worth nothing.
    """
    model.require_depth(length)
    last = torch.zeros(*model.p[length - 1].shape[:2], 2, dtype=torch.float64)
    values = [last] * (num_draft_tokens + 1)
    for p, q in reversed(list(zip(model.p, model.q, strict=True))[: length - 1]):
        fresh, *if_kept = (value.unflatten(1, (-1, model.vocab_size)) for value in values)
        recovered = _expect((p - q).clamp(min=0.0), fresh)
        distance_MN = total_variation(p, q)
        values = []
        for next_MNV2 in if_kept:
            strict = _verified(torch.minimum(p, q), torch.zeros_like(distance_MN), next_MNV2) + recovered
            loose = _verified(q, distance_MN, next_MNV2)
            weight = choose(strict, loose)
            values.append(weight * strict + (1.0 - weight) * loose)
        values.append(_expect(p, fresh))
    accepted, distance = values[0].mean(dim=(0, 1)).tolist()
    return Point(distance, accepted)


def _verified(kept_MNV: Tensor, distance_MN: Tensor, next_MNV2: Tensor) -> Tensor:
    """Value of a verified place, and of what follows where the drafted token is kept."""
    return torch.stack([kept_MNV.sum(dim=2), distance_MN], dim=2) + _expect(kept_MNV, next_MNV2)


def _expect(weights_MNV: Tensor, next_MNV2: Tensor) -> Tensor:
    return (weights_MNV[..., None] * next_MNV2).sum(dim=2)


def _require_support(model: EnumerableModel) -> None:
    if not model.tells_q:
        raise ValueError("tells_q=False: an ensemble needs a drafter whose q is told.")
    if any(((p == 0) & (q > 0)).any() for p, q in zip(model.p, model.q, strict=True)):
        raise ValueError(
            "q gives a token that p gives probability 0: the frontier is linear in w only where q's support lies in "
            "p's. Use a sampling without top_k, top_p and min_p."
        )
