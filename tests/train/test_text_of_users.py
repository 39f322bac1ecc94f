"""Prompts and sources in other encodings, damaged, or with half characters: file, line and remedy in one line."""

import gzip
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from eval.frontier.questions import task_name
from models.files import write_text
from tests.models.test_text_files import COMPRESSIONS
from train.answers.answers import Answer, write_answers
from train.data.prompts import DataOptions, Prompt, load_prompts

ROOT = Path(__file__).parents[2]
ROWS = [{"prompt": f"안녕 {n}", "x": {"a": n}} for n in range(20)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def load(path: Path, source: str = "jsonl", **options: Any) -> list[Prompt]:
    return load_prompts(DataOptions(source, str(path), **options))


def contents(prompts: list[Prompt]) -> set[str]:
    return {prompt.content() for prompt in prompts}


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_compressed_prompts(tmp_path: Path, suffix: str) -> None:
    """As a file, in a folder, as a split of a known set; and what the task is called in tables."""
    path = tmp_path / f"train.jsonl.{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](LINES.encode()))
    expected = {row["prompt"] for row in ROWS}
    assert contents(load(path)) == contents(load(tmp_path)) == expected
    assert contents(load(tmp_path, "hub", prompt_column="prompt")) == expected
    assert {prompt.place for prompt in load(path)} == {f"{path}:{n}" for n in range(1, 21)}
    assert task_name("auto", "jsonl", str(path)) == "train"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "\\ud83d"}', r"rows\.jsonl:2: prompt holds half of a character"),
        (b'{"prompt": "a", "answer": "x\\uDC00"}', r"rows\.jsonl:2: answer holds half"),
        (b'{"prompt": "a", "tests": [{"b": "\\ud83d\\ud83d"}]}', r"rows\.jsonl:2: tests\[0\]\.b holds half"),
        (b'{"prompt": "a", "\\ud83d": 1}', r"rows\.jsonl:2: the name '\\ud83d' holds half"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', r":2: messages\[0\]\.content holds half"),
        (b'{"prompt": "caf\xe9"}', r"rows\.jsonl:2: not UTF-8 \(byte 0xe9 at place 16"),
        (b'{"prompt": "a\0"}', r"rows\.jsonl:2: a NUL byte"),
        (b'{"prompt": ' + b"[" * 100_000 + b'"', r"rows\.jsonl:2: not JSON \(.*recursion"),
        (b'{"prompt": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}", r"rows\.jsonl:2: not JSON \(.*recursion"),
        (b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}", r"rows\.jsonl:2: not JSON \(Exceeds the limit"),
        (b'[{"prompt": "a"}]', r"rows\.jsonl:2: found a list, not an object"),
    ],
)
def test_rows_that_are_none(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "ok"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path / "rows.jsonl")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_escapes_that_spell_whole_characters(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "\\ud83d\\ude00 \\u0000 \\\\ud83d"}\n')
    assert contents(load(tmp_path / "rows.jsonl")) == {"😀 \0 \\ud83d"}


def test_a_compressed_file_cut_short(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(LINES.encode())[:-10])
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz: not a whole gzip file"):
        load(tmp_path / "rows.jsonl.gz")


def test_parquet_with_text_that_is_no_utf8(tmp_path: Path) -> None:
    text = pyarrow.array([b"ok", b"caf\xe9"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": text}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"rows\.parquet: a text in the rows from 1 on is no UTF-8 \(.*byte 0xe9\)"):
        load(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"x = 1\ny = '\xe9'\n", r"m\.py:2: not utf-8 \(byte 0xe9\); write it as UTF-8, or name its encoding"),
        (b"# -*- coding: nope -*-\n", r"m\.py:1: unknown encoding.*; write it as UTF-8"),
        (b"x = 1\0\n", r"m\.py: .*\(source code string cannot contain null bytes\)"),
        (b"x = " + b"(" * 250 + b")" * 250, r"m\.py:1: not Python"),
        (b"x = " + b"-" * 100_000 + b"1", r"m\.py: Python cannot read it \(.+\); leave it out"),
    ],
)
def test_sources_that_python_cannot_read(tmp_path: Path, source: bytes, message: str) -> None:
    (tmp_path / "m.py").write_bytes(source)
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path, "stdlib")
    assert "\n" not in str(caught.value)


def test_a_source_in_an_encoding_that_it_names(tmp_path: Path) -> None:
    body = "".join(f"    a{n} = '\xe9'\n" for n in range(12))
    (tmp_path / "m.py").write_bytes(f"# -*- coding: latin-1 -*-\ndef f():\n{body}".encode("latin-1"))
    assert any("é" in prompt.content() + (prompt.answer or "") for prompt in load(tmp_path, "stdlib"))


def test_what_is_written_never_fails_half_way(tmp_path: Path) -> None:
    """Not that such text comes so far: it is refused where it is read."""
    answer = Answer("a\ud83d", "chat", "train", [1], [2], "stop")
    write_answers(tmp_path / "answers", [answer])
    assert json.loads((tmp_path / "answers").read_text(encoding="utf-8")) == asdict(answer)
    write_text(tmp_path / "text", json.dumps({"x": "\udc00 안"}, ensure_ascii=False))
    assert json.loads((tmp_path / "text").read_text(encoding="utf-8")) == {"x": "\udc00 안"}


def test_bytes_on_the_command_line(tmp_path: Path) -> None:
    words = (sys.executable, "-m", "train.regenerate", "+model=tiny", b"data.path=caf\xe9")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    done = subprocess.run(words, capture_output=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2
    (line,) = done.stderr.decode().strip().splitlines()
    assert line.startswith(r"error: 'data.path=caf\xe9' on the command line holds bytes that are no UTF-8")
    assert list(tmp_path.iterdir()) == []
