"""Drafters of trees for tests: one that knows the answer and hides it, and one with a distribution that fits badly.

And the statistical test of what a decoder with trees samples.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.drafters.base import Branches, Draft, SideNodes
from models.processors.block import BlockProcessor
from models.sampling import SamplingParams, transform_logits
from models.target.model import Target
from models.verification.tree import children_of, draw_without_replacement
from tests.models.decoding.scripted import BigramDrafter, ScriptedDrafter, ScriptedState
from tests.models.decoding.test_decoder_sampled import chi_square_p_value, exact_law

LAW_VOCAB = 5  # tokens of a target for `check_law`
LAW_TOKENS = 4
NUM_SAMPLES = 1000  # of each prompt
FALSE_ALARM = 1e-6
SAMPLING = SamplingParams(temperature=1.3, top_k=4)

FORK = (-1, -1, 0, 0, 1, 1, 2)  # two children of the root with two each, and a leaf below the first of those


def random_tree(num_nodes: int, generator: torch.Generator) -> tuple[int, ...]:
    """Each node below the root or any earlier node."""
    return tuple(int(torch.randint(-1, node, (), generator=generator)) if node else -1 for node in range(num_nodes))


class ScriptedTrees(ScriptedDrafter):
    """A random tree a row and block, with the first j tokens of the known continuation on a path, j running.

    All other nodes are wrong, some of them repeated, some do not count; nodes beside the tree see what they will. With
    `side` it checks what the target thinks of those.
    """

    num_nodes = 9

    def __init__(self, target: Target, continuations: dict[tuple[int, ...], list[int]], side: bool = False) -> None:
        super().__init__(target, continuations)
        self.generator = torch.Generator().manual_seed(0)
        self.with_side = side
        self.num_watched = 0

    def propose(
        self,
        state: ScriptedState,
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
    ) -> Draft:
        trees = [self._tree(state, b, num_draft_tokens) for b in range(len(state.texts))]
        parents, tokens, drafted = (list(part) for part in zip(*trees, strict=True))
        tokens_BN, drafted_BN = torch.tensor(tokens), torch.tensor(drafted)
        side = self._side(state) if self.with_side else None
        return Draft(tokens_BN[:, :0], branches=Branches(parents, tokens_BN, drafted_BN, side=side))

    def _tree(self, state: ScriptedState, b: int, depth: int) -> tuple[tuple[int, ...], list[int], list[bool]]:
        num_right = state.num_blocks[b] % (depth + 1)
        state.num_blocks[b] += 1
        known = (self._continuation(state.texts[b]) + [0] * depth)[:depth]
        parents = random_tree(self.num_nodes, self.generator)
        depths, tokens, drafted = [0] * len(parents), [], []
        path = -1  # the last node of the right path
        for node, parent in enumerate(parents):
            depths[node] = 1 if parent < 0 else depths[parent] + 1
            right = known[depths[node] - 1] if depths[node] <= depth else 0
            is_right = parent == path and depths[node] <= num_right
            tokens.append(right if is_right else (right + 1) % self.vocab_size)
            drafted.append(is_right or (node + b) % 4 > 0)
            path = node if is_right else path
        return parents, tokens, drafted

    def _side(self, state: ScriptedState) -> SideNodes:
        """A chain of two and a chain of one below the root, all but the first watched."""
        tokens_BS = torch.tensor([[text[-1], 7, 11] for text in state.texts])
        paths = [(0, 1), (2,)]
        texts = [list(text) for text in state.texts]

        def watch(tokens_BW: Tensor) -> None:
            for b, text in enumerate(texts):
                for place, path in enumerate(paths):
                    ids_1T = torch.tensor([[*text, *tokens_BS[b, list(path)].tolist()]])
                    logits_V = self.target.hide_padding(self.target.logits(self.target.hidden(ids_1T)))[0, -1]
                    assert tokens_BW[b, place] == logits_V.argmax()
                    self.num_watched += 1

        return SideNodes((-1, 0, -1), tokens_BS, 2, watch)


class BigramTrees(BigramDrafter):
    """Trees whose q depends on the last token alone. how: distinct, independent (drawn), or likeliest.

    likeliest: half of the rows, by their last token, have another shape.
    """

    num_nodes = len(FORK) + 1

    def __init__(self, vocab_size: int, how: str, seed: int = 0) -> None:
        super().__init__(vocab_size, seed)
        self.how = how

    def propose(
        self,
        state: list[int],
        num_draft_tokens: int,
        params: SamplingParams,
        uniforms_BK: Tensor | None,
        processor: BlockProcessor | None = None,
    ) -> Draft:
        if self.how == "likeliest":
            shapes = [(-1, 0, 1, 0, -1, 2) if token % 2 else FORK[:6] for token in state]
            tokens_BN = torch.tensor(
                [self._likeliest(token, shape) for token, shape in zip(state, shapes, strict=True)]
            )
            return Draft(tokens_BN[:, :0], branches=Branches(shapes, tokens_BN, torch.ones_like(tokens_BN).bool()))
        tokens_BN = torch.zeros(len(state), len(FORK), dtype=torch.long)
        drafted_BN = torch.zeros_like(tokens_BN).bool()
        probs = []
        for place, nodes in enumerate(map(list, children_of(FORK))):
            if nodes:
                before_B = torch.tensor(state) if place == 0 else tokens_BN[:, place - 1]
                probs.append(transform_logits(self.table_VV[before_B], params))
                assert uniforms_BK is not None
                tokens_BN[:, nodes], drafted_BN[:, nodes] = self._draw(probs[-1], uniforms_BK[:, nodes])
        q_BIV = torch.stack(probs, dim=1)
        branches = Branches([FORK] * len(state), tokens_BN, drafted_BN, q_BIV, distinct=self.how == "distinct")
        return Draft(tokens_BN[:, :0], branches=branches)

    def _draw(self, q_BV: Tensor, uniforms_BC: Tensor) -> tuple[Tensor, Tensor]:
        if self.how == "distinct":
            return draw_without_replacement(q_BV, uniforms_BC)
        columns = [draw_without_replacement(q_BV, uniforms_B1) for uniforms_B1 in uniforms_BC.split(1, dim=1)]
        tokens, drafted = zip(*columns, strict=True)
        return torch.cat(tokens, dim=1), torch.cat(drafted, dim=1)

    def _likeliest(self, token: int, shape: Sequence[int]) -> list[int]:
        tokens: list[int] = []
        for node, parent in enumerate(shape):
            rank = shape[:node].count(parent)
            before = token if parent < 0 else tokens[parent]
            tokens.append(int(self.table_VV[before].argsort(descending=True)[rank]))
        return tokens


def check_law(decoder: Decoder, prompts: list[list[int]], least_kept: float = 0.3) -> None:
    """N = 1000 texts a prompt, ragged neighbours; refused below p = 1e-6, the false-alarm rate of each.

    Their first four tokens of six, so that the length limit does not keep trees flat. least_kept: accepted tokens a
    block, below which the test would mean little.
    """
    results = decoder.generate(prompts * NUM_SAMPLES, GenerationParams(6, SAMPLING, seed=5, eos_token_ids=()), 500)
    for place, prompt in enumerate(prompts):
        samples = [result.tokens[:LAW_TOKENS] for result in results[place :: len(prompts)]]
        law = exact_law(decoder.target, prompt, SAMPLING, LAW_TOKENS)
        assert chi_square_p_value(samples, law, LAW_VOCAB) > FALSE_ALARM
    assert least_kept < np.mean([result.counters.accepted / result.counters.blocks for result in results]) < 2.5
