"""A pass over trees, moving the kept path together, and going on == a fresh forward, for every path of every tree."""

import pytest
import torch
from torch import Tensor

from models.cache.ragged import RaggedCache
from models.cache.tree_entries import keep_path, lineage, tree_masks, tree_positions
from models.target.model import Target
from models.target.tiny import FAMILIES, make_tiny_target
from tests.models.cache.test_ragged import check_row, feed, make_cache, random_tokens
from tests.models.decoding.trees import random_tree

Tree = tuple[int, ...]
NUM_NODES = 6


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Target:
    return make_tiny_target(family=request.param)


def path_to(parents: Tree, node: int) -> list[int]:
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


def feed_trees(
    target: Target, cache: RaggedCache, roots: list[int], trees: list[Tree], tokens: list[list[int]]
) -> Tensor:
    """One pass over a root and its nodes a row; moves no length."""
    sees_BTT, depths_BT = lineage(torch.tensor(trees))
    ids_BT = torch.tensor([[root, *row] for root, row in zip(roots, tokens, strict=True)])
    return target.hidden(ids_BT, tree_masks(cache, sees_BTT, depths_BT), tree_positions(cache, depths_BT), cache)


def keep(cache: RaggedCache, paths: list[list[int]]) -> None:
    """The root and these nodes stay."""
    width = max(map(len, paths)) + 1
    places = [[0, *(node + 1 for node in path)] for path in paths]
    keep_path(cache, torch.tensor([row + [0] * (width - len(row)) for row in places]), [len(row) for row in places])
    cache.advance([len(row) for row in places])


def test_lineage_by_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    trees = [random_tree(NUM_NODES, generator) for _ in range(20)]
    sees_BTT, depths_BT = lineage(torch.tensor(trees))
    for parents, sees_TT, depths_T in zip(trees, sees_BTT, depths_BT, strict=True):
        for place in range(NUM_NODES + 1):
            path = path_to(parents, place - 1)
            assert depths_T[place] == len(path)
            assert sees_TT[place].nonzero()[:, 0].tolist() == [0, *(node + 1 for node in path)]
    assert lineage(torch.zeros(2, 0, dtype=torch.long))[0].tolist() == [[[True]]] * 2


def check_every_path(target: Target, lengths: list[int]) -> None:
    """Each row has a tree of its own; paths of different lengths are kept beside each other, then chains and trees."""
    generator = torch.Generator().manual_seed(sum(lengths))
    trees = [random_tree(NUM_NODES, generator) for _ in lengths]
    for last in range(-1, NUM_NODES):
        texts = [random_tokens(length, seed=length) for length in lengths]
        cache = make_cache(target, len(lengths))
        feed(target, cache, texts)
        for step in range(2):
            roots = [random_tokens(1, seed=step)[0]] * len(lengths)
            tokens = [random_tokens(NUM_NODES, seed=10 * step + b) for b in range(len(lengths))]
            hidden_BTH = feed_trees(target, cache, roots, trees, tokens)
            paths = [path_to(parents, (last + b + 1 + step) % (NUM_NODES + 1) - 1) for b, parents in enumerate(trees)]
            for b, parents in enumerate(trees):
                for node in range(-1, NUM_NODES):
                    text = [*texts[b], roots[b], *(tokens[b][n] for n in path_to(parents, node))]
                    check_row(target, text, hidden_BTH[b, node + 1 : node + 2])
                texts[b] += [roots[b], *(tokens[b][n] for n in paths[b])]
            keep(cache, paths)
            assert cache.lengths == [len(text) for text in texts]
            blocks = [random_tokens(2, seed=20 + step + b) for b in range(len(lengths))]
            hidden_BTH = feed(target, cache, blocks)
            for b, block in enumerate(blocks):
                texts[b] += block
                check_row(target, texts[b], hidden_BTH[b])


@pytest.mark.parametrize("lengths", [[1], [15], [14, 3, 30], [16, 16]])
def test_every_path_is_kept_right(target: Target, lengths: list[int]) -> None:
    """Around the sliding window (16): nodes of one pass, and settled entries, fall out of it by depth, not by slot."""
    check_every_path(target, lengths)


def test_same_with_eager_attention() -> None:
    target = make_tiny_target(family="mistral")
    target.model.set_attn_implementation("eager")
    check_every_path(target, [14, 3, 30])


def test_a_deep_chain_leaves_the_window() -> None:
    """A path longer than the window, whose nodes' slots are further on than their depths say."""
    target = make_tiny_target(family="mistral", sliding_window=4)
    parents = (-1, -1, 1, 0, 2, 0, 4, 6, -1, 7)
    text, root, tokens = random_tokens(6, seed=1), 9, random_tokens(len(parents), seed=2)
    cache = make_cache(target, 1)
    feed(target, cache, [text])
    hidden_BTH = feed_trees(target, cache, [root], [parents], [tokens])
    for node in range(-1, len(parents)):
        path = [tokens[n] for n in path_to(parents, node)]
        check_row(target, [*text, root, *path], hidden_BTH[0, node + 1 : node + 2])


def test_a_tree_level_by_level(target: Target) -> None:
    """Nodes that come in several passes, as drafting does, see those of the earlier ones on their way."""
    trees: list[Tree] = [(-1, -1, 0, 1, 1, 2), (-1, -1, 1, 0, 1, 3)]
    texts = [random_tokens(15, seed=1), random_tokens(4, seed=2)]
    tokens = [random_tokens(6, seed=3), random_tokens(6, seed=4)]
    cache = make_cache(target, 2)
    feed(target, cache, texts)
    sees_BTT, depths_BT = (values[:, 1:] for values in lineage(torch.tensor(trees)))
    sees_BTT, depths_BT = sees_BTT[:, :, 1:], depths_BT - 1  # without a root
    hidden = []
    for start, end in ((0, 2), (2, 5), (5, 6)):
        masks = tree_masks(cache, sees_BTT[:, start:end, :end], depths_BT[:, :end])
        positions_BT = tree_positions(cache, depths_BT[:, start:end], num_pending=start)
        ids_BT = torch.tensor(tokens)[:, start:end]
        hidden.append(target.hidden(ids_BT, masks, positions_BT, cache))
        cache.advance([end - start] * 2)
    hidden_BTH = torch.cat(hidden, dim=1)
    for b, parents in enumerate(trees):
        for node in range(6):
            text = texts[b] + [tokens[b][n] for n in path_to(parents, node)]
            check_row(target, text, hidden_BTH[b, node : node + 1])
