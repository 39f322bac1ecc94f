"""Trees by heads of every kind: lossless, and drafted as the definitions say."""

from pathlib import Path

import pytest
import torch

from models.checkpoint import heads_record, save_heads
from models.drafters.base import Branches
from models.drafters.build import make_drafter
from models.drafters.heads import HeadRows, HeadsState
from models.drafters.options import DrafterOptions, default_draft_tokens
from models.drafters.tree import DynamicTreeDrafter, StaticTreeDrafter
from models.heads import HEAD_KINDS, DraftHead
from models.heads.base import HeadState
from models.processors.block import BlockProcessor
from models.processors.prefix import ProcessorParams, Processors
from models.sampling import SamplingParams, sample_from, transform_logits
from models.target.model import Target, TargetOptions
from models.target.tiny import make_tiny_target
from tests.models.decoding.scripted import random_prompts
from tests.models.drafters.test_heads import make_head

NEW_TOKENS = 12
PROMPTS = random_prompts(4, longest=25)
ACCURACY = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.4, 0.3, 0.1], [0.3, 0.2, 0.1]]
SHAPES = ("static", "dynamic")
DEPTH = 4


def make(head: DraftHead, shape: str, num_nodes: int = 12) -> StaticTreeDrafter | DynamicTreeDrafter:
    if shape == "static":
        return StaticTreeDrafter(head, num_nodes, 3, ACCURACY)
    return DynamicTreeDrafter(head, num_nodes, 3)


class Drafted:
    """A tree of two ragged rows that have absorbed something, and the chain that leads to any of its nodes."""

    def __init__(self, target: Target, head: DraftHead) -> None:
        self.target, self.head = target, head
        self.texts = [random_prompts(1, longest=25, seed=seed)[0] + [50, 60, 70] for seed in (4, 5)]

    def state(self, rows: list[int]) -> HeadsState:
        texts = [self.texts[row] for row in rows]
        drafter = HeadRows(self.head)
        state = drafter.start([[0]] * len(rows))
        width = max(map(len, texts))
        ids_BT = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        with torch.no_grad():
            hidden_BTH = self.target.hidden(ids_BT, reads=self.head.reads)[:, :-1]
            drafter.absorb(state, hidden_BTH, ids_BT[:, 1:], [len(text) - 1 for text in texts])
        return state

    def head_state(self, rows: list[int]) -> HeadState:
        """What the head alone knows, having read all."""
        state = self.state(rows)
        HeadRows(self.head).read(state)
        return state.head

    def logits(self, row: int, path: list[int]) -> torch.Tensor:
        """The same without ids that no token has."""
        return self.target.hide_padding(self.raw_logits(row, path))

    def raw_logits(self, row: int, path: list[int]) -> torch.Tensor:
        """Logits [V] after these tokens, drafted as a chain."""
        state = self.head_state([row])
        logits_1V = self.head.draft_logits(state, None)
        for token in path:
            logits_1V = self.head.draft_logits(state, torch.tensor([token]))
        return logits_1V[0]


def paths_of(branches: Branches, row: int) -> list[list[int]]:
    """The tokens on the way to each node."""
    paths: list[list[int]] = []
    for token, parent in zip(branches.tokens_BN[row].tolist(), branches.parents[row], strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_each_node_is_drafted_as_a_chain_would(kind: str) -> None:
    """Three levels in which every node but the last of its level has children, other ones in each row."""
    world = Drafted(make_tiny_target(), make_head(make_tiny_target(), kind))
    state = world.head_state([0, 1])
    generator = torch.Generator().manual_seed(0)
    paths: list[list[list[int]]] = [[[]], [[]]]  # of each row's last level
    logits_BMV = world.head.level_logits(state, None, None)
    for num_nodes in (2, 3, 4):
        for row in range(2):
            for node, path in enumerate(paths[row]):
                assert (logits_BMV[row, node] - world.raw_logits(row, path)).abs().max() < 2e-4
        last = len(paths[0])
        parents = [[(node + row) % last for node in reversed(range(num_nodes))] for row in range(2)]
        tokens_BM = torch.randint(3, 259, (2, num_nodes), generator=generator)
        paths = [
            [[*paths[row][parent], int(token)] for parent, token in zip(parents[row], tokens_BM[row], strict=True)]
            for row in range(2)
        ]
        logits_BMV = world.head.level_logits(state, tokens_BM, torch.tensor(parents))
    for row in range(2):
        for node, path in enumerate(paths[row]):
            assert (logits_BMV[row, node] - world.raw_logits(row, path)).abs().max() < 2e-4


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_dynamic_trees_by_definition(kind: str) -> None:
    """EAGLE-2 on paths: the best three of each level grow, then the best of all stay; q by chains of the same head."""
    world = Drafted(make_tiny_target(), make_head(make_tiny_target(), kind))
    drafter = make(world.head, "dynamic", num_nodes=9)
    state = world.state([0, 1])
    for _ in range(2):  # a second draft from the same state forgets the first
        branches = drafter.propose(state, DEPTH, SamplingParams(), None).branches
    for row in range(2):
        scores: dict[tuple[int, ...], float] = {}
        growing: list[tuple[int, ...]] = [()]
        for _ in range(DEPTH):
            level = {}
            for path in growing:
                best = world.logits(row, list(path)).log_softmax(dim=0).topk(3)
                for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                    level[(*path, token)] = scores.get(path, 0.0) + value
            scores |= level
            growing = sorted(level, key=level.__getitem__, reverse=True)[:3]
        expected = sorted(scores, key=scores.__getitem__, reverse=True)[:9]
        assert sorted(map(tuple, paths_of(branches, row))) == sorted(expected)
        assert branches.drafted_BN.all()
    assert branches.parents[0] != branches.parents[1] or kind == "medusa"


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_static_trees_by_definition(kind: str) -> None:
    """Greedy: siblings are the likeliest tokens. Sampled: drawn one after the other from q without those before."""
    world = Drafted(make_tiny_target(), make_head(make_tiny_target(), kind))
    drafter = make(world.head, "static")
    sampling = SamplingParams(0.8, top_k=10)
    uniforms_BN = torch.rand(2, drafter.num_nodes, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    greedy = drafter.propose(world.state([0, 1]), DEPTH, SamplingParams(), None).branches
    sampled = drafter.propose(world.state([0, 1]), DEPTH, sampling, uniforms_BN).branches
    assert greedy.parents == sampled.parents
    assert greedy.probs_BIV is None
    assert sampled.distinct
    parents = greedy.parents[0]
    assert len(parents) == drafter.num_nodes
    inner = sorted({parent + 1 for parent in parents})
    for row in range(2):
        for node, parent in enumerate(parents):
            rank = parents[:node].count(parent)
            before = paths_of(greedy, row)[parent] if parent >= 0 else []
            assert greedy.tokens_BN[row, node] == world.logits(row, before).argsort(descending=True)[rank]
            before = paths_of(sampled, row)[parent] if parent >= 0 else []
            q_V = transform_logits(world.logits(row, before), sampling)
            assert torch.allclose(sampled.probs_BIV[row, inner.index(parent + 1)], q_V, atol=1e-5)
            siblings = [n for n in range(node) if parents[n] == parent]
            q_V[sampled.tokens_BN[row, siblings]] = 0.0
            assert sampled.tokens_BN[row, node] == sample_from(q_V, uniforms_BN[row, node])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_processors_see_each_nodes_prefix(kind: str, shape: str) -> None:
    """What may follow hangs on all of the drafted path, and every drafted node keeps to it."""
    target = make_tiny_target()
    world = Drafted(target, make_head(target, kind))

    def allowed(prompt: tuple[int, ...], generated: tuple[int, ...]) -> list[int]:
        return [10 + (token + 7 * sum(generated)) % 200 for token in range(5)]

    processors = Processors(ProcessorParams(allowed_tokens=allowed), (), target.vocab_size)
    processor = BlockProcessor(processors, [[1], [2]], [[3], [4]])
    drafter = make(world.head, shape)
    branches = drafter.propose(world.state([0, 1]), DEPTH, SamplingParams(), None, processor).branches
    assert branches.drafted_BN.all()
    for row, root in enumerate((3, 4)):
        for path in paths_of(branches, row):
            assert path[-1] in allowed((), (root, *path[:-1]))


def test_by_name(tmp_path: Path) -> None:
    target = make_tiny_target()
    model = TargetOptions(name="tiny", source="random")
    head = make_head(target, "medusa")
    save_heads(tmp_path, head, acceptance={"accuracy_by_rank": ACCURACY})
    drafter, record = make_drafter(
        DrafterOptions("tree", shape="dynamic", num_nodes=9, top_k=3), model, target, tmp_path
    )
    assert isinstance(drafter, DynamicTreeDrafter)
    assert (drafter.num_nodes, drafter.top_k, default_draft_tokens(drafter)) == (9, 3, 6)
    fingerprint = heads_record(tmp_path)["fingerprint"]
    assert record["kind"] == "tree"
    assert record["fingerprint"] == f"{fingerprint}, shape=dynamic, num_nodes=9, top_k=3"
    drafter, _ = make_drafter(DrafterOptions("tree", shape="static", num_nodes=9, top_k=2), model, target, tmp_path)
    assert isinstance(drafter, StaticTreeDrafter)
    assert drafter.accuracy == tuple(tuple(row[:2]) for row in ACCURACY)

    def refused(message: str, folder: Path | None = tmp_path, **changes: object) -> None:
        options = {"shape": "static", "num_nodes": 9, "top_k": 2} | changes
        with pytest.raises(ValueError, match=message):
            make_drafter(DrafterOptions("tree", **options), model, target, folder)

    refused("drafter=tree needs checkpoint=FOLDER", None)
    refused("drafter.shape='oak' is unknown; choose one of static, dynamic", shape="oak")
    refused("drafter.num_nodes=0 and drafter.top_k=2: both must be at least 1", num_nodes=0)
    refused("drafter.top_k=300: both must be at least 1, and the second at most 264", top_k=300)
    refused("drafter.top_k=4: must be at most 3 with drafter.shape=static", top_k=4)
    save_heads(tmp_path, head)
    refused("has no acceptance.accuracy_by_rank, which a static tree is made from")
    refused("both must be at least 1", shape="dynamic", num_nodes=0)
