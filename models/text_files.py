"""Text that a user gives, in files, on standard input or as words of a command: UTF-8, or told in a line.

Files may be compressed (gzip, bzip2, xz, Zstandard, LZ4), which is seen by their first bytes and not by their names.
Errors name the file, the line and the remedy. Knows nothing of what the text means.
"""

from __future__ import annotations

import codecs
import io
import lzma
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

# First bytes of a file, and what reads it: a codec of pyarrow's, or lzma.
XZ = "xz"
MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\xfd7zXZ\x00": XZ,
}
ARCHIVES = {b"PK\x03\x04": "zip", b"7z\xbc\xaf\x27\x1c": "7z", b"Rar!": "rar"}
# Longest first: the mark of UTF-32 begins as that of UTF-16.
OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
# What compressed files are called.
SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".lz4")
SURROGATE = re.compile("[\ud800-\udfff]")
SHOWN = 40


def plain_name(path: Path) -> str:
    """The file's name without its suffix, and without that of a compression before: train of train.jsonl.gz."""
    return Path(path.stem).stem if path.suffix in SUFFIXES else path.stem


def read_text(path: Path) -> str:
    """A whole text file. ValueError where it is no UTF-8 text, or damaged; OSError where it cannot be read."""
    with _opened(path) as file:
        return decode(file.read(), str(path))


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, line) without the line's end, which is a line feed, a carriage return or both. Errors as `read_text`."""
    number = 0
    with _opened(path) as file:
        _refuse_other_marks(file.peek(4)[:4], str(path))  # type: ignore[attr-defined]
        for raw in file:
            # In JSON and in templates a carriage return can only end a line.
            for part in raw.removesuffix(b"\n").removesuffix(b"\r").split(b"\r"):
                number += 1
                if number == 1:
                    part = part.removeprefix(codecs.BOM_UTF8)
                yield number, _decode_line(part, f"{path}:{number}")


def decode(data: bytes, name: str) -> str:
    """Bytes as text, without a byte order mark. ValueError that names the line of what is no UTF-8."""
    _refuse_other_marks(data[:4], name)
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode()
        fault = text.find("\0")
        place = f"{name}:{text.count(chr(10), 0, fault) + 1}"
    except UnicodeDecodeError as error:
        first = data.rfind(b"\n", 0, error.start) + 1
        number = data.count(b"\n", 0, error.start) + 1
        raise _not_utf8(f"{name}:{number}", data[error.start], error.start - first) from None
    if fault >= 0:
        raise _has_nul(place)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def find_surrogate(value: object, where: str = "") -> str | None:
    """Where in a value of JSON a lone surrogate stands, such as `tests[0].name`; None where there is none.

    JSON can spell half of a character ("\\ud83d"), which is no text: nothing can encode, tokenise or write it.
    """
    if isinstance(value, str):
        return (where or "the text") if SURROGATE.search(value) else None
    if isinstance(value, Mapping):
        for key, inner in value.items():
            name = f"{where}.{key}" if where else str(key)
            if SURROGATE.search(str(key)):
                return f"the name {key!a}"
            if (found := find_surrogate(inner, name)) is not None:
                return found
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for index, inner in enumerate(value):
            if (found := find_surrogate(inner, f"{where}[{index}]")) is not None:
                return found
    return None


def require_words(words: Sequence[str]) -> None:
    """ValueError for a word of a command line that holds bytes which are no UTF-8 (Python reads them as surrogates)."""
    for word in words:
        if SURROGATE.search(word):
            raise ValueError(
                f"{_shown(word)} on the command line holds bytes that are no UTF-8; type it in a UTF-8 terminal "
                "(LC_ALL=C.UTF-8), and rename a file whose name is not UTF-8"
            )


def tolerate(stream: TextIO) -> None:
    """What the stream's own encoding lacks is written as an escape from now on: no output fails half way."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed. ValueError where they are damaged, or lie in an archive."""
    with path.open("rb") as raw:
        start = raw.peek(8)[:8]
        for magic, name in ARCHIVES.items():
            if start.startswith(magic):
                raise ValueError(f"{path}: a {name} archive; unpack it, and give the file itself (or compress by gzip)")
        codec = next((codec for magic, codec in MAGIC.items() if start.startswith(magic)), None)
        if codec is None:
            yield raw
            return
        try:
            yield _decompressed(raw, codec)
        except (OSError, EOFError, lzma.LZMAError) as error:
            reason = " ".join(str(error).split())[:120]
            raise ValueError(f"{path}: not a whole {codec} file ({reason}); fetch it or compress it again") from error


def _decompressed(raw: BinaryIO, codec: str) -> BinaryIO:
    if codec == XZ:
        return cast(BinaryIO, io.BufferedReader(lzma.LZMAFile(raw)))
    try:
        import pyarrow  # Python 3.11 knows no Zstandard; the library alone does without
    except ImportError as error:
        raise ValueError(
            f"{raw.name}: reading a {codec} file needs pyarrow (pip install pyarrow), or unpack it"
        ) from error
    return cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(raw, codec)))


def _refuse_other_marks(start: bytes, name: str) -> None:
    for mark, encoding in OTHER_MARKS.items():
        if start.startswith(mark):
            raise ValueError(f"{name}: {encoding} text; write it as UTF-8: iconv -f {encoding} -t UTF-8 OLD > NEW")


def _decode_line(raw: bytes, place: str) -> str:
    try:
        line = raw.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(place, raw[error.start], error.start) from None
    if "\0" in line:
        raise _has_nul(place)
    return line


def _not_utf8(place: str, byte: int, index: int) -> ValueError:
    return ValueError(
        f"{place}: not UTF-8 (byte {byte:#04x} at place {index + 1} of the line); write it as UTF-8: iconv -f ENCODING "
        "-t UTF-8 OLD > NEW, with ENCODING such as LATIN1, CP1252 or CP949"
    )


def _has_nul(place: str) -> ValueError:
    return ValueError(
        f"{place}: a NUL byte, so this is no UTF-8 text; give a text file, or write UTF-16 as UTF-8: iconv -f UTF-16LE "
        "-t UTF-8 OLD > NEW"
    )


def _shown(word: str) -> str:
    """With the bytes themselves, as \\xe9."""
    shown = repr(word.encode("utf-8", "surrogateescape"))[1:] if _is_escaped(word) else ascii(word)
    return shown if len(shown) <= 2 * SHOWN else shown[:SHOWN] + "..." + shown[-SHOWN:]


def _is_escaped(word: str) -> bool:
    return all("\udc80" <= found <= "\udcff" for found in SURROGATE.findall(word))
