"""1 when a written program passes all its tests, else 0: MBPP, HumanEval, and sets with their columns.

MBPP's columns: `test_list`, and `test_setup_code`, `test_imports` where there are any. HumanEval's: `test`,
`entry_point`, and its `prompt`, which trl passes as `prompts`; if that was reworded, the original as `code_prompt`.
Programs are run by `sandbox` alone; here they are only text.
"""

import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import fields
from typing import Any, get_args

from eval.rewards.jail.sandbox import Limits, Outcome, Program, Sandbox, Status
from eval.rewards.loading import Reward, answer_texts, completion_text
from eval.rewards.reading.bounded import BoundedProcess, OutOfBounds
from eval.rewards.reading.columns import name_of, python_of, tests_of

NAME = "code"
EXTRACTION = "eval.rewards.reading.extraction"
READER = BoundedProcess()


def make_reward(workers: int = 2, unsafe: bool = False, limits: Mapping[str, Any] | None = None) -> Reward:
    """The reward. workers: programs run at a time. limits: keywords of `sandbox.Limits`. unsafe: see `Sandbox`."""
    names = [field.name for field in fields(Limits)]
    if unknown := set(limits or {}) - set(names):
        raise ValueError(f"limits has no {', '.join(sorted(unknown))}; it takes {', '.join(names)}")
    if importlib.util.find_spec("markdown_it") is None:
        raise ValueError("reward=code needs markdown-it-py: pip install 'foretoken[rl]'")
    sandbox = Sandbox(Limits(**(limits or {})), workers, unsafe)
    print(f"reward {NAME}: {sandbox.describe()}", flush=True)

    def code(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_answers: Sequence[str] | None = None,
        log_extra: Callable[[str, list[str]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """trl's signature; 1.0 or 0.0 a completion, and the outcomes to the log."""
        rows = [
            {name: values[index] for name, values in columns.items() if is_column(values, len(completions))}
            for index in range(len(completions))
        ]
        texts = answer_texts(completions, completion_answers)
        outcomes = sandbox.run_all([make_program(*row) for row in zip(prompts, texts, rows, strict=True)])
        log_outcomes(outcomes, log_extra, log_metric)
        return [float(outcome.status == "passed") for outcome in outcomes]

    return code


def is_column(values: object, count: int) -> bool:
    """Whether this keyword is one of the dataset's columns."""
    return isinstance(values, list | tuple) and len(values) == count


def log_outcomes(
    outcomes: Sequence[Outcome],
    log_extra: Callable[[str, list[str]], None] | None,
    log_metric: Callable[[str, float], None] | None,
) -> None:
    """Each outcome beside its completion, and how many ended in which way."""
    if log_extra is not None:
        log_extra("code_outcome", [f"{outcome.status} {outcome.message}".strip() for outcome in outcomes])
    if log_metric is not None and outcomes:
        counts = Counter(outcome.status for outcome in outcomes)
        for status in get_args(Status):
            log_metric(f"code/{status}", counts[status] / len(outcomes))


def make_program(prompt: object, text: str, row: Mapping[str, Any]) -> Program:
    """The program to run for one completion. ValueError when the row has the columns of neither kind."""
    row = {name: value for name, value in row.items() if not is_empty(value)}
    if "test_list" in row:
        tests = tests_of(row["test_list"], NAME, "test_list")
        setup = python_of(row.get("test_setup_code", ""), NAME, "test_setup_code")
        return mbpp_program(text, tests, setup, tests_of(row.get("test_imports", []), NAME, "test_imports"))
    if "test" in row and "entry_point" in row:
        test, entry_point = python_of(row["test"], NAME, "test"), name_of(row["entry_point"], NAME, "entry_point")
        stub = row.get("code_prompt") or find_code(completion_text(prompt), [entry_point])
        return humaneval_program(python_of(stub, NAME, "code_prompt", is_whole=False), text, test, entry_point)
    raise ValueError(
        f"reward {NAME!r} needs the columns test_list (as MBPP), or test and entry_point (as HumanEval); this row has "
        f"{', '.join(sorted(row)) or 'none'}"
    )


def is_empty(value: object) -> bool:
    """Whether a column has nothing for this row, as where another kind of row has it."""
    return value is None or (isinstance(value, Sized) and len(value) == 0)


def mbpp_program(text: str, test_list: Sequence[str], setup: str = "", imports: Sequence[str] = ()) -> Program:
    """The completion's code, then MBPP's asserts."""
    called = re.findall(r"([A-Za-z_]\w*)\s*\(", "\n".join(test_list))
    return Program(find_code(text, called), [*imports, setup, *test_list])


def humaneval_program(stub: str, text: str, test: str, entry_point: str) -> Program:
    """HumanEval's stub with the completion as its body, or, where that defines the function anew, behind it."""
    if not defines(stub, entry_point):
        raise ValueError(
            f"reward {NAME!r}: the prompt does not hold the function {entry_point!r} that its test calls; give "
            "HumanEval's own prompt as the column code_prompt"
        )
    answer = find_code(text, [entry_point])
    if defines(answer, entry_point):
        answer = "\n    pass\n\n" + answer
    else:
        answer = read_text("function_body", answer, stub, answer)
    # What the stub defines before the function is the judge's, too: tests compute with its helpers.
    helpers = re.split(rf"^(?:async\s+)?def\s+{re.escape(entry_point)}\b", stub, maxsplit=1, flags=re.M)[0]
    return Program(stub + answer, [helpers, f"{test}\n\ncheck({entry_point})"])


def find_code(text: str, names: Sequence[str]) -> str:
    """The program in a text that defines one of the names, see `extraction.extract_code`."""
    return read_text("extract_code", text, text, names)


def read_text(function: str, otherwise: str, *arguments: Any) -> str:
    """What this function of `extraction` makes of a text; `otherwise` for a text that it cannot read within bounds."""
    try:
        return READER.call(EXTRACTION, function, *arguments)
    except OutOfBounds:
        return otherwise


def defines(source: str, name: str) -> bool:
    """Whether a line at the margin defines the name; the text is not parsed, since parsing runs on it."""
    wanted = re.escape(name)
    return re.search(rf"^(?:(?:async\s+)?def|class)\s+{wanted}\b|^{wanted}\s*=(?!=)", source, re.M) is not None
