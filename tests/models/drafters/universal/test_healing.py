"""Drafting behind a text that ends inside what the draft model writes as one token."""

import pytest
import torch

from models.decoding.counters import add_up
from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.drafters.universal import healing, make_universal
from models.drafters.universal.healing import MAX_TAKEN_BACK, Healer
from models.drafters.universal.translation import Transcript, Translator
from tests.models.drafters.universal.vocabularies import ENGLISH, TEXT, make_model, make_trained_model


def settle(translator: Translator, data: bytes) -> Transcript:
    """A text that the target has written, a token a byte where it can do no other."""
    text = translator.start()
    translator.append(text, translator.target_spelling.encode(data))
    return text


def logits_for(translator: Translator, *ranked: bytes) -> torch.Tensor:
    """The first of these tokens is the likeliest; all others are less likely than any."""
    logits_D = torch.zeros(len(translator.spelling.spelled))
    for place, token in enumerate(ranked):
        logits_D[translator.spelling.id_of[token]] = 10.0 - place
    return logits_D


def test_what_is_taken_back() -> None:
    """Against a listing: the most ids at the end that begin a longer token, but never what stands for good."""
    for target, draft in (("bytes", "byte_bpe"), ("bytes", "fallback_bpe"), ("byte_bpe", "unigram")):
        translator = Translator(make_model(draft), make_model(target))
        healer, tokens, found = Healer(translator), set(translator.spelling.id_of), set()
        for end in range(1, 60):
            text = settle(translator, TEXT.encode()[:end])
            expected = 0
            for num in range(1, min(MAX_TAKEN_BACK, len(text.ids) - max(1, text.num_fixed)) + 1):
                data = b"".join(text.sources[-num:])
                if any(token.startswith(data) and token != data for token in tokens):
                    expected = num
            assert healer.num_taken_back(text) == (0 if text.pending else expected)
            found.add(expected)
        assert {0, 1} < found


def test_the_likeliest_token_across_the_seam() -> None:
    """The settled bytes are the target's own tokens, so it ends one wherever the draft model's go on."""
    translator = Translator(make_model("byte_bpe"), make_model("bytes"))
    healer, text = Healer(translator), settle(translator, b"the cat on the")
    num = healer.num_taken_back(text)
    settled = b"".join(text.sources[-num:])
    longer = sorted(token for token in translator.spelling.id_of if token.startswith(settled) and token != settled)
    assert settled == b" the"
    assert len(longer) >= 2
    for likeliest in longer:
        assert healer.across(text, num, logits_for(translator, likeliest)) == translator.spelling.id_of[likeliest]
    assert healer.across(text, num, logits_for(translator, settled, *longer)) is None
    assert healer.across(text, num, logits_for(translator, b"a", longer[0])) == translator.spelling.id_of[longer[0]]


def test_a_token_that_the_target_has_is_left() -> None:
    """Where it would have written all of it at once, it has said that it did not want to."""
    translator = Translator(make_model("byte_bpe"), make_model("byte_bpe"))
    healer, text = Healer(translator), settle(translator, b"the cat on the")
    longer = [token for token in translator.spelling.id_of if token.startswith(b" the") and token != b" the"]
    assert longer
    for likeliest in longer:
        assert healer.across(text, 1, logits_for(translator, likeliest)) is None


def test_seams() -> None:
    """Whether the target's tokenizer ends a token there: every split of a text."""
    translator = Translator(make_model("bytes"), make_model("byte_bpe"))
    spelling, data = translator.target_spelling, ENGLISH.encode()[:60]
    ends, end = set(), 0
    for index in spelling.encode(data):
        end += len(spelling.spelled[index] or b"")
        ends.add(end)
    for seam in range(1, len(data)):
        assert translator.ends_token(settle(translator, data[:seam]), data[seam:]) == (seam in ends)


def test_more_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target of bytes, and a draft model of words: without healing it meets half words that it never saw."""
    target, draft = make_trained_model("bytes"), make_trained_model("byte_bpe")
    ids = target.tokenizer.encode(TEXT)
    rates = []
    for most in (MAX_TAKEN_BACK, 0):
        monkeypatch.setattr(healing, "MAX_TAKEN_BACK", most)
        decoder = Decoder(target, make_universal("slem", draft, target), 4)
        results = decoder.generate([ids[:20], ids[:40]], GenerationParams(24), 2)
        rates.append(add_up(result.counters for result in results).acceptance_rate)
    assert rates[0] > 1.5 * rates[1]
