"""Shapes of trees, against all trees there are."""

import itertools

import pytest

from models.drafters.tree_shapes import best_tree, levels_of, monotone

Ranks = tuple[int, ...]  # a node: the rank of each guess on the way to it


def value_of(node: Ranks, accuracy: tuple[tuple[float, ...], ...]) -> float:
    value = 1.0
    for level, rank in enumerate(node):
        value *= accuracy[min(level, len(accuracy) - 1)][rank]
    return value


def nodes_of(parents: tuple[int, ...]) -> list[Ranks]:
    nodes: list[Ranks] = []
    for node, parent in enumerate(parents):
        above = () if parent < 0 else nodes[parent]
        nodes.append((*above, parents[:node].count(parent)))
    return nodes


def is_tree(nodes: set[Ranks]) -> bool:
    """Every node's parent is there, and its siblings of better rank."""
    return all(
        (len(node) == 1 or node[:-1] in nodes) and (node[-1] == 0 or (*node[:-1], node[-1] - 1) in nodes)
        for node in nodes
    )


@pytest.mark.parametrize(
    "accuracy",
    [
        ((0.6, 0.2, 0.1), (0.5, 0.2, 0.1)),
        ((0.4, 0.35, 0.2), (0.9, 0.05, 0.01)),
        ((0.3, 0.3, 0.3), (0.1, 0.1, 0.1)),
        ((0.7, 0.25, 0.0),),
    ],
)
def test_no_tree_of_as_many_nodes_is_better(accuracy: tuple[tuple[float, ...], ...]) -> None:
    """Expected accepted tokens: the sum over nodes of the product on the way, for every tree of depth 2 (or 3)."""
    for depth in (1, 2) if len(accuracy) > 1 else (3,):
        ranks = range(3 if depth < 3 else 2)
        everything = [node for length in range(1, depth + 1) for node in itertools.product(ranks, repeat=length)]
        for num_nodes in range(1, 7):
            sums = [
                sum(value_of(node, accuracy) for node in nodes)
                for nodes in itertools.combinations(everything, min(num_nodes, len(everything)))
                if is_tree(set(nodes))
            ]
            parents = best_tree(accuracy, num_nodes, depth)
            nodes = nodes_of(parents)
            assert is_tree(set(nodes))
            assert len(set(nodes)) == len(nodes) <= num_nodes
            assert max(map(len, nodes)) <= depth
            assert sum(value_of(node, accuracy) for node in nodes) == pytest.approx(max(sums), abs=1e-12)
            # Level after level, and siblings next to each other.
            assert [len(node) for node in nodes] == sorted(len(node) for node in nodes)
            assert list(parents) == sorted(parents)


def test_small_and_hopeless_trees() -> None:
    assert best_tree(((0.5,), (0.4,)), 5, 3) == (-1, 0, 1)
    assert best_tree(((0.5, 0.0), (0.0, 0.0)), 5, 3) == (-1,)
    assert best_tree(((0.0, 0.0),), 5, 3) == ()


def test_ranks_measured_out_of_order() -> None:
    assert monotone([[0.5, 0.1, 0.3, 0.05], [0.2, 0.2, 0.1, 0.1]], 3) == ((0.5, 0.1, 0.1), (0.2, 0.2, 0.1))


def test_levels() -> None:
    levels = levels_of((-1, -1, -1, 0, 0, 2, 4, 5, 5))
    assert [(level.nodes, level.parents, level.children) for level in levels] == [
        ((-1,), (), ((0, 1, 2),)),
        ((0, 2), (0, 0), ((3, 4), (5,))),
        ((4, 5), (0, 1), ((6,), (7, 8))),
    ]
    assert levels_of(()) == ()
