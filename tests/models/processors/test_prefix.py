"""Processors: every place of a block sees what transformers' own list gives on the same prefix, exactly.

The same checks are then shown to fail for faults planted in the real source.
"""

import inspect
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from models.processors import block as block_processor
from models.processors import edits as block_edits
from models.processors import history
from models.processors import prefix as processors
from models.processors.block import BlockProcessor
from models.processors.prefix import ProcessorParams, Processors
from tests.models.decoding.processor_checks import (
    CASES,
    EOS,
    VOCAB,
    check_draft,
    check_failures,
    check_impossible,
    check_places,
    check_plain,
    check_results,
    check_sick_logits,
)
from tests.models.decoding.processor_properties import check_draft_at_once, check_places_at_once
from tests.planting import blank_module

CHECKS = [check_results, check_impossible, check_failures, check_sick_logits, check_places, check_draft, check_plain]
CHECKS += [check_places_at_once, check_draft_at_once]
REAL = SimpleNamespace(**vars(processors), **{"History": history.History, "BlockProcessor": BlockProcessor})


@pytest.mark.parametrize("check", CHECKS)
def test_prefix_is_plain_decodings(check: Callable[[SimpleNamespace], None]) -> None:
    check(REAL)


MODULES = (processors, history, block_edits, block_processor)


def planted(right: str, wrong: str) -> SimpleNamespace:
    """The modules made anew, as one, with `wrong` in place of the first `right` in their source."""
    joins = r"^from \.(prefix|history|edits) import .*\n"
    source = "".join(re.sub(joins, "", inspect.getsource(module), flags=re.MULTILINE) for module in MODULES)
    assert right in source, f"the planted fault no longer matches the code: {right}"
    faulty = blank_module("faulty_processors", processors.__package__)
    sys.modules[faulty.__name__] = faulty  # where dataclasses look
    try:
        exec(compile(source.replace(right, wrong, 1), "faulty processors", "exec"), faulty.__dict__)
    finally:
        del sys.modules[faulty.__name__]
    return SimpleNamespace(**vars(faulty))


def fails(check: Callable[[SimpleNamespace], None], code: SimpleNamespace) -> bool:
    try:
        check(code)
    except (AssertionError, IndexError, LookupError, RuntimeError, ValueError, pytest.fail.Exception):
        return True
    return False


PLANTED = {
    "only the last token of the block": ("tuple(tokens[:k]), first", "tuple(tokens[k - 1 : k]), first"),
    "prefix one token short": ("tuple(tokens[:k]), first", "(*tokens[: k - 2], tokens[k - 1]), first"),
    "prefix one token long": ("tuple(tokens[:k]), first", "tuple(tokens[: k + 1]), first"),
    "the neighbour's text": ("histories[row]).with", "histories[row - 1]).with"),
    "the neighbour's bans": (
        "self._banned(place, histories[place.row])",
        "self._banned(place, histories[place.row - 1])",
    ),
    "the neighbour's grammar": (
        "self._processors.allowed(self._histories[place.row].prompt",
        "self._processors.allowed(self._histories[place.row - 1].prompt",
    ),
    "the neighbour's output": ("(*self._histories[place.row].gen", "(*self._histories[place.row - 1].gen"),
    "the block alone": ("(*self._histories[place.row].generated, *place.path)", "place.path"),
    "penalties of the settled text alone": ("[place.path for place in members]", "[() for place in members]"),
    "n-grams of the settled text alone": ("range(len(text) - size + 1) if", "range(0) if"),
    "n-grams without the path": ("text = [*self.tail(size - 1), *path]", "text = self.tail(size - 1)"),
    "counts of output in the place of the text": ("lambda row: row.of_text", "lambda row: row.of_output"),
    "counts of text in the place of the output": ("lambda row: row.of_output", "lambda row: row.of_text"),
    "counts only once": ("counts[row, self.place_of[token]", "counts[0, self.place_of[token]"),
    "repetition penalty at places that have not come to the token": (
        "torch.where(counts_E > 0, pen",
        "torch.where(counts_E >= 0, pen",
    ),
    "bad words need one token more": ("if length <= len(text)", "if length < len(text)"),
    "bad words without the path": ("[*history.tail(self._longest), *place.path]", "history.tail(self._longest)"),
    "minimum length one too long": ("+ len(place.path) < params", "+ len(place.path) <= params"),
    "minimum length without the path": ("len(history.generated) + len(place.path)", "len(history.generated)"),
    "block frequency without a count": ("counts_E.to(scores_E.dtype)", "(counts_E > 0).to(scores_E.dtype)"),
    "block presence counts": ("presence_penalty * (counts_E > 0)", "presence_penalty * counts_E"),
    "block grammar inverted": ("sub_(0.5).mul_(torch.inf)", "sub_(0.5).mul_(-torch.inf)"),
    "masks of the first places alone": (
        "range(0, len(slots), MASKED_TOGETHER)",
        "range(0, min(1, len(slots)), MASKED_TOGETHER)",
    ),
    "masks of scattered places forgotten": ("torch.minimum(self._scores_PV[some], limits)", "self._scores_PV[some]"),
    "masks of adjacent places forgotten": ("torch.minimum(part_PV, limits, out=part_PV)", "pass"),
    "masks of other places": ("masks_PV[first : first + MASKED_TOGETHER]", "masks_PV[:MASKED_TOGETHER]"),
    "output without the prompt": ("[self.prompt + self.generated]", "[self.generated]"),
    "prompt without the output": ("[self.prompt + self.generated]", "[self.prompt]"),
    "minimum length counted from the prompt on": ("processor(prefix.generated_1T", "processor(prefix.text_1T"),
    "frequency counts the prompt": ("bincount(prefix.generated_1T[0]", "bincount(prefix.text_1T[0]"),
    "frequency without a count": ("frequency * counts_V", "frequency * (counts_V > 0)"),
    "presence counts": ("presence * (counts_V > 0)", "presence * counts_V"),
    "frequency before repetition": ('steps.append(("frequency', 'steps.insert(0, ("frequency'),
    "custom first": ('steps.append((f"custom', 'steps.insert(0, (f"custom'),
    "grammar after custom": ("return steps", 'return sorted(steps, key=lambda step: step[0] == "allowed_tokens")'),
    "grammar inverted": ("masked_fill(~_as_mask(", "masked_fill(_as_mask("),
    "grammar has prompt and output exchanged": (
        "(prefix.prompt, prefix.generated)",
        "(prefix.generated, prefix.prompt)",
    ),
    "bans fed the output alone": (
        "_on_shown(bad_words)",
        "lambda prefix, scores: bad_words(prefix.generated_1T, scores)",
    ),
    "target in place": ("wide, copy=True,", "wide,"),
    "one prefix in place": ("widen(logits_V)[None].clone()", "widen(logits_V)[None]"),
    "padding processed": ("range(1, count + 1)", "range(1, len(tokens) + 1)"),
    "bonus place left out": ("range(1, count + 1)", "range(1, count)"),
    "draft one token short": ("Place(b, b, tuple(path))", "Place(b, b, tuple(path[:-1]))"),
    "grammar asked behind what it forbids": ("if parent in mask_of and not", "if False and not"),
    "grammar asked behind what is banned": (
        "(self._scores_PV[slots, tokens] != -torch.inf)",
        "(self._scores_PV[slots, tokens] < 9e9)",
    ),
    "error at a place that nothing reaches": ("if slot % width == 0:", "if True:"),
    "error at the first place waits": ("if slot % width == 0:", "if False:"),
    "unreached places stay processed": ("if number not in reached or", "if"),
    "failed places stay processed": ("or p.slot in failures", ""),
    "ill places of a block processed": ("for place in places if has_law[place.slot]]", "for place in places]"),
    "grammar asked at ill places": ("if not has_law[place.slot]:", "if False:"),
    "empty places of a block go through": ("if emptied or walk.num_masks:", "if False:"),
    "failures of the walk are forgotten": ("ill |= walk.failed", ""),
    "error raised one token early": ("num_emitted[b] > place", "num_emitted[b] >= place"),
    "error raised one token late": ("num_emitted[b] > place", "num_emitted[b] > place + 1"),
    "sick logits processed": ("if not scores_1V.amax().isfinite():", "if False:"),
    "NaN goes through": ("if not math.isfinite(best):", "if best == math.inf:"),
    "empty grammar goes through": ("if best == -math.inf:", "if False:"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_caught(fault: str) -> None:
    """Each change to the real source makes at least one of the checks above fail."""
    mutant = planted(*PLANTED[fault])
    assert any(fails(check, mutant) for check in CHECKS)


def test_nothing_set_costs_nothing() -> None:
    assert ProcessorParams().is_empty
    assert not any(ProcessorParams(**options).is_empty for options in CASES.values())
    logits_BTV = torch.zeros(2, 4, VOCAB)
    # A minimum length without an EOS has nothing to do either.
    for params, eos in [(ProcessorParams(), EOS), (ProcessorParams(min_new_tokens=5), ())]:
        made = Processors(params, eos, VOCAB)
        block = BlockProcessor(made, [[1], [2]], [[], []])
        assert made.is_empty
        assert block.target(logits_BTV, torch.zeros(2, 3, dtype=torch.long), [3, 2]) is logits_BTV
        assert block.draft(logits_BTV[:, 0], []).data_ptr() == logits_BTV.data_ptr()


def test_a_draft_vocabulary_may_lack_every_allowed_token() -> None:
    """Then the drafter's logits stay as they are: whatever it drafts is rejected, and decoding goes on."""
    made = Processors(ProcessorParams(allowed_tokens=lambda prompt, generated: [3]), EOS, VOCAB)
    logits_BV = torch.zeros(2, VOCAB)
    logits_BV[0, 3] = -torch.inf
    got_BV = BlockProcessor(made, [[1], [1]], [[], []]).draft(logits_BV, [])
    assert torch.equal(got_BV[0], logits_BV[0])
    assert (got_BV[1] > -torch.inf).nonzero()[:, 0].tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    made = Processors(ProcessorParams(**CASES["all"]), EOS, VOCAB)
    logits_BTV = torch.randn(1, 2, VOCAB, generator=torch.Generator().manual_seed(0)).to(dtype)
    block = BlockProcessor(made, [[1, 2]], [[3]])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    target_BTV = block.target(logits_BTV, torch.tensor([[4]]), [1])
    assert target_BTV.dtype == block.draft(logits_BTV[:, 0], []).dtype == wide
    assert torch.equal(target_BTV, block.target(logits_BTV.to(wide), torch.tensor([[4]]), [1]))
