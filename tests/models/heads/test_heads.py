"""Draft heads: what training computes for all positions at once is what drafting computes step by step.

The two go different ways (one masked pass over padded rows; a ragged cache that is appended to and rolled back), so
each is the other's oracle. Bugs planted in either must show.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from models.cache.ragged import RaggedCache
from models.heads import HEAD_KINDS, DraftHead, HeadOptions, build_head
from models.heads import base as base_module
from models.heads import hydra as hydra_module
from models.heads import medusa as medusa_module
from models.heads import recursive as recursive_module
from models.target.model import Target
from models.target.tiny import FAMILIES, make_tiny_target

K = 3
TOLERANCE = 2e-4  # float32 logits of order 10, computed in passes of different shapes
NUM_ROWS, LENGTH = 2, 24
DRAFT_VOCAB = torch.arange(3, 120, 2)
READS = (0, 1, 2)  # what an eagle3 head reads of a target of three layers
RECURSIVE = [kind for kind in HEAD_KINDS if HEAD_KINDS[kind].recursive]

_targets: dict[str, Target] = {}


def get_target(family: str = "llama") -> Target:
    if family not in _targets:
        _targets[family] = make_tiny_target(family=family)
    return _targets[family]


def make_head(
    target: Target, kind: str, draft_vocab: Tensor | None = None, seed: int = 0, **options: object
) -> DraftHead:
    """A head moved off its start, so that no part of it is trivially zero or the identity."""
    torch.manual_seed(seed)
    head = build_head(target, HeadOptions(kind=kind, **{"num_draft_tokens": K, **options}), draft_vocab)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return head


def make_text(
    target: Target, rows: int = NUM_ROWS, length: int = LENGTH, seed: int = 1, kind: str = "mtp"
) -> tuple[Tensor, Tensor]:
    """Random ids [B, T] and the target's hidden states for them, as a head of this kind reads them."""
    ids_BT = torch.randint(3, 259, (rows, length), generator=torch.Generator().manual_seed(seed))
    return ids_BT, target.hidden(ids_BT, reads=READS if HEAD_KINDS[kind].reads_layers else ())


@torch.no_grad()
def forced_logits(head: DraftHead, hidden_BTH: Tensor, ids_BT: Tensor) -> Tensor:
    """Teacher-forced logits [K, B, T, V] of a head."""
    states_KBTH = head(hidden_BTH, ids_BT)
    return torch.stack([head.widen(head.logits(states_KBTH[k], k + 1)) for k in range(len(states_KBTH))])


def check_block(
    head: DraftHead, state: object, rows: Sequence[tuple[int, int]], expected: Tensor, ids_BT: Tensor
) -> None:
    """Draft a block of true tokens: `rows` are (row of the text, last position whose pair was absorbed)."""
    tokens_B = None
    for k in range(len(expected)):
        got_BV = head.draft_logits(state, tokens_B)
        want_BV = torch.stack([expected[k, b, t] for b, t in rows])
        assert got_BV.dtype == torch.float32
        assert torch.equal(got_BV.isinf(), want_BV.isinf())
        torch.testing.assert_close(got_BV, want_BV, atol=TOLERANCE, rtol=0)
        tokens_B = torch.stack([ids_BT[b, t + 1 + (k + 1)] for b, t in rows])


def absorb(
    head: DraftHead, state: object, hidden_BTH: Tensor, ids_BT: Tensor, spans: Sequence[tuple[int, int, int]]
) -> None:
    """Absorb positions start .. start + count - 1 of some rows of the text: `spans` are (row, start, count)."""
    longest = max(count for _, _, count in spans)
    # What stands behind a row's count must not matter, so it is made loud.
    hidden = torch.full((len(spans), longest, hidden_BTH.shape[-1]), 7.0)
    tokens = torch.full((len(spans), longest), 5)
    for i, (b, start, count) in enumerate(spans):
        hidden[i, :count] = hidden_BTH[b, start : start + count]
        tokens[i, :count] = ids_BT[b, start + 1 : start + 1 + count]
    head.absorb(state, hidden, tokens, [count for _, _, count in spans])


def check_drafting_equals_forced(
    head: DraftHead, hidden_BTH: Tensor, ids_BT: Tensor, expected: Tensor | None = None
) -> None:
    """Ragged prompts, then ragged second and third blocks, all along true tokens."""
    expected = forced_logits(head, hidden_BTH, ids_BT) if expected is None else expected
    state = head.start(2)
    absorb(head, state, hidden_BTH, ids_BT, [(0, 0, 9), (1, 0, 4)])
    check_block(head, state, [(0, 8), (1, 3)], expected, ids_BT)
    absorb(head, state, hidden_BTH, ids_BT, [(0, 9, 1), (1, 4, 3)])
    check_block(head, state, [(0, 9), (1, 6)], expected[:1], ids_BT)  # a block that drafts a single token
    absorb(head, state, hidden_BTH, ids_BT, [(0, 10, 4), (1, 7, 2)])
    check_block(head, state, [(0, 13), (1, 8)], expected, ids_BT)
    check_block(head, state, [(0, 13), (1, 8)], expected, ids_BT)  # started anew, it forgets what it drafted


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("family", FAMILIES)
class TestEveryKindAndFamily:
    def test_drafting_equals_forced(self, family: str, kind: str) -> None:
        target = get_target(family)
        ids_BT, hidden_BTH = make_text(target, kind=kind)
        check_drafting_equals_forced(make_head(target, kind), hidden_BTH, ids_BT)

    def test_bases_pick_from_all(self, family: str, kind: str) -> None:
        target = get_target(family)
        ids_BT, hidden_BTH = make_text(target, kind=kind)
        head = make_head(target, kind)
        bases_BS = torch.tensor([[2, 5, 9, 20], [0, 7, 8, 0]])
        with torch.no_grad():
            everywhere = head(hidden_BTH, ids_BT)
            some = head(hidden_BTH, ids_BT, bases_BS)
        for b in range(NUM_ROWS):
            torch.testing.assert_close(some[:, b], everywhere[:, b, bases_BS[b]], atol=TOLERANCE, rtol=0)

    def test_padded_batch_equals_single_rows(self, family: str, kind: str) -> None:
        """Values and gradients."""
        target = get_target(family)
        ids_BT, hidden_BTH = make_text(target, kind=kind)
        head = make_head(target, kind)
        lengths = [LENGTH, 13]
        weights = torch.randn(K, NUM_ROWS, LENGTH, target.hidden_size, generator=torch.Generator().manual_seed(3))
        padded_hidden, padded_ids = hidden_BTH.clone(), ids_BT.clone()
        padded_hidden[1, 13:], padded_ids[1, 13:] = 100.0, 0
        states = head(padded_hidden, padded_ids)
        # Step k at t reads token t + k: the last K positions of a row have no label and no promise.
        total = sum((states[:, b, : n - K] * weights[:, b, : n - K]).sum() for b, n in enumerate(lengths))
        batched = torch.autograd.grad(total, list(head.parameters()), allow_unused=True)
        total = torch.zeros(())
        for b, n in enumerate(lengths):
            alone = head(hidden_BTH[b : b + 1, :n], ids_BT[b : b + 1, :n])
            torch.testing.assert_close(states[:, b, : n - K], alone[:, 0, : n - K], atol=TOLERANCE, rtol=0)
            total = total + (alone[:, 0, : n - K] * weights[:, b, : n - K]).sum()
        single = torch.autograd.grad(total, list(head.parameters()), allow_unused=True)
        assert any(grad is not None and grad.abs().max() > 0 for grad in single)
        for (name, _), one, other in zip(head.named_parameters(), batched, single, strict=True):
            assert (one is None) == (other is None), name
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, atol=2e-3, rtol=1e-3, msg=name)

    def test_reads_nothing_later(self, family: str, kind: str) -> None:
        """Step k at t depends on h_0 .. h_t and x_1 .. x_{t+k} alone; hydra and mtp do depend on x_{t+k}."""
        target = get_target(family)
        ids_BT, hidden_BTH = make_text(target, rows=1, kind=kind)
        head = make_head(target, kind)
        t = 11
        with torch.no_grad():
            before = head(hidden_BTH, ids_BT)[:, 0, t]
            for k in range(1, K + 1):
                later_hidden, later_ids = hidden_BTH.clone(), ids_BT.clone()
                later_hidden[:, t + 1 :] += 3.0
                later_ids[:, t + k + 1 :] = (later_ids[:, t + k + 1 :] + 11) % 250
                after = head(later_hidden, later_ids)[:, 0, t]
                torch.testing.assert_close(after[:k], before[:k], atol=0, rtol=0)
                if kind != "medusa":
                    later_ids[:, t + k] = (later_ids[:, t + k] + 11) % 250
                    assert (head(hidden_BTH, later_ids)[k - 1, 0, t] - before[k - 1]).abs().max() > 1e-3

    def test_frozen_parts_stay_out(self, family: str, kind: str) -> None:
        """Nothing of the target is registered, saved, trained or given a gradient."""
        target = get_target(family)
        ids_BT, hidden_BTH = make_text(target, kind=kind)
        head = make_head(target, kind)
        before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
        logits = head.logits(head(hidden_BTH, ids_BT)[K - 1], K)
        logits.logsumexp(dim=-1).sum().backward()
        assert all(parameter.requires_grad for parameter in head.parameters())
        assert set(head.state_dict()) == {name for name, _ in head.named_parameters()}
        targets_storage = {tensor.data_ptr() for tensor in target.model.state_dict().values()}
        assert not targets_storage & {parameter.data_ptr() for parameter in head.parameters()}
        assert all(not p.requires_grad and p.grad is None for p in target.model.parameters())
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.add_(1.0)
        assert all(torch.equal(before[name], tensor) for name, tensor in target.model.state_dict().items())


def test_first_pair_without_its_embedding() -> None:
    """The second token is then seen by drafts from the first two positions alone, and drafting is still the forward."""
    target = get_target("llama")
    ids_BT, hidden_BTH = make_text(target, kind="mtp")
    changed_BT = ids_BT.clone()
    changed_BT[:, 1] = (changed_BT[:, 1] + 11) % 250
    for blank_first in (True, False):
        head = make_head(target, "mtp", blank_first=blank_first)
        check_drafting_equals_forced(head, hidden_BTH, ids_BT)
        with torch.no_grad():
            before, after = head(hidden_BTH, ids_BT), head(hidden_BTH, changed_BT)
        assert torch.equal(before[:, :, 2:], after[:, :, 2:]) is blank_first
        assert not torch.equal(before[0, :, 2:], head(hidden_BTH.roll(1, dims=1), ids_BT)[0, :, 2:])


def test_blanking_is_for_mtp() -> None:
    with pytest.raises(ValueError, match=r"heads\.blank_first=true: it is for heads=mtp, not for hydra"):
        make_head(get_target("llama"), "hydra", blank_first=True)


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("own_output_head", [False, True])
def test_reduced_vocabulary(kind: str, own_output_head: bool) -> None:
    """-inf outside, inside the full head's own logits; drafting agrees with training there too."""
    target = get_target("gemma2")  # soft-capped, so that a head that forgets it shows
    ids_BT, hidden_BTH = make_text(target, kind=kind)
    full, reduced = (make_head(target, kind, vocab) for vocab in (None, DRAFT_VOCAB))
    if own_output_head:
        reduced = make_head(target, kind, DRAFT_VOCAB, own_output_head=True)
        with torch.no_grad():
            for copy in reduced.output_heads:
                copy.copy_(target.output_head.weight[DRAFT_VOCAB])
    reduced.load_state_dict(full.state_dict(), strict=not own_output_head)
    wide, narrow = forced_logits(full, hidden_BTH, ids_BT), forced_logits(reduced, hidden_BTH, ids_BT)
    assert narrow.shape == wide.shape == (K, NUM_ROWS, LENGTH, target.vocab_size)
    torch.testing.assert_close(narrow[..., DRAFT_VOCAB], wide[..., DRAFT_VOCAB], atol=1e-5, rtol=0)
    outside = torch.ones(target.vocab_size, dtype=torch.bool)
    outside[DRAFT_VOCAB] = False
    assert (narrow[..., outside] == -torch.inf).all()
    check_drafting_equals_forced(reduced, hidden_BTH, ids_BT)


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_own_output_heads(kind: str) -> None:
    """Started at the target's in float32, one a step (one in all for the recursive kind), and then its own."""
    target = get_target("llama")
    head = build_head(target, HeadOptions(kind=kind, num_draft_tokens=K, own_output_head=True))
    assert len(head.output_heads) == (1 if head.recursive else K)
    assert all(torch.equal(copy, target.output_head.weight) for copy in head.output_heads)
    states = torch.randn(5, target.hidden_size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head.logits(states, 2), target.logits(states), atol=1e-5, rtol=0)
    with torch.no_grad():
        for index, copy in enumerate(head.output_heads):
            copy.mul_(index + 2.0)
    for step in range(1, K + 1):
        factor = 2.0 if head.recursive else step + 1.0
        torch.testing.assert_close(head.logits(states, step), factor * target.logits(states), atol=1e-4, rtol=0)
    ids_BT, hidden_BTH = make_text(target, kind=kind)
    check_drafting_equals_forced(head, hidden_BTH, ids_BT)


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_rows_leave_and_join(kind: str) -> None:
    """Rows dropped, reordered and appended in mid-text draft on as if they had always stood alone."""
    target = get_target("llama")
    ids_BT, hidden_BTH = make_text(target, rows=4, kind=kind)
    head = make_head(target, kind)
    expected = forced_logits(head, hidden_BTH, ids_BT)
    state = head.start(3)
    absorb(head, state, hidden_BTH, ids_BT, [(0, 0, 7), (1, 0, 2), (2, 0, 5)])
    check_block(head, state, [(0, 6), (1, 1), (2, 4)], expected, ids_BT)
    head.select_rows(state, [2, 0])
    absorb(head, state, hidden_BTH, ids_BT, [(2, 5, 3), (0, 7, 1)])
    check_block(head, state, [(2, 7), (0, 7)], expected, ids_BT)
    joined = head.start(2)
    absorb(head, joined, hidden_BTH, ids_BT, [(3, 0, 10), (1, 0, 3)])
    check_block(head, joined, [(3, 9), (1, 2)], expected, ids_BT)  # a draft under way in both when they meet
    head.extend(state, joined)
    check_block(head, state, [(2, 7), (0, 7), (3, 9), (1, 2)], expected, ids_BT)
    absorb(head, state, hidden_BTH, ids_BT, [(2, 8, 1), (0, 8, 2), (3, 10, 3), (1, 3, 4)])
    check_block(head, state, [(2, 8), (0, 9), (3, 12), (1, 6)], expected, ids_BT)
    head.select_rows(state, [3])
    check_block(head, state, [(1, 6)], expected, ids_BT)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kind", "num_layers"), [("mtp", 1), ("mtp", 2), ("eagle3", 1)])
def test_recursive_head_goes_beyond_what_it_was_trained_for(family: str, kind: str, num_layers: int) -> None:
    """Drafting 6 tokens with a head trained for 3 is what the same weights compute when trained for 6."""
    target = get_target(family)
    ids_BT, hidden_BTH = make_text(target, kind=kind)
    short = make_head(target, kind, num_layers=num_layers)
    long = build_head(target, HeadOptions(kind=kind, num_draft_tokens=6, num_layers=num_layers))
    long.load_state_dict(short.state_dict())
    check_drafting_equals_forced(short, hidden_BTH, ids_BT, expected=forced_logits(long, hidden_BTH, ids_BT))


@pytest.mark.parametrize("kind", [kind for kind in HEAD_KINDS if not HEAD_KINDS[kind].recursive])
def test_other_heads_refuse_to_go_beyond(kind: str) -> None:
    target = get_target("llama")
    ids_BT, hidden_BTH = make_text(target, kind=kind)
    head = make_head(target, kind)
    state = head.start(1)
    absorb(head, state, hidden_BTH, ids_BT, [(0, 0, 4)])
    check_block(head, state, [(0, 3)], forced_logits(head, hidden_BTH, ids_BT), ids_BT)
    with pytest.raises(
        ValueError, match=rf"{kind} heads were trained for 3 draft tokens and cannot give 4; .*heads=mtp"
    ):
        head.draft_logits(state, ids_BT[:1, 8])


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("family", FAMILIES)
def test_untrained_head_repeats_the_targets_prediction(family: str, kind: str) -> None:
    target = get_target(family)
    ids_BT, hidden_BTH = make_text(target, kind=kind)
    head = build_head(target, HeadOptions(kind=kind, num_draft_tokens=K))
    assert torch.equal(head(hidden_BTH, ids_BT), hidden_BTH.expand(K, -1, -1, -1))
    assert torch.equal(head.logits(head(hidden_BTH, ids_BT)[1], 2), target.logits(hidden_BTH))


@pytest.mark.parametrize("family", FAMILIES)
def test_recursive_head_starts_from_the_targets_last_layers(family: str) -> None:
    target = get_target(family)
    head = build_head(target, HeadOptions(kind="mtp", num_draft_tokens=K, num_layers=2))
    weights = head.state_dict()
    for ours, theirs in enumerate((1, 2)):
        for name, tensor in target.layers()[theirs].state_dict().items():
            assert torch.equal(weights[f"layers.{ours}.{name}"], tensor)
    for name, tensor in target.decoder.norm.state_dict().items():
        assert torch.equal(weights[f"norm_out.{name}"], tensor)
    assert [layer.self_attn.layer_idx for layer in target.layers()] == [0, 1, 2]


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_fitted_start_is_the_least_squares_one(family: str, num_layers: int) -> None:
    """Of all projections the one closest to what the copied layer receives, relatively; no step away is better."""
    target = get_target(family)
    texts = list(make_text(target, rows=12, length=48)[0])
    head = build_head(target, HeadOptions(kind="mtp", num_draft_tokens=K, num_layers=num_layers))
    blind = head.project.weight.clone()
    head.fit_start(texts)
    assert not torch.equal(head.project.weight, blind)

    @torch.no_grad()
    def error(weight: Tensor) -> float:
        """Mean squared distance from the stream that enters the layer, both over the stream's own size."""
        total = 0.0
        for ids_T in texts:
            output = target.model(input_ids=ids_T[None], output_hidden_states=True)
            stream = output.hidden_states[3 - num_layers][0, 1:]
            states, embedded = target.hidden(ids_T[None])[0, :-1], target.embed(ids_T[1:])
            features = torch.cat([head.norm_state(states), head.norm_embedding(embedded)], dim=-1)
            size = stream.pow(2).mean(dim=-1, keepdim=True).sqrt()
            total += ((features @ weight.T * head.scale - stream) / size).pow(2).sum().item()
        return total

    best = error(head.project.weight)
    assert best < error(blind)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        step = torch.randn(blind.shape, generator=generator) * 0.02
        assert error(head.project.weight + step) > best


def test_too_little_text_leaves_the_start_as_it_was() -> None:
    target = get_target()
    head = build_head(target, HeadOptions(kind="mtp", num_draft_tokens=K))
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    head.fit_start(list(make_text(target, rows=2, length=40)[0]))
    assert all(torch.equal(before[name], tensor) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_heads_of_a_bfloat16_target(kind: str) -> None:
    """Trained in float32 over bfloat16 hidden states; drafted in bfloat16, with float32 logits close to those."""
    target = make_tiny_target(dtype="bfloat16")
    ids_BT, hidden_BTH = make_text(target, kind=kind)
    head = make_head(target, kind)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
    states = head(hidden_BTH, ids_BT)
    assert states.dtype == torch.float32
    expected = forced_logits(head, hidden_BTH, ids_BT)
    head = head.to(torch.bfloat16)
    state = head.start(1)
    head.absorb(state, hidden_BTH[:1, :9], ids_BT[:1, 1:10], [9])
    tokens = None
    for k in range(K):
        got = head.draft_logits(state, tokens)
        assert got.dtype == torch.float32
        # Eight bits a product, some hundred products deep.
        assert (got - expected[k, :1, 8]).abs().max() < 0.05 * expected.abs().max()
        tokens = ids_BT[:1, 10 + k]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "eagle9"}, r"heads\.kind='eagle9' is unknown; choose one of medusa, hydra, mtp, eagle3"),
        ({"num_draft_tokens": 0}, r"heads\.num_draft_tokens=0 and .*must be at least 1"),
        ({"kind": "medusa", "num_layers": 0}, r"heads\.num_layers=0: both must be at least 1"),
        ({"kind": "mtp", "num_layers": 4}, r"heads\.num_layers=4: the target has only 3 layers"),
        ({"kind": "mtp", "reads": [0, 1, 2]}, r"heads\.reads=\[0, 1, 2\]: mtp heads read none of the layers"),
        ({"kind": "eagle3", "num_layers": 2}, r"heads\.num_layers=2: an eagle3 head has one layer"),
        *(
            ({"kind": "eagle3", "reads": reads}, r"heads\.reads=.*reads 3 layers .*rising from 0 .*to at most 3")
            for reads in ([0, 1], [0, 1, 2, 3], [0, 2, 1], [1, 1, 2], [-1, 0, 1], [1, 2, 4])
        ),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_head(get_target("llama"), HeadOptions(**options))


# Planted bugs. Each is one that a rewrite could bring in; `check_drafting_equals_forced` must notice.


def _rotary_one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted entries stand one position too far (a shift of all would be invisible: rotary positions are relative)."""
    for kind in RECURSIVE:
        original = HEAD_KINDS[kind]._run

        def run(
            self: object,
            state: Tensor,
            ids: Tensor,
            positions: Tensor,
            mask: Tensor | None,
            cache: object,
            original: Callable[..., Tensor] = original,
        ) -> Tensor:
            is_drafted = isinstance(cache, RaggedCache) and ids.shape[1] == 1
            return original(self, state, ids, positions + 1 if is_drafted else positions, mask, cache)

        monkeypatch.setattr(HEAD_KINDS[kind], "_run", run)


def _no_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: object, state: recursive_module.RecursiveState) -> None:
        state.num_drafted_entries = 0

    monkeypatch.setattr(recursive_module.RecursiveHead, "_forget_draft", forget)


def _one_too_few_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: object, state: recursive_module.RecursiveState) -> None:
        if state.num_drafted_entries > 1:
            state.cache.rollback([state.num_drafted_entries - 1] * state.cache.batch_size)
        state.num_drafted_entries = 0

    monkeypatch.setattr(recursive_module.RecursiveHead, "_forget_draft", forget)


def _token_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (recursive_module, hydra_module):
        monkeypatch.setattr(module, "tokens_after", lambda ids, bases, n: base_module.tokens_after(ids, bases, n + 1))


def _mask_shows_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    original = recursive_module._step_mask
    monkeypatch.setattr(recursive_module, "_step_mask", lambda *args: torch.zeros_like(original(*args)))


def _mask_one_short(monkeypatch: pytest.MonkeyPatch) -> None:
    original = recursive_module._step_mask
    monkeypatch.setattr(
        recursive_module,
        "_step_mask",
        lambda bases, positions, step, dtype: original((bases - 1).clamp(min=0), positions, step, dtype),
    )


def _drafts_own_entries_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    original = recursive_module._step_mask

    def masked(bases: Tensor, positions: Tensor, step: int, dtype: torch.dtype) -> Tensor:
        mask = original(bases, positions, step, dtype)
        if step > 2:  # the entry of step 2 is what step 3 loses
            first = positions.shape[1]
            mask[..., first : first + bases.shape[1]] = torch.finfo(dtype).min
        return mask

    monkeypatch.setattr(recursive_module, "_step_mask", masked)


def _last_column_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (recursive_module, hydra_module, medusa_module):
        monkeypatch.setattr(module, "last_kept", lambda hidden, counts: hidden[:, -1])


def _hands_on_the_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    """While drafting alone: training hands on what comes before the final norm."""
    original = recursive_module.RecursiveHead._append
    eagle3 = HEAD_KINDS["eagle3"]

    def append(self: Any, state: object, carried: Tensor, ids: Tensor) -> Tensor:
        out = original(self, state, carried, ids)
        return self.norm(out) if ids.shape[1] == 1 else out

    monkeypatch.setattr(eagle3, "_append", append)


def _reads_the_final_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the last stream, while drafting alone."""
    original = HEAD_KINDS["eagle3"].absorb

    def absorb(self: Any, state: object, hidden: Tensor, tokens: Tensor, counts: Sequence[int]) -> None:
        final = self.target.get.final(hidden)
        return original(self, state, torch.cat([hidden[..., : -self.hidden_size], final], dim=-1), tokens, counts)

    monkeypatch.setattr(HEAD_KINDS["eagle3"], "absorb", absorb)


def _hydra_keeps_the_last_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    def draft_state(self: hydra_module.HydraHeads, state: hydra_module.HydraState, tokens: Tensor | None) -> Tensor:
        root = state.tokens_BK[:, -1:] if tokens is None else state.tokens_BK
        state.tokens_BK = root if tokens is None else torch.cat([root, tokens[:, None]], dim=1)
        embeddings = [self._embed(column) for column in state.tokens_BK.unbind(dim=1)]
        return self.heads[state.step - 1](state.hidden_BH, embeddings)

    monkeypatch.setattr(hydra_module.HydraHeads, "draft_state", draft_state)


@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        *itertools.product(
            RECURSIVE,
            (
                _rotary_one_ahead,
                _no_rollback,
                _one_too_few_rolled_back,
                _token_off_by_one,
                _mask_shows_the_future,
                _mask_one_short,
                _drafts_own_entries_hidden,
                _last_column_for_all,
            ),
        ),
        ("eagle3", _hands_on_the_normalised),
        ("eagle3", _reads_the_final_state),
        ("hydra", _token_off_by_one),
        ("hydra", _last_column_for_all),
        ("hydra", _hydra_keeps_the_last_draft),
        ("medusa", _last_column_for_all),
    ],
)
def test_planted_bugs_are_noticed(
    kind: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = get_target("qwen3")
    ids_BT, hidden_BTH = make_text(target, kind=kind)
    head = make_head(target, kind)
    check_drafting_equals_forced(head, hidden_BTH, ids_BT)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_drafting_equals_forced(head, hidden_BTH, ids_BT)
