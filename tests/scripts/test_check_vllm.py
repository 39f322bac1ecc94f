"""The parts of the check against vLLM that need no vLLM: what counts as agreement, and that its side stands alone."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.peers import check_vllm
from scripts.peers.check_vllm import compare, main

SCRIPT = Path(check_vllm.__file__)
OURS: dict[str, Any] = {"num_draft_tokens": 2, "tokens": [[5, 6, 7], [8]], "acceptance_at": [0.5, 0.25]}


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({}, []),
        ({"acceptance_at": [0.519, 0.231]}, []),
        ({"acceptance_at": [0.5, 0.28]}, ["place 2: 0.250 of ours kept, 0.280 of vLLM's"]),
        ({"acceptance_at": [0.47, 0.25]}, ["place 1: 0.500 of ours kept, 0.470 of vLLM's"]),
        ({"tokens": [[5, 9, 7], [8]]}, ["prompt 0: texts differ from token 1 on"]),
        ({"tokens": [[5, 6, 7], [8, 2]]}, ["prompt 1: texts differ in length (1 and 2 tokens)"]),
    ],
)
def test_agreement(
    changes: dict[str, Any], problems: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = {**OURS, **changes}
    assert compare(OURS, theirs) == problems
    for side, found in (("ours", OURS), ("theirs", theirs)):
        (tmp_path / f"{side}.json").write_text(json.dumps(found))
    assert main(["compare", str(tmp_path)]) == bool(problems)
    captured = capsys.readouterr()
    assert "greedy texts are equal (4 tokens)" in captured.out
    assert captured.err.splitlines() == [f"error: {problem}" for problem in problems]


def test_another_number_of_places_or_prompts_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare(OURS, {**OURS, "acceptance_at": [0.5]})
    with pytest.raises(ValueError, match="shorter"):
        compare(OURS, {**OURS, "tokens": [[5, 6, 7]]})


def test_vllms_side_needs_nothing_of_ours() -> None:
    """Its environment has neither this project nor what it depends on."""
    tree = ast.parse(SCRIPT.read_text())
    named = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in named} <= sys.stdlib_module_names
    (theirs,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "decode_theirs")
    assert [node.module for node in ast.walk(theirs) if isinstance(node, ast.ImportFrom)] == ["vllm"]


def test_ours_needs_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ours", str(tmp_path)])
    assert "ours needs --checkpoint" in capsys.readouterr().err


def test_the_script_parses() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT.with_suffix(".sh"))], check=True)
