"""Every reference solution of MBPP and HumanEval earns the reward. Slow, and on files that are not part of the project.

FORETOKEN_MBPP=mbpp.jsonl FORETOKEN_HUMANEVAL=HumanEval.jsonl pytest -m slow tests/eval/rewards/test_references.py
"""

import json
import os
from pathlib import Path

import pytest

from eval.rewards.code import make_program
from eval.rewards.jail.sandbox import Limits, Sandbox

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("variable", "solution"), [("FORETOKEN_MBPP", "code"), ("FORETOKEN_HUMANEVAL", "canonical_solution")]
)
@pytest.mark.timeout(3600)
def test_references_are_paid(variable: str, solution: str) -> None:
    if variable not in os.environ:
        pytest.skip(f"{variable} does not name the set's .jsonl file")
    rows = [json.loads(line) for line in Path(os.environ[variable]).read_text().splitlines()]
    programs = [make_program(row.get("prompt", ""), row[solution], row) for row in rows]
    outcomes = Sandbox(Limits(cpu_s=20, wall_s=120)).run_all(programs)
    unpaid = {
        row["task_id"]: outcome for row, outcome in zip(rows, outcomes, strict=True) if outcome.status != "passed"
    }
    assert unpaid == {}
    print(f"{len(rows)} references paid")
