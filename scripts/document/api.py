"""docs/api.md: signatures and descriptions of the public Python interface, read from the source, not by importing."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Definition = ast.ClassDef | ast.FunctionDef

INTRO = """\
# Python interface

Made by `python -m scripts.document` (`make docs`) from the source; a test fails where this page is not what the command
writes. `models` is all that inference needs, and imports neither Hydra nor a trainer. Whatever does not fit raises a
ValueError of one line that says what was wrong and what to do. Tensors have shape suffixes: B rows, T positions, K
drafted tokens, V vocabulary, H hidden size.

[How they are put together](decoding.md#from-python), with an example that runs.
"""
# Section -> module:name, or module:Class.method.
PUBLIC: dict[str, tuple[str, ...]] = {
    "Targets": (
        "models.target.model:TargetOptions",
        "models.target.model:load_target",
        "models.target.model:Target",
        "models.target.model:Target.hidden",
        "models.target.model:Target.logits",
        "models.target.model:Target.fingerprint",
    ),
    "Decoding": (
        "models.decoding.decoder:Decoder",
        "models.decoding.decoder:Decoder.generate",
        "models.decoding.decoder:BlockRecord",
        "models.decoding.rows:GenerationParams",
        "models.sampling:SamplingParams",
        "models.processors.prefix:ProcessorParams",
        "models.decoding.rows:DecodeResult",
        "models.decoding.rows:TokenLogprobs",
        "models.decoding.counters:Counters",
        "models.decoding.counters:Timings",
        "models.decoding.reference:decode_plainly",
    ),
    "Drafters": (
        "models.drafters.options:DrafterOptions",
        "models.drafters.build:make_drafter",
        "models.drafters.heads:HeadsDrafter",
        "models.drafters.tree:StaticTreeDrafter",
        "models.drafters.tree:DynamicTreeDrafter",
        "models.drafters.model:ModelDrafter",
        "models.drafters.universal.slem:StringExactMatch",
        "models.drafters.universal.tli:TokenIntersection",
        "models.drafters.universal.slrs:StringRejectionSampling",
        "models.drafters.text.ngram:NgramDrafter",
        "models.drafters.text.suffix:SuffixDrafter",
        "models.drafters.text.lookahead:LookaheadDrafter",
        "models.drafters.hybrid:HybridDrafter",
        "models.drafters.base:Drafter",
        "models.drafters.base:Drafter.start",
        "models.drafters.base:Drafter.absorb",
        "models.drafters.base:Drafter.propose",
        "models.drafters.base:Drafter.select_rows",
        "models.drafters.base:Drafter.extend",
        "models.drafters.base:Draft",
    ),
    "Draft lengths": (
        "models.decoding.length_options:LengthOptions",
        "models.decoding.length_options:make_length",
        "models.decoding.length:FixedLength",
        "models.decoding.length:AdaptiveLength",
        "models.drafters.stop:DraftStop",
    ),
    "Verification rules": (
        "models.verification.options:VerifierOptions",
        "models.verification.options:make_rule",
        "models.verification.token:TokenVerification",
        "models.verification.blockwise:BlockVerification",
        "models.verification.ensemble:StaticEnsemble",
        "models.verification.ensemble:DynamicEnsemble",
        "models.verification.lenience:Lenience",
        "models.verification.mentored:MentoredDecoding",
        "models.verification.cascades:SpeculativeCascade",
        "models.verification.thresholds:TypicalAcceptance",
        "models.verification.thresholds:ProbabilityGap",
        "models.verification.thresholds:ThresholdSampling",
        "models.verification.fly:FLy",
        "models.verification.tree:WithoutReplacement",
        "models.verification.tree:MultiRound",
        "models.verification.traversal:TraversalVerification",
        "models.verification.base:Rule",
        "models.verification.base:Block",
        "models.verification.base:Verdict",
    ),
    "Heads and checkpoints": (
        "models.heads.base:HeadOptions",
        "models.heads:build_head",
        "models.heads.base:DraftHead",
        "models.ensemble:EnsembleOptions",
        "models.ensemble:EnsembleHead",
        "models.checkpoint:load_heads",
        "models.checkpoint:save_heads",
        "models.checkpoint:load_ensemble",
        "models.checkpoint:save_ensemble",
        "models.checkpoint:heads_record",
        "models.checkpoint:model_record",
        "models.checkpoint:read_config",
    ),
    "In transformers, and for servers": (
        "models.export.custom_generate:load_speculative",
        "models.export.custom_generate:SpeculativeGenerate",
        "models.export.servers:export",
        "models.export.hf:fetch_folder",
        "models.export.hf:push_folder",
    ),
    "Rewards": (
        "eval.rewards.loading:load_reward",
        "eval.rewards.loading:RewardOptions",
    ),
}


def render_api() -> str:
    """The page. ValueError for a name that is not there, or has no docstring."""
    parts = [INTRO]
    for section, names in PUBLIC.items():
        parts += [f"## {section}\n", *(entry(name) for name in names)]
    return "\n".join(parts)


def entry(name: str) -> str:
    """One heading, the signature or the fields, and the docstring."""
    module, _, path = name.partition(":")
    node = find(module, path)
    texts = [ast.get_docstring(node), ast.get_docstring(init) if (init := init_of(node)) else None]
    if not texts[0]:
        raise ValueError(f"{name} has no docstring to be shown")
    code = "\n".join(signature(module, path, node))
    described = "\n\n".join(paragraphs(text) for text in texts if text)
    return f"### {path}\n\n`{module}`\n\n```python\n{code}\n```\n\n{described}\n"


@cache
def source_of(module: str) -> str:
    """The module's source."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        raise ValueError(f"{module} is no module here")
    return path.read_text(encoding="utf-8")


def find(module: str, path: str) -> Definition:
    """The class, function or method. ValueError where it is not defined in this module."""
    body: Sequence[ast.stmt] = ast.parse(source_of(module)).body
    found: Definition | None = None
    for part in path.split("."):
        found = next((one for one in body if isinstance(one, Definition) and one.name == part), None)
        if found is None:
            raise ValueError(f"{module}:{path} is not defined there")
        body = found.body
    assert found is not None
    return found


def init_of(node: Definition) -> ast.FunctionDef | None:
    """A class's `__init__`, where it has one."""
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef)] if isinstance(node, ast.ClassDef) else []
    return next((one for one in methods if one.name == "__init__"), None)


def signature(module: str, path: str, node: Definition) -> Iterator[str]:
    """What is typed to call it, and of a record what it holds, with the comments on its fields."""
    if isinstance(node, ast.FunctionDef):
        yield wrapped(path, node)
        return
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    if (init := init_of(node)) is not None:
        yield wrapped(path, init)
    elif fields:
        yield f"class {path}:"
        lines = source_of(module).splitlines()
        for field in fields:
            first = field.lineno - 1
            while lines[first - 1].startswith("    # "):
                first -= 1
            yield from lines[first : field.end_lineno]
    else:
        yield f"class {path}({', '.join(map(ast.unparse, node.bases))})" if node.bases else f"class {path}"


def wrapped(path: str, node: ast.FunctionDef) -> str:
    """A signature, one argument a line where it is long."""
    arguments = [word for word in split_arguments(node.args) if word.partition(":")[0] not in ("self", "cls")]
    returns = "" if node.returns is None or node.name == "__init__" else f" -> {ast.unparse(node.returns)}"
    line = f"{path}({', '.join(arguments)}){returns}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{path}(", *(f"    {word}," for word in arguments), f"){returns}"])


def split_arguments(arguments: ast.arguments) -> list[str]:
    """Each argument with its type and default, in order."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    words = [_word(one, default) for one, default in zip(plain, defaults, strict=True)]
    if arguments.vararg or arguments.kwonlyargs:
        words.append(f"*{_word(arguments.vararg, None) if arguments.vararg else ''}")
    words += [_word(one, d) for one, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return [*words, f"**{_word(arguments.kwarg, None)}"] if arguments.kwarg else words


def _word(argument: ast.arg, default: ast.expr | None) -> str:
    typed = argument.arg if argument.annotation is None else f"{argument.arg}: {ast.unparse(argument.annotation)}"
    equals = " = " if argument.annotation else "="
    return typed if default is None else f"{typed}{equals}{ast.unparse(default)}"


def paragraphs(text: str) -> str:
    """A docstring as Markdown: what is indented more than its first line is code, all else flows."""
    parts = []
    for part in text.split("\n\n"):
        lines = part.splitlines()
        is_code = all(line.startswith("    ") for line in lines)
        parts.append("\n".join(["```text", *(line[4:] for line in lines), "```"]) if is_code else part)
    return "\n\n".join(parts)
