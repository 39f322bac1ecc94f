"""Drafting with another vocabulary: lossless, and q is what the method says, by fresh forwards of the draft model."""

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from models.decoding.counters import add_up
from models.decoding.decoder import Decoder
from models.decoding.drafters import universal as real_code
from models.decoding.drafters.options import DrafterOptions, make_drafter
from models.decoding.processors import ProcessorParams
from models.decoding.reference import decode_plainly
from models.decoding.rows import GenerationParams
from models.decoding.sampling import SamplingParams
from models.target import Target, TargetOptions
from models.tiny import make_tiny_target
from tests.models.decoding.drafters.universal.toy import Witness
from tests.models.decoding.drafters.universal.vocabularies import (
    TEXT,
    make_model,
    make_toy_draft,
    make_toy_target,
    make_trained_model,
)
from tests.models.decoding.test_decoder_sampled import (
    FALSE_ALARM,
    NUM_SAMPLES,
    NUM_TOKENS,
    SAMPLING,
    chi_square_p_value,
    exact_law,
)

METHODS = ("slem", "slrs", "tli")
PACKAGE = "models.decoding.drafters.universal"
MODULES = ("spelling", "translation", "base", "text_tree", "slem", "slrs", "tli")
PROMPTS = [[5, 4, 9], [7], [1, 2, 3, 4, 4, 8, 6], [2, 2], [11, 10]]
SAMPLED = GenerationParams(9, SamplingParams(1.2, top_k=6), seed=3, eos_token_ids=())


def check_blocks(code: ModuleType, method: str) -> None:
    """Rows that keep 0 .. K tokens, leave and join."""
    draft, target = make_toy_draft(), make_toy_target()
    bounds = {"max_sequences": 10**6, "min_mass": 0.0} if method == "slrs" else {}
    drafter = {
        "slem": code.StringExactMatch, "slrs": code.StringRejectionSampling, "tli": code.TokenIntersection
    }[method](draft, target, **bounds)  # fmt: skip
    prompts, params = (PROMPTS[:4], replace(SAMPLED, max_new_tokens=6)) if method == "slrs" else (PROMPTS, SAMPLED)
    witness = Witness(method, draft, target, params)
    witness.run(drafter, prompts, num_draft_tokens=2 if method == "slrs" else 3, max_batch_size=3)
    assert {0, 1, 2} <= set(witness.num_accepted)


def check_context(code: ModuleType, method: str) -> None:
    """The draft model's context is outgrown several times; a prompt that is longer than it; never read past its end."""
    target, draft = make_toy_target(), make_toy_draft(max_position_embeddings=12)
    prompts = [PROMPTS[0], [1, 2, 3] * 9]
    expected = [decode_plainly(target, prompt, 20, eos_token_ids=()) for prompt in prompts]
    drafter = code.make_universal(method, draft, target)
    propose = drafter.propose

    def checked(state, *args):
        proposal = propose(state, *args)
        assert state.cache.lengths == [len(read) for read in state.read]
        assert all(len(text.ids) <= 12 for text in state.texts)
        assert state.cache.longest <= 12
        return proposal

    def checked_nodes(state, forest, wanted):
        ends = [start + len(leaf.path) for start, leaves in zip(forest.starts, wanted, strict=True) for leaf in leaves]
        assert max(ends) <= 11
        return read_nodes(state, forest, wanted)

    drafter.propose = checked
    if method == "slrs":
        read_nodes, drafter._read_nodes = drafter._read_nodes, checked_nodes
    results = Decoder(target, drafter, 3).generate(prompts, GenerationParams(20, eos_token_ids=()))
    assert [result.tokens for result in results] == expected
    assert all(result.counters.drafted > 10 for result in results)


CHECKS: dict[str, tuple[Callable[[ModuleType, str], None], str]] = {
    **{f"blocks {method}": (check_blocks, method) for method in METHODS},
    **{f"context {method}": (check_context, method) for method in METHODS},
}

FAULTS = [
    # (check that must refuse it, module, right, wrong)
    ("blocks tli", "base", "state.cache.rollback(rollback)\n        # Prompts", "# Prompts"),
    ("blocks tli", "base", "kept = min(kept, max(0, len(text.ids) - 1))", "pass"),
    ("blocks tli", "base", "tokens[:count]", "tokens[: count - 1]"),
    ("blocks tli", "base", "state.read = [state.read[row] for row in rows]", "state.read = state.read[: len(rows)]"),
    ("blocks tli", "base", "[state.texts[row] for row in rows]", "state.texts[: len(rows)]"),
    ("blocks tli", "base", "state.cache.select_rows(rows)", "state.cache.select_rows(sorted(rows))"),
    ("blocks tli", "base", "state.texts += other.texts", "state.texts = other.texts + state.texts"),
    ("blocks tli", "base", "return last_kept(hidden_BTH, counts)", "return hidden_BTH[:, -1]"),
    ("blocks tli", "base", "state.read[row].append(index)", "pass"),
    ("blocks tli", "tli", "transform_logits(logits_BV, params)", "logits_BV.softmax(dim=-1)"),
    ("blocks tli", "tli", "uniforms_BK[:, place]", "uniforms_BK[:, 0]"),
    ("blocks tli", "tli", "self._to_draft_V[tokens[-1]]", "self._to_draft_V[tokens[0]]"),
    ("blocks tli", "tli", "self._to_draft_V[tokens[-1]]", "tokens[-1]"),
    ("blocks tli", "tli", "(len(logits_BD), self.vocab_size), -torch.inf", "(len(logits_BD), self.vocab_size), 0.0"),
    ("blocks tli", "translation", "del ids[start:], transcript.sources[start:]", "pass"),
    ("blocks tli", "translation", "return start + num_same", "return len(ids)"),
    ("blocks slem", "slem", "(text, ids, num_draft_tokens) for", "(text, ids[1:], num_draft_tokens) for"),
    ("blocks slem", "slem", "to_target(text, data), *closing]", "to_target(text, data)]"),
    ("blocks slem", "slem", "self._step(state, ids_B, is_on)", "self._step(state, ids_B * 0, is_on)"),
    ("blocks slem", "translation", "joined = settled + data", "joined = data"),
    ("blocks slrs", "slrs", "state.cache.rollback([len(depths) for depths in forest.depths])", "pass"),
    ("blocks slrs", "slrs", "forest.trees[row].condition(token)", "forest.trees[row].condition(0)"),
    ("blocks slrs", "slrs", "uniforms_BK[:, len(tokens)]", "uniforms_BK[:, 0]"),
    ("blocks slrs", "slrs", "(start + node for node in path)", "(start + node for node in path[:-1])"),
    ("blocks slrs", "slrs", "positions_BN = starts_B1 - 1 +", "positions_BN = starts_B1 +"),
    ("blocks slrs", "slrs", "first_nodes[row] + place", "first_nodes[row]"),
    ("blocks slrs", "text_tree", "mass=leaf.mass / total", "mass=1.0 / len(kept)"),
    ("blocks slrs", "text_tree", "self._expanded[parent].probs_D[leaf.last_id] = 0.0", "pass"),
    ("blocks slrs", "text_tree", "rest=leaf.rest[length:]", "rest=b''"),
    ("blocks slrs", "text_tree", "expanded.mass * expanded.probs_D).masked_fill", "expanded.probs_D).masked_fill"),
    ("context tli", "base", "rollback[row] = len(state.read[row])", "pass"),
    ("context tli", "base", "text.ids = [*prefix, *text.ids[-num_kept:]]", "pass"),
    ("context slrs", "slrs", "self.context_length - start", "self.context_length"),
]  # fmt: skip


def with_fault(module: str, right: str, wrong: str) -> ModuleType:
    """A copy of the package in which one module has another line."""
    names = [f"{PACKAGE}.{name}" for name in MODULES]
    sources = {name: inspect.getsource(importlib.import_module(name)) for name in names}
    saved = {name: sys.modules.pop(name) for name in (PACKAGE, *names)}
    assert right in sources[f"{PACKAGE}.{module}"], f"the planted fault no longer matches the code: {right}"
    try:
        package = ModuleType(PACKAGE)
        package.__path__ = list(saved[PACKAGE].__path__)
        sys.modules[PACKAGE] = package
        for name in names:
            source = sources[name].replace(right, wrong, 1) if name == f"{PACKAGE}.{module}" else sources[name]
            sys.modules[name] = copy = ModuleType(name)
            exec(compile(source, f"faulty {name}", "exec"), copy.__dict__)
        exec(compile(inspect.getsource(saved[PACKAGE]), "faulty package", "exec"), package.__dict__)
        return package
    finally:
        sys.modules.update(saved)


@pytest.mark.parametrize("name", CHECKS)
def test_checks(name: str) -> None:
    check, method = CHECKS[name]
    check(real_code, method)


@pytest.mark.parametrize(("name", "module", "right", "wrong"), FAULTS)
def test_planted_faults_are_caught(name: str, module: str, right: str, wrong: str) -> None:
    check, method = CHECKS[name]
    with pytest.raises((AssertionError, IndexError, KeyError, RuntimeError, ValueError)):
        check(with_fault(module, right, wrong), method)


@pytest.mark.parametrize("method", METHODS)
def test_law_is_the_targets(method: str) -> None:
    """N = 2000 texts of 3 tokens a prompt, ragged neighbours; refused below p = 1e-6, the false-alarm rate of each."""
    target, draft = make_toy_target(), make_toy_draft(num_hidden_layers=1)
    prompts = [[5, 7, 4], [9]]
    params = GenerationParams(NUM_TOKENS, SAMPLING, seed=11, eos_token_ids=())
    results = Decoder(target, real_code.make_universal(method, draft, target), 2).generate(
        prompts * NUM_SAMPLES, params, 333
    )
    for place, prompt in enumerate(prompts):
        samples = [result.tokens for result in results[place :: len(prompts)]]
        assert chi_square_p_value(samples, exact_law(target, prompt, SAMPLING)) > FALSE_ALARM
    assert 0.05 < add_up(result.counters for result in results).acceptance_rate < 0.8


# Target and draft model; every kind on both sides.
PAIRS = [
    ("byte_bpe", "bytes"), ("bytes", "byte_bpe"), ("byte_bpe", "unigram"), ("unigram", "wordpiece"),
    ("wordpiece", "fallback_bpe"), ("fallback_bpe", "byte_bpe"),
]  # fmt: skip


@pytest.mark.parametrize(("target_kind", "draft_kind"), PAIRS)
def test_greedy_equals_reference(target_kind: str, draft_kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Both know one text by heart (Korean, emoji, code with tabs): batch 1 and 4, ragged, EOS inside blocks."""
    target, draft = make_trained_model(target_kind), make_trained_model(draft_kind, seed=1)
    ids = target.tokenizer.encode(TEXT)
    prompts = [ids[:3], ids[: len(ids) // 2], [5, 6], ids[:-5]]
    expected = [decode_plainly(target, prompt, 24) for prompt in prompts]
    assert any(tokens[-1] in target.eos_token_ids for tokens in expected)
    rates = {}
    for method in METHODS:
        decoder = Decoder(target, real_code.make_universal(method, draft, target), 4)
        for batch_size in (1, 4):
            results = decoder.generate(prompts, GenerationParams(24), batch_size)
            assert [result.tokens for result in results] == expected
        rates[method] = round(add_up(result.counters for result in results).acceptance_rate, 3)
    with capsys.disabled():
        print(f"\n{target_kind} with {draft_kind} drafting, accepted share of drafted tokens: {rates}")
    assert max(rates.values()) > 0.3


@pytest.mark.parametrize("method", METHODS)
def test_rows_do_not_depend_on_the_batch(method: str) -> None:
    """Counters too: a row's drafts are the same whatever stands beside it, and after rows left and joined."""
    target, draft = make_toy_target(), make_toy_draft()
    params = GenerationParams(8, SamplingParams(1.0), seed=3)
    decoder = Decoder(target, real_code.make_universal(method, draft, target), 3)
    alone = decoder.generate(PROMPTS, params, max_batch_size=1)
    assert decoder.generate(PROMPTS, params, max_batch_size=3) == alone


@pytest.mark.parametrize("method", METHODS)
def test_processors_are_asked(method: str) -> None:
    """The output is that of plain decoding; TLI, whose law has other tokens left, drafts none that is forbidden."""
    target, draft = make_toy_target(), make_toy_draft()
    processors = ProcessorParams(bad_words_ids=((1,), (2,), (3,)), no_repeat_ngram_size=2)
    drafter = real_code.make_universal(method, draft, target)
    drafted: list[int] = []
    propose = drafter.propose

    def watched(*args):
        proposal = propose(*args)
        drafted.extend(proposal.tokens_BK.flatten().tolist())
        return proposal

    drafter.propose = watched
    params = GenerationParams(10, eos_token_ids=(), processors=processors)
    results = Decoder(target, drafter, 2).generate(PROMPTS[3:], params)
    expected = [decode_plainly(target, prompt, 10, eos_token_ids=(), processors=processors) for prompt in PROMPTS[3:]]
    assert [result.tokens for result in results] == expected
    assert drafted
    assert method != "tli" or not {1, 2, 3} & set(drafted)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_other_attention(family: str) -> None:
    """Sliding windows and soft-capping in the draft model: a tree's drafts are those of a listing."""
    target, draft = make_toy_target(), make_toy_draft(family=family)
    witness = Witness("slrs", draft, target, SAMPLED)
    drafter = real_code.StringRejectionSampling(draft, target, 10**6, 0.0)
    witness.run(drafter, [[5, 4, 9, 1, 2, 3] * 4, [7]], num_draft_tokens=2, max_batch_size=2)
    assert sum(witness.num_accepted) > 0


def test_what_does_not_fit_is_refused() -> None:
    target, draft = make_toy_target(), make_toy_draft()
    with pytest.raises(ValueError, match=r"'toy draft' has 8 tokens, and max_sequences=7: psi is summed over all"):
        real_code.make_universal("slrs", draft, target, 7)
    with pytest.raises(ValueError, match=r"drafter.method='tlx' is unknown; choose one of slem, slrs, tli"):
        real_code.make_universal("tlx", draft, target)
    with pytest.raises(ValueError, match="max_sequences=0: must be at least 1"):
        real_code.StringRejectionSampling(draft, target, 0)
    with pytest.raises(ValueError, match="min_mass=1"):
        real_code.StringRejectionSampling(draft, target, 10, 1.0)
    draft.device = torch.device("meta")
    with pytest.raises(ValueError, match="is on meta and target 'toy target' on cpu"):
        real_code.make_universal("tli", draft, target)
    draft = make_toy_draft()
    draft.config.layer_types = ["linear_attention"] * 2
    with pytest.raises(ValueError, match=r"draft model 'toy draft' cannot draft: .*linear_attention"):
        real_code.make_universal("slem", draft, target)


def test_no_common_token_is_refused() -> None:
    """Other letters altogether, and no EOS on one side."""
    backend = Tokenizer(models.BPE(vocab={"x": 0, "y": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    draft = Target(
        make_tiny_target(vocab_size=2, eos_token_id=None, pad_token_id=None).model,
        PreTrainedTokenizerFast(tokenizer_object=backend),
        "xy",
    )
    with pytest.raises(ValueError, match=r"draft model 'xy' and target 'toy target' share no token.*method=slem"):
        real_code.make_universal("tli", draft, make_toy_target())
    (result,) = Decoder(make_toy_target(), real_code.make_universal("slem", draft, make_toy_target()), 2).generate(
        [PROMPTS[0]], GenerationParams(5, eos_token_ids=())
    )
    assert result.tokens == decode_plainly(make_toy_target(), PROMPTS[0], 5, eos_token_ids=())


def test_by_options() -> None:
    """From a configuration: a random target gets a random sibling, which shares its vocabulary."""
    options = DrafterOptions("universal", method="slem", max_sequences=8192)
    target = make_model("bytes")
    drafter, record = make_drafter(options, TargetOptions(name="tiny", source="random"), target)
    assert isinstance(drafter, real_code.StringExactMatch)
    assert record["kind"] == "universal"
    assert record["method"] == "slem"
    assert record["fingerprint"] == drafter.draft.fingerprint()
