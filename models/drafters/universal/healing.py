"""Token healing: a settled text may end inside what the draft model would write as one token.

Behind " hel" the draft model has read the two tokens " he" and "l", which it never sees before "lo": it writes " hello"
as one. So the last ids, where their text begins a longer token, are taken back, and what is drafted first is the
likeliest id that begins with this text. An id counts only where the target's tokenizer too ends a token at the seam:
behind a settled " the" it is not " there", which the target would have written whole.

Nothing here decides what is emitted. Shape suffixes: D the draft model's vocabulary.
"""

from bisect import bisect_left, bisect_right

import torch
from torch import Tensor

from .translation import Transcript, Translator

MAX_TAKEN_BACK = 4  # ids at the end of a text
MAX_TRIED = 8  # likeliest ids whose seam is looked at


class Healer:
    """Finds the draft model's ids that go across the seam. Knows nothing of passes and caches."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        sorted_tokens = sorted(translator.spelling.id_of.items())
        self._tokens = [token for token, _ in sorted_tokens]
        self._ids_D = torch.tensor([index for _, index in sorted_tokens], dtype=torch.long)

    def num_taken_back(self, text: Transcript) -> int:
        """How many ids at the end some longer token could stand for; the first id of a text always stays."""
        most = 0 if text.pending else min(MAX_TAKEN_BACK, len(text.ids) - max(1, text.num_fixed))
        return next((num for num in range(most, 0, -1) if self._is_begun(b"".join(text.sources[-num:]))), 0)

    def across(self, text: Transcript, num_taken_back: int, logits_D: Tensor) -> int | None:
        """The likeliest id for the text of the last ids and more, by what follows the ids before them.

        None where nothing is likelier than the text as it stands, or nothing fits the target's settled tokens.
        """
        settled = b"".join(text.sources[-num_taken_back:])
        start, end = self._range(settled)
        ids_N = self._ids_D[start:end]
        ranked = logits_D.cpu()[ids_N].topk(min(MAX_TRIED, len(ids_N))).indices
        for index in ids_N[ranked].tolist():
            token = self._translator.spelling.spelled[index] or b""
            if token == settled:
                return None
            if self._translator.ends_token(text, token[len(settled) :]):
                return index
        return None

    def _is_begun(self, data: bytes) -> bool:
        """Whether a token begins with these bytes and is longer."""
        start, end = self._range(data)
        return end - start > (start < end and self._tokens[start] == data)

    def _range(self, data: bytes) -> tuple[int, int]:
        """Where the tokens that begin with these bytes are."""
        last = data + b"\xff" * self._translator.spelling.longest_token_bytes
        return bisect_left(self._tokens, data), bisect_right(self._tokens, last)
