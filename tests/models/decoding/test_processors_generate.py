"""Processors against transformers' own `generate`: the same greedy tokens, token by token and in blocks."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from models.processors.block import BlockProcessor
from models.processors.prefix import ProcessorParams, Processors
from models.target.tiny import make_tiny_target
from tests.models.decoding.scripted import random_prompts

WIDTH = 3  # drafted tokens
TARGET = make_tiny_target()


def decode(made: Processors, prompt: list[int], eos: tuple[int, ...], new_tokens: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < new_tokens and not (tokens and tokens[-1] in eos):
        logits_V = TARGET.logits(TARGET.hidden(torch.tensor([prompt + tokens])))[0, -1]
        tokens.append(int(made.apply(logits_V, prompt, tokens).argmax()))
    return tokens


def generate(prompt: list[int], eos: tuple[int, ...], new_tokens: int, **options: Any) -> list[int]:
    if "bad_words_ids" in options:
        options["bad_words_ids"] = [list(word) for word in options["bad_words_ids"]]
    output = TARGET.model.generate(
        torch.tensor([prompt]),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=list(eos),
        **options,
    )
    return output[0, len(prompt) :].tolist()


NEW_TOKENS = 32


def test_greedy_equals_generate() -> None:
    """Token by token, and in blocks of the output's own tokens at each place."""
    changes: Counter[str] = Counter()
    for prompt in random_prompts(3, longest=20):
        free = generate(prompt, (), NEW_TOKENS)
        ends = (free[4], free[9])
        words = ((free[0],), (free[1], free[2]), tuple(free[5:8]))
        bans = {"no_repeat_ngram_size": 2, "bad_words_ids": words, "min_new_tokens": 12}
        cases: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
            ("penalty", (), {"repetition_penalty": 1.5}),
            ("reward", (), {"repetition_penalty": 0.6}),
            ("no unigram twice", (), {"no_repeat_ngram_size": 1}),
            ("no bigram twice", (), {"no_repeat_ngram_size": 2}),
            ("bad words", ends, {"bad_words_ids": words}),
            ("minimum length", ends, {"min_new_tokens": 7}),
            ("all", ends, {"repetition_penalty": 1.2, **bans}),
        ]
        for name, eos, options in cases:
            made = Processors(ProcessorParams(**options), eos, TARGET.vocab_size)
            tokens = generate(prompt, eos, NEW_TOKENS, **options)
            assert decode(made, prompt, eos, NEW_TOKENS) == tokens, name
            check_blocks(made, prompt, tokens)
            first_eos = next((place for place, token in enumerate(free) if token in eos), NEW_TOKENS)
            changes[name] += tokens != free[: first_eos + 1]
    assert min(changes.values()) > 0, changes


def check_blocks(made: Processors, prompt: list[int], tokens: list[int]) -> None:
    """Blocks that begin anywhere in the output, and draft what follows, choose just that."""
    logits_TV = TARGET.logits(TARGET.hidden(torch.tensor([prompt + tokens])))[0, len(prompt) - 1 : -1]
    for start in range(len(tokens)):
        chosen = tokens[start : start + WIDTH + 1]
        logits_1TV = logits_TV[None, start : start + len(chosen)]
        block = BlockProcessor(made, [prompt], [tokens[:start]])
        got_1TV = block.target(logits_1TV, torch.tensor([chosen[:-1]]), [len(chosen) - 1])
        assert got_1TV[0].argmax(dim=-1).tolist() == chosen


def test_grammar_on_a_model() -> None:
    """One to four digits, then EOS: nothing else comes out of a random model, greedy or sampled."""
    eos = TARGET.eos_token_ids
    digits = TARGET.tokenizer.convert_tokens_to_ids(list("0123456789"))

    def number(prompt: Sequence[int], generated: Sequence[int]) -> list[int]:
        return [*(digits if len(generated) < 4 else []), *(eos if generated else [])]

    made = Processors(ProcessorParams(allowed_tokens=number), eos, TARGET.vocab_size)
    prompt = random_prompts(1, longest=9)[0]
    texts = [decode(made, prompt, eos, NEW_TOKENS)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        tokens: list[int] = []
        while not tokens or tokens[-1] not in eos:
            logits_V = TARGET.logits(TARGET.hidden(torch.tensor([prompt + tokens])))[0, -1]
            probs_V = made.apply(logits_V, prompt, tokens).softmax(dim=-1)
            tokens.append(int(torch.multinomial(probs_V, 1, generator=generator)))
        texts.append(tokens)
    assert len({tuple(tokens) for tokens in texts}) > 3
    for tokens in texts:
        assert tokens[-1] in eos
        assert 1 <= len(tokens[:-1]) <= 4
        assert TARGET.tokenizer.decode(tokens[:-1]).isdecimal()
