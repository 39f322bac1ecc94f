"""The automaton against a count by hand over all texts, its size, and what a memory shares and forgets."""

import random

import pytest

from models.drafters.text.suffix import Memory, SuffixDrafter, SuffixReader
from models.drafters.text.suffix_automaton import MAX_COUNTED, ROOT, SuffixAutomaton
from models.target.tiny import make_tiny_target

COUNT = 6


class Plain:
    """The same by counting over every token ever read, with the text of its row before it."""

    def __init__(self, num_rows: int) -> None:
        self.texts: list[list[int]] = [[] for _ in range(num_rows)]
        self.events: list[tuple[list[int], int]] = []  # (what stood before, token)

    def extend(self, row: int, token: int) -> None:
        self.events.append((list(self.texts[row]), token))
        self.texts[row].append(token)

    def match(self, context: list[int]) -> list[int]:
        """The longest ending of the context that something has followed."""
        for start in range(len(context) + 1):
            if self.followers(context[start:]):
                return context[start:]
        return []

    def followers(self, ending: list[int]) -> dict[int, tuple[int, int]]:
        """token -> (how often it followed, when last)."""
        found: dict[int, tuple[int, int]] = {}
        for time, (before, token) in enumerate(self.events):
            if not ending or before[-len(ending) :] == ending:
                found[token] = (found.get(token, (0, 0))[0] + 1, time)
        return found

    def walk(self, row: int, min_match: int, min_probability: float) -> list[int]:
        context, tokens, probability = self.texts[row], [], 1.0
        while len(tokens) < COUNT:
            context = self.match(context)
            if len(context) < min_match:
                break
            followers = self.followers(context)
            token = max(followers, key=lambda token: followers[token])
            probability *= followers[token][0] / sum(count for count, _ in followers.values())
            if probability < min_probability:
                break
            tokens.append(token)
            context = [*context, token]
        return tokens


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 6])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_walks_are_those_counted_by_hand(vocab_size: int, num_rows: int) -> None:
    """After every token of random texts that grow side by side, copies of earlier parts among them."""
    rng = random.Random(10 * vocab_size + num_rows)
    num_walks = 0
    for _ in range(4):
        plain, automaton = Plain(num_rows), SuffixAutomaton()
        states = [ROOT] * num_rows
        for _ in range(MAX_COUNTED if vocab_size == 1 else 60):
            row = rng.randrange(num_rows)
            tokens = [rng.randrange(vocab_size)]
            if rng.random() < 0.1 and (source := rng.choice(plain.texts)):
                start = rng.randrange(len(source))
                tokens = source[start : start + 5]
            for token in tokens if vocab_size > 1 else tokens[:1]:
                plain.extend(row, token)
                states[row] = automaton.extend(states[row], token)
            for one in range(num_rows):
                assert automaton.lengths[automaton.match(states[one])] == len(plain.match(plain.texts[one]))
            limits = rng.choice([1, 2, 4]), rng.choice([0.0, 0.3, 0.6])
            assert automaton.walk(states[row], COUNT, *limits) == plain.walk(row, *limits)
            num_walks += 1
    assert num_walks > 100


@pytest.mark.parametrize("vocab_size", [1, 2, 50])
def test_size_is_linear(vocab_size: int) -> None:
    """At most 2 n - 1 states and 3 n - 4 edges (Blumer et al. 1985), in two texts as in one."""
    rng = random.Random(0)
    automaton = SuffixAutomaton()
    states = [ROOT, ROOT]
    for _ in range(2000):
        row = rng.randrange(2)
        states[row] = automaton.extend(states[row], rng.randrange(vocab_size))
    assert automaton.num_tokens == 2000
    assert len(automaton.lengths) <= 2 * 2000 - 1
    assert sum(map(len, automaton.edges)) <= 3 * 2000 - 4


def test_a_long_loop_goes_on() -> None:
    """Where each token ends as many repeated strings as the text is long, and not all of them are counted."""
    automaton, state = SuffixAutomaton(), ROOT
    for place in range(20 * MAX_COUNTED):
        state = automaton.extend(state, place % 2)
    assert automaton.walk(state, 5, 1, 0.9) == [0, 1, 0, 1, 0]


def read(reader: SuffixReader, tokens: str) -> SuffixReader:
    reader.read([ord(token) for token in tokens])
    return reader


def drafted(reader: SuffixReader, count: int = 4) -> str:
    return "".join(map(chr, reader.propose(count)))


def test_the_most_frequent_continuation() -> None:
    """Of two the more frequent; of equals the later; of matches the longest."""
    assert drafted(read(SuffixReader(1, 0.0, None), "abXabXabYab"), 1) == "X"
    assert drafted(read(SuffixReader(1, 0.0, None), "abXabYab"), 1) == "Y"
    assert drafted(read(SuffixReader(1, 0.0, None), "cabXdabYdabYcab"), 1) == "X"
    assert drafted(read(SuffixReader(3, 0.0, None), "abXabXabYab"), 1) == ""
    text = "1abX2abX3abY4ab"
    assert drafted(read(SuffixReader(1, 0.7, None), text)) == ""
    assert drafted(read(SuffixReader(1, 0.6, None), text)) == "X"
    assert drafted(read(SuffixReader(1, 0.3, None), text)) == "X3ab"
    assert drafted(read(SuffixReader(3, 0.0, None), text)) == ""


def test_other_rows_are_drafted_from_where_they_match_more() -> None:
    memory = Memory(1000)
    read(SuffixReader(1, 0.0, memory), "the quick brown fox")
    row = read(SuffixReader(1, 0.0, memory), "a quick br")
    assert drafted(row, 6) == "own fo"
    assert drafted(read(SuffixReader(1, 0.0, None), "a quick br")) == ""
    own = read(SuffixReader(1, 0.0, memory), "n brun n br")
    assert drafted(own, 2) == "un"  # its own match is as long as any


def test_a_full_memory_is_cleared() -> None:
    """Rows that were in it go on with their own text, and fill the new one."""
    memory = Memory(10)
    first = read(SuffixReader(1, 0.0, memory), "abcdefgh")
    second = read(SuffixReader(1, 0.0, memory), "cd")
    assert drafted(second, 2) == "ef"
    read(second, "e")
    assert memory.automaton.num_tokens == 1
    assert drafted(second, 2) == ""
    assert drafted(first, 2) == ""
    read(first, "ab")
    assert drafted(first, 2) == "cd"
    assert memory.automaton.num_tokens == 3
    assert drafted(read(SuffixReader(1, 0.0, memory), "a"), 1) == "b"


def test_a_drafter_shares_one_memory_until_it_forgets() -> None:
    drafter = SuffixDrafter(make_tiny_target(), 1, 0.0, 1000)
    read(drafter.make_reader(), "abc")
    assert drafted(read(drafter.make_reader(), "ab"), 1) == "c"
    drafter.forget()
    assert drafted(read(drafter.make_reader(), "ab"), 1) == ""
    alone = SuffixDrafter(make_tiny_target(), 1, 0.0)
    read(alone.make_reader(), "abc")
    assert drafted(read(alone.make_reader(), "ab"), 1) == ""


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((0, 0.1, 0), r"drafter.min_match=0 must be at least 1"),
        ((1, 1.5, 0), r"drafter.min_probability=1.5 must lie between 0 and 1"),
        ((1, 0.1, -1), r"drafter.remembered_tokens=-1 must be at least 0"),
    ],
)
def test_limits_out_of_range(limits: tuple[int, float, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SuffixDrafter(make_tiny_target(), *limits)
