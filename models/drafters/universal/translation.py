"""From a target's ids to a draft model's, and from drafted text back to the target's ids.

The target's settled ids are the truth and are never rewritten. The draft model reads the text that they spell in its
own tokenization, and that one changes as text is joined to it: "th" + "e" becomes "the". So the last ids before new
text are tokenized anew together with it, and whatever comes out different counts as changed. Nothing here decides what
is emitted: a bad translation makes drafts worse, never the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...target.model import Target
from .spelling import NO_TOKEN, Spelling, num_incomplete_bytes

LOOK_BEHIND_TOKENS = 16  # ids before new text that are tokenized anew with it, at first; more where these change early
PROBE = "a"


@dataclass
class Transcript:
    """One row's text so far in the draft model's ids."""

    ids: list[int]
    sources: list[bytes]  # what each of them was made from
    num_fixed: int  # first ids that stand, whatever text comes: BOS, special tokens and what is before them
    target_tail: list[int] = field(default_factory=list)  # the target's last ids that are text, LOOK_BEHIND at most
    num_target_tokens: int = 0
    num_dropped: int = 0  # ids that are gone from the beginning, for want of context
    pending: bytes = b""  # the end of the text that no id stands for, such as part of a character
    is_at_start: bool = True


class Translator:
    """Between the vocabularies of one target and one draft model."""

    def __init__(self, draft: Target, target: Target) -> None:
        """ValueError for tokenizers whose tokens have no bytes of their own."""
        self.spelling = _spelling_of(draft)
        self.target_spelling = _spelling_of(target)
        self.prefix = _prefix_ids(draft)
        self.eos_ids = frozenset(draft.eos_token_ids)
        # Special tokens that mean the same: by name, and by role. A tokenizer may have more than its model has rows.
        theirs = {name: index for name, index in self.spelling.specials.items() if index < draft.num_tokens}
        ours = {name: index for name, index in self.target_spelling.specials.items() if index < target.num_tokens}
        their_eos = [index for index in draft.eos_token_ids if index < draft.num_tokens]
        our_eos = [index for index in target.eos_token_ids if index < target.num_tokens]
        self.special_to_target = {theirs[name]: ours[name] for name in theirs.keys() & ours.keys()}
        self._special_to_draft = {ours[name]: theirs[name] for name in theirs.keys() & ours.keys()}
        if their_eos and our_eos:
            self.special_to_target = dict.fromkeys(their_eos, our_eos[0]) | self.special_to_target
            self._special_to_draft = dict.fromkeys(our_eos, their_eos[0]) | self._special_to_draft
        self._target_prefix = frozenset(_prefix_ids(target))

    def start(self) -> Transcript:
        """An empty text."""
        return Transcript(list(self.prefix), [b""] * len(self.prefix), len(self.prefix))

    def append(self, transcript: Transcript, target_ids: Sequence[int]) -> None:
        """Take in more of the target's ids.

        A special token becomes the draft model's of the same name or role, and is left out where there is none.
        """
        data = b""
        transcript.num_target_tokens += len(target_ids)
        for index in target_ids:
            spelled = self.target_spelling.spell([index])
            if spelled is not None:
                data += spelled
                transcript.target_tail.append(index)
                continue
            self._write(transcript, data)
            data, transcript.target_tail = b"", []
            is_opening = transcript.is_at_start and index in self._target_prefix and bool(self.prefix)
            if index in self._special_to_draft and not is_opening:
                transcript.ids.append(self._special_to_draft[index])
                transcript.sources.append(b"")
                transcript.num_fixed = len(transcript.ids)
                transcript.pending = b""
        self._write(transcript, data)
        del transcript.target_tail[:-LOOK_BEHIND_TOKENS]

    def to_target(self, transcript: Transcript, data: bytes) -> list[int]:
        """Ids of drafted text that follows the transcript's, as the target's tokenizer would go on writing.

        Where a token of the joined text lies across the seam, what it has behind the seam is written with the longest
        tokens that fit. Cut at the first character that the target's vocabulary lacks, and before one that is begun at
        the end.
        """
        spelling, settled = self.target_spelling, self._settled(transcript)
        if transcript.pending.endswith(b" "):
            data = data.removeprefix(b" ")  # the draft model has not seen this one, and began a word
        joined = settled + data
        joined = joined[: len(joined) - num_incomplete_bytes(joined)]
        if len(joined) <= len(settled):
            return []
        ids = _behind(spelling, spelling.encode(joined), settled)
        if ids is None:  # a tokenizer that changes the text: "\n" is a space to it, say
            ids = spelling.encode(joined[len(settled) :])
        known = (place for place, index in enumerate(ids) if spelling.spell([index]) is None)
        return ids[: next(known, len(ids))]

    def ends_token(self, transcript: Transcript, data: bytes) -> bool:
        """Whether the target's tokenizer too ends a token where the transcript ends, when this text follows."""
        settled, end = self._settled(transcript), 0
        for index in self.target_spelling.encode(settled + data):
            if end >= len(settled):
                break
            spelled = self.target_spelling.spell([index])
            if spelled is None:
                return False
            end += len(spelled)
        return end == len(settled)

    def _settled(self, transcript: Transcript) -> bytes:
        """The end of the target's text, whole characters."""
        tail = [self.target_spelling.spelled[index] or b"" for index in transcript.target_tail]
        return b"".join(tail[_window_start(tail, LOOK_BEHIND_TOKENS, 0) :])

    def _write(self, transcript: Transcript, data: bytes) -> None:
        """Join text to the draft model's ids."""
        ids = transcript.ids
        if not data:
            return
        if transcript.is_at_start:
            transcript.is_at_start = False
            if self.target_spelling.has_dummy_prefix:
                data = data.removeprefix(b" ")
            if self.spelling.has_dummy_prefix:
                data = b" " + data
        num_behind = LOOK_BEHIND_TOKENS
        while True:
            start = _window_start(transcript.sources, num_behind, transcript.num_fixed)
            old = ids[start:]
            pieces = self.spelling.pieces(b"".join(transcript.sources[start:]) + transcript.pending + data)
            num_same = num_common(old, [index for index, _ in pieces if index != NO_TOKEN])
            # A window that begins inside a word is tokenized in another way: agreement shows that it does not matter.
            if num_same >= len(old) // 2 or start == transcript.num_fixed:
                break
            num_behind *= 2
        del ids[start:], transcript.sources[start:]
        transcript.pending = b""
        for index, source in pieces:
            transcript.pending += source
            if index != NO_TOKEN:
                ids.append(index)
                transcript.sources.append(transcript.pending)
                transcript.pending = b""


def _behind(spelling: Spelling, ids: list[int], settled: bytes) -> list[int] | None:
    """What of `ids` spells text behind `settled`; None where they spell another text than that."""
    end = 0
    for place, index in enumerate(ids):
        if end == len(settled):
            return ids[place:]
        spelled = spelling.spell([index])
        if spelled is None or spelled[: len(settled) - end] != settled[end : end + len(spelled)]:
            return None
        if end + len(spelled) > len(settled):
            return spelling.longest_match(spelled[len(settled) - end :]) + ids[place + 1 :]
        end += len(spelled)
    return [] if end == len(settled) else None


def _window_start(parts: Sequence[bytes], num_behind: int, num_fixed: int) -> int:
    """Where the last num_behind parts of a text begin, or more of them: never inside a character."""
    start = max(num_fixed, len(parts) - num_behind)
    while start > num_fixed and start < len(parts) and parts[start][:1] and parts[start][0] & 0xC0 == 0x80:
        start -= 1
    return start


def num_common(old: Sequence[int], new: Sequence[int]) -> int:
    """How many ids two texts begin with in common."""
    pairs = enumerate(zip(old, new, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(old), len(new)))


def _spelling_of(model: Target) -> Spelling:
    try:
        return Spelling(model.tokenizer, model.num_tokens, frozenset(model.eos_token_ids))
    except ValueError as error:
        raise ValueError(f"the tokenizer of {model.name!r} cannot be translated: {error}") from error


def _prefix_ids(model: Target) -> list[int]:
    """What the tokenizer puts before a text, such as BOS."""
    with_special = model.tokenizer.encode(PROBE, add_special_tokens=True)
    without = model.tokenizer.encode(PROBE, add_special_tokens=False)
    for place in range(len(with_special) - len(without) + 1):
        if with_special[place : place + len(without)] == without:
            return with_special[:place]
    return []
