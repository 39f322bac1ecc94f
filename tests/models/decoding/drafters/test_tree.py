"""Trees by heads of every kind: lossless, and drafted as the definitions say."""

from pathlib import Path

import pytest
import torch

from models.checkpoint import heads_record, save_heads
from models.decoding.counters import add_up
from models.decoding.decoder import Decoder
from models.decoding.drafters.base import Branches
from models.decoding.drafters.options import DrafterOptions, default_draft_tokens, make_drafter
from models.decoding.drafters.tree import DynamicTreeDrafter, StaticTreeDrafter
from models.decoding.processors import BlockProcessor, ProcessorParams, Processors
from models.decoding.reference import decode_plainly
from models.decoding.rows import GenerationParams
from models.decoding.sampling import SamplingParams, sample_from, transform_logits
from models.decoding.verification.blockwise import BlockVerification
from models.decoding.verification.token import TokenVerification
from models.heads import HEAD_KINDS, DraftHead
from models.target import Target, TargetOptions
from models.tiny import FAMILIES, make_tiny_target
from tests.models.decoding.drafters.test_heads import make_head
from tests.models.decoding.scripted import random_prompts, transformers_generate
from tests.models.decoding.trees import LAW_VOCAB, check_law
from tests.train.test_acceptance import NUM_PROMPTS, train_quickly

NEW_TOKENS = 12
PROMPTS = random_prompts(4, longest=25)
ACCURACY = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.4, 0.3, 0.1], [0.3, 0.2, 0.1]]
SHAPES = ("static", "dynamic")
DEPTH = 4


def make(head: DraftHead, shape: str, num_nodes: int = 12) -> StaticTreeDrafter | DynamicTreeDrafter:
    if shape == "static":
        return StaticTreeDrafter(head, num_nodes, 3, ACCURACY)
    return DynamicTreeDrafter(head, num_nodes, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_reference(family: str) -> None:
    target = make_tiny_target(family=family)
    expected = [decode_plainly(target, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert [transformers_generate(target, prompt, NEW_TOKENS) for prompt in PROMPTS] == expected
    for kind in HEAD_KINDS:
        head = make_head(target, kind)
        runs = [("static", 4, 4), ("dynamic", 4, 4), ("static", 2, 1), ("dynamic", 3, 1)]
        for shape, depth, max_batch_size in runs if family == "llama" else runs[:2]:
            decoder = Decoder(target, make(head, shape), depth)
            results = decoder.generate(PROMPTS, GenerationParams(NEW_TOKENS), max_batch_size)
            assert [result.tokens for result in results] == expected


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_trained_heads_keep_deep_paths(kind: str) -> None:
    """Heads that know the texts: what they draft at every depth is kept, and the output is the reference's."""
    target = make_tiny_target()
    head = train_quickly(target, kind, DEPTH, None, steps=60)
    prompts = random_prompts(NUM_PROMPTS, longest=12, seed=3)
    expected = [decode_plainly(target, prompt, NEW_TOKENS, eos_token_ids=()) for prompt in prompts]
    for shape in SHAPES:
        for max_batch_size in (1, 4):
            decoder = Decoder(target, make(head, shape), DEPTH)
            results = decoder.generate(prompts, GenerationParams(NEW_TOKENS, eos_token_ids=()), max_batch_size)
            assert [result.tokens for result in results] == expected
            counters = add_up(result.counters for result in results)
            assert min(counters.accepted_at[:3]) > 0
            assert counters.mean_block_length > 1.5


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_do_not_depend_on_the_batch(kind: str, shape: str) -> None:
    target = make_tiny_target()
    head = make_head(target, kind)
    for temperature, rule in ((0.0, None), (1.0, TokenVerification()), (1.0, BlockVerification())):
        params = GenerationParams(NEW_TOKENS, SamplingParams(temperature, top_k=20), seed=3, eos_token_ids=())
        decoder = Decoder(target, make(head, shape), DEPTH, rule)
        alone = decoder.generate(PROMPTS, params, max_batch_size=1)
        assert decoder.generate(PROMPTS, params, max_batch_size=3) == alone


class Drafted:
    """A tree of two ragged rows that have absorbed something, and the chain that leads to any of its nodes."""

    def __init__(self, target: Target, head: DraftHead) -> None:
        self.target, self.head = target, head
        self.texts = [random_prompts(1, longest=25, seed=seed)[0] + [50, 60, 70] for seed in (4, 5)]

    def state(self, rows: list[int]) -> object:
        texts = [self.texts[row] for row in rows]
        state = self.head.start(len(rows))
        width = max(map(len, texts))
        ids_BT = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        with torch.no_grad():
            hidden_BTH = self.target.hidden(ids_BT)[:, :-1]
            self.head.absorb(state, hidden_BTH, ids_BT[:, 1:], [len(text) - 1 for text in texts])
        return state

    def logits(self, row: int, path: list[int]) -> torch.Tensor:
        """Logits [V] after these tokens, drafted as a chain."""
        state = self.state([row])
        logits_1V = self.head.draft_logits(state, None)
        for token in path:
            logits_1V = self.head.draft_logits(state, torch.tensor([token]))
        return self.target.hide_padding(logits_1V[0])


def paths_of(branches: Branches, row: int) -> list[list[int]]:
    """The tokens on the way to each node."""
    paths: list[list[int]] = []
    for token, parent in zip(branches.tokens_BN[row].tolist(), branches.parents[row], strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_reduced_vocabulary_and_fewer_tokens_than_children(kind: str, shape: str) -> None:
    """Two tokens may be drafted: a third child never counts; the output is the target's."""
    target = make_tiny_target()
    drafter = make(make_head(target, kind, torch.tensor([40, 140])), shape)
    expected = [decode_plainly(target, prompt, NEW_TOKENS) for prompt in PROMPTS]
    decoder = Decoder(target, drafter, DEPTH)
    assert [r.tokens for r in decoder.generate(PROMPTS, GenerationParams(NEW_TOKENS))] == expected
    sampled = decoder.generate(PROMPTS, GenerationParams(40, SamplingParams(1.0), eos_token_ids=()))
    for result in sampled:
        drafted = zip(result.tokens, result.accepted, strict=True)
        assert all(token in (40, 140) for token, is_accepted in drafted if is_accepted)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_law_is_the_targets(kind: str, shape: str) -> None:
    """See `check_law` for N, threshold and false-alarm probability."""
    target = make_tiny_target(seed=3, vocab_size=LAW_VOCAB, num_hidden_layers=1)
    rule = TokenVerification() if kind == "hydra" else BlockVerification()
    drafter = make(make_head(target, kind), shape, num_nodes=6)
    check_law(Decoder(target, drafter, 3, rule), [[3, 4, 1], [2], [4, 4, 3, 1, 0, 2]])


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
