"""A block's places processed at once give what one prefix at a time gives, bit for bit: chains, trees and drafting.

`code` is the modules under test, real or with a planted fault.
"""

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.processors.block import BlockProcessor
from models.processors.prefix import Processors
from tests.models.decoding.processor_checks import EOS, VOCAB, Pull, other_parity, parity_mask

TOKENS = st.integers(0, 5)  # few, so that tokens and n-grams come again
WIDTH_OF_PADDING = 4
# Always the same examples, without shrinking: a planted fault must be found each time, and soon.
EXAMPLES = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)

_shared = torch.zeros(VOCAB, dtype=torch.bool)


def reused_mask(prompt: Sequence[int], generated: Sequence[int]) -> Tensor:
    """A grammar that always answers with the same tensor."""
    return _shared.copy_(parity_mask(prompt, generated))


def failing(prompt: Sequence[int], generated: Sequence[int]) -> list[int]:
    """A grammar that knows no answer for some texts, and never for one with a 3 in it."""
    if sum(generated) % 4 == 3 or 3 in generated:
        raise ValueError(f"no such text: {generated}")
    return [0, 1, 2, 4, 5]


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.3, 1.3, 3e38]),
        "frequency_penalty": st.sampled_from([-0.7, 0.3]),
        "presence_penalty": st.sampled_from([-1.1, 0.4]),
        "no_repeat_ngram_size": st.integers(1, 4),
        "bad_words_ids": st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=6)
        .map(lambda words: tuple(word for word in words if word not in [(token,) for token in EOS]))
        .filter(bool),
        "min_new_tokens": st.integers(1, 6),
        "allowed_tokens": st.sampled_from([other_parity, parity_mask, reused_mask, failing]),
        "custom": st.just((Pull(),)),
    },
)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Ragged rows with padded prompts, trees of one size (a chain among them), and logits with a few ill places."""
    num_rows, num_nodes = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    per_row = [
        {
            "prompt": draw(st.lists(TOKENS, min_size=1, max_size=6)),
            "padding": [0] * draw(st.integers(0, WIDTH_OF_PADDING)),
            "generated": draw(st.lists(TOKENS, max_size=8)),
            "tokens": draw(st.lists(TOKENS, min_size=num_nodes, max_size=num_nodes)),
            "parents": tuple(draw(st.integers(-1, node - 1)) for node in range(num_nodes)),
            "drafted": draw(st.lists(st.booleans(), min_size=num_nodes, max_size=num_nodes)),
            "count": draw(st.integers(0, num_nodes)),
        }
        for _ in range(num_rows)
    ]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits_BTV = torch.randn(num_rows, num_nodes + 1, VOCAB, generator=generator) * 3
    logits_BTV[..., 7] = -torch.inf
    sick = draw(st.sampled_from([None, torch.nan, torch.inf, -torch.inf]))
    if sick is not None:
        logits_BTV[draw(st.integers(0, num_rows - 1)), draw(st.integers(0, num_nodes))] = sick
    return {"rows": per_row, "logits_BTV": logits_BTV}


def one_at_a_time(
    made: Processors, row: dict[str, Any], logits_TV: Tensor, parents: Sequence[int], drafted: Sequence[bool]
) -> tuple[Tensor, dict[int, str]]:
    """Every place of a row by `Processors.apply` (which is held to transformers elsewhere), and what failed where."""
    scores_TV, failed = logits_TV.clone(), {}
    paths: dict[int, list[int]] = {}
    for place in range(len(parents) + 1):
        path: list[int] = []
        if place > 0:
            above, token = parents[place - 1] + 1, row["tokens"][place - 1]
            if not drafted[place - 1] or above not in paths or scores_TV[above, token] == -torch.inf:
                continue
            path = [*paths[above], token]
        try:
            shown = row["padding"] + row["prompt"]
            scores_TV[place] = made.apply(logits_TV[place], row["prompt"], row["generated"] + path, shown)
        except ValueError as error:
            failed[place] = str(error)
            continue
        paths[place] = path
    return scores_TV, failed


def block(code: SimpleNamespace, made: Processors, rows: Sequence[dict[str, Any]]) -> BlockProcessor:
    """With histories that saw half of the output in an earlier block, and another end that was taken back."""
    histories = []
    for row in rows:
        history = code.History(row["prompt"], row["padding"] + row["prompt"])
        half = row["generated"][: len(row["generated"]) // 2]
        histories.append(history)
        for text in ([*half, 1, 1], half):
            code.BlockProcessor(made, [row["prompt"]], [text], histories=[history]).draft(torch.zeros(1, VOCAB), [])
    shown = [row["padding"] + row["prompt"] for row in rows]
    prompts, generated = [row["prompt"] for row in rows], [row["generated"] for row in rows]
    made_block: BlockProcessor = code.BlockProcessor(made, prompts, generated, shown, histories)
    return made_block


def same(got: Tensor, wanted: Tensor) -> bool:
    return torch.equal(got.nan_to_num(7e30), wanted.nan_to_num(7e30))


def places_at_once(code: SimpleNamespace, options: dict[str, Any], batch: dict[str, Any], is_chain: bool) -> None:
    """See `check_places_at_once`."""
    made, rows = code.Processors(code.ProcessorParams(**options), EOS, VOCAB), batch["rows"]
    logits_BTV = batch["logits_BTV"]
    num_nodes = logits_BTV.shape[1] - 1
    for row in rows:
        if is_chain:
            row["parents"] = tuple(range(-1, num_nodes - 1))
            row["drafted"] = [node < row["count"] for node in range(num_nodes)]
    wanted = [
        one_at_a_time(made, row, logits_TV, row["parents"], row["drafted"])
        for row, logits_TV in zip(rows, logits_BTV, strict=True)
    ]
    before, processor = logits_BTV.clone(), block(code, made, rows)
    tokens_BN = torch.tensor([row["tokens"] for row in rows], dtype=torch.long).view(len(rows), num_nodes)
    roots = [failed[0] for _, failed in wanted if 0 in failed]
    drafted_BN = torch.tensor([row["drafted"] for row in rows], dtype=torch.bool).view(len(rows), num_nodes)

    def process() -> Tensor:
        if is_chain:
            return processor.target(logits_BTV, tokens_BN, [row["count"] for row in rows])
        return processor.target_tree(logits_BTV, tokens_BN, drafted_BN, [row["parents"] for row in rows])

    if roots:
        with pytest.raises(ValueError, match=f"^{re.escape(roots[0])}$"):
            process()
        return
    got = process()
    assert same(logits_BTV, before)
    assert same(got, torch.stack([scores_TV for scores_TV, _ in wanted]))
    for b, (_, failed) in enumerate(wanted):
        for place, message in failed.items():
            if not is_chain:  # a path that ends there; the errors on other paths stay silent
                processor.follow([[0, place] if row == b else [0] for row in range(len(rows))])
            reach = place + 1 if is_chain else 2
            processor.raise_if_reached([reach - 1 if row == b else 1 for row in range(len(rows))])
            with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                processor.raise_if_reached([reach if row == b else 1 for row in range(len(rows))])


def draft_at_once(code: SimpleNamespace, options: dict[str, Any], batch: dict[str, Any]) -> None:
    made, rows, logits_BTV = (
        code.Processors(code.ProcessorParams(**options), EOS, VOCAB),
        batch["rows"],
        batch["logits_BTV"],
    )
    processor = block(code, made, rows)
    for place in range(logits_BTV.shape[1]):
        drafted = [torch.tensor([row["tokens"][k] for row in rows]) for k in range(place)]
        got_BV = processor.draft(logits_BTV[:, place], drafted)
        for row, logits_V, got_V in zip(rows, logits_BTV[:, place], got_BV, strict=True):
            shown = row["padding"] + row["prompt"]
            try:
                text = row["generated"] + row["tokens"][:place]
                wanted_V = made.apply(logits_V, row["prompt"], text, shown)
            except ValueError:
                wanted_V = logits_V
            assert same(got_V, wanted_V)


def check_places_at_once(code: SimpleNamespace) -> None:
    """Target side, over options, texts, ragged chains and trees."""
    EXAMPLES(given(st.just(code), OPTIONS, batches(), st.booleans())(places_at_once))()


def check_draft_at_once(code: SimpleNamespace) -> None:
    """Drafting side."""
    EXAMPLES(given(st.just(code), OPTIONS, batches())(draft_at_once))()
