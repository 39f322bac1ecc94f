"""Numbers that are none: what a row drafts, holds or is given that is NaN or infinite stays its own, and costs drafts.

A token is sick where its embedding is no number. Plain decoding ends a row behind a sick token that it emits, and so
does the decoder: at the same token, whatever was drafted.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.cache.ragged import RaggedCache
from models.decoding.decoder import Decoder
from models.decoding.rows import DecodeResult, GenerationParams
from models.drafters.base import Branches, Draft
from models.drafters.heads import HeadsDrafter
from models.drafters.model import ModelDrafter
from models.heads import HeadOptions, build_head
from models.sampling import SamplingParams
from models.target.model import Target
from models.target.tiny import make_tiny_target
from models.verification.base import Rule
from models.verification.blockwise import BlockVerification
from models.verification.token import TokenVerification
from tests.models.decoding.scripted import BigramDrafter, ScriptedDrafter, ScriptedState, random_prompts
from tests.models.decoding.test_decoder_sampled import FALSE_ALARM, chi_square_p_value, exact_law
from tests.models.decoding.trees import LAW_VOCAB, BigramTrees, random_tree

HEALTHY = make_tiny_target(family="qwen3")  # its output head is not tied to the embedding
PROMPTS = random_prompts(7, longest=12)
PROMPT = [3, 1, 4]
NEW = 16
EXPECTED = Decoder(HEALTHY).generate(PROMPTS, GenerationParams(NEW, eos_token_ids=()))
USED = {token for prompt in PROMPTS for token in prompt} | {token for row in EXPECTED for token in row.tokens}
SICK = [token for token in range(259) if token not in USED][:6]
VALUES = st.sampled_from([float("nan"), float("inf"), float("-inf")])


def sick_target(value: float, tokens: list[int] = SICK, **options: Any) -> Target:
    target = make_tiny_target(**{"family": "qwen3", **options})
    with torch.no_grad():
        target.model.get_input_embeddings().weight[tokens] = value
    return target


class SickGuesses(ScriptedDrafter):
    """Chains or trees with right tokens, wrong ones and sick ones; the target's hidden states must be numbers."""

    def __init__(self, seed: int, num_nodes: int = 0) -> None:
        texts = {tuple(prompt): row.tokens for prompt, row in zip(PROMPTS, EXPECTED, strict=True)}
        super().__init__(HEALTHY, texts)
        self.num_nodes = num_nodes
        self._random = torch.Generator().manual_seed(seed)

    def absorb(self, state: ScriptedState, hidden_BTH: Tensor, next_tokens_BT: Tensor, counts: Any) -> None:
        assert hidden_BTH.isfinite().all()
        super().absorb(state, hidden_BTH, next_tokens_BT, counts)

    def propose(self, state: Any, num_draft_tokens: int, params: Any, uniforms_BK: Any, processor: Any = None) -> Draft:
        width = self.num_nodes or num_draft_tokens
        shape = (len(state.texts), width)
        parents = [
            random_tree(width, self._random) if self.num_nodes else tuple(range(-1, width - 1)) for _ in state.texts
        ]
        tokens = []
        for text, above in zip(state.texts, parents, strict=True):
            known, depths = self._continuation(text) + [0] * width, []
            for parent in above:
                depths.append(0 if parent < 0 else depths[parent] + 1)
            tokens.append([known[depth] for depth in depths])
        what = torch.randint(0, 4, shape, generator=self._random)
        sick = torch.tensor(SICK)[torch.randint(0, len(SICK), shape, generator=self._random)]
        tokens_BN = torch.where(what == 0, sick, torch.where(what == 1, 3, torch.tensor(tokens)))
        if not self.num_nodes:
            return Draft(
                tokens_BN, counts=[int(n) for n in torch.randint(0, width + 1, shape[:1], generator=self._random)]
            )
        drafted_BN = torch.rand(shape, generator=self._random) < 0.9
        return Draft(tokens_BN[:, :0], branches=Branches(parents, tokens_BN, drafted_BN))


@settings(max_examples=20, deadline=None)
@given(VALUES, st.integers(1, 5), st.integers(1, 7), st.integers(0, 999), st.booleans(), st.booleans())
def test_greedy_is_plain_decoding_whatever_is_drafted(
    value: float, width: int, batch: int, seed: int, is_tree: bool, is_beside_sick_rows: bool
) -> None:
    """Chains and trees, rows that join, move and leave, sick rows among them, sick padding."""
    drafter = SickGuesses(seed, 7 if is_tree else 0)
    prompts = [list(prompt) for prompt in PROMPTS]
    if is_beside_sick_rows:
        for place in (1, 4):
            prompts[place].insert(len(prompts[place]) // 2, SICK[0])
    results = Decoder(sick_target(value, [0, *SICK]), drafter, width).generate(
        prompts, GenerationParams(NEW, eos_token_ids=()), batch
    )
    for place, (result, expected) in enumerate(zip(results, EXPECTED, strict=True)):
        if SICK[0] in prompts[place]:
            assert (result.tokens, result.finish_reason) == ([], "invalid")
        else:
            assert (result.tokens, result.finish_reason) == (expected.tokens, "length")


def canonical(texts: Any, sick: int, num_tokens: int) -> np.ndarray:
    """Texts as they end: a sick token is the last one, and fills the rest."""
    rows = []
    for text in texts:
        cut = list(text[: list(text).index(sick) + 1]) if sick in text else list(text)
        rows.append(cut + [sick] * (num_tokens - len(cut)))
    return np.array(rows)


def law_p_value(decoder: Decoder, healthy: Target, vocab_size: int, sick: int, num_samples: int) -> float:
    """Of what a decoder samples, against the target's own law with rows that end at the sick token."""
    prompt, num_tokens, sampling = PROMPT, 3, SamplingParams(1.3, top_k=4)
    params = GenerationParams(num_tokens, sampling, seed=5, eos_token_ids=())
    results = decoder.generate([prompt] * num_samples, params, 500)
    texts = list(itertools.product(range(vocab_size), repeat=num_tokens))
    powers = vocab_size ** np.arange(num_tokens - 1, -1, -1)
    law = np.zeros(len(texts))
    np.add.at(law, canonical(texts, sick, num_tokens) @ powers, exact_law(healthy, prompt, sampling, num_tokens))
    samples = canonical([result.tokens for result in results], sick, num_tokens)
    ends = [result.finish_reason == "invalid" for result in results]
    assert ends == [sick in result.tokens and len(result.tokens) < num_tokens for result in results]
    assert 0.02 < np.mean(ends) < 0.9, "sick tokens must be drafted and emitted for the test to mean anything"
    return chi_square_p_value(samples.tolist(), law, vocab_size)


@pytest.mark.parametrize("rule", [TokenVerification(), BlockVerification()], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_law_stays_the_targets(rule: Rule, value: float) -> None:
    """N = 800, false alarm 1e-6 each. Trying an ill block again without its draft would shift this law."""
    options = {"seed": 3, "vocab_size": 8}
    healthy = make_tiny_target(family="qwen3", **options)
    likely = healthy.logits(healthy.hidden(torch.tensor([PROMPT])))[0, -1].argsort(descending=True).tolist()
    sick = next(token for token in likely[1:] if token not in PROMPT)
    decoder = Decoder(sick_target(value, [sick], **options), BigramDrafter(8), 3, rule)
    assert law_p_value(decoder, healthy, 8, sick, 800) > FALSE_ALARM


@pytest.mark.parametrize("how", ["distinct", "independent", "likeliest"])
@pytest.mark.parametrize("rule", [TokenVerification(), BlockVerification()], ids=lambda rule: type(rule).__name__)
def test_the_law_of_trees_stays_the_targets(rule: Rule, how: str) -> None:
    """N = 300, false alarm 1e-6 each."""
    options = {"seed": 3, "vocab_size": LAW_VOCAB}
    healthy = make_tiny_target(family="qwen3", **options)
    decoder = Decoder(sick_target(torch.nan, [2], **options), BigramTrees(LAW_VOCAB, how), 3, rule)
    assert law_p_value(decoder, healthy, LAW_VOCAB, 2, 300) > FALSE_ALARM


def model_drafter(target: Target) -> ModelDrafter:
    draft = sick_target(torch.nan, [0, *SICK], seed=1, num_hidden_layers=2)
    return ModelDrafter(draft, target)


def heads_drafter(target: Target) -> HeadsDrafter:
    torch.manual_seed(0)
    return HeadsDrafter(build_head(target, HeadOptions("mtp", 4)).eval())


def ill_heads_drafter(target: Target) -> HeadsDrafter:
    drafter = heads_drafter(target)
    with torch.no_grad():
        drafter.head.get_submodule("norm_out").weight[0] = torch.inf
    return drafter


@pytest.mark.parametrize("make", [model_drafter, heads_drafter, ill_heads_drafter])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(2.0), SamplingParams(1.5, top_p=0.9)], ids=str)
def test_a_row_is_what_it_is_alone(make: Any, sampling: SamplingParams) -> None:
    """Draft models that read sick tokens, and heads that give NaN: the ids do not depend on the neighbours."""
    target = sick_target(torch.nan, [0, *SICK])

    def decode(prompts: list[list[int]], batch: int, first: int = 0) -> list[DecodeResult]:
        params_of = GenerationParams(NEW, sampling, seed=4, eos_token_ids=(), first_stream=first)
        return Decoder(target, make(target), 4).generate(prompts, params_of, batch)

    alone = [decode([prompt], 1, place)[0] for place, prompt in enumerate(PROMPTS)]
    for batch in (2, 5, 7):
        for result, own in zip(decode(PROMPTS, batch), alone, strict=True):
            assert (result.tokens, result.finish_reason) == (own.tokens, own.finish_reason)
    if sampling.is_greedy:
        assert [result.tokens for result in alone] == [row.tokens for row in EXPECTED]


class PlantedIn(BigramDrafter):
    """Makes one row's settled cache entries NaN before its second block."""

    def __init__(self, decoder_caches: list[RaggedCache], row: int) -> None:
        super().__init__(HEALTHY.vocab_size)
        self.caches, self.row, self.calls = decoder_caches, row, 0

    def propose(self, *args: Any, **kwargs: Any) -> Draft:
        self.calls += 1
        if self.calls == 2:
            for layer in self.caches[0].layers:
                layer.keys[self.row, :, 1] = torch.nan
                layer.values[self.row, :, 1] = torch.inf
        return super().propose(*args, **kwargs)


@pytest.mark.parametrize("row", range(3))
def test_nan_in_one_rows_cache_ends_that_row_alone(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps what it has, and those that decode beside it, move into its place, or come later are well."""
    caches: list[RaggedCache] = []
    start = RaggedCache.__init__

    def noted(self: RaggedCache, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        caches.append(self)

    drafter = PlantedIn(caches, row)
    decoder = Decoder(HEALTHY, drafter, 3)
    monkeypatch.setattr(RaggedCache, "__init__", noted)
    results = decoder.generate(PROMPTS, GenerationParams(NEW, eos_token_ids=()), 3)
    for place, (result, expected) in enumerate(zip(results, EXPECTED, strict=True)):
        if place == row:
            assert result.finish_reason == "invalid"
            assert 0 < len(result.tokens) < NEW
            assert result.tokens == expected.tokens[: len(result.tokens)]
        else:
            assert (result.tokens, result.finish_reason) == (expected.tokens, "length")
    for layer in caches[0].layers:
        assert layer.keys.isfinite().all()
        assert layer.values.isfinite().all()


class NoDistribution(BigramDrafter):
    """After some tokens q has NaN, infinities, or nothing at all."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        super().__init__(vocab_size)
        generator = torch.Generator().manual_seed(seed)
        kinds = torch.randint(0, 6, (vocab_size,), generator=generator)
        self.table_VV[kinds == 0, 5] = torch.nan
        self.table_VV[kinds == 1, 9] = torch.inf
        self.table_VV[kinds == 2] = -torch.inf


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 999), st.integers(1, 4), st.sampled_from([SamplingParams(), SamplingParams(1.5)]))
def test_a_draft_without_a_distribution_stays_its_rows(seed: int, width: int, sampling: SamplingParams) -> None:
    def decode(prompts: list[list[int]], first: int = 0) -> list[DecodeResult]:
        params = GenerationParams(8, sampling, seed=4, eos_token_ids=(), first_stream=first)
        return Decoder(HEALTHY, NoDistribution(HEALTHY.vocab_size, seed), width).generate(prompts, params, 4)

    together = decode(PROMPTS)
    for place, (prompt, result) in enumerate(zip(PROMPTS, together, strict=True)):
        assert result.finish_reason == "length"
        assert result.tokens == decode([prompt], place)[0].tokens
        if sampling.is_greedy:
            assert result.tokens == EXPECTED[place].tokens[:8]
