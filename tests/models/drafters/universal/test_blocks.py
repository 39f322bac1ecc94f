"""Every block of a run against the method's drafts made anew, and that planted faults do not get past that."""

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest

from models.decoding.decoder import Decoder
from models.decoding.reference import decode_plainly
from models.decoding.rows import GenerationParams
from models.drafters import universal as real_code
from tests.models.drafters.universal.toy import PROMPTS, SAMPLED, Witness
from tests.models.drafters.universal.vocabularies import make_toy_draft, make_toy_target
from tests.planting import blank_module

METHODS = ("slem", "slrs", "tli")
PACKAGE = "models.drafters.universal"
MODULES = ("spelling", "translation", "healing", "base", "text_tree", "slem", "slrs", "tli")


MOST_SEEDS = 8


def check_blocks(code: ModuleType, method: str) -> None:
    """Rows that keep 0 .. K tokens, leave and join; further seeds until each count up to 2 was seen.

    How often the trained toys agree depends on the processor that trained them.
    """
    draft, target = make_toy_draft(), make_toy_target()
    bounds = {"max_sequences": 4000, "min_mass": 0.0} if method == "slrs" else {}
    drafter = {
        "slem": code.StringExactMatch, "slrs": code.StringRejectionSampling, "tli": code.TokenIntersection
    }[method](draft, target, **bounds)  # fmt: skip
    prompts, params = (PROMPTS[:4], replace(SAMPLED, max_new_tokens=6)) if method == "slrs" else (PROMPTS, SAMPLED)
    seen: set[int] = set()
    for seed in range(params.seed, params.seed + MOST_SEEDS):
        witness = Witness(method, draft, target, replace(params, seed=seed))
        witness.run(drafter, prompts, num_draft_tokens=2 if method == "slrs" else 3, max_batch_size=3)
        seen |= set(witness.num_accepted)
        if seen >= {0, 1, 2}:
            return
    raise AssertionError(f"only {sorted(seen)} drafted tokens were kept in {MOST_SEEDS} runs")


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
    ("blocks tli", "base", "max(0, len(text.ids) - self._num_read_again(text))", "len(text.ids)"),
    ("blocks tli", "base", "tokens[:count]", "tokens[: count - 1]"),
    ("blocks tli", "base", "state.read = [state.read[row] for row in rows]", "state.read = state.read[: len(rows)]"),
    ("blocks tli", "base", "[state.texts[row] for row in rows]", "state.texts[: len(rows)]"),
    ("blocks tli", "base", "state.cache.select_rows(rows)", "state.cache.select_rows(sorted(rows))"),
    ("blocks tli", "base", "state.texts += other.texts", "state.texts = other.texts + state.texts"),
    ("blocks tli", "tli", "last_kept(*self._read_all(state, is_on))", "self._read_all(state, is_on)[0][:, -1]"),
    ("blocks tli", "base", "state.read[row].append(index)", "pass"),
    ("blocks tli", "tli", "transform_logits(logits_BV, params)", "logits_BV.softmax(dim=-1)"),
    ("blocks tli", "tli", "uniforms_BK[:, place]", "uniforms_BK[:, 0]"),
    ("blocks tli", "tli", "self._to_draft_V[tokens[-1]]", "self._to_draft_V[tokens[0]]"),
    ("blocks tli", "tli", "self._to_draft_V[tokens[-1]]", "tokens[-1]"),
    ("blocks tli", "tli", "(len(logits_BD), self.vocab_size), -torch.inf", "(len(logits_BD), self.vocab_size), 0.0"),
    ("blocks tli", "translation", "del ids[start:], transcript.sources[start:]", "pass"),
    ("blocks tli", "base", "num_common(state.read[row], text.ids)", "len(state.read[row])"),
    ("blocks slem", "slem", "_to_target(text, line, num_draft_tokens) for", "_to_target(text, line, 2) for"),
    ("blocks slem", "slem", "[line.num_settled_bytes :]", "[0:]"),
    ("blocks slem", "slem", "counts[row] - 1 - num]", "counts[row] - num]"),
    ("blocks slem", "slem", "del state.read[row][-num:]", "pass"),
    ("blocks slem", "slem", "state.cache.rollback(rollback)", "pass"),
    ("blocks slem", "slem", "return 1 + self._healer.num_taken_back(text)", "return 1"),
    ("blocks slem", "healing", "if token == settled:", "if False:"),
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
        package = blank_module(PACKAGE, PACKAGE)
        package.__path__ = list(saved[PACKAGE].__path__)
        sys.modules[PACKAGE] = package
        for name in names:
            source = sources[name].replace(right, wrong, 1) if name == f"{PACKAGE}.{module}" else sources[name]
            sys.modules[name] = copy = blank_module(name, PACKAGE)
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
