"""A smaller model as drafter: lossless, and its q and hidden states are those of a fresh forward of the draft model."""

import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from models.decoding.counters import add_up
from models.decoding.decoder import BlockRecord, Decoder
from models.decoding.reference import decode_plainly
from models.decoding.rows import GenerationParams, stream_seed
from models.drafters import drawing
from models.drafters import model as real_code
from models.drafters.model import ModelDrafter, load_model_drafter
from models.processors.prefix import ProcessorParams
from models.sampling import SamplingParams, sample_from, transform_logits
from models.target.model import Target, TargetOptions
from models.target.tiny import FAMILIES, make_tiny_target, make_tiny_tokenizer
from models.verification.ensemble import StaticEnsemble
from tests.models.decoding.scripted import HIDDEN_TOLERANCE, random_prompts
from tests.models.decoding.test_decoder_sampled import (
    FALSE_ALARM,
    NUM_SAMPLES,
    NUM_TOKENS,
    SAMPLING,
    VOCAB_SIZE,
    chi_square_p_value,
    exact_law,
)
from tests.planting import blank_module

NUM_IDS = 259  # tokens of the tiny tokenizer; further rows of an output head are padding
NEW_TOKENS = 16
PROMPTS = random_prompts(7, longest=25)
PROB_TOLERANCE = 1e-4  # float32 probabilities whose logits were computed in passes of different shapes
EVERY_LENGTH = [(1, 4), (2, 1), (3, 3), (4, 2), (5, 4)]  # (num_draft_tokens, max_batch_size)


def sibling(target: Target, noise: float) -> Target:
    """The target with noise on its weights: a draft model that is often right, and with 0.0 always."""
    draft = Target(copy.deepcopy(target.model), target.tokenizer, "sibling")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.model.parameters():
            if weight.dim() > 1:
                weight += torch.randn(weight.shape, generator=generator) * noise * weight.std()
    return draft


def make_gpt2(num_positions: int) -> Target:
    """A draft model with a table of learned positions: reading past its end is an error."""
    config = AutoConfig.for_model(
        "gpt2", vocab_size=264, n_embd=32, n_layer=2, n_head=4, n_positions=num_positions, eos_token_id=2
    )
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config), make_tiny_tokenizer(), "gpt2")


class Witness:
    """Compares every block of a sampled run with a fresh forward of the draft model over the whole text.

    Draft tokens are recomputed from the rows' random streams. num_ids: ids that may be drafted.
    """

    def __init__(self, draft: Target, prompts: Sequence[list[int]], params: GenerationParams, num_ids: int) -> None:
        self.draft, self.params, self.num_ids = draft, params, num_ids
        self.context = draft.config.max_position_embeddings
        self.texts = [list(prompt) for prompt in prompts]
        self.streams = [torch.Generator().manual_seed(stream_seed(params.seed, index)) for index in range(len(prompts))]
        self.num_generated = [0] * len(prompts)
        self.num_accepted: list[int] = []
        self.widths: list[int] = []

    def run(self, decoder: Decoder, max_batch_size: int) -> None:
        prompts, self.num_draft_tokens = [list(text) for text in self.texts], decoder.num_draft_tokens
        results = decoder.generate(prompts, self.params, max_batch_size, self.on_tokens, on_block=self.on_block)
        assert [text[len(prompt) :] for text, prompt in zip(self.texts, prompts, strict=True)] == [
            result.tokens for result in results
        ]

    def on_tokens(self, index: int, tokens: list[int], verdicts: Sequence[str]) -> None:
        if verdicts[0] == "prefill":
            self._uniforms(index, 1)
            self.texts[index] += tokens
            self.num_generated[index] += 1

    def on_block(self, record: BlockRecord) -> None:
        block, verdict = record.block, record.verdict
        self.widths.append(block.draft_tokens_BK.shape[1])
        for b, index in enumerate(record.indices):
            text, count = self.texts[index], int(block.num_drafted_B[b])
            remaining = self.params.max_new_tokens - self.num_generated[index]
            room = max(0, self.context - len(text) + 1)
            assert count == min(self.num_draft_tokens, remaining - 1, room)
            uniforms_K = self._uniforms(index, 2 * self.num_draft_tokens + 1)[:count]
            drafted_K = block.draft_tokens_BK[b, :count]
            if count:
                self._compare(text, drafted_K, block.draft_probs_BKV[b, :count], uniforms_K)
                self._compare_hidden(text, drafted_K, block.draft_hidden_BKH[b, :count])
            num_accepted = int(verdict.num_accepted_B[b])
            emitted = [*drafted_K[:num_accepted].tolist(), int(verdict.next_token_B[b])][: record.num_emitted[b]]
            text += emitted
            self.num_generated[index] += len(emitted)
            self.num_accepted.append(num_accepted)

    def _uniforms(self, index: int, count: int) -> Tensor:
        return torch.rand(count, generator=self.streams[index], dtype=torch.float64)

    def _ids(self, text: list[int], drafted_K: Tensor) -> Tensor:
        """What the draft model has to read; ids that it lacks as its last one."""
        ids_1T = torch.tensor([[*text, *drafted_K[:-1].tolist()]])
        return ids_1T.clamp(max=self.draft.vocab_size - 1)

    @torch.no_grad()
    def _compare(self, text: list[int], drafted_K: Tensor, probs_KV: Tensor, uniforms_K: Tensor) -> None:
        raw_KV = self.draft.model(input_ids=self._ids(text, drafted_K)).logits[0, -len(drafted_K) :].float()
        logits_KV = torch.full((len(drafted_K), probs_KV.shape[1]), -torch.inf)
        logits_KV[:, : self.num_ids] = raw_KV[:, : self.num_ids]
        expected_KV = transform_logits(logits_KV, self.params.sampling)
        assert probs_KV.dtype == torch.float32
        assert (probs_KV - expected_KV).abs().max() < PROB_TOLERANCE
        assert torch.equal(drafted_K, sample_from(probs_KV, uniforms_K))

    def _compare_hidden(self, text: list[int], drafted_K: Tensor, hidden_KH: Tensor) -> None:
        expected_KH = self.draft.hidden(self._ids(text, drafted_K))[0, -len(drafted_K) :]
        assert (hidden_KH - expected_KH).abs().max() < HIDDEN_TOLERANCE


def count_passes(draft: Target) -> list[int]:
    """The new tokens a row of each pass of the draft model with a cache, from now on."""
    seen: list[int] = []
    hidden = draft.hidden

    def counted(ids_BT: Tensor, *args: object) -> Tensor:
        if args:
            seen.append(ids_BT.shape[1])
        return hidden(ids_BT, *args)

    draft.hidden = counted
    return seen


# What holds of the code, checked on the real module and on copies with planted faults.


def check_blocks(code: ModuleType) -> None:
    """q, tokens, hidden states and the number of passes, with rows that keep 0 .. K tokens, leave and join."""
    target = make_tiny_target(family="qwen3")
    draft = sibling(target, 0.05)
    params = GenerationParams(18, SamplingParams(0.7, top_k=40), seed=3, eos_token_ids=tuple(range(80, 86)))
    (only_first,) = Decoder(target).generate(PROMPTS[:1], replace(params, max_new_tokens=1))
    params = replace(params, eos_token_ids=(*range(80, 86), only_first.tokens[0]))  # the first row leaves at once
    witness = Witness(draft, PROMPTS, params, NUM_IDS)
    passes = count_passes(draft)
    decoder = Decoder(target, code.ModelDrafter(draft, target), 3)
    witness.run(decoder, 3)
    assert set(witness.num_accepted) == {0, 1, 2, 3}
    assert decoder.timings.prefills >= 3
    assert len(passes) == sum(witness.widths) + decoder.timings.prefills
    assert max(sorted(passes)[: -decoder.timings.prefills]) <= 2


def check_self_draft(code: ModuleType) -> None:
    """The target's own twin drafts under its penalties: everything is kept, whatever K, at K passes a block."""
    target = make_tiny_target()
    processors = ProcessorParams(repetition_penalty=1.5, no_repeat_ngram_size=2)
    for num_draft_tokens, max_batch_size in EVERY_LENGTH:
        draft = sibling(target, 0.0)
        passes = count_passes(draft)
        decoder = Decoder(target, code.ModelDrafter(draft, target), num_draft_tokens)
        new_tokens = 1 + 3 * (num_draft_tokens + 1)
        params = GenerationParams(new_tokens, eos_token_ids=(), processors=processors)
        counters = add_up(r.counters for r in decoder.generate(PROMPTS[:4], params, max_batch_size))
        assert counters.acceptance_rate == 1.0
        assert counters.mean_block_length == num_draft_tokens + 1
        assert len(passes) == num_draft_tokens * decoder.timings.target_passes + decoder.timings.prefills


def check_padding(code: ModuleType) -> None:
    """Output heads of other sizes, both ways, whose padding would win every draw; one lacks real tokens, too."""
    for target_size, draft_size in ((264, 300), (300, 259), (264, 200), (200, 264)):
        target = make_tiny_target(family="qwen3", vocab_size=target_size)
        draft = make_tiny_target(1, family="qwen3", vocab_size=draft_size, hidden_size=16, num_hidden_layers=1)
        with torch.no_grad():
            num_ids = min(target_size, draft_size, NUM_IDS)
            draft.output_head.weight[num_ids:] = 3.0 * draft.output_head.weight[: draft_size - num_ids]
        prompts = [[token % target_size for token in prompt] for prompt in PROMPTS[:3]]
        expected = [decode_plainly(target, prompt, 6) for prompt in prompts]
        decoder = Decoder(target, code.ModelDrafter(draft, target), 3)
        assert [r.tokens for r in decoder.generate(prompts, GenerationParams(6))] == expected
        params = GenerationParams(6, SamplingParams(1.3), seed=1, eos_token_ids=())
        Witness(draft, prompts, params, num_ids).run(decoder, 2)


def check_context(code: ModuleType) -> None:
    """Rows that stop drafting where the draft's context ends; a prompt that is longer; then all of them."""
    target, draft = make_tiny_target(), make_gpt2(num_positions=20)
    prompts = [[50, 60, 70], list(range(100, 117)), list(range(60, 90)), list(range(40, 60))]
    passes = count_passes(draft)
    decoder = Decoder(target, code.ModelDrafter(draft, target), 4)
    results = decoder.generate(prompts, GenerationParams(24, eos_token_ids=()), max_batch_size=2)
    assert [r.tokens for r in results] == [decode_plainly(target, prompt, 24, eos_token_ids=()) for prompt in prompts]
    assert results[0].counters.drafted > 18
    assert results[2].counters.drafted == 0
    witness = Witness(draft, prompts, GenerationParams(24, SamplingParams(1.0), eos_token_ids=()), NUM_IDS)
    witness.run(decoder, max_batch_size=4)
    assert {0, 4} <= set(witness.widths)
    assert max(passes) <= 20


CHECKS: dict[str, Callable[[ModuleType], None]] = {
    "blocks": check_blocks,
    "self draft": check_self_draft,
    "padding": check_padding,
    "context": check_context,
}

FAULTS = [
    # (check that must refuse it, right, wrong)
    ("blocks", "state.cache.rollback([", "list(["),
    ("blocks", "min(count - 1, state.num_drafted_entries)", "min(count, state.num_drafted_entries)"),
    ("blocks", "min(count - 1, state.num_drafted_entries)", "count - 1"),
    ("blocks", "tokens[num_kept:count]", "tokens[num_kept : count - 1]"),
    ("blocks", "tokens[num_kept:count]", "tokens[count - 1 : count]"),
    ("blocks", "state.num_drafted_entries += 1", "pass"),
    ("blocks", "state.num_drafted_entries += 1", "state.num_drafted_entries += 2"),
    ("blocks", "state.cache.select_rows(rows)", "state.cache.select_rows(sorted(rows))"),
    ("blocks", "state.unread = [state.unread[row] for row in rows]", "state.unread = state.unread[: len(rows)]"),
    ("blocks", "state.unread += other.unread", "state.unread = other.unread + state.unread"),
    ("blocks", "return last_kept(hidden_BTH, counts)", "return hidden_BTH[:, -1]"),
    ("blocks", "num_left: int = 0", "num_left: int = 1"),
    ("blocks", "if state.cache.longest == 0 and any(self._room(state)):", "if any(self._room(state)):"),
    ("blocks", "if state.cache.longest == 0 and any(self._room(state)):", "if False:"),
    ("padding", "value=-torch.inf", "value=0.0"),
    ("padding", "min(draft.num_tokens, target.num_tokens)", "min(draft.vocab_size, target.vocab_size)"),
    ("padding", "ids_BT = ids_BT.clamp(max=self._largest_id)", "pass"),
    ("context", "positions_BT = positions_BT.clamp(max=self.context_length - 1)", "pass"),
    ("context", "length + 1) for", "length + 2) for"),
    ("context", "length + 1) for", "length) for"),
    ("context", "num_left if room else 0", "num_left"),
]

# Of the drawing that the drafters share.
DRAWING_FAULTS = [
    ("blocks", "else transform_logits(logits_BV, self._params)", "else logits_BV.softmax(dim=-1)"),
    ("blocks", "sample_from(q_BV", "sample_from(logits_BV.softmax(dim=-1)"),
    ("blocks", "self._uniforms_BK[:, len(self.tokens)]", "self._uniforms_BK[:, 0]"),
    ("blocks", "torch.stack(self._hidden, dim=1)", "torch.stack(self._hidden[:1] + self._hidden[:-1], dim=1)"),
    (
        "blocks",
        "self._probs.append(self._given_probs(q_BV))",
        "self._probs.append(self._probs[0] if self._probs else q_BV)",
    ),
    ("self draft", "logits_BV = self._processor.draft(logits_BV, self.tokens)", "pass"),
    ("self draft", "draft(logits_BV, self.tokens)", "draft(logits_BV, self.tokens[:1] * len(self.tokens))"),
    ("context", "counts = [min(limit, width) for limit in limits]", "counts = [width for limit in limits]"),
]


@pytest.mark.parametrize("name", CHECKS)
def test_checks(name: str) -> None:
    CHECKS[name](real_code)


@pytest.mark.parametrize(("check", "right", "wrong"), FAULTS)
def test_planted_faults_are_caught(check: str, right: str, wrong: str) -> None:
    source = inspect.getsource(real_code)
    assert right in source, f"the planted fault no longer matches the code: {right}"
    faulty = blank_module("faulty", real_code.__package__)
    exec(compile(source.replace(right, wrong, 1), "faulty drafter", "exec"), faulty.__dict__)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        CHECKS[check](faulty)


@pytest.mark.parametrize(("check", "right", "wrong"), DRAWING_FAULTS)
def test_planted_faults_of_drawing_are_caught(
    check: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = inspect.getsource(drawing)
    assert right in source, f"the planted fault no longer matches the code: {right}"
    faulty = blank_module("faulty_drawing", drawing.__package__)
    monkeypatch.setitem(sys.modules, "faulty_drawing", faulty)  # dataclasses look their module up
    exec(compile(source.replace(right, wrong, 1), "faulty drawing", "exec"), faulty.__dict__)
    monkeypatch.setattr(real_code, "Drawing", faulty.Drawing)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        CHECKS[check](real_code)


OTHERS = ["llama and gemma3_text", "gemma2 and mistral", "qwen3 and gpt2"]


def make_pair(names: str) -> tuple[Target, Target]:
    """Target and draft of two families, the draft smaller; or a target and its noisy twin."""
    if names in FAMILIES:
        target = make_tiny_target(family=names)
        return target, sibling(target, 0.02)
    of_target, of_draft = names.split(" and ")
    target = make_tiny_target(family=of_target)
    if of_draft == "gpt2":
        return target, make_gpt2(64)
    small = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    return target, make_tiny_target(1, family=of_draft, **small)


@pytest.mark.parametrize("names", [*FAMILIES, *OTHERS])
def test_greedy_equals_reference(names: str) -> None:
    """K 1 to 5, batch 1 to 4, ragged prompts, EOS inside blocks; every length for llama."""
    target, draft = make_pair(names)
    endless = [decode_plainly(target, prompt, NEW_TOKENS, eos_token_ids=()) for prompt in PROMPTS[:5]]
    eos_token_ids = (endless[0][6], endless[1][9], endless[3][11])
    expected = [_up_to(tokens, eos_token_ids) for tokens in endless]
    assert [len(tokens) < NEW_TOKENS for tokens in expected].count(True) >= 3
    params = GenerationParams(NEW_TOKENS, eos_token_ids=eos_token_ids)
    counters = []
    for num_draft_tokens, max_batch_size in EVERY_LENGTH if names == "llama" else EVERY_LENGTH[2:3]:
        decoder = Decoder(target, ModelDrafter(draft, target), num_draft_tokens)
        results = decoder.generate(PROMPTS[:5], params, max_batch_size)
        assert [result.tokens for result in results] == expected
        counters += [result.counters for result in results]
    if names in FAMILIES:
        assert 0.2 < add_up(counters).acceptance_rate < 0.95


def _up_to(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    return tokens[: next((place + 1 for place, token in enumerate(tokens) if token in eos_token_ids), None)]


@pytest.mark.parametrize(("draft_size", "num_draft_tokens", "max_batch_size"), [(15, 2, 333), (9, 4, 256)])
def test_law_is_the_targets(draft_size: int, num_draft_tokens: int, max_batch_size: int) -> None:
    """N = 2000 texts of 3 tokens a prompt, ragged neighbours; refused below p = 1e-6, the false-alarm rate of each."""
    target = make_tiny_target(seed=3, vocab_size=VOCAB_SIZE)
    draft = make_tiny_target(4, vocab_size=draft_size, num_hidden_layers=1, hidden_size=16)
    prompts = [[5, 7, 4], [9]]
    params = GenerationParams(NUM_TOKENS, SAMPLING, seed=11, eos_token_ids=())
    decoder = Decoder(target, ModelDrafter(draft, target), num_draft_tokens)
    results = decoder.generate(prompts * NUM_SAMPLES, params, max_batch_size)
    for place, prompt in enumerate(prompts):
        samples = [result.tokens for result in results[place :: len(prompts)]]
        assert chi_square_p_value(samples, exact_law(target, prompt, SAMPLING)) > FALSE_ALARM
    assert 0.05 < np.mean([result.counters.acceptance_rate for result in results]) < 0.8


@pytest.mark.parametrize("family", FAMILIES)
def test_q_is_the_draft_models_own(family: str) -> None:
    """Every family's cache, windows of 16 included, under a rule that relaxes."""
    target = make_tiny_target(family=family)
    draft = sibling(target, 0.1)
    params = GenerationParams(NEW_TOKENS, SamplingParams(1.0), seed=5, eos_token_ids=())
    witness = Witness(draft, PROMPTS[:5], params, NUM_IDS)
    witness.run(Decoder(target, ModelDrafter(draft, target), 4, StaticEnsemble(0.3)), 3)
    assert len(set(witness.num_accepted)) >= 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_do_not_depend_on_the_batch(temperature: float) -> None:
    """Counters too: a row's drafts are the same whatever stands beside it, and after rows left and joined."""
    target = make_tiny_target()
    params = GenerationParams(NEW_TOKENS, SamplingParams(temperature, top_k=20), seed=3)
    decoder = Decoder(target, ModelDrafter(sibling(target, 0.03), target), 4)
    alone = decoder.generate(PROMPTS[:5], params, max_batch_size=1)
    assert decoder.generate(PROMPTS[:5], params, max_batch_size=3) == alone


def test_blocks_without_drafts_are_caught_up_with() -> None:
    """Settled tokens that came while nobody asked for drafts are read with the next block's first pass."""
    target = make_tiny_target()
    drafter = ModelDrafter(target, target)
    prompts = PROMPTS[:2]
    state = drafter.start(prompts)
    nothing_BTH = torch.zeros(2, 30, 1)
    settled = [[*prompt[1:], 90] for prompt in prompts]
    width = max(map(len, settled))
    padded_BT = torch.tensor([tokens + [7] * (width - len(tokens)) for tokens in settled])
    drafter.absorb(state, nothing_BTH[:, :width], padded_BT, [len(tokens) for tokens in settled])
    for tokens_BT in (torch.tensor([[100], [110]]), torch.tensor([[101], [111]])):
        drafter.absorb(state, nothing_BTH[:, :1], tokens_BT, [1, 1])
    passes = count_passes(target)
    draft = drafter.propose(state, 3, SamplingParams(), None)
    assert passes == [3, 1, 1]
    for prompt, end, drafted in zip(prompts, ([90, 100, 101], [90, 110, 111]), draft.tokens_BK.tolist(), strict=True):
        assert drafted == decode_plainly(make_tiny_target(), [*prompt, *end], 3, eos_token_ids=())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_q_is_float32(dtype: str) -> None:
    """Whatever dtype the draft model has, and beside a target of another."""
    target, draft = make_tiny_target(dtype="bfloat16"), make_tiny_target(1, dtype=dtype)
    drafter = ModelDrafter(draft, target)
    state = drafter.start([[5]])
    drafter.absorb(state, torch.zeros(1, 1, 1), torch.tensor([[9]]), [1])
    uniforms_BK = torch.full((1, 2), 0.5, dtype=torch.float64)
    proposed = drafter.propose(state, 2, SamplingParams(0.8), uniforms_BK)
    assert proposed.probs_BKV is not None
    assert proposed.probs_BKV.dtype == torch.float32
    assert torch.equal(proposed.tokens_BK, sample_from(proposed.probs_BKV, uniforms_BK))
    assert proposed.hidden_BKH is not None
    assert proposed.hidden_BKH.dtype == draft.dtype


def test_other_vocabulary_is_refused() -> None:
    target, draft = make_tiny_target(), make_tiny_target(1)
    draft.tokenizer.chat_template = "another template is no other vocabulary"
    ModelDrafter(draft, target)
    draft.tokenizer.add_tokens(["<|think|>", "<|tool|>"])
    with pytest.raises(
        ValueError, match=r"of 261 and 259 tokens 2 differ \('<\|think\|>' is id 259 in the draft model"
    ):
        ModelDrafter(draft, target)
    with pytest.raises(ValueError, match=r"is missing in the draft model and id 259 in the target.*family"):
        ModelDrafter(target, draft)


def test_draft_that_cannot_roll_back_is_refused() -> None:
    draft = make_tiny_target(1)
    draft.config.layer_types = ["linear_attention"] * 3
    draft.name = "recurrent"
    with pytest.raises(ValueError, match=r"draft model 'recurrent' cannot draft: .*linear_attention"):
        ModelDrafter(draft, make_tiny_target())


def test_other_device_is_refused() -> None:
    draft = make_tiny_target(1)
    draft.device = torch.device("meta")
    with pytest.raises(ValueError, match="is on meta and target 'tiny' on cpu: load both onto one device"):
        ModelDrafter(draft, make_tiny_target())


def test_loading(tmp_path: Path) -> None:
    """From a folder in the target's dtype; random targets get a random sibling; without a name, an error says so."""
    made = make_tiny_target(7, family="qwen3")
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    target = make_tiny_target()
    drafter = load_model_drafter(TargetOptions(name="some/target", source="wheel", draft=str(tmp_path)), target)
    assert drafter.draft.dtype == target.dtype
    assert drafter.draft.fingerprint() == made.fingerprint()
    tiny = load_model_drafter(TargetOptions(name="tiny", source="random"), target)
    assert tiny.draft.fingerprint() == make_tiny_target(1).fingerprint() != target.fingerprint()
    with pytest.raises(ValueError, match=r"model.draft is empty, and 'tiny' has no smaller sibling"):
        load_model_drafter(TargetOptions(name="some/target"), target)
    with pytest.raises(ValueError, match=r"model\.draft='nowhere' is not a folder"):
        load_model_drafter(TargetOptions(name="some/target", draft="./nowhere"), target)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{weights} is damaged or cut short") as error:
        load_model_drafter(TargetOptions(name="some/target", draft=str(tmp_path)), target)
    assert "\n" not in str(error.value)
    weights.unlink()
    with pytest.raises(ValueError, match=rf"model\.draft='{tmp_path}' lacks weights"):
        load_model_drafter(TargetOptions(name="some/target", draft=str(tmp_path)), target)
