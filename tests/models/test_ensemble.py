"""The ensemble head: what it looks at, what it must not see, where it starts, and float32 throughout."""

import copy
import inspect
import itertools
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from models import ensemble
from models.decoding.decoder import BlockRecord, Decoder
from models.decoding.rows import GenerationParams
from models.drafters.heads import HeadsDrafter
from models.ensemble import KINDS, EnsembleHead, EnsembleOptions
from models.heads import HeadOptions, build_head
from models.sampling import SamplingParams
from models.target.tiny import make_tiny_target
from models.verification.base import Block
from models.verification.ensemble import DynamicEnsemble, StaticEnsemble
from tests.models.verification.enumeration import fails
from tests.planting import blank_module

REAL = SimpleNamespace(**vars(ensemble))
DRAFT_SIZE, TARGET_SIZE, VOCAB = 6, 4, 5
ROUNDING = 1e-6  # float32 sums of a dozen terms of order 1


def make_block(num_rows: int = 3, width: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32) -> Block:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(num_rows, *shape, generator=generator)

    p_BTV, q_BKV = random(width + 1, VOCAB).mul(2).softmax(-1), random(width, VOCAB).mul(2).softmax(-1)
    tokens_BK = torch.randint(0, VOCAB, (num_rows, width), generator=generator)
    uniforms_BK = torch.rand(num_rows, width, generator=generator, dtype=torch.float64)
    return Block(
        p_BTV,
        q_BKV,
        tokens_BK,
        torch.full((num_rows,), width),
        uniforms_BK,
        uniforms_BK[:, 0],
        target_hidden_BTH=(random(width + 1, TARGET_SIZE) * 3).to(dtype),
        draft_hidden_BKH=(random(width, DRAFT_SIZE) * 7).to(dtype),
    )


def make_head(code: SimpleNamespace, kind: str, trained: bool = True, **options: float) -> EnsembleHead:
    torch.manual_seed(0)
    head = code.EnsembleHead(
        code.EnsembleOptions(**{"kind": kind, "draft_size": DRAFT_SIZE, "target_size": TARGET_SIZE, **options})
    )
    if trained:
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.5)
    return head


# ---- each check takes the code, so that it can be shown to catch faults ----


def check_features(code: SimpleNamespace) -> None:
    """Every feature against its definition, in plain numbers."""
    block = make_block()
    block.target_probs_BTV[0, 0] = torch.tensor([0.0, 0.5, 0.5, 0.0, 0.0])  # entropy with zeros
    for kind in KINDS:
        head = make_head(code, kind)
        features_BKF = head.features(block)
        assert features_BKF.dtype == torch.float32
        assert features_BKF.shape == (3, 4, head.num_features)
        for b, k in itertools.product(range(3), range(4)):
            expected = []
            for hidden in (block.draft_hidden_BKH[b, k], block.target_hidden_BTH[b, k]):
                rms = math.sqrt(sum(x * x for x in hidden.tolist()) / len(hidden))
                expected += [x / rms for x in hidden.tolist()]
            if kind == "mlp":
                p, q = block.target_probs_BTV[b, k].tolist(), block.draft_probs_BKV[b, k].tolist()
                entropies = [-sum(x * math.log(x) for x in law if x > 0) / math.log(VOCAB) for law in (p, q)]
                tv = sum(abs(x - y) for x, y in zip(p, q, strict=True)) / 2
                agrees = float(p.index(max(p)) == q.index(max(q)))
                scale = math.sqrt((DRAFT_SIZE + TARGET_SIZE) / 5)
                expected += [scale * one for one in (*entropies, tv, agrees, 1 / (k + 1))]
            assert features_BKF[b, k].tolist() == pytest.approx(expected, abs=ROUNDING)


def check_start(code: SimpleNamespace) -> None:
    """The untrained head gives initial_weight, whatever it looks at, and its last layer has a gradient there."""
    for kind, weight in itertools.product(KINDS, (0.05, 0.5, 0.9, 0.999)):
        head = make_head(code, kind, trained=False, initial_weight=weight)
        for scale in (0.0, 1.0, 1e6):
            w_N = head(scale * torch.randn(7, head.num_features))
            assert w_N.tolist() == pytest.approx([weight] * 7, abs=ROUNDING)
            assert len(set(w_N.tolist())) == 1
        head.weigh(make_block())
        head(torch.randn(7, head.num_features)).sum().backward()
        assert head.output.weight.grad.norm() > 0


def check_blind(code: SimpleNamespace) -> None:
    """Nothing at or after drafted token k changes w_k, but for the two hidden states and laws that it is judged by."""
    block = make_block()
    other = make_block(seed=1)
    for kind, k in itertools.product(KINDS, range(4)):
        weigh = make_head(code, kind).weigh
        before_BK = weigh(block)
        later = {
            name: torch.cat([getattr(block, name)[:, : k + 1], getattr(other, name)[:, k + 1 :]], dim=1)
            for name in ("target_probs_BTV", "draft_probs_BKV", "target_hidden_BTH", "draft_hidden_BKH")
        }
        tokens_BK = torch.cat([block.draft_tokens_BK[:, :k], (block.draft_tokens_BK[:, k:] + 1) % VOCAB], dim=1)
        uniforms = {"uniforms_BK": other.uniforms_BK, "final_uniform_B": other.final_uniform_B}
        counts_B = torch.full((3,), max(1, k))
        changed = replace(block, **later, **uniforms, draft_tokens_BK=tokens_BK, num_drafted_B=counts_B)
        after_BK = weigh(changed)
        assert torch.equal(after_BK[:, : k + 1], before_BK[:, : k + 1])
        assert k == 3 or not torch.equal(after_BK[:, k + 1 :], before_BK[:, k + 1 :])


def check_sees(code: SimpleNamespace) -> None:
    """What it is to look at does change w_k, and no other place or row."""
    seen = {"linear": ("target_hidden_BTH", "draft_hidden_BKH")}
    seen["mlp"] = (*seen["linear"], "target_probs_BTV", "draft_probs_BKV")
    for kind in KINDS:
        weigh, block, other = make_head(code, kind).weigh, make_block(), make_block(seed=1)
        before_BK = weigh(block)
        for name in ("target_hidden_BTH", "draft_hidden_BKH", "target_probs_BTV", "draft_probs_BKV"):
            tensor = getattr(block, name).clone()
            tensor[1, 2] = getattr(other, name)[1, 2]
            differs_BK = weigh(replace(block, **{name: tensor})) != before_BK
            assert torch.nonzero(differs_BK).tolist() == ([[1, 2]] if name in seen[kind] else [])


def check_forward(code: SimpleNamespace) -> None:
    """The layers, written out."""
    for kind in KINDS:
        head, block = make_head(code, kind), make_block()
        features_BKF, tensors = head.features(block), head.state_dict()
        if kind == "mlp":
            hidden = features_BKF @ tensors["hidden.0.weight"].T + tensors["hidden.0.bias"]
            features_BKF = hidden * hidden.sigmoid()
        logits_BK1 = features_BKF @ tensors["output.weight"].T + tensors["output.bias"]
        assert torch.allclose(head.weigh(block), logits_BK1[..., 0].sigmoid(), atol=ROUNDING)


def check_extremes(code: SimpleNamespace) -> None:
    """No NaN and no exact 0 or 1, for hidden states of 0, 1e-30, and nearly the largest number there is."""
    for kind, size in itertools.product(KINDS, (0.0, 1e-30, 1e4, 3e38)):
        head, block = make_head(code, kind), make_block()
        with torch.no_grad():
            head.output.weight.mul_(1e4)
        hidden_BTH = torch.full_like(block.target_hidden_BTH, size)
        hidden_BTH[..., 0] *= -1
        block = replace(block, target_hidden_BTH=hidden_BTH, draft_hidden_BKH=hidden_BTH[:, 1:, :1].expand(-1, -1, 6))
        features_BKF = head.features(block)
        assert features_BKF.isfinite().all()
        assert float(features_BKF[..., :10].square().mean()) == pytest.approx(float(size > 0), abs=1e-4)
        w_BK = head(features_BKF)
        assert ((w_BK > 0.0) & (w_BK < 1.0)).all()
        w_BK.sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in head.parameters())


def check_float32(code: SimpleNamespace) -> None:
    """Hidden states in bfloat16, autocast on, another default dtype: parameters and arithmetic stay in float32."""
    wide, narrow = make_block(), make_block(dtype=torch.bfloat16)
    exact = replace(
        wide,
        target_hidden_BTH=narrow.target_hidden_BTH.float(),
        draft_hidden_BKH=narrow.draft_hidden_BKH.float(),
    )
    for kind in KINDS:
        torch.set_default_dtype(torch.bfloat16)
        try:
            head = code.EnsembleHead(code.EnsembleOptions(kind=kind, draft_size=DRAFT_SIZE, target_size=TARGET_SIZE))
        finally:
            torch.set_default_dtype(torch.float32)
        assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
        head = make_head(code, kind)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got_BK = head.weigh(narrow)
        assert got_BK.dtype == torch.float32
        assert torch.equal(got_BK, head.weigh(exact))
        with pytest.raises(ValueError, match=r"the ensemble head is in torch\.bfloat16, in which its updates are lost"):
            copy.deepcopy(head).bfloat16().weigh(narrow)


CHECKS = (check_features, check_start, check_blind, check_sees, check_forward, check_extremes, check_float32)


@pytest.mark.parametrize("check", CHECKS)
def test_head(check: object) -> None:
    check(REAL)  # type: ignore[operator]


PLANTED = {
    "target's hidden state one place late": ("target_hidden_BTH[:, :num_draft_tokens]", "target_hidden_BTH[:, 1:]"),
    "target's law one place late": ("block.target_probs_BTV[:, :-1]", "block.target_probs_BTV[:, 1:]"),
    "target before draft": (
        "[unit_rms(draft_hidden_BKH), unit_rms(target_hidden_BTH[:, :num_draft_tokens])]",
        "[unit_rms(target_hidden_BTH[:, :num_draft_tokens]), unit_rms(draft_hidden_BKH)]",
    ),
    "looks at the drafted token": (
        "agrees_BK = p_BKV.argmax(dim=-1) == q_BKV.argmax(dim=-1)",
        "agrees_BK = p_BKV.argmax(dim=-1) == block.draft_tokens_BK",
    ),
    "looks at the length of the draft": (
        "place_K = 1.0 / ",
        "place_K = block.num_drafted_B[:, None] / ",
    ),
    "entropy of 0 log 0": ("torch.special.entr(p_BKV)", "(-p_BKV * p_BKV.log())"),
    "entropies swapped": ("torch.special.entr(p_BKV)", "torch.special.entr(q_BKV)"),
    "squares overflow": (
        "scaled = hidden / hidden.abs().amax(dim=-1, keepdim=True).clamp(min=TINY)",
        "scaled = hidden",
    ),
    "not normalised": ("scaled * torch.rsqrt(scaled.square().mean(dim=-1, keepdim=True).clamp(min=TINY))", "scaled"),
    "zeros divided by zero": ("clamp(min=TINY)\n    return", "clamp(min=0.0)\n    return"),
    "places counted from 0": ("torch.arange(1, p_BKV.shape[1] + 1", "torch.arange(p_BKV.shape[1]"),
    "last layer drawn at random": ("nn.init.zeros_(self.output.weight)", "pass"),
    "bias is the weight": (
        "math.log(options.initial_weight) - math.log1p(-options.initial_weight)",
        "options.initial_weight",
    ),
    "w reaches 0 and 1": (".clamp(MARGIN, 1.0 - MARGIN)", ""),
    "weight of the draft": ("return logits.sigmoid()", "return (-logits).sigmoid()"),
    "head in the default dtype": ("self.float()", "pass"),
    "head in the features' dtype": ("features.to(dtype)", "features.bfloat16().to(dtype)"),
    "autocast not switched off": ("enabled=False", "enabled=torch.is_autocast_enabled('cpu')"),
    "bfloat16 parameters let pass": ("if dtype.itemsize < torch.float32.itemsize", "if False"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = PLANTED[fault]
    source = inspect.getsource(ensemble)
    assert right in source, f"the planted fault no longer matches the code: {right}"
    module = blank_module("faulty_ensemble", ensemble.__package__)
    monkeypatch.setitem(sys.modules, "faulty_ensemble", module)
    exec(compile(source.replace(right, wrong, 1), "faulty ensemble", "exec"), module.__dict__)
    code = SimpleNamespace(**vars(module))
    assert any(is_refused(check, code) for check in CHECKS)


def is_refused(check: object, code: SimpleNamespace) -> bool:
    try:
        return fails(check, code)  # type: ignore[arg-type]
    except pytest.fail.Exception:  # what should have been raised was not
        return True


# ---- updates ----


def test_small_updates_are_kept() -> None:
    """An update of 1e-4 to the bias, logit(0.9) = 2.197, is kept; bfloat16, whose spacing is 1/64 there, loses it."""
    head = make_head(REAL, "linear", trained=False)
    lost = copy.deepcopy(head).bfloat16().output.bias
    before, before_lost = head.output.bias.item(), lost.item()
    optimizer = torch.optim.SGD([head.output.bias, lost], lr=1e-4)
    head.output.bias.grad, lost.grad = torch.ones(1), torch.ones(1, dtype=torch.bfloat16)
    optimizer.step()
    assert head.output.bias.item() - before == pytest.approx(-1e-4, rel=1e-2)
    assert lost.item() == before_lost


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_where_to_trust_the_draft(kind: str) -> None:
    """Fitted to w = 0.05 or 0.95 by a direction in the target's hidden state."""
    block, head = make_block(num_rows=64), make_head(REAL, kind, trained=False)
    features_BKF = head.features(block)
    wanted_BK = 0.05 + 0.9 * (features_BKF[..., DRAFT_SIZE] > 0)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    for _ in range(150):
        loss = torch.nn.functional.binary_cross_entropy(head(features_BKF), wanted_BK)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert ((head(features_BKF) > 0.5) == (wanted_BK > 0.5)).float().mean() > 0.95


# ---- in the decoder ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_decodes_as_the_static_ensemble_before_training(kind: str, dtype: str) -> None:
    """Same seed, same tokens; and each block's features can be made again from what is told of it."""
    target = make_tiny_target(dtype=dtype)
    torch.manual_seed(0)
    drafter = HeadsDrafter(build_head(target, HeadOptions(num_draft_tokens=3)).to(target.dtype))
    options = EnsembleOptions(
        kind=kind, draft_size=target.hidden_size, target_size=target.hidden_size, initial_weight=0.4
    )
    head = EnsembleHead(options)
    params = GenerationParams(max_new_tokens=14, sampling=SamplingParams(1.0), eos_token_ids=(), seed=3)
    prompts = [[5, 6, 7], [40, 41], [9, 8, 7, 6, 5]]
    widths = set()

    def hear(record: BlockRecord) -> None:
        features_BKF = head.features(record.block)
        widths.add(features_BKF.shape[1])
        assert features_BKF.shape == (*record.block.draft_tokens_BK.shape, head.num_features)
        assert features_BKF.isfinite().all()

    dynamic = Decoder(target, drafter, 3, DynamicEnsemble(head.weigh)).generate(prompts, params, on_block=hear)
    static = Decoder(target, drafter, 3, StaticEnsemble(0.4)).generate(prompts, params)
    assert [result.tokens for result in dynamic] == [result.tokens for result in static]
    assert [result.certificate for result in dynamic] == pytest.approx(
        [result.certificate for result in static], rel=1e-4
    )
    assert 3 in widths


def test_features_of_an_empty_block() -> None:
    block = make_block()
    empty = Block(
        block.target_probs_BTV[:, :1],
        None,
        block.draft_tokens_BK[:, :0],
        torch.zeros(3),
        block.uniforms_BK[:, :0],
        block.final_uniform_B,
    )
    head = make_head(REAL, "mlp")
    assert head.features(empty).shape == (3, 0, head.num_features)
    assert head.weigh(empty).shape == (3, 0)


# ---- refused ----


@pytest.mark.parametrize(("field", "whose"), [("draft_hidden_BKH", "drafter"), ("target_hidden_BTH", "target")])
def test_hidden_states_are_needed(field: str, whose: str) -> None:
    with pytest.raises(
        ValueError, match=f"reads hidden states, and the {whose} gave none; use a drafter with a network"
    ):
        make_head(REAL, "linear").weigh(replace(make_block(), **{field: None}))


def test_other_widths_are_refused() -> None:
    block = make_block()
    swapped = replace(block, draft_hidden_BKH=block.target_hidden_BTH[:, 1:], target_hidden_BTH=block.target_hidden_BTH)
    with pytest.raises(ValueError, match=r"are 4 and 4 wide, the ensemble head was made for 6 and 4; use the pair"):
        make_head(REAL, "linear").weigh(swapped)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "transformer"}, "ensemble.kind='transformer' is unknown; choose one of linear, mlp"),
        ({"draft_size": 0}, "ensemble.draft_size=0: must be at least 1"),
        ({"target_size": -3}, "ensemble.target_size=-3: must be at least 1"),
        ({"width": 0}, "ensemble.width=0: must be at least 1"),
        ({"initial_weight": 1.0}, r"ensemble.initial_weight=1\.0: must be above 0 and below 1"),
        ({"initial_weight": 0.0}, r"ensemble.initial_weight=0\.0: must be above 0 and below 1"),
        ({"initial_weight": math.nan}, "ensemble.initial_weight=nan: must be above 0 and below 1"),
    ],
)
def test_bad_options(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnsembleOptions(**{"draft_size": 6, "target_size": 4, **changes})
