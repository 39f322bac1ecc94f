"""When a sequence ends: EOS ids, stop strings, the length limit. The first stop wins, and nothing after it counts.

Owns the incremental text as well, because a stop string may begin in one token and end in another.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

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


class StopChecker:
    """Ends one sequence. `reason` is None until it has ended."""

    def __init__(
        self,
        max_new_tokens: int,
        eos_token_ids: Collection[int],
        stop_strings: Sequence[str],
        tokenizer: Detokenizer | None,
    ) -> None:
        """`tokenizer` is needed for stop strings alone."""
        self.remaining = max_new_tokens
        self.reason: FinishReason | None = None
        self.stop_at: int | None = None  # where in `text.text` the stop string begins
        self._eos_token_ids = frozenset(eos_token_ids)
        self._stop_strings = tuple(stop_strings)
        self.text = IncrementalText(tokenizer) if stop_strings and tokenizer is not None else None

    def add(self, token: int) -> bool:
        """Take in one emitted token; True when the sequence ends with it. EOS goes before stop string before length."""
        self.remaining -= 1
        if token in self._eos_token_ids:
            self.reason = "eos"
        elif self.text is not None and self._completes_stop_string(self.text, token):
            self.reason = "stop"
        elif self.remaining <= 0:
            self.reason = "length"
        return self.reason is not None

    def _completes_stop_string(self, text: IncrementalText, token: int) -> bool:
        piece = text.add(token)
        if not piece:
            return False
        # A match ends in the new piece, so it begins less than its own length before it.
        new_from = len(text.text) - len(piece)
        places = [text.text.find(stop, max(0, new_from - len(stop) + 1)) for stop in self._stop_strings]
        self.stop_at = min((place for place in places if place >= 0), default=None)
        return self.stop_at is not None
