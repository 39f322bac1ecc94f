"""The simulated decoding: against enumeration, a Monte Carlo, a literal walk, and against what the decoder counts."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from models.decoding.counters import add_up
from models.decoding.decoder import Decoder
from models.decoding.reference import decode_plainly
from models.decoding.rows import DecodeResult, GenerationParams
from models.drafters.heads import HeadsDrafter
from models.heads import HEAD_KINDS, DraftHead, HeadOptions, build_head
from models.sampling import SamplingParams
from models.target.model import Target
from models.target.tiny import FAMILIES, make_tiny_target
from tests.models.decoding.scripted import random_prompts
from train.heads import acceptance as acceptance_module
from train.heads.acceptance import NUM_RANKS, accept_probabilities, accuracy_by_rank, answer_spans, rank_hits, simulate


@dataclass
class Walk:
    """One decoding: how many blocks; drafted and kept at each place; drafts judged; probability of the choices made."""

    blocks: int
    drafted_at: list[int]
    kept_at: list[int]
    judged: int
    probability: float


def walk(table: Sequence[Sequence[float]], length: int, keep: Sequence[bool] | random.Random) -> Walk:
    """`keep` decides each draft: choices in order, or a random source that follows the probabilities."""
    num_steps = len(table)
    done = Walk(0, [0] * num_steps, [0] * num_steps, 0, 1.0)
    root = 0
    while root < length - 1:
        done.blocks += 1
        num_drafted = min(num_steps, length - 1 - root)
        emitted = 0
        for k in range(num_drafted):
            done.drafted_at[k] += 1
        for k in range(num_drafted):
            chance = table[k][root]
            is_kept = keep.random() < chance if isinstance(keep, random.Random) else keep[done.judged]
            done.judged += 1
            done.probability *= chance if is_kept else 1 - chance
            emitted += 1
            if not is_kept:
                break
            done.kept_at[k] += 1
        else:
            emitted += 1  # the bonus, unless the text is over
        root += emitted
    return done


def enumerate_walks(table: Sequence[Sequence[float]], length: int) -> tuple[float, list[float], list[float]]:
    """Expected blocks, drafts and kept drafts, over every outcome that there is."""
    num_steps = len(table)
    blocks, drafted, kept, total = 0.0, [0.0] * num_steps, [0.0] * num_steps, 0.0
    num_choices = length - 1  # each judged draft emits a token, so there are no more
    for choices in itertools.product([True, False], repeat=num_choices):
        one = walk(table, length, choices)
        # Choices that the walk never came to are summed over: each walk is met 2^unused times.
        weight = one.probability / 2 ** (num_choices - one.judged)
        total += weight
        blocks += weight * one.blocks
        for k in range(num_steps):
            drafted[k] += weight * one.drafted_at[k]
            kept[k] += weight * one.kept_at[k]
    assert total == pytest.approx(1.0)
    return blocks, drafted, kept


def random_table(num_steps: int, length: int, seed: int, zero_or_one: bool = False) -> Tensor:
    table = torch.rand(num_steps, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (table > 0.4).double() if zero_or_one else table


@pytest.mark.parametrize("length", [2, 3, 5, 8])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_simulation_equals_enumeration(num_steps: int, length: int) -> None:
    """Float64, two texts at once, to 1e-12."""
    tables = [random_table(num_steps, length, seed) for seed in (0, 1)]
    sums = [enumerate_walks(table.tolist(), length) for table in tables]
    blocks = sum(blocks for blocks, _, _ in sums)
    got = simulate(tables)
    assert got.mean_block_length == pytest.approx(2 * (length - 1) / blocks, rel=1e-12)
    for k in range(num_steps):
        drafted, kept = (sum(part[which][k] for part in sums) for which in (1, 2))
        assert got.acceptance_at[k] == pytest.approx(kept / drafted if drafted else 0.0, rel=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_simulation_of_certain_outcomes_is_a_walk(seed: int) -> None:
    """Tables of zeros and ones, texts of different lengths: exactly the walk's counts."""
    tables = [random_table(3, length, seed, zero_or_one=True) for length in (40, 7, 2, 1)]
    counts = [walk(table.tolist(), table.shape[1], random.Random(0)) for table in tables]
    got = simulate(tables)
    assert got.mean_block_length == (39 + 6 + 1 + 0) / sum(count.blocks for count in counts)
    for k in range(3):
        assert got.acceptance_at[k] == sum(count.kept_at[k] for count in counts) / sum(
            count.drafted_at[k] for count in counts
        )


def test_simulation_agrees_with_a_monte_carlo() -> None:
    """20,000 walks over 30 tokens; five standard errors, a false alarm in 2 million seeds."""
    length, num_walks = 30, 20_000
    table = random_table(4, length, 5)
    source = random.Random(1)
    blocks = [walk(table.tolist(), length, source).blocks for _ in range(num_walks)]
    mean = sum(blocks) / num_walks
    spread = math.sqrt(sum((block - mean) ** 2 for block in blocks) / (num_walks - 1))
    expected = (length - 1) / simulate([table]).mean_block_length
    assert abs(mean - expected) < 5 * spread / math.sqrt(num_walks)


@pytest.mark.parametrize(("chance", "block_length"), [(0.0, 1.0), (1.0, 4.0)])
def test_simulation_at_the_ends(chance: float, block_length: float) -> None:
    """Nothing kept: a token a block. All kept: K + 1."""
    got = simulate([torch.full((3, 41), chance)])
    assert got.mean_block_length == pytest.approx(block_length)
    assert got.acceptance_at == pytest.approx([chance] * 3)


def test_simulation_of_nothing() -> None:
    assert simulate([]).mean_block_length == 0.0
    assert simulate([torch.zeros(3, 1)]).acceptance_at == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("mask", "spans"),
    [
        ([0, 0, 1, 1], [(2, 4)]),
        ([0, 1, 1, 0], [(1, 3)]),
        ([0, 1, 0, 1, 1, 0, 0, 1], [(1, 2), (3, 5), (7, 8)]),
        ([1, 1, 1, 0], [(1, 3)]),
        ([1, 0, 0, 0], []),
        ([0, 0], []),
    ],
)
def test_answer_spans(mask: list[int], spans: list[tuple[int, int]]) -> None:
    assert answer_spans(torch.tensor(mask).bool()) == spans


# Against the decoder.

NUM_PROMPTS = 8
LIMIT = 32


def train_quickly(
    target: Target, kind: str, num_draft_tokens: int, draft_vocab: Tensor | None, steps: int = 25
) -> DraftHead:
    """A head that has learned enough for every length of block to occur."""
    torch.manual_seed(0)
    head = build_head(target, HeadOptions(kind=kind, num_draft_tokens=num_draft_tokens, num_layers=1), draft_vocab)
    prompts = random_prompts(NUM_PROMPTS, longest=12, seed=3)
    width = 30
    texts = [[*prompt, *decode_plainly(target, prompt, width, eos_token_ids=())][:width] for prompt in prompts]
    ids_BT = torch.tensor(texts)
    hidden_BTH = target.hidden(ids_BT, reads=head.reads)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(steps):
        states_KBTH = head(hidden_BTH, ids_BT)
        loss = torch.zeros(())
        for k in range(1, num_draft_tokens + 1):
            logits = head.widen(head.logits(states_KBTH[k - 1, :, : width - 1 - k], k))
            logits = logits.clamp(min=-1e4)
            loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1 + k :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval().requires_grad_(False)


def simulate_on(
    target: Target, head: DraftHead, prompts: list[list[int]], answers: list[list[int]], sampling: SamplingParams
) -> list[Tensor]:
    tables = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids_T = torch.tensor([*prompt, *answer])
        with torch.no_grad():
            hidden_TH = target.hidden(ids_T[None], reads=head.reads)[0]
            tables.append(accept_probabilities(head, hidden_TH, ids_T, len(prompt), sampling))
    return tables


def decode(
    target: Target, head: DraftHead, prompts: list[list[int]], params: GenerationParams, max_batch_size: int = 4
) -> list[DecodeResult]:
    return Decoder(target, HeadsDrafter(head), head.num_draft_tokens).generate(prompts, params, max_batch_size)


def check_against_decoder(target: Target, head: DraftHead, eos_token_ids: tuple[int, ...]) -> list[DecodeResult]:
    """Greedy: the very number of blocks of every answer, and the very mean block length of all."""
    prompts = random_prompts(NUM_PROMPTS, longest=12, seed=3)
    results = decode(target, head, prompts, GenerationParams(LIMIT, eos_token_ids=eos_token_ids))
    tables = simulate_on(target, head, prompts, [result.tokens for result in results], SamplingParams())
    assert all(((table == 0) | (table == 1)).all() for table in tables)
    for table, result in zip(tables, results, strict=True):
        assert simulate([table]).mean_block_length == result.counters.mean_block_length
    total = add_up(result.counters for result in results)
    simulated = simulate(tables)
    assert simulated.mean_block_length == pytest.approx(total.mean_block_length, rel=1e-12)
    # The ends of texts differ (a decoder drafts past an end it does not know, and not what the length limit forbids),
    # so a place's counts do too, by at most one block a text.
    for k, rate in enumerate(simulated.acceptance_at):
        slack = NUM_PROMPTS / total.drafted_at[k]
        assert abs(rate - total.acceptance_by_place[k]) <= slack
    return results


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_simulation_is_what_the_decoder_counts(family: str, kind: str) -> None:
    """Texts cut by the length limit."""
    target = make_tiny_target(family=family)
    results = check_against_decoder(target, train_quickly(target, kind, 3, None), ())
    total = add_up(result.counters for result in results)
    assert 0 < total.accepted < total.drafted


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_greedy_simulation_with_ends_of_text(kind: str) -> None:
    """Texts that stop at one of several tokens, inside a block and at its end; and a reduced draft vocabulary."""
    target = make_tiny_target()
    prompts = random_prompts(NUM_PROMPTS, longest=12, seed=3)
    endless = [decode_plainly(target, prompt, LIMIT, eos_token_ids=()) for prompt in prompts]
    eos = tuple({tokens[8 + 2 * i] for i, tokens in enumerate(endless)})
    head = train_quickly(target, kind, 4, torch.arange(0, 264, 2))
    results = check_against_decoder(target, head, eos)
    assert len({len(result.tokens) for result in results}) > 3


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_sampled_simulation_agrees_with_the_decoder(kind: str) -> None:
    """At temperature 1 the decoder's own texts, in expectation, have the blocks that it counted.

    N = 96 texts of 32 tokens. Given its text, a decoding's number of blocks has mean E[blocks] (the simulation's), so
    the difference summed over texts has mean zero; five standard errors, a false alarm in 2 million seeds.
    """
    target = make_tiny_target(num_hidden_layers=2 if kind == "eagle3" else 1)
    sampling = SamplingParams(temperature=1.0, top_k=30)
    head = train_quickly(target, kind, 3, None, steps=15)
    prompts = random_prompts(96, longest=12, seed=8)
    results = decode(target, head, prompts, GenerationParams(LIMIT, sampling, seed=1, eos_token_ids=()), 96)
    tables = simulate_on(target, head, prompts, [result.tokens for result in results], sampling)
    assert any(((table > 0.05) & (table < 0.95)).any() for table in tables)
    gaps = [
        (LIMIT - 1) / simulate([table]).mean_block_length - result.counters.blocks
        for table, result in zip(tables, results, strict=True)
    ]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1))
    assert add_up(result.counters for result in results).accepted > 100
    assert abs(mean) < 5 * spread / math.sqrt(len(gaps))


def test_accept_probabilities_by_definition() -> None:
    """min(1, q(y) / p(y)) with p from transformers' own forward, and zeros past the end."""
    target = make_tiny_target(family="gemma2")
    head = train_quickly(target, "mtp", 3, torch.arange(0, 264, 2), steps=5)
    sampling = SamplingParams(temperature=0.7)
    ids_T = torch.tensor(random_prompts(1, longest=20, seed=11)[0] + [40, 50, 60, 70, 81, 90])
    first, length = len(ids_T) - 6, 6
    hidden_TH = target.hidden(ids_T[None])[0]
    with torch.no_grad():
        got = accept_probabilities(head, hidden_TH, ids_T, first, sampling)
        p_TV = (target.model(input_ids=ids_T[None]).logits[0] / 0.7).softmax(-1)
        states = head(hidden_TH[None], ids_T[None])[:, 0]
    assert got.shape == (3, length)
    for k in range(1, 4):
        for i in range(length):
            if i + k >= length:
                assert got[k - 1, i] == 0
                continue
            label = ids_T[first + i + k]
            q = (head.widen(head.logits(states[k - 1, first + i - 1], k)) / 0.7).softmax(-1)[label]
            assert got[k - 1, i].item() == pytest.approx(
                min(1.0, (q / p_TV[first + i + k - 1, label]).item()), rel=1e-3
            )


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_accuracy_by_rank_by_definition(kind: str) -> None:
    """Sorted logits of one draft after another, the head given the answer's own tokens; rank 1 is the greedy table."""
    target = make_tiny_target()
    head = train_quickly(target, kind, 3, None, steps=60)
    prompts = random_prompts(NUM_PROMPTS, longest=12, seed=3)[:3]
    lengths = (18, 2, 14)
    answers = [decode_plainly(target, p, length, eos_token_ids=()) for p, length in zip(prompts, lengths, strict=True)]
    hits, places, counted = torch.zeros(3, NUM_RANKS), torch.zeros(3), []
    for prompt, answer in zip(prompts, answers, strict=True):
        text = [*prompt, *answer]
        hidden_1TH = target.hidden(torch.tensor([text]), reads=head.reads)
        with torch.no_grad():
            counted.append(rank_hits(head, hidden_1TH[0], torch.tensor(text), len(prompt)))
        for root in range(len(answer) - 1):
            end = len(prompt) + root + 1  # tokens up to the root
            state = head.start(1)
            head.absorb(state, hidden_1TH[:, : end - 1], torch.tensor([text[1:end]]), [end - 1])
            for k in range(min(3, len(text) - end)):
                token = None if k == 0 else torch.tensor([text[end + k - 1]])
                order = head.draft_logits(state, token)[0].argsort(descending=True)[:NUM_RANKS].tolist()
                places[k] += 1
                if text[end + k] in order:
                    hits[k, order.index(text[end + k])] += 1
    got = torch.tensor(accuracy_by_rank(counted))
    assert torch.allclose(got, hits / places[:, None])
    assert got.count_nonzero() >= 3
    greedy = torch.cat(simulate_on(target, head, prompts, answers, SamplingParams()), dim=1)
    assert torch.allclose(got[:, 0], greedy.sum(dim=1) / places)


@pytest.mark.parametrize("plant", ["bases", "bonus"])
def test_planted_bugs_are_noticed(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bases one position off, and a simulation that forgets the token after a full block."""
    target = make_tiny_target()
    head = train_quickly(target, "mtp", 3, None)
    if plant == "bases":
        original = head.forward
        monkeypatch.setattr(head, "forward", lambda hidden, ids, bases: original(hidden, ids, bases + 1))
    else:
        monkeypatch.setattr(acceptance_module, "min", lambda *values: min(*values) - (len(values) == 2), raising=False)
    with pytest.raises(AssertionError):
        check_against_decoder(target, head, ())
