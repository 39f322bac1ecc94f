"""Processors: every place of a block sees what transformers' own list gives on the same prefix, exactly.

The same checks are then shown to fail for faults planted in the real source.
"""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch

from models.decoding import block_processor, processors
from models.decoding.block_processor import BlockProcessor
from models.decoding.processors import ProcessorParams, Processors
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

CHECKS = [check_results, check_impossible, check_failures, check_sick_logits, check_places, check_draft, check_plain]
REAL = SimpleNamespace(**{**vars(processors), **vars(block_processor)})


@pytest.mark.parametrize("check", CHECKS)
def test_prefix_is_plain_decodings(check: Callable[[SimpleNamespace], None]) -> None:
    check(REAL)


def planted(right: str, wrong: str) -> SimpleNamespace:
    """Both modules made anew, as one, with `wrong` in place of the first `right` in their source."""
    joins = "from models.decoding.processors import Processors, widen\n"
    source = inspect.getsource(processors) + inspect.getsource(block_processor).replace(joins, "")
    assert right in source, f"the planted fault no longer matches the code: {right}"
    faulty = ModuleType("faulty_processors")
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
    "only the last token of the block": ("scores_TV[place], tokens[:place])", "scores_TV[place], tokens[:place][-1:])"),
    "prefix one token short": ("scores_TV[place], tokens[:place])", "scores_TV[place], tokens[: max(0, place - 1)])"),
    "prefix one token long": ("scores_TV[place], tokens[:place])", "scores_TV[place], tokens[: place + 1])"),
    "prefix without the block": ("scores_TV[place], tokens[:place])", "scores_TV[place], ())"),
    "the neighbour's prompt": ("self._prompts[b]", "self._prompts[b - 1]"),
    "the neighbour's output": ("(*self._generated[b], *drafted)", "(*self._generated[b - 1], *drafted)"),
    "the block alone": ("(*self._generated[b], *drafted)", "tuple(drafted)"),
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
    "target in place": ("widen(logits_BTV).clone()", "widen(logits_BTV)"),
    "one prefix in place": ("widen(logits_V)[None].clone()", "widen(logits_V)[None]"),
    "padding processed": ("tokens[:count])", "tokens)"),
    "bonus place left out": ("range(len(tokens) + 1)", "range(max(1, len(tokens)))"),
    "draft one token short": ("logits_V, drafted_BK[b])", "logits_V, drafted_BK[b][:-1])"),
    "grammar asked behind what it forbids": ("tokens[place]] == -torch.inf", "tokens[place]] == torch.inf"),
    "error at a place that nothing reaches": ("if place == 0:", "if True:"),
    "error at the first place waits": ("if place == 0:", "if False:"),
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
