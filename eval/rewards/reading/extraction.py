"""The program in a model's answer: out of Markdown, HTML, marks or bare prose.

Of several blocks of code the last one that defines what the tests call is the answer; what it needs and only earlier
blocks define comes with it. Text is parsed here, so this runs in a process of its own (`bounded`).
"""

import ast
import builtins
import html
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from markdown_it import MarkdownIt
from markdown_it.token import Token

FENCE_LINE = re.compile(r"^[ \t]*(?:`{3,}|~{3,})", re.M)
END_OF_FENCE = re.compile(r"^[\s>]*(?:`{3,}|~{3,})\s*$")
# Code that begins on the fence's own line, behind the language or in its place.
ON_FENCE_LINE = re.compile(r"(?:py\w*\s+)?((?:def|class|import|from|async def)\s.*)", re.I)
MAX_NESTING = 3  # of fences in longer fences
HTML_CODE = re.compile(r"<(pre|code)\b[^>]*>(.*?)</\1\s*>", re.S | re.I)
HTML_TAG = re.compile(r"</?(?:pre|code|span|br)\b[^>]*>", re.I)
ANSWER_TAG = re.compile(r"</?(?:answer|solution|response|code)>", re.I)
# The marks of MBPP's few-shot prompts.
BEGIN = re.compile(r"\[BEGIN\][ \t]*\n?")
DONE = re.compile(r"^(.*)\[DONE\][ \t]*$", re.M)
PROMPT = re.compile(r"^(?:>>>|\.\.\.)(?: |$)", re.M)
# What a program without a fence may begin with.
FIRST_LINE = re.compile(
    r"[ \t]*(?:(?:import|from|def|class|async|if|for|while|with|try)\b|@|#|[\"']{3}"
    r"|[A-Za-z_]\w*(?: *:[^=\n]+)? *=(?!=))"
)
# Where a continued function body is over: a line that starts at the margin and is no code at module level.
PROSE = re.compile(r"^(?!(?:async |def |class |@|import |from |#|[)\]}]|[A-Za-z_]\w*(?: *:[^=\n]+)? *=(?!=)))\S", re.M)


@dataclass(frozen=True)
class Block:
    """A piece of code. is_cut: its end is missing, as at a length limit. first_line: its number in the text, or -1."""

    code: str
    language: str = ""
    is_cut: bool = False
    first_line: int = -1


def extract_code(text: str, names: Sequence[str]) -> str:
    """The program that defines one of the names; without any, the last fenced block, else the text."""
    text = between_marks(text.replace("\r\n", "\n").replace("\r", "\n"))
    fenced = fenced_blocks(text)
    python = [block for block in fenced if block.language in ("", "python")]
    for blocks in (python, fenced, html_blocks(text)):
        blocks = [as_script(block, names) for block in blocks]
        defining = [index for index, block in enumerate(blocks) if defines(block.code, names)]
        if defining:
            chosen = whole_program(blocks[defining[-1]], text, names)
            return with_definitions(chosen, [block.code for block in blocks[: defining[-1]]])
    bare = [*runs(ANSWER_TAG.sub("\n", text)), *inline_code(text)]
    defining = [index for index, code in enumerate(bare) if defines(code, names)]
    if defining:
        return with_definitions(bare[defining[-1]], bare[: defining[-1]])
    return fenced[-1].code if fenced else text


def function_body(stub: str, text: str) -> str:
    """The text as the body of the function in which the stub ends, indented where it is not, without prose behind."""
    shifted = (textwrap.indent(text, "    "), "    " + text.lstrip())  # all of it, or but for its lost first spaces
    bodies = (text, text.expandtabs(4)) if text.lstrip("\n")[:1].isspace() else shifted
    for body in map(without_prose, bodies):
        if body.strip() and parse(stub + body) is not None:
            return body
    whole = without_prose(text)
    lines = (stub + whole).splitlines(keepends=True)
    kept = "".join(lines[: parsed_lines(lines)])
    return kept[len(stub) :] if len(kept) > len(stub) else whole


def without_prose(body: str) -> str:
    """A function's body up to what is no code."""
    end = PROSE.search(body)
    return body if end is None else body[: end.start()]


def defines(source: str, names: Sequence[str]) -> bool:
    """Whether a line at the margin defines one of the names."""
    wanted = "|".join(map(re.escape, names))
    return re.search(rf"^(?:(?:async\s+)?def|class)\s+(?:{wanted})\b|^(?:{wanted})\s*=(?!=)", source, re.M) is not None


def between_marks(text: str) -> str:
    """What stands between the first [BEGIN] and the first [DONE]: a base model goes on with a question of its own."""
    begin = BEGIN.search(text)
    text = text if begin is None else text[begin.end() :]
    done = DONE.search(text)
    return text if done is None else text[: done.end(1)]


# ---- blocks ----


def fenced_blocks(text: str, depth: int = 0) -> list[Block]:
    """What CommonMark's fences hold, in order; of a fence around fences, what those hold."""
    parser = MarkdownIt("commonmark").disable("html_block")  # a tag alone on its line would hide the fence below
    lines = text.split("\n")
    blocks: list[Block] = []
    for token in parser.parse(text):
        if token.type != "fence":
            continue
        block = fenced_block(token, lines)
        if depth < MAX_NESTING and block.language != "python" and FENCE_LINE.search(block.code):
            inner = fenced_blocks(block.code, depth + 1)
            if inner and parse(textwrap.dedent(block.code)) is None:
                blocks += [replace(one, first_line=-1) for one in inner]
                continue
        blocks.append(block)
    return blocks


def fenced_block(token: Token, lines: Sequence[str]) -> Block:
    """Of markdown-it's token."""
    assert token.map is not None
    first, end = token.map
    is_cut = end - 1 <= first or END_OF_FENCE.match(lines[end - 1]) is None
    code = token.content
    if is_cut:  # its end may stand behind the last line of code
        code = re.split(r"(?:`{3,}|~{3,})[ \t]*(?:\n|$)", code, maxsplit=1)[0]
    if match := ON_FENCE_LINE.match(token.info.strip()):
        return Block(f"{match[1]}\n{code}", "python", is_cut)
    words = re.findall(r"\w+", token.info.lower())
    language = "" if not words else "python" if any(word.startswith("py") for word in words[:2]) else words[0]
    return Block(code, language, is_cut, first + 1)


def html_blocks(text: str) -> list[Block]:
    """What pre and code elements hold."""
    return [Block(html.unescape(HTML_TAG.sub("", match[2])).lstrip("\n")) for match in HTML_CODE.finditer(text)]


def inline_code(text: str) -> list[str]:
    """Code within the lines of a text."""
    tokens = MarkdownIt("commonmark").parse(text)
    children = [child for token in tokens for child in token.children or ()]
    return [child.content for child in children if child.type == "code_inline" and parse(child.content) is not None]


def as_script(block: Block, names: Sequence[str]) -> Block:
    """The block at the margin, and without an interactive session's prompts."""
    code = block.code
    if PROMPT.match(code.lstrip()):
        code = "".join(f"{line.lstrip()[4:]}\n" for line in code.split("\n") if PROMPT.match(line.lstrip()))
    if not defines(code, names) and defines(flush := textwrap.dedent(code), names):
        code = flush
    return replace(block, code=code)


def whole_program(block: Block, text: str, names: Sequence[str]) -> str:
    """The block's code, where it does not parse because a fence in a string has ended it: up to where it does.

    Where its end is missing, as much of it as parses. Other faults are the program's own.
    """
    if parse(block.code) is not None:
        return block.code
    lines = text.split("\n")
    ends = (
        [i for i in range(block.first_line, len(lines)) if FENCE_LINE.match(lines[i])] if block.first_line >= 0 else []
    )
    for end in [*ends[:16], len(lines)] if ends else []:
        code = textwrap.dedent("\n".join(lines[block.first_line : end]) + "\n")
        if defines(code, names) and parse(code) is not None:
            return code
    if block.is_cut:
        parts = block.code.splitlines(keepends=True)
        kept = "".join(parts[: parsed_lines(parts)])
        if defines(kept, names):
            return kept
    return block.code


# ---- what parses ----


def parse(source: str) -> ast.Module | None:
    """Its syntax tree, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def parsed_lines(lines: Sequence[str]) -> int:
    """How many lines from the first on are a program: each error cuts them off before it."""
    count = len(lines)
    while count:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse("".join(lines[:count]))
            return count
        except SyntaxError as error:
            count = min(count, error.lineno or count) - 1
        except (ValueError, RecursionError, MemoryError):
            count -= 1
    return 0


def runs(text: str) -> Iterator[str]:
    """The pieces of a text that are programs, in order: each as long as it can be."""
    lines = text.splitlines(keepends=True)
    start = 0
    while start < len(lines):
        if FIRST_LINE.match(lines[start]):
            indent = re.match(r"[ \t]*", lines[start])
            assert indent is not None
            flush = list(without_indent(lines[start:], indent[0]))
            count = parsed_lines(flush)
            code = without_remarks("".join(flush[:count]))
            if code.strip():
                yield code if code.endswith("\n") else code + "\n"
            start += max(count, 1)
        else:
            start += 1


def without_indent(lines: Sequence[str], indent: str) -> Iterator[str]:
    """The lines that are indented at least so far, without that."""
    for line in lines:
        if line.strip() and not line.startswith(indent):
            return
        yield line[len(indent) :] if line.strip() else "\n"


def without_remarks(code: str) -> str:
    """The program up to its last statement that does something: `[DONE]` and `Output: x` parse as well."""
    tree = parse(code)
    body = tree.body if tree is not None else []
    while body and is_remark(body[-1]):
        body.pop()
    end = body[-1].end_lineno if body else 0
    return "".join(code.splitlines(keepends=True)[:end])


def is_remark(statement: ast.stmt) -> bool:
    """Whether a statement at module level has no effect but that it may fail."""
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None
    return isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Call | ast.Await)


# ---- definitions of other blocks ----


def with_definitions(code: str, earlier: Sequence[str]) -> str:
    """The program, and before it what it needs and only an earlier block defines."""
    tree = parse(code)
    if tree is None or not earlier:
        return code
    missing = needed(tree) - bound(tree)
    found: list[tuple[int, int, str]] = []
    for number in reversed(range(len(earlier))):
        source = earlier[number].splitlines(keepends=True)
        tree = parse(earlier[number])
        for statement in reversed(tree.body if tree is not None else []):
            names = defined(statement)
            if missing & names or (missing and "*" in names):
                first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", ()))])
                found.append((number, first, "".join(source[first - 1 : statement.end_lineno]).rstrip("\n") + "\n"))
                missing = (missing - names) | (needed(statement) - bound(statement))
    return "".join(text for _, _, text in sorted(found)) + code


def needed(tree: ast.AST) -> set[str]:
    """Names that are read anywhere in it, those that Python brings apart."""
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return read - set(dir(builtins))


def bound(tree: ast.AST) -> set[str]:
    """Names that it binds anywhere, as functions, classes, modules, variables or parameters."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def defined(statement: ast.stmt) -> set[str]:
    """Names that one statement at module level binds there; "*" for all of a module."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Expr):
        return set()
    return bound(statement)
