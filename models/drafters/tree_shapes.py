"""Which nodes a drafted tree has: the best tree for measured accuracies, and the levels in which any tree is drafted.

A node stands for "the draft's r-th guess after its parent's". Taking guesses to be right independently of one another,
the expected number of accepted tokens is the sum over nodes of the product of accuracies on the way to each. Accuracy
falls with rank, and a child's product is no larger than its parent's, so the n largest products are a tree, and no tree
of n nodes has a larger sum: Medusa's sparse tree (Cai et al. 2024, arXiv 2401.10774, section 2.3.3), and Sequoia's for
these assumptions (Chen et al. 2024, arXiv 2402.12374, section 3.1).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from ..verification.tree import children_of

Accuracy = tuple[tuple[float, ...], ...]  # [k][r]: share of right r-th guesses of head k + 1


def monotone(accuracy: Sequence[Sequence[float]], num_ranks: int) -> Accuracy:
    """The first ranks, where a rank that was measured better than the one before it counts as equally good."""
    return tuple(tuple(accumulate(row[:num_ranks], min)) for row in accuracy)


@lru_cache(maxsize=64)
def best_tree(accuracy: Accuracy, num_nodes: int, depth: int) -> tuple[int, ...]:
    """Parents (-1: the root) of the best tree of at most num_nodes nodes, level after level, siblings by rank.

    accuracy: falling in each row; levels below its last row have that row's. Guesses that are never right are left out.
    """
    children: list[list[int]] = [[]]  # by place: 0 the root, n + 1 node n in the order of choice
    values, levels = [1.0], [0]
    rows = [accuracy[min(level, len(accuracy) - 1)] for level in range(depth)]
    waiting = [(-rows[0][0], 0, 0)]  # (-product, parent's place, rank)
    while waiting and len(values) <= num_nodes:
        value, parent, rank = heapq.heappop(waiting)
        if value == 0:
            break
        place, level = len(values), levels[parent]
        children[parent].append(place)
        children.append([])
        values.append(-value)
        levels.append(level + 1)
        if rank + 1 < len(rows[level]):
            heapq.heappush(waiting, (-values[parent] * rows[level][rank + 1], parent, rank + 1))
        if level + 1 < depth:
            heapq.heappush(waiting, (value * rows[level + 1][0], place, 0))
    return _level_after_level(children)


def _level_after_level(children: Sequence[Sequence[int]]) -> tuple[int, ...]:
    parents: list[int] = []
    numbers = [(0, -1)]  # (place, the number that its node gets)
    for place, number in numbers:
        for child in children[place]:
            numbers.append((child, len(parents)))
            parents.append(number)
    return tuple(parents)


@dataclass(frozen=True)
class Level:
    """The inner places of one depth: their nodes (-1: the root), each one's parent among the inner places of the depth
    before (the root: none), and each one's children."""

    nodes: tuple[int, ...]
    parents: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=64)
def levels_of(parents: tuple[int, ...]) -> tuple[Level, ...]:
    """What has to be drafted, in order; parents go level after level."""
    children = children_of(parents)
    levels: list[Level] = []
    nodes: tuple[int, ...] = (-1,)
    above: tuple[int, ...] = ()
    while nodes := tuple(node for node in nodes if children[node + 1]):
        places = () if not levels else tuple(above.index(parents[node]) for node in nodes)
        levels.append(Level(nodes, places, tuple(children[node + 1] for node in nodes)))
        above, nodes = nodes, tuple(child for node in nodes for child in children[node + 1])
    return tuple(levels)
