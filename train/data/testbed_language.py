"""The testbed's language: mostly free wording, and a few digits that the prompt decides.

A prompt gives each name a digit: `<start> Red 7 Blue 2 Green 5 Gold 1 :`. An answer rambles, says each name once, in
the prompt's order, with its digit behind it, and ends. Its words follow a Markov chain, and so does where a name falls.
Two dialects share words and rules and differ in the chain: the target's, and the draft's, in which moreover a digit is
drawn blindly most of the time.

Everything here is a function of its seed. Must know nothing of models.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

PAD, START, END, COLON = "<pad>", "<start>", "<end>", ":"
DIGITS = tuple("0123456789")
NAMES = ("red", "blue", "green", "gold")
KEYS = tuple(name.capitalize() for name in NAMES)  # what prompts call them, so that answers can be told from prompts
WORDS = (
    *("we", "they", "you", "all", "walk", "sing", "run", "sleep", "talk", "rest", "slowly", "gladly"),
    *("often", "again", "now", "here", "there", "home", "away", "over", "under", "by", "and", "while"),
)
TOKENS = (PAD, START, END, COLON, *DIGITS, *KEYS, *NAMES, *WORDS)
IDS = {token: i for i, token in enumerate(TOKENS)}
NAME_IDS = frozenset(IDS[name] for name in NAMES)

SPLITS = ("train", "selection", "test")
# Prompts whose digits add up to a multiple of this are held out, an odd multiple for selection and an even one for the
# test; all others are for training. In each split, each digit is as likely as any other.
HELDOUT_EVERY = 5
# Words before a name: at least, and at most.
MIN_WORDS, MAX_WORDS = 3, 6
# Longest row: the prompt, every part at its longest, and the end.
MAX_TOKENS = 2 + 2 * len(NAMES) + len(NAMES) * (MAX_WORDS + 2) + 1
_COMPLETION = re.compile(" ".join(f"(?:(?:{'|'.join(WORDS)}) )+{name} ([0-9])" for name in NAMES))


@dataclass(frozen=True)
class Dialect:
    """How one of the two models speaks.

    sharpness: spread of the log-probabilities of the chain, 0 for all words alike. strangeness: in [0, 1], how far the
    chain is from the target's. name_chance: of a name where a name or a word may come. blind_share: of digits that are
    drawn uniformly, whatever the prompt says.
    """

    sharpness: float = 1.5
    strangeness: float = 0.0
    name_chance: float = 0.3
    blind_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("strangeness", "name_chance", "blind_share"):
            if not 0.0 <= (value := getattr(self, name)) <= 1.0:
                raise ValueError(f"{name}={value}: must be in [0, 1].")

    def chain(self) -> np.ndarray:
        """Probabilities [words + 1, words] of a word after each word and, last, at the start of a part."""
        shape = (len(WORDS) + 1, len(WORDS))
        common, own = (np.random.default_rng(number).standard_normal(shape) for number in (1, 2))
        mixed = common * np.sqrt(1.0 - self.strangeness**2) + own * self.strangeness
        weights = np.exp(self.sharpness * mixed)
        return weights / weights.sum(axis=1, keepdims=True)


TARGET_DIALECT = Dialect()
DRAFT_DIALECT = Dialect(strangeness=0.8, name_chance=0.45, blind_share=0.6)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, blanks between them. No token stands for unknown words: such text is an error."""
    backend = Tokenizer(WordLevel(vocab=IDS))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, bos_token=START, eos_token=END)


def draw_answers(count: int, seed: int, split: str) -> list[str]:
    """Digits of `count` prompts of a split, one string a prompt, without repetition as long as there are enough."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is unknown; choose one of {', '.join(SPLITS)}")
    digits = np.indices((len(DIGITS),) * len(NAMES)).reshape(len(NAMES), -1).T
    multiple, rest = np.divmod(digits.sum(axis=1), HELDOUT_EVERY)
    heldout = np.where(multiple % 2 == 1, SPLITS.index("selection"), SPLITS.index("test"))
    pool = digits[np.where(rest == 0, heldout, SPLITS.index("train")) == SPLITS.index(split)]
    rng = np.random.default_rng(seed)
    rounds = [rng.permutation(pool) for _ in range(-(-count // len(pool)))]
    drawn = np.concatenate([pool[:0], *rounds])[:count]
    return ["".join(DIGITS[digit] for digit in row) for row in drawn]


def prompt_ids(answer: str) -> list[int]:
    """The prompt that gives the names these digits."""
    pairs = [part for pair in zip(KEYS, answer, strict=True) for part in pair]
    return [IDS[token] for token in (START, *pairs, COLON)]


def prompt_text(answer: str) -> str:
    """The same prompt as text."""
    return " ".join(TOKENS[token] for token in prompt_ids(answer))


def testbed_prompts(count: int, seed: int, split: str) -> list[dict[str, Any]]:
    """Rows with `prompt`, its text (the tokenizer gives back its ids), and `answer`, its digits in the names' order.

    The prompts of the splits are disjoint for any seeds.
    """
    return [{"prompt": prompt_text(answer), "answer": answer} for answer in draw_answers(count, seed, split)]


def write_completions(answers: Sequence[str], dialect: Dialect, seed: int, num_sighted: int = 0) -> list[list[int]]:
    """One completion in a dialect for each prompt, its end included. In the first `num_sighted` no digit is blind."""
    rng = np.random.default_rng(seed)
    cumulated = dialect.chain().cumsum(axis=1).tolist()
    sighted = replace(dialect, blind_share=0.0)
    completions = []
    for place, answer in enumerate(answers):
        uniforms = iter(rng.random(2 * MAX_TOKENS).tolist())
        completions.append(_write(answer, sighted if place < num_sighted else dialect, cumulated, uniforms))
    return completions


def _write(answer: str, dialect: Dialect, cumulated: list[list[float]], uniforms: Iterator[float]) -> list[int]:
    ids = []
    for name, digit in zip(NAMES, answer, strict=True):
        row = len(WORDS)
        for place in range(MAX_WORDS):
            if place >= MIN_WORDS and next(uniforms) < dialect.name_chance:
                break
            row = min(bisect(cumulated[row], next(uniforms)), len(WORDS) - 1)
            ids.append(IDS[WORDS[row]])
        if next(uniforms) < dialect.blind_share:
            digit = DIGITS[int(next(uniforms) * len(DIGITS))]
        ids += [IDS[name], IDS[digit]]
    return [*ids, IDS[END]]


def read_digits(text: str) -> str | None:
    """The digits that a completion's text gives the names, in their order; None where it is not well formed.

    Well formed: every name once, in order, with words before it and one digit behind it, and nothing else. How many
    words, is not asked.
    """
    match = _COMPLETION.fullmatch(" ".join(text.split()))
    return "".join(match.groups()) if match else None


def decisive_places(tokens: Sequence[int]) -> list[bool]:
    """Which tokens of a completion the prompt decides: those behind a name."""
    return [False, *(token in NAME_IDS for token in tokens[:-1])][: len(tokens)]
