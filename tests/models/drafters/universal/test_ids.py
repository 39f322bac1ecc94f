"""No drafter proposes an id that the target lacks, whatever its tokenizer has beyond the model's rows."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.drafters.base import Draft
from models.drafters.text.lookahead import LookaheadDrafter
from models.drafters.text.ngram import NgramDrafter
from models.drafters.text.suffix import SuffixDrafter
from models.drafters.universal import METHODS, make_universal
from models.drafters.universal.translation import Translator
from models.sampling import SamplingParams
from models.target.model import Target
from models.target.tiny import make_tiny_target
from tests.models.drafters.universal.vocabularies import make_toy_draft, make_toy_target

ADDED = ("<|one|>", "<|two|>", "aab", "cab")  # the first two special, the others text
TARGET, DRAFT = make_toy_target(), make_toy_draft(num_hidden_layers=1)


def with_added(model: Target, tokens: list[str], eos: int | None) -> Target:
    """The model with more tokens in its tokenizer and no more rows; eos: one more EOS id, whatever it is."""
    tokenizer = copy.deepcopy(model.tokenizer)
    for token in tokens:
        tokenizer.add_tokens([token], special_tokens=token.startswith("<"))
    found = Target(model.model, tokenizer, model.name)
    if eos is not None:
        found.eos_token_ids = (eos, *found.eos_token_ids)
    return found


def drafted_ids(decoder: Decoder, prompts: list[list[int]], params: GenerationParams) -> list[int]:
    """Every id that the drafter proposes, padding included."""
    found: list[int] = []
    propose = decoder.drafter.propose

    def watched(*args: object) -> Draft:
        draft = propose(*args)
        found.extend(draft.tokens_BK.flatten().tolist())
        if draft.branches is not None:
            found.extend(draft.branches.tokens_BN.flatten().tolist())
        return draft

    decoder.drafter.propose = watched
    decoder.generate(prompts, params)
    return found


added = st.lists(st.sampled_from(ADDED), unique=True, max_size=4)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(ours=added, theirs=added, our_eos=st.sampled_from([None, 12, 13, 40]), their_eos=st.sampled_from([None, 2, 11]))
def test_universal_drafters(
    method: str, ours: list[str], theirs: list[str], our_eos: int | None, their_eos: int | None
) -> None:
    """Added tokens on either side, EOS ids that have no row or are other tokens, and a draft model that writes them."""
    target, draft = with_added(TARGET, ours, our_eos), with_added(DRAFT, theirs, their_eos)
    translator = Translator(draft, target)
    assert all(index < target.num_tokens for index in translator.special_to_target.values())
    decoder = Decoder(target, make_universal(method, draft, target), 3)
    params = GenerationParams(6, SamplingParams(1.0), seed=1, eos_token_ids=())
    ids = drafted_ids(decoder, [[7, 5, 4, 8], [7], [5, 4, 7, 1, 4, 11]], params)
    assert set(ids) <= set(range(target.num_tokens))


def test_a_special_token_beyond_the_rows_has_no_partner() -> None:
    """A draft model whose likeliest id is a token that the target's tokenizer has and its embedding lacks."""
    target, draft = with_added(TARGET, ["<|one|>"], None), with_added(DRAFT, ["<|one|>"], None)
    assert target.tokenizer.get_vocab()["<|one|>"] >= target.vocab_size
    index = draft.tokenizer.get_vocab()["<|one|>"]
    assert index < draft.num_tokens
    draft.model = copy.deepcopy(draft.model)
    drafter = make_universal("slem", draft, target)
    logits = drafter._logits
    drafter._logits = lambda hidden: logits(hidden).index_fill(-1, torch.tensor([index]), 1e3)
    assert set(drafted_ids(Decoder(target, drafter, 3), [[7, 5, 4, 8]], GenerationParams(6))) <= set(range(12))


@pytest.mark.parametrize("name", ["ngram", "suffix", "lookahead"])
def test_ids_of_the_prompt_that_no_token_has(name: str) -> None:
    """They are text to go on from, and no draft: the target never emits them."""
    target = make_tiny_target()
    drafter = {
        "ngram": NgramDrafter(target, 1, 3),
        "suffix": SuffixDrafter(target, 1, 0.0, 100),
        "lookahead": LookaheadDrafter(target, 4, 4, 3),
    }[name]
    hole = target.num_tokens
    assert hole < target.vocab_size
    found = drafted_ids(Decoder(target, drafter, 3), [[7, hole, 8] * 5, [9, 9, 9, hole] * 4], GenerationParams(12))
    assert hole not in found


def test_ids_out_of_range_are_an_error() -> None:
    draft = Draft(torch.tensor([[3, 12]]))
    draft.check_ids(13)
    with pytest.raises(AssertionError, match=r"drafted ids \[12\]"):
        draft.check_ids(12)
