"""The bytes that a tokenizer's ids stand for, and ids for bytes: the meeting point of two vocabularies.

Bytes, not strings: a token may hold part of a character. A tokenizer's own `decode` and `encode` treat the first token
of a text in a way of their own (a space is added or dropped, special tokens are made of plain text); here every token
is read and written as it stands inside a text. The tokenizer itself is never changed.
"""

import json
import re
from typing import Any

from tokenizers import Tokenizer

NO_TOKEN = -1  # stands for a byte that the vocabulary cannot write
STRAY = re.compile("([\udc80-\udcff])")  # bytes outside any UTF-8 character, as Python's surrogateescape has them
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
UNWRITTEN = "\ufdd0"  # no character: no text contains it
UNSPACED = frozenset(".,!?")  # a WordPiece decoder writes these without the space before a word
KNOWN_DECODERS = "ByteLevel, Metaspace, ByteFallback, Replace and WordPiece"


class Spelling:
    """Both ways between the ids of one tokenizer and bytes.

    spelled[id]: its bytes inside a text; None for special tokens, unknown tokens, and ids that no token has.
    id_of: an id for each of these; of several the one that the tokenizer itself would write.
    """

    def __init__(self, tokenizer: Any, num_ids: int, control_ids: frozenset[int] = frozenset()) -> None:
        """num_ids: ids that the model can emit. control_ids: more ids that are not text, such as EOS ids.

        ValueError for a tokenizer whose tokens have no bytes of their own.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"tokenizer {type(tokenizer).__name__} has no tokenizers backend to read its tokens' bytes from: use "
                "a fast tokenizer."
            )
        settings = json.loads(backend.to_str())
        parts = _flatten(settings["decoder"])
        self.has_dummy_prefix = _drop_dummy_prefix(settings) or any(part["type"] == "WordPiece" for part in parts)
        spell = _speller(parts)
        special = {token["content"] for token in settings["added_tokens"] if token["special"]}
        _read_special_tokens_as_text(settings, special)
        settings.update(post_processor=None, truncation=None, padding=None)
        self._backend = Tokenizer.from_str(json.dumps(settings))
        unknown = settings["model"].get("unk_token")
        self.specials: dict[str, int] = {}
        self.spelled: list[bytes | None] = [None] * num_ids
        for token, index in tokenizer.get_vocab().items():
            if token in special or index in control_ids:
                self.specials[token] = index
            elif index < num_ids and token != unknown and index != settings["model"].get("unk_id"):
                self.spelled[index] = spell(token) or None
        self.id_of = self._invert()
        self.longest_token_bytes = max(map(len, self.id_of), default=0)

    def encode(self, data: bytes) -> list[int]:
        """The ids of `pieces`."""
        return [index for index, _ in self.pieces(data)]

    def pieces(self, data: bytes) -> list[tuple[int, bytes]]:
        """Ids of this text as they would stand inside a longer one, each with the bytes that it was made from.

        Bytes that are no UTF-8 character are written one by one. NO_TOKEN: bytes that no token stands for, as spaces at
        the end are to a tokenizer of words. A character that is unknown to the tokenizer becomes its unknown token.
        """
        found: list[tuple[int, bytes]] = []
        for piece in STRAY.split(data.decode("utf-8", "surrogateescape")):
            if STRAY.match(piece):
                byte = bytes([ord(piece) - 0xDC00])
                found.append((self.id_of.get(byte, NO_TOKEN), byte))
            elif piece:
                found += self._pieces_of_text(piece)
        return found

    def _pieces_of_text(self, text: str) -> list[tuple[int, bytes]]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        spelled = [self.spelled[index] if index < len(self.spelled) else None for index in encoding.ids]
        exact = [part for part in spelled if part is not None]
        if b"".join(exact) == text.encode() and len(exact) == len(spelled):
            return list(zip(encoding.ids, exact, strict=True))
        found, end = [], 0  # a tokenizer that changes the text, or lacks a character of it
        for index, (_, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            found.append((index, text[end:stop].encode()))
            end = max(end, stop)
        return [*found, (NO_TOKEN, text[end:].encode())] if end < len(text) else found

    def spell(self, ids: list[int]) -> bytes | None:
        """Bytes of these ids; None if one of them has none."""
        parts = [self.spelled[index] if 0 <= index < len(self.spelled) else None for index in ids]
        known = [part for part in parts if part is not None]
        return b"".join(known) if len(known) == len(parts) else None

    def longest_match(self, data: bytes) -> list[int]:
        """Ids that spell `data`, the longest token first; cut where no token fits."""
        ids: list[int] = []
        while data:
            lengths = range(min(len(data), self.longest_token_bytes), 0, -1)
            length = next((length for length in lengths if data[:length] in self.id_of), 0)
            if length == 0:
                break
            ids.append(self.id_of[data[:length]])
            data = data[length:]
        return ids

    def _invert(self) -> dict[bytes, int]:
        self.id_of = {}
        twins: dict[bytes, list[int]] = {}
        for index, data in enumerate(self.spelled):
            if data is not None:
                twins.setdefault(data, []).append(index)
        inverted = {data: indices[0] for data, indices in twins.items()}
        for data, indices in twins.items():
            if len(indices) > 1 and (written := self.encode(data)) and len(written) == 1 and written[0] in indices:
                inverted[data] = written[0]
        return inverted


def num_incomplete_bytes(data: bytes) -> int:
    """Bytes at the end that begin a UTF-8 character and do not complete it, 0 to 3."""
    for length in range(1, min(3, len(data)) + 1):
        lead = data[-length]
        if lead & 0xC0 != 0x80:  # not a continuation byte
            needed = 2 if 0xC2 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4 if 0xF0 <= lead < 0xF5 else 1
            return length if needed > length else 0
    return 0


def _flatten(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a tokenizer's normalizer, pre-tokenizer or decoder."""
    if part is None:
        return []
    for key in ("decoders", "pretokenizers", "normalizers"):
        if key in part:
            return [step for child in part[key] for step in _flatten(child)]
    return [part]


def _drop_dummy_prefix(settings: dict[str, Any]) -> bool:
    """Take out, in place, what puts a space before a text; whether anything did."""
    is_there = False
    for part in _flatten(settings["pre_tokenizer"]):
        if part["type"] == "Metaspace" and part.get("prepend_scheme") != "never":
            part["prepend_scheme"], is_there = "never", True
        elif part["type"] == "ByteLevel" and part["add_prefix_space"]:
            part["add_prefix_space"], is_there = False, True
    kept = [part for part in _flatten(settings["normalizer"]) if part["type"] != "Prepend"]
    if len(kept) < len(_flatten(settings["normalizer"])):
        settings["normalizer"], is_there = {"type": "Sequence", "normalizers": kept}, True
    return is_there


def _read_special_tokens_as_text(settings: dict[str, Any], special: set[str]) -> None:
    """In place: a special token that is spelled out in a text is its letters."""
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] not in special]
    if settings["model"]["type"] == "Unigram":  # its vocabulary has them, too, and prefers them
        pieces = settings["model"]["vocab"]
        settings["model"]["vocab"] = [
            [UNWRITTEN + piece if piece in special else piece, score] for piece, score in pieces
        ]


def _speller(parts: list[dict[str, Any]]) -> Any:
    """A function from a token as its vocabulary writes it to its bytes inside a text."""
    by_type = {part["type"]: part for part in parts}
    if "ByteLevel" in by_type:
        byte_of = _byte_alphabet()

        def spell(token: str) -> bytes:
            if all(char in byte_of for char in token):
                return bytes(byte_of[char] for char in token)
            return token.encode()  # an added token is literal text

    elif "WordPiece" in by_type:
        prefix = by_type["WordPiece"]["prefix"]

        def spell(token: str) -> bytes:
            if token.startswith(prefix) and token != prefix:
                return token[len(prefix) :].encode()
            return (token if token in UNSPACED else f" {token}").encode()

    elif by_type.keys() & {"Metaspace", "ByteFallback", "Replace"}:
        replacements = [(part["pattern"].get("String"), part["content"]) for part in parts if part["type"] == "Replace"]
        replacements += [(part["replacement"], " ") for part in parts if part["type"] == "Metaspace"]
        has_bytes = "ByteFallback" in by_type

        def spell(token: str) -> bytes:
            if has_bytes and (match := BYTE_TOKEN.fullmatch(token)):
                return bytes([int(match[1], 16)])
            for old, new in replacements:
                token = token.replace(old, new) if old else token
            return token.encode()

    else:
        found = ", ".join(by_type) or "none"
        raise ValueError(
            f"a tokenizer whose decoder is {found} does not say which bytes its tokens stand for; known are "
            f"{KNOWN_DECODERS}."
        )
    return spell


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letter for each byte: itself where printable, else one of those from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}
