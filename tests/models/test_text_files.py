"""Text of users: compressed or not, with every line end, and what is no UTF-8 is told with file, line and remedy."""

import bz2
import codecs
import gzip
import io
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.target.template import read_template
from models.text_files import decode, find_surrogate, numbered_lines, plain_name, read_text, require_words, tolerate


def _by_pyarrow(codec: str) -> Callable[[bytes], bytes]:
    def compress(data: bytes) -> bytes:
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, codec) as stream:
            stream.write(data)
        return sink.getvalue().to_pybytes()

    return compress


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": _by_pyarrow("zstd"),
    "lz4": _by_pyarrow("lz4"),
}
TEXT = '{"prompt": "안녕 é 😀"}\n\n{"a": 1}\n' * 500


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_compressed_files_are_read_by_their_content(tmp_path: Path, suffix: str) -> None:
    compressed = COMPRESSIONS[suffix](codecs.BOM_UTF8 + TEXT.encode())
    for name in (f"rows.jsonl.{suffix}", "rows.jsonl"):
        (tmp_path / name).write_bytes(compressed)
        assert read_text(tmp_path / name) == TEXT
        assert list(numbered_lines(tmp_path / name)) == list(enumerate(TEXT.splitlines(), start=1))
    two = COMPRESSIONS[suffix](b"a\n") + COMPRESSIONS[suffix](b"b\n")  # one behind another, as `cat` joins them
    (tmp_path / "two").write_bytes(two)
    assert [line for _, line in numbered_lines(tmp_path / "two")] == ["a", "b"]


@pytest.mark.parametrize("kept", [0.3, 0.99])
@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_a_compressed_file_cut_short(tmp_path: Path, suffix: str, kept: float) -> None:
    whole = COMPRESSIONS[suffix]("".join(f"{n} {hash(str(n))}\n" for n in range(20_000)).encode())
    path = tmp_path / "rows"
    path.write_bytes(whole[: int(len(whole) * kept)])
    for read in (read_text, lambda path: list(numbered_lines(path))):
        with pytest.raises(
            ValueError, match=r"rows: not a whole \w+ file \(.*\); fetch it or compress it again"
        ) as caught:
            read(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a\nb\xe9c\n", r"rows:2: not UTF-8 \(byte 0xe9 at place 2 of the line\).*iconv -f ENCODING"),
        (b"ab\n\xed\xa0\xbd\n", r"rows:2: not UTF-8 \(byte 0xed"),  # half of a pair, encoded
        ("a\nb\n".encode("utf-16"), "rows: UTF-16 text; write it as UTF-8: iconv -f UTF-16 "),
        (codecs.BOM_UTF16_BE + "a".encode("utf-16-be"), "rows: UTF-16 text"),
        ("a\n".encode("utf-32"), "rows: UTF-32 text; write it as UTF-8: iconv -f UTF-32 "),
        ("a\nb\n".encode("utf-16-le"), "rows:1: a NUL byte.*iconv -f UTF-16LE"),
        (b"a\nb\0c", "rows:2: a NUL byte"),
        (b"PK\x03\x04abc", "rows: a zip archive; unpack it"),
    ],
)
def test_what_is_no_text(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "rows").write_bytes(data)
    for read in (read_text, lambda path: list(numbered_lines(path))):
        with pytest.raises(ValueError, match=message) as caught:
            read(tmp_path / "rows")
        assert "\n" not in str(caught.value)
    (tmp_path / "rows").write_bytes(gzip.compress(data))
    if not data.startswith(b"PK"):
        with pytest.raises(ValueError, match=message):
            read_text(tmp_path / "rows")


@given(st.lists(st.text(st.characters(exclude_characters="\r\n\0\ufeff", exclude_categories=["Cs"])), min_size=1))
def test_lines_of_any_text(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    """Whatever ends them; other separators of Unicode end none."""
    path = tmp_path_factory.mktemp("lines") / "rows"
    for end in ("\n", "\r\n", "\r"):
        path.write_bytes("".join(line + end for line in lines).encode())
        assert [line for _, line in numbered_lines(path)][: len(lines)] == lines
        assert read_text(path) == "".join(line + "\n" for line in lines)
        assert decode(path.read_bytes(), "stdin") == read_text(path)


def test_a_very_long_line(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(b"x" * 20_000_000 + b"\ny\n")
    assert [len(line) for _, line in numbered_lines(tmp_path / "rows")] == [20_000_000, 1]


@pytest.mark.parametrize(
    ("name", "plain"),
    [("a.jsonl", "a"), ("a.jsonl.gz", "a"), ("a.b.jsonl.zst", "a.b"), ("a.parquet", "a"), ("a", "a"), ("a.gz", "a")],
)
def test_plain_names(name: str, plain: str) -> None:
    assert plain_name(Path("folder.gz") / name) == plain


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ("\ud83d", "the text"),
        ({"a": [1, {"b": "x\udc00"}]}, "a[1].b"),
        ({"a": {"\ud83d": 1}}, "the name '\\ud83d'"),
        ([["ok"], "\udfff"], "[1]"),
        ({"a": "😀", "b": [None, 1.5, b"\xff"]}, None),
    ],
)
def test_half_characters_are_found(value: object, where: str | None) -> None:
    assert find_surrogate(value) == where


def test_words_of_a_command_line() -> None:
    require_words(["data.path=안녕/é.jsonl", "--prompt", "😀"])
    with pytest.raises(ValueError, match=r"'data\.path=caf\\xe9' on the command line holds bytes that are no UTF-8"):
        require_words(["x", b"data.path=caf\xe9".decode("utf-8", "surrogateescape")])


def test_output_never_fails_half_way() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    tolerate(stream)
    stream.write("é 한")
    stream.flush()
    assert stream.buffer.getvalue() == b"\xe9 \\ud55c"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{{ messages }}\n\xe9", r"model\.chat_template=.* cannot be read \(.*own\.jinja:2: not UTF-8"),
        ("{{ messages }}".encode("utf-16"), "UTF-16 text"),
        (b"{{ messages\0 }}", "NUL byte"),
    ],
)
def test_chat_templates(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "own.jinja").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_template(str(tmp_path / "own.jinja"))


def test_a_template_with_a_byte_order_mark(tmp_path: Path) -> None:
    """The mark is no part of what is rendered."""
    (tmp_path / "own.jinja").write_bytes(codecs.BOM_UTF8 + b"{{ messages }}")
    assert read_template(str(tmp_path / "own.jinja")) == "{{ messages }}"


def test_without_pyarrow_a_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"reading a gzip file needs pyarrow"):
        read_text(path)
