"""Draft-head losses: closed forms against torch's own, chunks against the plain reference, value and gradient."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.heads import HEAD_KINDS, DraftHead, HeadOptions, build_head
from models.target.model import Target
from models.target.tiny import make_tiny_target
from train.heads import losses as losses_module
from train.heads.hidden_cache import answer_positions, log_normalisers
from train.heads.losses import (
    MIN_OVERLAP,
    LossOptions,
    draft_labels,
    head_loss,
    head_weights,
    loss_and_gradient,
    reference_loss,
    supervised_loss,
    teacher_probs,
)
from train.heads.targets import HeadTargets, draft_bases, line_up

K = 3
MIXES = {
    "ce": {"ce": 1.0, "kl": 0.0},
    "kl": {"kl": 1.0},
    "tv": {"kl": 0.0, "tv": 1.0},
    "lk": {"kl": 0.0, "lk": 1.0},
    "mix": {"ce": 0.3, "kl": 0.5, "tv": 0.7, "lk": 0.2},
}
DRAFT_VOCAB = torch.arange(3, 120, 2)
# Plain, soft-capped, and with an output head of its own.
FAMILIES = ("llama", "gemma2", "mistral")
ROOT = Path(__file__).resolve().parents[3]


def make_head(
    target: Target, kind: str, draft_vocab: Tensor | None = None, own: bool = False, steps: int = K
) -> DraftHead:
    torch.manual_seed(0)
    head = build_head(target, HeadOptions(kind=kind, num_draft_tokens=steps, own_output_head=own), draft_vocab)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return head


def make_batch(head: DraftHead) -> tuple[Tensor, Tensor, Tensor]:
    """ids, hidden, mask of three rows: one long answer, two turns, a short one."""
    ids_BT = torch.randint(3, 259, (3, 20), generator=torch.Generator().manual_seed(2))
    mask_BT = torch.zeros(3, 20, dtype=torch.bool)
    mask_BT[0, 6:18] = True
    mask_BT[1, 2:6] = mask_BT[1, 10:20] = True
    mask_BT[2, 10:13] = True
    return ids_BT, head.target.get.hidden(ids_BT, reads=head.reads), mask_BT


def targets_of(head: DraftHead, with_normaliser: bool = False) -> HeadTargets:
    target = head.target.get
    ids_BT, hidden_BTH, mask_BT = make_batch(head)
    final_BTH = target.final(hidden_BTH)
    normaliser_BT = None
    if with_normaliser:
        flat = log_normalisers(target, final_BTH.flatten(0, 1), answer_positions(mask_BT).flatten())
        normaliser_BT = flat.view(mask_BT.shape)
    bases_BS = draft_bases(mask_BT)
    return line_up(head(hidden_BTH, ids_BT, bases_BS), bases_BS, final_BTH, ids_BT, mask_BT, normaliser_BT)


def value_and_gradients(head: DraftHead, total: Tensor) -> list[Tensor]:
    grads = torch.autograd.grad(total, list(head.parameters()), allow_unused=True)
    return [total.detach(), *(torch.zeros(()) if grad is None else grad for grad in grads)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert any(grad.abs().max() > 1e-3 for grad in theirs[1:])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5 * max(1.0, other.abs().max().item()))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("draft_vocab", [None, DRAFT_VOCAB], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_equal_reference(family: str, kind: str, draft_vocab: Tensor | None, own: bool) -> None:
    """Every mix, over chunks of a few positions, with and without normalisers from a cache."""
    target = make_tiny_target(family=family)
    head = make_head(target, kind, draft_vocab, own)
    for mix, with_normaliser in zip(MIXES.values(), itertools.cycle([False, True])):
        options = LossOptions(**mix, chunk_elements=4000)
        expected = value_and_gradients(head, reference_loss(head, targets_of(head), options))
        loss = head_loss(head, targets_of(head, with_normaliser), options)
        assert_same(value_and_gradients(head, loss.total), expected)


@pytest.mark.parametrize("chunk_elements", [1, 700, 3000, 10**9])
def test_chunk_size_changes_nothing(chunk_elements: int) -> None:
    head = make_head(make_tiny_target(family="gemma2"), "mtp", own=True)
    whole, cut = (
        head_loss(head, targets_of(head), LossOptions(**MIXES["mix"], chunk_elements=size))
        for size in (2**22, chunk_elements)
    )
    assert_same(value_and_gradients(head, cut.total), value_and_gradients(head, whole.total))
    torch.testing.assert_close(cut.loss_K, whole.loss_K, rtol=1e-5, atol=1e-5)
    assert torch.equal(cut.correct_K, whole.correct_K)
    assert torch.equal(cut.count_K, whole.count_K)


def test_gradient_scales_with_what_comes_after() -> None:
    """The chunks' gradients are made in the forward pass: a factor that comes later must still reach them."""
    head = make_head(make_tiny_target(), "mtp", own=True)
    options = LossOptions(**MIXES["mix"])
    once = value_and_gradients(head, head_loss(head, targets_of(head), options).total)[1:]
    scaled = value_and_gradients(head, head_loss(head, targets_of(head), options).total * -2.5)[1:]
    for one, other in zip(once, scaled, strict=True):
        torch.testing.assert_close(other, -2.5 * one, rtol=1e-5, atol=1e-5)


def test_counts_and_accuracies() -> None:
    """loss_K, correct_K and count_K by a loop over all supervised places."""
    target = make_tiny_target()
    head = make_head(target, "mtp")
    ids_BT, hidden_BTH, mask_BT = make_batch(head)
    loss = head_loss(head, targets_of(head), LossOptions(**MIXES["ce"], beta=0.5, chunk_elements=2000))
    states_KBTH = head(hidden_BTH, ids_BT)
    sums, right, count = [0.0] * K, [0] * K, [0] * K
    for k in range(1, K + 1):
        for b, row in enumerate(mask_BT.tolist()):
            for t in range(len(row) - 1 - k):
                if all(row[t + 1 : t + 2 + k]):
                    logits = head.logits(states_KBTH[k - 1, b, t], k)
                    label = ids_BT[b, t + 1 + k]
                    sums[k - 1] += F.cross_entropy(logits, label).item()
                    right[k - 1] += int(logits.argmax() == label)
                    count[k - 1] += 1
    assert loss.count_K.tolist() == count
    assert loss.correct_K.tolist() == right
    torch.testing.assert_close(loss.loss_K, torch.tensor(sums), rtol=1e-4, atol=0)
    weights = [1 / 1.75, 0.5 / 1.75, 0.25 / 1.75]
    assert loss.total.item() == pytest.approx(sum(w * s for w, s in zip(weights, sums, strict=True)), rel=1e-4)


@pytest.mark.parametrize("beta", [0.3, 0.8, 1.0])
def test_head_weights(beta: float) -> None:
    weights = head_weights(4, beta)
    assert weights.sum().item() == pytest.approx(1.0)
    assert (weights[1:] / weights[:-1]).tolist() == pytest.approx([beta] * 3)


def random_case(vocab: int = 11, rows: int = 40, mass: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [N, D], p [N, D] with this mass, labels [N]; float64, so that closed forms can be held to 1e-12."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 2
    p = (torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 2).softmax(-1) * mass
    return logits, p, torch.randint(0, vocab, (rows,), generator=generator)


def only(name: str) -> LossOptions:
    return LossOptions(**{"kl": 0.0, name: 1.0})


def test_ce_is_torchs() -> None:
    logits, p, labels = random_case()
    logits.requires_grad_()
    expected = F.cross_entropy(logits, labels, reduction="none")
    loss, right, grad = loss_and_gradient(logits.detach().clone(), p, labels, only("ce"))
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), logits)[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(right, logits.argmax(-1) == labels)


def test_ce_of_a_token_that_cannot_be_drafted_is_nothing() -> None:
    logits, p, labels = random_case()
    labels[::2] = -1
    loss, right, grad = loss_and_gradient(logits.clone(), p, labels, only("ce"))
    assert (loss[::2] == 0).all()
    assert (grad[::2] == 0).all()
    assert not right[::2].any()
    assert (loss[1::2] > 0).all()


@pytest.mark.parametrize("mass", [1.0, 0.6])
def test_kl_is_torchs(mass: float) -> None:
    logits, p, labels = random_case(mass=mass)
    logits.requires_grad_()
    expected = F.kl_div(logits.log_softmax(-1), p, reduction="none").sum(-1)
    loss, _, grad = loss_and_gradient(logits.detach().clone(), p, labels, only("kl"))
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), logits)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mass", [1.0, 0.6])
def test_tv_is_the_probability_of_rejection(mass: float) -> None:
    """By enumeration: draw x ~ q, keep it with probability min(1, p(x) / q(x)). lk is -log of the acceptance."""
    logits, p, labels = random_case(mass=mass)
    q = logits.softmax(-1)
    accepted = torch.stack(
        [sum(q[n, x] * min(1.0, (p[n, x] / q[n, x]).item()) for x in range(11)) for n in range(len(q))]
    )
    tv, _, tv_grad = loss_and_gradient(logits.clone(), p, labels, only("tv"))
    lk, _, lk_grad = loss_and_gradient(logits.clone(), p, labels, only("lk"))
    torch.testing.assert_close(tv, 1 - accepted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lk, -accepted.log(), rtol=1e-12, atol=1e-12)
    if mass == 1.0:
        torch.testing.assert_close(tv, (p - q).abs().sum(-1) / 2, rtol=1e-12, atol=1e-12)
    logits.requires_grad_()
    overlap = torch.minimum(p, logits.softmax(-1)).sum(-1)
    torch.testing.assert_close(tv_grad, -torch.autograd.grad(overlap.sum(), logits, retain_graph=True)[0])
    torch.testing.assert_close(lk_grad, -torch.autograd.grad(overlap.log().sum(), logits)[0])


@pytest.mark.parametrize("name", ["kl", "tv", "lk"])
def test_a_perfect_head_has_no_loss(name: str) -> None:
    """The gradient of kl vanishes with it; tv and lk have a kink there, and every move away costs."""
    logits, _, labels = random_case()
    p = logits.softmax(-1)
    loss, _, grad = loss_and_gradient(logits.clone(), p, labels, only(name))
    assert loss.abs().max() < 1e-14
    if name == "kl":
        assert grad.abs().max() < 1e-14
    moved = logits + 0.01 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert (loss_and_gradient(moved, p, labels, only(name))[0] > 1e-6).all()


def test_no_overlap_gives_a_finite_loss_without_gradient() -> None:
    """lk is cut at MIN_OVERLAP: a head that misses p altogether has a large finite loss and no noise for a gradient."""
    logits, p = torch.tensor([[0.0, 90.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    loss, _, grad = loss_and_gradient(logits.clone(), p, torch.tensor([0]), only("lk"))
    assert loss.item() == pytest.approx(-math.log(MIN_OVERLAP))
    assert (grad == 0).all()
    loss, _, grad = loss_and_gradient(logits.clone(), p, torch.tensor([0]), LossOptions(ce=1, kl=1, tv=1, lk=1))
    assert torch.isfinite(loss).all()
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("draft_vocab", [None, DRAFT_VOCAB], ids=["whole", "reduced"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_teacher_is_the_targets_own_distribution(family: str, draft_vocab: Tensor | None) -> None:
    """p is transformers' softmax over all tokens at the position that predicts the label; a reduced one is its part."""
    target = make_tiny_target(family=family)
    head = make_head(target, "medusa", draft_vocab)
    ids_BT, _, mask_BT = make_batch(head)
    with torch.no_grad():
        p_BTV = target.model(input_ids=ids_BT).logits.softmax(-1)
    # A teacher stands where the next token and the one before it are answer tokens.
    wanted = [p_BTV[b, s] for b in range(3) for s in range(1, 19) if mask_BT[b, s] and mask_BT[b, s + 1]]
    expected = torch.stack(wanted)[:, slice(None) if draft_vocab is None else draft_vocab]
    for with_normaliser in (False, True):
        got = teacher_probs(head, targets_of(head, with_normaliser), slice(None))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6)
        assert (got.sum(-1) < 0.999).all() == (draft_vocab is not None)


def test_draft_labels() -> None:
    head = make_head(make_tiny_target(), "medusa", torch.tensor([4, 7, 200]))
    assert draft_labels(head, torch.tensor([4, 5, 7, 200, 263, 0])).tolist() == [0, -1, 1, 2, -1, -1]
    assert draft_labels(make_head(make_tiny_target(), "medusa"), torch.tensor([4, 263])).tolist() == [4, 263]


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_the_teacher_is_the_final_state(kind: str) -> None:
    """Whatever layers stand behind it for the head to read."""
    head = make_head(make_tiny_target(), kind)
    ids_BT, hidden_BTH, mask_BT = make_batch(head)
    options = LossOptions(kl=1.0)
    total = supervised_loss(head, head, hidden_BTH, ids_BT, mask_BT, None, options).total
    torch.testing.assert_close(total, reference_loss(head, targets_of(head), options), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_chunks_equal_reference_under_autocast(kind: str) -> None:
    """bf16 products over float32 weights: both ways agree within what 8 bits give, and the total stays float32."""
    head = make_head(make_tiny_target(), kind, own=True)
    options = LossOptions(**MIXES["mix"], chunk_elements=4000)
    with torch.autocast("cpu", torch.bfloat16):
        total = head_loss(head, targets_of(head), options).total
        expected = reference_loss(head, targets_of(head), options)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(expected.item(), rel=0.01)
    ours, theirs = (
        torch.cat([grad.flatten() for grad in value_and_gradients(head, loss)[1:]]) for loss in (total, expected)
    )
    assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl": -1.0}, "must be 0 or more"),
        ({"kl": 0.0}, "one of them above 0"),
        ({"beta": 0.0}, r"loss\.beta=0\.0 must lie in \(0, 1\]"),
        ({"beta": 1.5}, r"loss\.beta=1\.5 must lie in \(0, 1\]"),
    ],
)
def test_bad_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossOptions(**options)


@pytest.mark.parametrize("plant", ["gradient of unsupervised places", "labels", "beta", "normaliser"])
def test_planted_bugs_are_noticed(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds chunks to the reference would catch these."""
    head = make_head(make_tiny_target(), "mtp", DRAFT_VOCAB)
    options = LossOptions(**MIXES["mix"], chunk_elements=4000)
    expected = value_and_gradients(head, reference_loss(head, targets_of(head), options))
    targets = targets_of(head, with_normaliser=True)
    assert_same(value_and_gradients(head, head_loss(head, targets, options).total), expected)
    targets = targets_of(head, with_normaliser=True)
    if plant == "gradient of unsupervised places":
        targets.valid_KN.fill_(True)
    elif plant == "labels":
        monkeypatch.setattr(losses_module, "draft_labels", lambda head, labels: draft_labels(head, labels.roll(1)))
    elif plant == "beta":
        monkeypatch.setattr(losses_module, "head_weights", lambda steps, beta: head_weights(steps, 1.0))
    else:
        assert targets.log_normaliser_N is not None
        targets.log_normaliser_N.add_(0.1)
    with pytest.raises(AssertionError):
        assert_same(value_and_gradients(head, head_loss(head, targets, options).total), expected)


# Peak memory, measured in a process of its own: what the loss adds to what stood there before it.

PEAK = """
import re, sys
from pathlib import Path
import torch
from models.heads import HeadOptions, build_head
from models.target.tiny import make_tiny_target
from train.heads.losses import LossOptions, head_loss, reference_loss
from train.heads.targets import HeadTargets

loss, steps, vocab, positions = sys.argv[1], *map(int, sys.argv[2:])
head = build_head(make_tiny_target(vocab_size=vocab), HeadOptions("medusa", num_draft_tokens=steps))

def run(states):
    targets = HeadTargets(states, torch.randn(states.shape[1:]), torch.randint(0, vocab, states.shape[1:2]),
                          torch.ones(states.shape[:2], dtype=torch.bool), None)
    options = LossOptions(ce=0.5, kl=0.5)
    total = head_loss(head, targets, options).total if loss == "chunked" else reference_loss(head, targets, options)
    total.backward()

def kib(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

states = torch.randn(steps, positions, head.hidden_size, requires_grad=True)
run(states[:, :1])  # libraries' own buffers
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is held now
before = kib("VmRSS")
run(states)
print((kib("VmHWM") - before) * 1024)
"""


def peak_bytes(loss: str, steps: int, vocab: int = 128_000, positions: int = 96) -> int:
    command = [sys.executable, "-c", PEAK, loss, str(steps), str(vocab), str(positions)]
    # Large blocks go back to the system when freed, so that the peak is that of what was held at once.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_peak_memory_does_not_grow_with_the_number_of_heads() -> None:
    """At V = 128k: K = 4 within 1.2 times K = 1, and under a quarter of the naive loss."""
    one, four = peak_bytes("chunked", 1), peak_bytes("chunked", 4)
    naive = peak_bytes("naive", 4)
    print(
        f"peak of the loss at V = 128k: K=1 {one / 1e6:.0f} MB, K=4 {four / 1e6:.0f} MB, naive K=4 {naive / 1e6:.0f} MB"
    )
    assert one > 10e6
    assert four <= 1.2 * one
    assert four < naive / 4
