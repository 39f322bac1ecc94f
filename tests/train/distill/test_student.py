"""The student: what of it is trained and saved, what its folder holds, and what it is measured and trained on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.drafters.model import ModelDrafter
from models.sampling import SamplingParams, transform_logits
from models.target.model import Target, TargetOptions, load_target
from models.target.tiny import make_tiny_target
from train.data.examples import OnlineRows, Row, collate
from train.data.prompts import Example
from train.distill.cut import CutOptions, cut_layers
from train.distill.lora import LoraOptions
from train.distill.measure import HeldOut, block_table
from train.distill.samples import answer_anew
from train.distill.student import Student, start_draft

TINY = TargetOptions(name="tiny", source="random", dtype="float32", device="cpu")
FULL, LORA = LoraOptions(), LoraOptions(rank=4)


def make_student(lora: LoraOptions = FULL, train_embeddings: bool = False, **overrides: Any) -> Student:
    return Student(cut_layers(make_tiny_target(0, **overrides), 2), lora, train_embeddings)


def disturb(student: Student, seed: int = 0) -> None:
    """Training, in short: every trained tensor changes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in student.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn(weight.shape, generator=generator)


def ids(length: int = 20) -> Tensor:
    return torch.randint(3, 259, (2, length), generator=torch.Generator().manual_seed(1))


def trained_names(student: Student) -> set[str]:
    return {name for name, weight in student.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_trained(tied: bool) -> None:
    """Full: all but the embeddings and the output head, or all; LoRA: matrices beside every linear layer."""
    student = make_student(tie_word_embeddings=tied)
    everything = {name for name, _ in student.named_parameters()}
    ends = {name for name in everything if "embed_tokens" in name or "lm_head" in name}
    assert len(ends) == (1 if tied else 2)
    assert trained_names(student) == everything - ends
    assert trained_names(make_student(train_embeddings=True, tie_word_embeddings=tied)) == everything
    adapted = trained_names(make_student(LORA, tie_word_embeddings=tied))
    assert len(adapted) == 2 * 7 * 2  # A and B beside seven linear layers in each of two decoder layers
    assert all("lora_" in name for name in adapted)


@pytest.mark.parametrize("lora", [FULL, LORA])
@pytest.mark.parametrize("train_embeddings", [False, True])
def test_a_checkpoint_holds_what_is_trained_and_no_more(lora: LoraOptions, train_embeddings: bool) -> None:
    student, other = (make_student(lora, train_embeddings) for _ in range(2))
    disturb(student)
    saved = student.state_dict()
    assert set(saved) == trained_names(student)
    assert not torch.equal(student(ids()), other(ids()))
    other.load_state_dict(saved, False)
    assert torch.equal(student(ids()), other(ids()))
    missing = dict(list(saved.items())[1:])
    for wrong in (missing, saved | {"more": torch.zeros(1)}):
        with pytest.raises(ValueError, match="a checkpoint of another draft: 1 tensors differ"):
            other.load_state_dict(wrong, False)


@pytest.mark.parametrize("lora", [FULL, LORA])
def test_it_starts_as_the_draft_it_is_made_of(lora: LoraOptions) -> None:
    plain = cut_layers(make_tiny_target(0), 2)
    student = make_student(lora)
    torch.testing.assert_close(student(ids()), plain.hidden(ids()), atol=1e-6, rtol=0)
    assert student(ids()).requires_grad
    assert torch.equal(student.view.hidden(ids()), student(ids()))


@pytest.mark.parametrize("lora", [FULL, LORA])
@pytest.mark.parametrize("train_embeddings", [False, True])
def test_the_exported_folder_is_the_live_model(lora: LoraOptions, train_embeddings: bool, tmp_path: Path) -> None:
    """For plain transformers and for ours: no trace of LoRA, a tied head tied, the target's tokenizer."""
    student = make_student(lora, train_embeddings)
    disturb(student)
    expected = student.view.logits(student(ids()))
    student.export(tmp_path / "draft", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    torch.testing.assert_close(model(ids()).logits, expected, atol=1e-4, rtol=0)
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    loaded = load_target(TargetOptions(str(tmp_path / "draft"), "draft", "folder", "float32", "cpu"))
    torch.testing.assert_close(loaded.logits(loaded.hidden(ids())), expected, atol=1e-4, rtol=0)
    assert loaded.eos_token_ids == student.view.eos_token_ids
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "draft")
    assert tokenizer.get_vocab() == student.view.tokenizer.get_vocab()
    assert not list((tmp_path / "draft").glob(".*"))


def test_lora_moves_what_it_should() -> None:
    """A merged matrix is W + alpha / rank B A."""
    student = make_student(LoraOptions(rank=4, alpha=12.0))
    disturb(student)
    layer = student.model.model.layers[1].mlp.up_proj
    expected = layer.base_layer.weight + 3.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    student._adapted.merge_and_unload()
    torch.testing.assert_close(student.view.model.model.layers[1].mlp.up_proj.weight, expected)


def test_lora_starts_from_the_seed_alone() -> None:
    draft = [cut_layers(make_tiny_target(0), 2) for _ in range(3)]
    torch.manual_seed(5)
    first = Student(draft[0], LORA, False, seed=1).state_dict()
    torch.rand(3)
    again, other = Student(draft[1], LORA, False, seed=1).state_dict(), Student(draft[2], LORA, False, 2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_where_the_draft_comes_from() -> None:
    target = load_target(TINY)
    assert len(start_draft(target, TINY, CutOptions(layers=2)).layers()) == 2
    sibling = start_draft(target, TINY, CutOptions())
    assert (
        sibling.fingerprint() == load_target(TargetOptions("tiny", source="random", device="cpu", seed=1)).fingerprint()
    )
    halved = load_target(replace(TINY, dtype="bfloat16"))
    assert start_draft(halved, TINY, CutOptions()).dtype == torch.float32
    unnamed = TargetOptions(name="somewhere", source="hub")
    with pytest.raises(ValueError, match=r"model\.draft is empty.*cut\.layers=N \(a quarter: cut\.layers=1\)"):
        start_draft(target, unnamed, CutOptions())


# What it is measured by


def greedy_texts(target: Target, num_texts: int = 6, length: int = 24) -> list[Example]:
    prompts = [[40 + i, 41, 50 + i] for i in range(num_texts)]
    results = Decoder(target).generate(prompts, GenerationParams(length, eos_token_ids=()))
    return [
        Example(str(i), "chat", "selection", prompt + result.tokens, [False] * 3 + [True] * len(result.tokens))
        for i, (prompt, result) in enumerate(zip(prompts, results, strict=True))
    ]


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
def test_greedy_measurements_are_those_of_real_decoding(num_draft_tokens: int) -> None:
    """The simulated block length is the decoder's own count on the same prompts."""
    target = make_tiny_target(0)
    draft = make_tiny_target(0)
    with torch.no_grad():
        for weight in draft.model.get_decoder().layers[2].parameters():
            weight *= 0.8
    texts = greedy_texts(target)
    measured = HeldOut(target, OnlineRows(texts), SamplingParams(), num_draft_tokens).measure(draft)
    decoder = Decoder(target, ModelDrafter(draft, target), num_draft_tokens)
    results = decoder.generate([text.input_ids[:3] for text in texts], GenerationParams(24, eos_token_ids=()))
    emitted = sum(len(result.tokens) - 1 for result in results)
    blocks = sum(result.counters.blocks for result in results)
    assert measured.mean_block_length == pytest.approx(emitted / blocks, abs=1e-6)
    assert 1.1 < measured.mean_block_length < num_draft_tokens + 1


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.7, top_k=20), SamplingParams(1.0)])
def test_acceptance_and_agreement(sampling: SamplingParams) -> None:
    """Position by position from both distributions; greedy decoding is measured at temperature 1."""
    target, draft = make_tiny_target(0), make_tiny_target(0)
    with torch.no_grad():
        draft.model.get_decoder().layers[2].mlp.down_proj.weight *= 0.5
    texts = greedy_texts(target)
    measured = HeldOut(target, OnlineRows(texts), sampling, 3).measure(draft)
    drawn = SamplingParams(1.0) if sampling.is_greedy else sampling
    overlaps, agreed = [], []
    for text in texts:
        tokens = torch.tensor(text.input_ids)[None]
        logits = [one.hide_padding(one.logits(one.hidden(tokens)))[0, 2:-1] for one in (target, draft)]
        p, q = (transform_logits(one, drawn) for one in logits)
        overlaps.append(torch.minimum(p, q).sum(-1))
        agreed.append((logits[0].argmax(-1) == logits[1].argmax(-1)).float())
    assert measured.acceptance == pytest.approx(torch.cat(overlaps).mean().item(), abs=1e-5)
    assert measured.agreement == pytest.approx(torch.cat(agreed).mean().item(), abs=1e-6)
    same = HeldOut(target, OnlineRows(texts), sampling, 3).measure(make_tiny_target(0))
    assert same.acceptance == pytest.approx(1.0, abs=1e-5)
    assert same.acceptance_at == pytest.approx([1.0, 1.0, 1.0], abs=1e-5)


def test_block_table() -> None:
    kept = torch.tensor([0.9, 0.1, 0.2, 0.3])
    expected = torch.tensor([[0.1, 0.2, 0.3, 0.0], [0.2, 0.3, 0.0, 0.0], [0.3, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert torch.equal(block_table(kept, 5), expected)


# What it writes itself


def test_answers_of_its_own() -> None:
    """Each prompt as it was, then what the draft samples from its seed, as long as the longest answer at most."""
    draft = make_tiny_target(1)
    rows = [Row(torch.tensor([40, 41, 42, 60, 61, 62]), torch.tensor([False] * 3 + [True] * 3))]
    rows.append(Row(torch.tensor([50, 51, 70, 71, 72, 73, 74, 75]), torch.tensor([False] * 2 + [True] * 5 + [False])))
    batch = collate(rows)
    found = answer_anew(draft, batch, 1.3, draft.eos_token_ids, seed=4)
    prompts = [[40, 41, 42], [50, 51]]
    results = Decoder(draft).generate(prompts, GenerationParams(5, SamplingParams(1.3), seed=4))
    for row, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        length = len(prompt) + len(result.tokens)
        assert found["input_ids"][row, :length].tolist() == prompt + result.tokens
        mask = found["loss_mask"][row].tolist()
        assert mask == [False] * len(prompt) + [True] * len(result.tokens) + [False] * (len(mask) - length)
    assert (found["labels"] != -100).equal(found["loss_mask"])
    assert max(len(result.tokens) for result in results) == 5
    assert not found["input_ids"].equal(answer_anew(draft, batch, 1.3, draft.eos_token_ids, seed=5)["input_ids"])


def test_answers_end_where_the_targets_do() -> None:
    draft = make_tiny_target(1)
    batch = collate([Row(torch.tensor([40, 41, 42, 60, 61, 62]), torch.tensor([False] * 3 + [True] * 3))])
    first = answer_anew(draft, batch, 1.0, (), seed=0)["input_ids"][0, 3].item()
    assert answer_anew(draft, batch, 1.0, (first,), seed=0)["input_ids"].shape == (1, 4)
