"""Every kind of head drafts losslessly (greedy output is the reference's), and drafts what training computes."""

import pytest
import torch

from models.decoding.counters import add_up
from models.decoding.decoder import Decoder
from models.decoding.reference import decode_plainly
from models.decoding.rows import GenerationParams
from models.drafters.heads import HeadsDrafter
from models.heads import HEAD_KINDS, DraftHead, HeadOptions, build_head
from models.sampling import SamplingParams
from models.target.model import Target
from models.target.tiny import FAMILIES, make_tiny_target
from tests.models.decoding.scripted import random_prompts, transformers_generate

NEW_TOKENS = 16
TRAINED_DRAFT_TOKENS = 6
PROMPTS = random_prompts(5, longest=25)


def make_head(target: Target, kind: str, draft_vocab: torch.Tensor | None = None) -> DraftHead:
    """An untrained head, moved off its start so that nothing in it is trivially zero."""
    torch.manual_seed(0)
    head = build_head(target, HeadOptions(kind=kind, num_draft_tokens=TRAINED_DRAFT_TOKENS), draft_vocab)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return head.eval()


EVERY_LENGTH = [(1, 4), (2, 1), (3, 3), (4, 2), (5, 5), (6, 4)]  # (num_draft_tokens, max_batch_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_reference(family: str) -> None:
    """All kinds; every block length for llama, some for the families with windows, soft-capping and the like."""
    target = make_tiny_target(family=family)
    expected = [decode_plainly(target, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert [transformers_generate(target, prompt, NEW_TOKENS) for prompt in PROMPTS] == expected
    for kind in HEAD_KINDS:
        drafter = HeadsDrafter(make_head(target, kind))
        for num_draft_tokens, max_batch_size in EVERY_LENGTH if family == "llama" else EVERY_LENGTH[2::3]:
            decoder = Decoder(target, drafter, num_draft_tokens)
            results = decoder.generate(PROMPTS, GenerationParams(NEW_TOKENS), max_batch_size)
            assert [result.tokens for result in results] == expected
            assert add_up(result.counters for result in results).drafted > 0


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_do_not_depend_on_the_batch(kind: str, temperature: float) -> None:
    """Counters too: a head drafts the same for a row whatever stands beside it, and after rows left and joined."""
    target = make_tiny_target()
    drafter = HeadsDrafter(make_head(target, kind))
    params = GenerationParams(NEW_TOKENS, SamplingParams(temperature, top_k=20), seed=3, eos_token_ids=())
    decoder = Decoder(target, drafter, 4)
    alone = decoder.generate(PROMPTS, params, max_batch_size=1)
    for max_batch_size in (2, 5):
        assert decoder.generate(PROMPTS, params, max_batch_size) == alone


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_drafts_what_training_computes(kind: str) -> None:
    """Absorbed in uneven pieces, the head proposes the argmax of its own teacher-forced logits."""
    target = make_tiny_target()
    head = make_head(target, kind)
    drafter = HeadsDrafter(head)
    text = random_prompts(1, longest=25, seed=4)[0] + [50, 60, 70, 80, 90]
    hidden_1TH = target.hidden(torch.tensor([text]), reads=head.reads)
    state = drafter.start([text[:2]])
    place = 0
    for count in (1, 3, len(text) - 5):
        next_tokens = torch.tensor([text[place + 1 : place + 1 + count]])
        drafter.absorb(state, hidden_1TH[:, place : place + count], next_tokens, [count])
        place += count
        drafted = drafter.propose(state, 3, SamplingParams(), None).tokens_BK[0].tolist()
        for step in range(1, 4):
            whole = text[: place + 1] + drafted[: step - 1]
            ids_1T = torch.tensor([whole + [0] * TRAINED_DRAFT_TOKENS])
            padded_1TH = torch.nn.functional.pad(hidden_1TH[:, :place], (0, 0, 0, ids_1T.shape[1] - place))
            with torch.no_grad():
                states_KBTH = head(padded_1TH, ids_1T)
                expected = head.widen(head.logits(states_KBTH[step - 1, 0, place - 1], step)).argmax()
            assert drafted[step - 1] == expected


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_reduced_vocabulary_is_lossless(kind: str) -> None:
    """Tokens that the head cannot draft are still emitted, greedy and sampled."""
    target = make_tiny_target()
    drafter = HeadsDrafter(make_head(target, kind, torch.arange(40, 140)))
    expected = [decode_plainly(target, prompt, NEW_TOKENS) for prompt in PROMPTS]
    decoder = Decoder(target, drafter, 3)
    assert [r.tokens for r in decoder.generate(PROMPTS, GenerationParams(NEW_TOKENS))] == expected
    sampled = decoder.generate(PROMPTS, GenerationParams(40, SamplingParams(1.0), eos_token_ids=()))
    assert any(token < 40 or token >= 140 for result in sampled for token in result.tokens)
    assert all(
        40 <= token < 140
        for result in sampled
        for token, is_accepted in zip(result.tokens, result.accepted, strict=True)
        if is_accepted
    )


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_longest_block(kind: str) -> None:
    """Only a recursive head may draft further than it was trained for."""
    target = make_tiny_target()
    head = make_head(target, kind)
    if head.recursive:
        decoder = Decoder(target, HeadsDrafter(head), TRAINED_DRAFT_TOKENS + 2)
        results = decoder.generate(PROMPTS, GenerationParams(NEW_TOKENS))
        assert [r.tokens for r in results] == [decode_plainly(target, prompt, NEW_TOKENS) for prompt in PROMPTS]
    else:
        with pytest.raises(ValueError, match="num_draft_tokens=7: must be 1 to 6 with this drafter"):
            Decoder(target, HeadsDrafter(head), TRAINED_DRAFT_TOKENS + 1)
