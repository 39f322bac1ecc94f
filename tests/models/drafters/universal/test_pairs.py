"""Greedy decoding with every kind of tokenizer on either side: token for token the reference's."""

import pytest

from models.decoding.counters import add_up
from models.decoding.decoder import Decoder
from models.decoding.reference import decode_plainly
from models.decoding.rows import GenerationParams
from models.drafters.universal import METHODS, make_universal
from tests.models.drafters.universal.vocabularies import TEXT, make_trained_model

# Target and draft model; every kind on both sides.
PAIRS = [
    ("byte_bpe", "bytes"), ("bytes", "byte_bpe"), ("byte_bpe", "unigram"), ("unigram", "wordpiece"),
    ("wordpiece", "fallback_bpe"), ("fallback_bpe", "byte_bpe"),
]  # fmt: skip


NUM_TOKENS = 16
FEWEST_ACCEPTED = 0.1  # of what SLEM drafts; 0.18 to 0.58 were found: the models know the text


@pytest.mark.parametrize(("target_kind", "draft_kind"), PAIRS)
def test_greedy_equals_reference(target_kind: str, draft_kind: str) -> None:
    """Both know one text by heart (Korean, emoji, code with tabs): batch 1 and 4, ragged, EOS inside blocks."""
    target, draft = make_trained_model(target_kind), make_trained_model(draft_kind)
    ids = target.tokenizer.encode(TEXT)
    prompts = [ids[:3], ids[: len(ids) // 2], [5, 6], ids[:-5]]
    expected = [decode_plainly(target, prompt, NUM_TOKENS) for prompt in prompts]
    assert any(tokens[-1] in target.eos_token_ids for tokens in expected)
    rates = {}
    for method in METHODS:
        decoder = Decoder(target, make_universal(method, draft, target), 4)
        for batch_size in (1, 4):
            results = decoder.generate(prompts, GenerationParams(NUM_TOKENS), batch_size)
            assert [result.tokens for result in results] == expected
        rates[method] = add_up(result.counters for result in results).acceptance_rate
    assert rates["slem"] > FEWEST_ACCEPTED, rates
