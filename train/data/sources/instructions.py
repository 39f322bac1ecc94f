"""Generated instruction prompts: every template, topic and passage is our own, so nothing is downloaded.

What is held out is a part of the *material*: held-out topics, people, places, passage genres and sums occur in no
training prompt, and some templates are held out as well. Which entries these are depends on their text alone, never on
the seed, so a head trained with one seed can be measured with another. Which held-out prompts are for selection and
which for the test, is decided by their content.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import TypeVar

from train.data.sources import arithmetic, english, korean, passages
from train.data.sources.korean import KoreanWord
from train.data.sources.record import Message, Prompt, content_of, digest, halve

Entry = TypeVar("Entry")
Turns = tuple[str, ...]
TRIES_PER_PROMPT = 30


@dataclass(frozen=True)
class Family:
    """Templates of one kind. `genres` (passages) or `problems` (sums) give the text that the instruction is about."""

    name: str
    task: str
    language: str
    num_prompts: int
    templates: tuple[Turns, ...]
    genres: tuple[passages.Genre, ...] = ()
    problems: tuple[arithmetic.Problem, ...] = ()
    max_sentences: int | None = None


def _single(templates: Sequence[str]) -> tuple[Turns, ...]:
    return tuple((template,) for template in templates)


FAMILIES = (
    Family("explain", "chat", "en", 1100, _single(english.EXPLAIN)),
    Family("list", "chat", "en", 700, _single(english.LIST)),
    Family("creative", "chat", "en", 500, _single(english.CREATIVE)),
    Family("follow-up", "chat", "en", 300, english.FOLLOW_UPS),
    Family("function", "code", "en", 650, _single(english.CODE_FUNCTION)),
    Family("class", "code", "en", 250, _single(english.CODE_CLASS)),
    Family("summarise", "summarise", "en", 700, _single(passages.SUMMARISE), genres=passages.GENRES),
    Family("rewrite", "rewrite", "en", 700, _single(passages.REWRITE), genres=passages.GENRES, max_sentences=3),
    Family("sums", "maths", "en", 2000, _single(arithmetic.WORKING), problems=arithmetic.PROBLEMS),
    Family("explain-ko", "chat_ko", "ko", 350, _single(korean.EXPLAIN_KO)),
    Family("list-ko", "chat_ko", "ko", 200, _single(korean.LIST_KO)),
    Family("creative-ko", "chat_ko", "ko", 200, _single(korean.CREATIVE_KO)),
    Family("follow-up-ko", "chat_ko", "ko", 80, korean.FOLLOW_UPS_KO),
    Family("summarise-ko", "chat_ko", "ko", 100, _single(korean.SUMMARISE_KO), genres=korean.GENRES_KO),
    Family("rewrite-ko", "chat_ko", "ko", 100, _single(korean.REWRITE_KO), genres=korean.GENRES_KO, max_sentences=3),
    Family("sums-ko", "chat_ko", "ko", 120, _single(arithmetic.WORKING_KO), problems=arithmetic.PROBLEMS_KO),
)

# What a slot may be filled with. Entities are split into training and held-out ones; fillers are shared.
ENTITIES: dict[str, dict[str, tuple[str, ...]]] = {
    "en": {
        "topic": english.TOPICS,
        "person": english.PEOPLE,
        "town": english.TOWNS,
        "task": english.CODE_TASKS,
        "thing": english.CODE_THINGS,
        "project": passages.PROJECTS,
        "product": passages.PRODUCTS,
        "animal": passages.ANIMALS,
        "item": arithmetic.ITEMS,
    },
    "ko": {
        "topic": korean.TOPICS_KO,
        "person": korean.PEOPLE_KO,
        "town": korean.TOWNS_KO,
        "item": arithmetic.ITEMS_KO,
    },
}
FILLERS: dict[str, dict[str, tuple[str, ...]]] = {
    "en": {
        "audience": english.AUDIENCES,
        "length": english.LENGTHS,
        "count": english.COUNTS,
        "language": english.CODE_LANGUAGES,
        "number": passages.NUMBERS,
        "month": passages.MONTHS,
    },
    "ko": {"audience": korean.AUDIENCES_KO, "length": korean.LENGTHS_KO, "count": korean.COUNTS_KO},
}
SECOND_OF = {"topic2": "topic", "other": "person"}


def split_pool(pool: Sequence[Entry], heldout_fraction: float, minimum: int = 1) -> tuple[list[Entry], list[Entry]]:
    """(training, held-out) entries: the smallest digests are held out, so a larger fraction holds out a superset."""
    if heldout_fraction == 0:
        return list(pool), []
    ranked = sorted(dict.fromkeys(pool), key=_entry_digest)
    heldout = ranked[: min(max(minimum, round(heldout_fraction * len(ranked))), len(ranked) - 1)]
    return [entry for entry in pool if entry not in heldout], heldout


def _entry_digest(entry: object) -> str:
    return digest("pool", entry.text if isinstance(entry, arithmetic.Problem) else repr(entry))


def heldout_entities(language: str, heldout_fraction: float) -> list[str]:
    """Every topic, person, place ... of the language that no training prompt may mention."""
    return [entry for pool in ENTITIES[language].values() for entry in split_pool(pool, heldout_fraction, 2)[1]]


def _deck(pool: Sequence[Entry], rng: random.Random) -> Iterator[Entry]:
    """The pool's entries without end, each as often as the others: shuffled, dealt out, shuffled again."""
    while True:
        yield from rng.sample(pool, len(pool))


class _Writer:
    """Writes prompts of one family, for training or held out, from that side's share of the material."""

    def __init__(self, family: Family, is_heldout: bool, heldout_fraction: float, seed: int) -> None:
        self.family, self.is_heldout = family, is_heldout
        self.rng = rng = random.Random(f"{family.name} {'heldout' if is_heldout else 'train'} {seed}")
        self.word = KoreanWord if family.language == "ko" else str
        side = int(is_heldout)
        pools = {slot: split_pool(pool, heldout_fraction, 2)[side] for slot, pool in ENTITIES[family.language].items()}
        self.decks = {slot: _deck(pool, rng) for slot, pool in (pools | FILLERS[family.language]).items()}
        # A held-out prompt takes a template of either side, half the time each; its topic is always a held-out one.
        self.templates = [_deck(part, rng) for part in split_pool(family.templates, heldout_fraction)[: side + 1]]
        self.genres = _deck(split_pool(family.genres, heldout_fraction, 2)[side], rng) if family.genres else None
        self.problems = _deck(split_pool(family.problems, heldout_fraction, 2)[side], rng) if family.problems else None

    def _fill(self, template: str, slots: dict[str, str]) -> str:
        """Fill the template; a slot that has a value already keeps it, so that turns agree with each other."""
        for slot in [name for _, name, _, _ in Formatter().parse(template) if name]:
            if slot not in slots:
                deck = self.decks[SECOND_OF.get(slot, slot)]
                slots[slot] = self.word(next(entry for entry in deck if entry not in slots.values()))
        return template.format(**slots).strip()

    def _problem(self, problem: arithmetic.Problem, slots: dict[str, str]) -> tuple[str, str]:
        a, b, c = (self.rng.randint(*limits) for limits in (problem.a, problem.b, problem.c))
        numbers = {"a": a, "b": b, "c": c, "ab": a * b, "bc": b * c, "abc": a * b * c, "a_plus_b": a + b}
        slots |= {name: self.word(number) for name, number in numbers.items()}
        return self._fill(problem.text, slots), str(problem.solve(a, b, c))

    def _passage(self, genre: passages.Genre, slots: dict[str, str]) -> str:
        for place in genre:
            for pattern in place:
                self._fill(pattern, slots)
        return passages.compose(genre, slots, self.rng, self.family.max_sentences)

    def write(self) -> Prompt:
        slots: dict[str, str] = {}
        turns = [self._fill(turn, slots) for turn in next(self.rng.choice(self.templates))]
        answer = None
        if self.genres is not None:
            turns[-1] = f"{turns[-1]}\n\n{self._passage(next(self.genres), slots)}"
        if self.problems is not None:
            text, answer = self._problem(next(self.problems), slots)
            turns[-1] = f"{text} {turns[-1]}".strip()
        roles = ("user", "assistant")
        messages: tuple[Message, ...] = tuple({"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns))
        prompt_id = f"{self.family.name}-{digest(*turns)}"
        split = halve(content_of(messages)) if self.is_heldout else "train"
        return Prompt(prompt_id, self.family.task, messages, split=split, answer=answer)


def _mentions(language: str, entities: Sequence[str]) -> re.Pattern[str]:
    """Finds any of the entities: whole words in English, anywhere in Korean, where particles follow without a space."""
    alternatives = "|".join(re.escape(entity) for entity in entities)
    return re.compile(rf"\b(?:{alternatives})\b" if language == "en" else alternatives, re.IGNORECASE)


def _write_family(
    family: Family, is_heldout: bool, num_prompts: int, heldout_fraction: float, seed: int
) -> list[Prompt]:
    """At most `num_prompts` distinct prompts; a training prompt that mentions a held-out entity is dropped."""
    if num_prompts == 0:
        return []
    writer = _Writer(family, is_heldout, heldout_fraction, seed)
    forbidden = heldout_entities(family.language, heldout_fraction) if not is_heldout else []
    mentions = _mentions(family.language, forbidden) if forbidden else None
    found: dict[str, Prompt] = {}
    for _ in range(num_prompts * TRIES_PER_PROMPT):
        prompt = writer.write()
        if mentions is None or not mentions.search(prompt.content()):
            found.setdefault(prompt.content(), prompt)
        if len(found) == num_prompts:
            break
    return list(found.values())


def generate(seed: int, heldout_fraction: float, languages: Sequence[str] = ("en", "ko")) -> list[Prompt]:
    """All generated prompts of these languages, family by family; the same for the same arguments, on every machine."""
    prompts: list[Prompt] = []
    for family in FAMILIES:
        if family.language in languages:
            num_heldout = round(family.num_prompts * heldout_fraction)
            prompts += _write_family(family, False, family.num_prompts - num_heldout, heldout_fraction, seed)
            prompts += _write_family(family, True, num_heldout, heldout_fraction, seed)
    return prompts
