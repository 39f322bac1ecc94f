"""The program in an answer: every shape of a right answer is paid, and no shape pays a wrong one."""

import inspect
import time
from typing import Any

import pytest

from eval.rewards import code as rewards
from eval.rewards.code import find_code, mbpp_program
from eval.rewards.jail.sandbox import PLANS, Protection, Sandbox, probe
from eval.rewards.reading import extraction
from eval.rewards.reading.bounded import BoundedProcess
from eval.rewards.reading.extraction import extract_code, function_body

pytest.importorskip("markdown_it")

needs_sandbox = pytest.mark.skipif(
    not any(isinstance(probe(plan), Protection) for plan in PLANS), reason="nothing here can shut a program in"
)

# A program in two parts, so that shapes can take it apart. SIGN is + in a right one.
HELPER = "def negate(x):\n    return -x\n"
ADD = "def add(a, b):\n    return a SIGN b\n"
USES_HELPER = "def add(a, b):\n    return a SIGN -negate(b)\n"
DOCUMENTED = 'def add(a, b):\n    """Add.\n\n    ```\n    add(1, 2)\n    ```\n    """\n    return a SIGN b\n'
FENCE_AT_MARGIN = 'def add(a, b):\n    """\n```python\nadd(1, 2)\n```\n    """\n    return a SIGN b\n'
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(5, 5) == 10"]


def indented(code: str, by: str) -> str:
    return "".join(f"{by}{line}" if line.strip() else line for line in code.splitlines(keepends=True))


SHAPES = {
    "code alone": ADD,
    "fence": f"```python\n{ADD}```",
    "fence without a language": f"```\n{ADD}```",
    "text before and after": f"Here it is:\n\n```py\n{ADD}```\n\nIt adds `a` and `b`.\n",
    "text right against the fence": f"Here it is:\n```python\n{ADD}```\nThat is all.",
    "tildes": f"~~~python\n{ADD}~~~",
    "info string with attributes": f'```python title="add.py" linenums="1"\n{ADD}```',
    "info string in braces": f"```{{.python .numberLines}}\n{ADD}```",
    "capital language": f"```Python3\n{ADD}```",
    "longer fence": f"````python\n{ADD}````",
    "fence in a longer fence": f"````markdown\nSo:\n```python\n{ADD}```\n````",
    "fence in a longer fence without a language": f"`````\n```python\n{ADD}```\n`````",
    "fence in a docstring": f"```python\n{DOCUMENTED}```\nThat is all.",
    "fence at the margin of a docstring": f"```python\n{FENCE_AT_MARGIN}```\nThat is all.",
    "docstring with a fence, and no other": DOCUMENTED,
    "numbered list": f"1. First, this:\n\n   ```python\n{indented(ADD, '   ')}   ```\n\n2. Then call it.",
    "numbered list, two digits": f"10. This:\n    ```python\n{indented(ADD, '    ')}    ```\n",
    "bullet in a bullet": f"- a\n  - b\n\n    ```python\n{indented(ADD, '    ')}    ```\n",
    "indented fence outside of a list": f"So:\n  ```python\n{indented(ADD, '  ')}  ```\n",
    "code indented in its fence": f"```python\n{indented(ADD, '    ')}```",
    "quotation": f"> ```python\n{indented(ADD, '> ')}> ```\n",
    "closing fence without an opening one": f"{ADD}```\nThis adds two numbers.",
    "text, code, closing fence": f"Sure, here it is.\n{ADD}```\n",
    "closing fence, then another block": f"{ADD}```\nUse it so:\n```python\nprint(add(1, 2))\n```\n",
    "opening fence without a closing one": f"```python\n{ADD}",
    "half a closing fence": f"```python\n{ADD}``",
    "cut in what follows": f"```python\n{ADD}\n\ndef test_add():\n    assert add(1,",
    "cut in the text behind": f"```python\n{ADD}```\nThis function ret",
    "fence behind a text on its line": f"Sure! ```python\n{ADD}```\n",
    "fence at the end of the last line": f"```python\n{ADD.rstrip()}```\nThat is all.",
    "code on the fence's line": f"```python {ADD}```\n",
    "example at the end": f"```python\n{ADD}```\nUse it so:\n```python\nprint(add(1, 2))\n```",
    "tests at the end": f"```python\n{ADD}```\n\n```python\ndef test_add():\n    assert add(1, 2) == 3\n```",
    "shell at the beginning": f"```bash\npip install numpy\n```\n```python\n{ADD}```",
    "output at the end": f"```python\n{ADD}```\nOutput:\n```\n3\n```",
    "another language at the end": f"```python\n{ADD}```\nIn Java:\n```java\nclass add {{ }}\n```",
    "helper, then the program": f"First a helper:\n```python\n{HELPER}```\nThen:\n```python\n{USES_HELPER}```",
    "imports, then the program": "```python\nfrom operator import neg as negate\n```\n```python\n"
    + USES_HELPER
    + "```\n",
    "a trial, then the program": f"```python\ndef add(a, b):\n    return 0\n```\nNo:\n```python\n{ADD}```",
    "no fence, text around": f"This is the function you asked for.\n\n{ADD}\nIt's simple (and works: see above).\n",
    "no fence, a helper, text between": f"A helper:\n\n{HELPER}\nAnd the function:\n\n{USES_HELPER}\nDone",
    "no fence, indented": f"This is it:\n\n{indented(ADD, '    ')}\nThat's it.\n",
    "marks": f"[BEGIN]\n{ADD}[DONE]\nYou are an expert Python programmer",
    "marks, and a question of the model's own": f"[BEGIN]\n{ADD}[DONE]\nNext: [BEGIN]\ndef add(a):\n    pass\n[DONE]",
    "half of the marks": f"[BEGIN]\n{ADD}",
    "the other half": f"{ADD}[DONE]\n\nYou are an expert",
    "fence in marks": f"[BEGIN]\n```python\n{ADD}```\n[DONE]",
    "answer element": f"<answer>\n```python\n{ADD}```\n</answer>",
    "answer element without a fence": f"<answer>{ADD}</answer>",
    "pre and code": f'<pre><code class="language-python">{ADD}</code></pre>',
    "pre": f"So:<pre>\n{ADD}</pre>",
    "code element, escaped": "<code>\ndef add(a, b):\n    return a SIGN b if a &lt; 99 else 0\n</code>",
    "inline code": "Use `def add(a, b): return a SIGN b` for it.",
    "lambda in inline code": "Use `add = lambda a, b: a SIGN b` for it.",
    "session": "```\n>>> def add(a, b):\n...     return a SIGN b\n...\n>>> add(1, 2)\n3\n```",
    "tabs": f"```python\n{ADD.replace('    ', chr(9))}```",
    "tabs in a list": f"1. So:\n\n\t```python\n{indented(ADD, chr(9))}\t```\n",
    "carriage returns": f"Here:\n\n```python\n{ADD}```\nDone.".replace("\n", "\r\n"),
    "thought": f"```python\n{ADD}```",
    "decorated": f"```python\nimport functools\n\n@functools.cache\n{ADD}```",
}


def filled(shape: str, sign: str) -> str:
    return SHAPES[shape].replace("SIGN", sign)


@needs_sandbox
def test_every_shape_of_a_right_answer_is_paid() -> None:
    programs = [mbpp_program(filled(shape, "+"), TESTS) for shape in SHAPES]
    statuses = [outcome.status for outcome in Sandbox().run_all(programs)]
    assert [shape for shape, status in zip(SHAPES, statuses, strict=True) if status != "passed"] == []


@needs_sandbox
def test_no_shape_pays_a_wrong_answer() -> None:
    programs = [mbpp_program(filled(shape, "*"), TESTS) for shape in SHAPES]
    assert {outcome.status for outcome in Sandbox().run_all(programs)} == {"failed"}


@pytest.mark.parametrize(
    "text",
    [
        # The last definition is the answer, whatever came before it.
        "```python\ndef add(a, b):\n    return a + b\n```\nOr rather:\n```python\ndef add(a, b):\n    return 0\n```",
        # A fault in a whole block is the program's own.
        "```python\ndef add(a, b):\n    return a + b\n\nx = = 3\n```",
        "",
        "add",
    ],
)
def test_what_is_no_right_answer_stays_one(text: str) -> None:
    names: dict[str, Any] = {}
    try:
        exec(extract_code(text, ["add"]), names)
        assert names["add"](1, 2) != 3
    except (SyntaxError, NameError, KeyError):
        pass


def test_without_a_definition() -> None:
    assert extract_code("```\na = 1\n```\n```\nb = 1\n```", ["add"]) == "b = 1\n"
    assert extract_code("    return 1\n", ["add"]) == "    return 1\n"


STUB = "import math\n\n\ndef area(r):\n    ''' Area of a circle. '''\n"


@pytest.mark.parametrize(
    "text",
    [
        "    return math.pi * r * r\n",
        "    s = r * r\n    return math.pi * s\n\nThis computes the area.\n",
        "return math.pi * r * r",
        "s = r * r\nreturn math.pi * s\n",
        "s = r * r\n    return math.pi * s\n",  # without its first spaces
        "    return math.pi * r * r\n\n\ndef test(",
        "\treturn math.pi * r * r\n",
    ],
)
def test_body_of_a_stub(text: str) -> None:
    names: dict[str, Any] = {}
    exec(STUB + function_body(STUB, text), names)
    assert names["area"](1.0) == pytest.approx(3.14159, abs=1e-4)


QUICK = BoundedProcess(cpu_s=1.0)
HOSTILE = {
    "brackets": "(" * 50_000,
    "minus signs": "x = " + "-" * 90_000 + "1",
    "nested fences": "".join("`" * n + "\n" for n in range(300, 2, -1)),
    "nested lists": "".join("  " * n + "- a\n" for n in range(500)),
    "attributes": "x = a" + ".b" * 40_000,
    "f-strings": "f'{" * 5_000,
    "starts of code": "import a b\n" * 5_000,
    "unclosed strings": "'''\"\"\"\n" * 5_000,
    "elements": "<pre>" * 20_000,
    "brackets of a comparison": "if " + "{[(" * 60 + ":\n",
    "blocks": "".join(" " * n + "if 1:\n" for n in range(400)),
    "no text": "\0\ud800\x1b",
    "quotations": ">" * 20_000,
    "links": "[" * 20_000 + "](" * 20_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_neither_ends_nor_holds_up_the_trainer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.rewards.code.READER", QUICK)
    text = HOSTILE[name]
    started = time.monotonic()
    for shape in (text, f"```python\ndef add(a, b):\n    return 3\n{text}\n", f"def add(a, b):\n    return 3\n{text}"):
        assert isinstance(find_code(shape, ["add"]), str)
    assert time.monotonic() - started < 60


def test_a_text_beyond_bounds_is_judged_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.rewards.code.READER", BoundedProcess(cpu_s=0.05))
    text = f"```python\ndef add(a, b):\n    return a + b\n```\n{'- a' * 5000}\n" + "import a b\n" * 20_000
    assert find_code(text, ["add"]) == text
    # And the next one is read again.
    monkeypatch.setattr(rewards.READER, "cpu_s", 5.0)
    assert find_code(SHAPES["fence"], ["add"]) == ADD


# ---- planted faults ----

FAULTS = [
    ("for blocks in (python, fenced,", "for blocks in (fenced,"),
    ("for blocks in (python, fenced,", "for blocks in ("),
    (", html_blocks(text)):", "):"),
    ("text if begin is None", "text if True"),
    ("text if done is None", "text if True"),
    ("whole_program(blocks[defining[-1]]", "whole_program(blocks[defining[0]]"),
    ("return with_definitions(chosen, ", "return chosen or ("),
    ("return with_definitions(bare[defining[-1]], ", "return bare[defining[-1]] or ("),
    ('ANSWER_TAG.sub("\\n", text)', "text"),
    (", *inline_code(text)]", "]"),
    ("return fenced[-1].code if fenced", "return fenced[0].code if fenced"),
    ('.replace("\\r\\n", "\\n")', ""),
    ('.disable("html_block")', ""),
    ("if inner and parse(textwrap.dedent(block.code)) is None:", "if False:"),
    ("if inner and parse(textwrap.dedent(block.code)) is None:", "if inner:"),
    ('re.split(r"(?:`{3,}|~{3,})[ \\t]*(?:\\n|$)", code, maxsplit=1)[0]', "code"),
    ("if match := ON_FENCE_LINE.match(token.info.strip()):", "if match := None:"),
    ("html.unescape(", "("),
    ("if PROMPT.match(code.lstrip()):", "if False:"),
    ("defines(flush := textwrap.dedent(code), names)", "False"),
    ("if defines(code, names) and parse(code) is not None:", "if False:"),
    ("    if block.is_cut:\n        parts", "    if False:\n        parts"),
    ("    if block.is_cut:\n        parts", "    if True:\n        parts"),
    ("count = min(count, error.lineno or count) - 1", "count = 0"),
    ("code = without_remarks(", "code = str("),
    ("missing = (missing - names) | (needed(statement) - bound(statement))", "missing = set()"),
    ("return read - set(dir(builtins))", "return set()"),
    ("isspace() else shifted", "isspace() else bodies"),
    (r"|^(?:{wanted})\s*=", r"|(?:{wanted})"),
    ("for body in map(without_prose, bodies):", "for body in bodies:"),
    ("def |class |@", "class |@"),
    ("kept[len(stub) :] if len(kept) > len(stub) else whole", "whole"),
]
SAMPLES = [
    *(filled(shape, "+") for shape in SHAPES),
    "```python\ndef add(a, b):\n    return a + b\n\nx = = 3\n```",
    "```\nONE = 1\n```\n```\ndef one():\n    return ONE\n```\n```\ndef add(a):\n    return one() + a\n```",
    "```\na = 1\n```\n```\nb = 1\n```",
    "print(add(1, 2))",
    "<answer>\n```python\n    return 1\n```\n</answer>",
    "````\n  s = 1\n  '''\n  ```\n  y\n  ```\n  '''\n  return s\n````",
    "```\ndef add(a):\n    return 0\n```\nNo:\n```\n    def add(a):\n        return 1\n```",
    "[BEGIN]\n    return 1\n[DONE]\nNext",
]
BODIES = [
    "return 1",
    "s = 1\n    return s",
    "    return 1\n\nThis.",
    "    return 1\n\nDone\n",
    "    s = 1\n\ndef f():\n    pass\n",
    "    s = 1\n\ndef f(",
]


def found(extract: Any, body: Any) -> list[str]:
    return [extract(text, ["add"]) for text in SAMPLES] + [body(STUB, text) for text in BODIES]


@pytest.mark.parametrize(("right", "wrong"), FAULTS)
def test_planted_fault_is_caught(right: str, wrong: str) -> None:
    """What the faulty code finds differs from what the tests above saw pass."""
    source = inspect.getsource(extraction)
    assert right in source, f"the planted fault no longer matches the code: {right}"
    faulty: dict[str, Any] = {"__name__": extraction.__name__}
    exec(compile(source.replace(right, wrong, 1), "faulty extraction", "exec"), faulty)
    try:
        same = found(faulty["extract_code"], faulty["function_body"]) == found(extract_code, function_body)
    except (TypeError, NameError, IndexError, UnboundLocalError):
        same = False
    assert not same
