"""When a sequence ends: EOS ids, stop strings, the length limit. The first stop wins, and nothing after it counts.

Stop strings are those of transformers' `StopStringCriteria`: a token ends the sequence when one of them ends in that
token, wherever it began, in the prompt as well. What a token writes is what the tokenizer writes for it behind other
text; a special token writes its own name, such as "<|im_end|>".

Owns the incremental text as well.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from transformers import StopStringCriteria

# invalid: the target's logits were no numbers, so no token could follow
FinishReason = Literal["eos", "stop", "length", "invalid"]

REPLACEMENT = "\ufffd"  # what a tokenizer decodes an unfinished UTF-8 character to


class Detokenizer(Protocol):
    """The part of a transformers tokenizer that is needed here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Text of these tokens."""
        ...


@dataclass
class IncrementalText:
    """Text of a growing list of tokens, a piece at a time, never half a character.

    A piece is decoded together with the tokens of the piece before it, because many tokenizers treat the first token of
    a text in a way of their own. Special tokens give no text.
    """

    tokenizer: Detokenizer
    text: str = ""
    _tokens: list[int] = field(default_factory=list)  # from the piece before the last on
    _num_settled: int = 0  # of these, tokens whose text is out

    def add(self, token: int) -> str:
        """Take in one token and return the text it completes, "" while a character is unfinished."""
        self._tokens.append(token)
        settled = self.tokenizer.decode(self._tokens[: self._num_settled], skip_special_tokens=True)
        everything = self.tokenizer.decode(self._tokens, skip_special_tokens=True)
        piece = everything[len(settled) :]
        if not piece or piece.endswith(REPLACEMENT):
            return ""
        del self._tokens[: self._num_settled]
        self._num_settled = len(self._tokens)
        self.text += piece
        return piece


class TokenBytes:
    """What each token of a tokenizer writes behind other text, as `StopStringCriteria` has it: UTF-8, or parts of it.

    The criterion reads the whole vocabulary first; here a token is read when it is met, and remembered.
    """

    PREFIXES = ("abcdef", "a", "e", "the", "0", ".")  # what tokens are read behind: the first that comes back as it is

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a transformers tokenizer. ValueError for one that does not tell what its tokens write."""
        self.tokenizer = tokenizer
        self._mode = StopStringCriteria._get_stop_string_matching_mode(tokenizer)
        self._known: dict[int, bytes | None] = {}
        self.special_ids = frozenset(tokenizer.all_special_ids)
        for prefix in self.PREFIXES:
            self._prefix, self._prefix_ids = prefix, tokenizer(prefix, add_special_tokens=False)
            tokens = tokenizer.convert_ids_to_tokens(self._prefix_ids["input_ids"])
            if prefix in tokenizer.convert_tokens_to_string(tokens):
                return
        raise ValueError(
            f"stop_strings with {type(tokenizer).__name__}, of which none of {', '.join(self.PREFIXES)} comes back as "
            "it is: the text of its tokens cannot be told; stop at eos_token_ids instead."
        )

    def of(self, token: int) -> bytes | None:
        """None for an id that the tokenizer does not have."""
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def length(self, stop_string: str) -> int:
        """How many tokens back the criterion looks for this stop string."""
        return len(stop_string) if self._mode is None else len(stop_string.encode())

    def _read(self, token: int) -> bytes | None:
        name = self.tokenizer.convert_ids_to_tokens(token) if token < len(self.tokenizer) else None
        if name is None:
            return None
        alone: Any = _OneToken(self.tokenizer, name, token, self._prefix_ids)
        ((written,), _) = StopStringCriteria.clean_tokenizer_vocab(alone, self._prefix, self._mode)
        return written if isinstance(written, bytes) else written.encode()


@dataclass(frozen=True)
class _OneToken:
    """A tokenizer with a single token in its vocabulary."""

    tokenizer: Any
    name: str
    index: int
    prefix_ids: Any

    def get_vocab(self) -> dict[str, int]:
        return {self.name: self.index}

    def __call__(self, text: str, add_special_tokens: bool) -> Any:
        return self.prefix_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


class _Begin(NamedTuple):
    """Where a stop string begins: in this output token, behind `offset` bytes of it. Below 0: in the prompt."""

    place: int
    offset: int


class _StopStrings:
    """The end of one row's text, as far back as a stop string may reach."""

    def __init__(self, stop_strings: Sequence[str], token_bytes: TokenBytes, prompt: Sequence[int]) -> None:
        self._stops = [stop.encode() for stop in stop_strings]
        self._token_bytes = token_bytes
        reach = max(map(token_bytes.length, stop_strings))
        self._pieces: deque[bytes | None] = deque(map(token_bytes.of, prompt[-reach:]), maxlen=reach)
        self._num_added = 0

    def add(self, token: int) -> _Begin | None:
        """Where the first of the stop strings begins that end in this new token."""
        self._pieces.append(self._token_bytes.of(token))
        self._num_added += 1
        last = self._pieces[-1]
        if last is None:
            return None
        pieces: list[bytes] = []  # back to an id without text, the last token first
        for piece in reversed(self._pieces):
            if piece is None:
                break
            pieces.append(piece)
        text = b"".join(reversed(pieces))
        old = len(text) - len(last)
        places = [text.find(stop, max(0, old - len(stop) + 1)) for stop in self._stops]
        if not (places := [place for place in places if place >= 0]):
            return None
        left = len(text) - min(places)  # from the beginning of the stop string on
        for back, piece in enumerate(pieces):
            if left <= len(piece):
                return _Begin(self._num_added - 1 - back, len(piece) - left)
            left -= len(piece)
        raise AssertionError("a stop string begins in its own text")


class StopChecker:
    """Ends one sequence. `reason` is None until it has ended."""

    def __init__(
        self,
        max_new_tokens: int,
        eos_token_ids: Collection[int],
        stop_strings: Sequence[str],
        token_bytes: TokenBytes | None,
        prompt: Sequence[int] = (),
    ) -> None:
        """`token_bytes` is needed for stop strings alone, which may begin in the prompt."""
        self.remaining = max_new_tokens
        self.reason: FinishReason | None = None
        self._begin: _Begin | None = None
        self._eos_token_ids = frozenset(eos_token_ids)
        self._token_bytes = token_bytes
        self._stops: _StopStrings | None = None
        if stop_strings:
            assert token_bytes is not None
            self._stops = _StopStrings(stop_strings, token_bytes, prompt)

    def add(self, token: int) -> bool:
        """Take in one emitted token; True when the sequence ends with it. EOS goes before stop string before length."""
        self.remaining -= 1
        if self._stops is not None:
            self._begin = self._stops.add(token)
        if token in self._eos_token_ids:
            self.reason = "eos"
        elif self._begin is not None:
            self.reason = "stop"
        elif self.remaining <= 0:
            self.reason = "length"
        return self.reason is not None

    def text(self, tokens: Sequence[int], tokenizer: Detokenizer) -> str:
        """Text of all tokens that were added, without special tokens, cut before the stop string."""
        if self.reason != "stop":
            return tokenizer.decode(list(tokens), skip_special_tokens=True)
        assert self._begin is not None
        assert self._token_bytes is not None
        place, offset = self._begin
        if place < 0:
            return ""
        before = tokenizer.decode(list(tokens[:place]), skip_special_tokens=True)
        if offset == 0 or tokens[place] in self._token_bytes.special_ids:
            return before
        rest = [token for token in tokens[place:] if token not in self._token_bytes.special_ids]
        tail = b"".join(self._token_bytes.of(token) or b"" for token in rest)[offset:]
        # The last token may end inside a character.
        ending = tail.decode(errors="ignore").rstrip(REPLACEMENT)
        whole = tokenizer.decode(list(tokens), skip_special_tokens=True).rstrip(REPLACEMENT)
        if ending and whole.endswith(ending):
            return whole.removesuffix(ending)
        # The tokenizer writes these tokens otherwise together (such as "n't"): without the token's own beginning.
        head = (self._token_bytes.of(tokens[place]) or b"")[:offset]
        return before + head.decode(errors="ignore")
