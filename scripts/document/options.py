"""docs/options.md: every option of every command, with its type, its default and its meaning.

Types come from the dataclasses that the commands check their options against, defaults from conf/ and else from those
dataclasses, meanings from what is written beside either (`meanings`).
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

import eval.theory.__main__ as theory
from eval import bench, pareto, verification_cost
from eval.rewards.loading import RewardOptions
from models.decoding.length_options import LengthOptions
from models.drafters.options import DrafterOptions
from models.heads import HeadOptions
from models.target.model import TargetOptions
from models.verification.options import VerifierOptions
from rl import diversed
from scripts import export, generate
from scripts.document.meanings import description, docstring_meanings, yaml_comments
from scripts.document.tables import flat, rows_of, shown, type_name, typed
from train import draft, mtp, regenerate, sft
from train.data.prompts import DataOptions
from train.heads.losses import LossOptions
from train.heads.trainer import TrainerOptions
from train.runtime.presets import CONF, preset_names

# Commands that take options as Hydra overrides: the file of conf/ -> its module and its schema.
COMMANDS: dict[str, tuple[Any, type]] = {
    "regenerate": (regenerate, regenerate.RegenerateConfig),
    "mtp": (mtp, mtp.MTPConfig),
    "draft": (draft, draft.DraftConfig),
    "sft": (sft, sft.SFTRunConfig),
    "diversed": (diversed, diversed.DiversedConfig),
    "bench": (bench, bench.BenchConfig),
    "pareto": (pareto, pareto.ParetoConfig),
    "verification_cost": (verification_cost, verification_cost.CostConfig),
}
# Commands with options of argparse.
PARSERS: dict[str, tuple[Any, ArgumentParser]] = {
    module.__name__.removesuffix(".__main__"): (module, module.make_parser()) for module in (generate, export, theory)
}
# Groups whose files give values to all options of one dataclass ...
SHARED: dict[str, type] = {
    "model": TargetOptions,
    "data": DataOptions,
    "heads": HeadOptions,
    "loss": LossOptions,
    "trainer": TrainerOptions,
}
# ... and those whose files each have options of their own.
OF_KINDS: dict[str, type] = {
    "drafter": DrafterOptions,
    "length": LengthOptions,
    "verifier": VerifierOptions,
    "reward": RewardOptions,
}
# Groups of settings that belong together.
BUNDLES = ("deepspeed", "experiment", "sweep")
INTRO = """\
# Every option

Made by `python -m scripts.document` (`make docs`) from `conf/` and from the dataclasses that the commands check their
options against; a test fails where this page is not what the command writes. How options are meant to be used is in the
[tutorials](README.md).

A command of Hydra takes `option=value`, and a file of a group by `group=NAME`; the target alone is added, with
`+model=NAME`. Brackets and spaces are quoted from the shell: `"tasks=[chat,maths]"`. `--cfg job` prints all options
with their values, `--help` the groups, `--multirun` runs the command for each of several values (`lam=0.1,1`). What is
unknown or of a wrong type stops the command before a model loads. In defaults `${...}` is another option's value.
"""


@dataclass(frozen=True)
class Option:
    """One row of a table, as text."""

    name: str
    type: str
    default: str
    meaning: str


def render_options() -> str:
    """The page. ValueError for an option whose meaning is written nowhere."""
    parts = [INTRO, "## Commands\n"]
    for name, (module, schema) in COMMANDS.items():
        parts += [command_section(name, module, schema)]
    for name, (module, parser) in PARSERS.items():
        parts += [parser_section(name, module, parser)]
    parts += ["## Groups\n"]
    for group, schema in SHARED.items():
        parts += [shared_section(group, schema)]
    for group, schema in OF_KINDS.items():
        parts += [kinds_section(group, schema)]
    parts += [bundle_section(group) for group in BUNDLES]
    return "\n".join(parts)


def command_section(name: str, module: Any, schema: type) -> str:
    """A command of Hydra: what it does, the groups that it takes, and all options outside of them."""
    path = CONF / f"{name}.yaml"
    chosen = group_defaults(path)
    groups = [f"[`{group}`](#{group})" + (f" ({choice})" if choice else "") for group, choice in chosen.items()]
    comments = yaml_comments(path)
    rows = list(command_options(schema, contents(path), comments, chosen))
    return "\n".join(
        [f"### {module.__name__}\n", first_sentence(module), f"\nGroups: {', '.join(groups)}.\n", *table(rows), ""]
    )


def group_defaults(path: Path) -> dict[str, str]:
    """The groups that a command takes, and the file of each that it takes by itself ("": none)."""
    groups = {"model": ""}
    for entry in contents(path).get("defaults", []):
        if isinstance(entry, Mapping):
            groups |= {str(group): choice or "" for group, choice in entry.items()}
    return groups


def command_options(
    schema: type, values: Any, comments: Mapping[str, str], chosen: Mapping[str, str], prefix: str = ""
) -> Iterator[Option]:
    """The options of a dataclass and of those within it, groups left out; ValueError for one without a meaning."""
    said = docstring_meanings(schema)
    types = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        name = f"{prefix}{field.name}"
        if name in chosen:
            continue
        value = values.get(field.name, default_of(field)) if isinstance(values, Mapping) else default_of(field)
        if dataclasses.is_dataclass(types[field.name]):
            yield from command_options(types[field.name], value, comments, chosen, f"{name}.")
            continue
        meaning = comments.get(name) or said.get(field.name, "")
        yield Option(name, type_name(types[field.name]), shown(value), require_meaning(name, schema, meaning))


def shared_section(group: str, schema: type) -> str:
    """A group of one dataclass: its files with what each sets, and the dataclass's options."""
    said, types = docstring_meanings(schema), typing.get_type_hints(schema)
    rows = []
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(types[field.name]):
            rows += list(command_options(types[field.name], default_of(field), {}, {}, f"{group}.{field.name}."))
            continue
        name = f"{group}.{field.name}"
        meaning = require_meaning(name, schema, said.get(field.name, ""))
        rows.append(Option(name, type_name(types[field.name]), shown(default_of(field)), meaning))
    files = []
    for name in preset_names(group):
        path = CONF / group / f"{name}.yaml"
        sets = settings(path)
        files.append((f"`{group}={name}`" if group != "model" else f"`+model={name}`", description(path), sets))
    return "\n".join(
        [
            f"### {group}\n",
            *rows_of(("file", "", "sets"), files),
            "",
            "Defaults below are those of a file that sets nothing.\n",
            *table(rows),
            "",
        ]
    )


def kinds_section(group: str, schema: type) -> str:
    """A group whose files each have options of their own: the files, and for each option which of them have it."""
    paths = [CONF / group / f"{name}.yaml" for name in preset_names(group)]
    files = [(f"`{group}={path.stem}`", description(path)) for path in paths]
    found: dict[tuple[str, str, str], list[tuple[str, Any]]] = {}
    for path in paths:
        for option, value in own_options(path, schema):
            found.setdefault(option, []).append((path.stem, value))
    rows = [
        (f"`{group}.{key}`", ", ".join(name for name, _ in of), kind, defaults(of), meaning)
        for (key, kind, meaning), of in sorted(found.items())
    ]
    own = [*rows_of(("option", "of", "type", "default", "meaning"), rows), ""] if rows else []
    return "\n".join([f"### {group}\n", *rows_of(("file", ""), files), "", *own])


def own_options(path: Path, schema: type) -> Iterator[tuple[tuple[str, str, str], Any]]:
    """Of one such file: (key, type, meaning) of each option that it gives a value to, and the value."""
    types, comments = typing.get_type_hints(schema), yaml_comments(path)
    for key, value in flat(contents(path)).items():
        if key not in ("kind", "spec"):
            kind = type_name(types[key]) if key in types else type(value).__name__
            yield (key, kind.removesuffix(" or null"), require_meaning(key, path, comments.get(key, ""))), value


def defaults(of: list[tuple[str, Any]]) -> str:
    """One default of all files, or each file's own."""
    values = {shown(value) for _, value in of}
    return values.pop() if len(values) == 1 else ", ".join(f"{shown(value)} ({name})" for name, value in of)


def bundle_section(group: str) -> str:
    """A group of settings that belong together: its files, and what each sets."""
    paths = [CONF / group / f"{name}.yaml" for name in preset_names(group)]
    rows = [(f"`{group}={path.stem}`", description(path), settings(path)) for path in paths]
    return "\n".join([f"### {group}\n", *rows_of(("file", "", "sets"), rows), ""])


def settings(path: Path) -> str:
    """What a file sets, as words of the command line; its choices of other groups are among them."""
    values = contents(path)
    chosen = {key: value for one in values.pop("defaults", []) for key, value in one.items()}
    words = {str(key).removeprefix("override ").lstrip("/"): value for key, value in chosen.items()} | flat(values)
    return ", ".join(f"`{key}={typed(value)}`" for key, value in words.items())


def contents(path: Path) -> dict[str, Any]:
    """What a file of conf/ says, with `${...}` as it is written."""
    values = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def parser_section(name: str, module: Any, parser: ArgumentParser) -> str:
    """A command of argparse: its positional arguments and its options."""
    rows = []
    for action in parser._actions:
        if action.default is SUPPRESS or "--help" in action.option_strings:
            continue
        words = ", ".join(f"`{word}`" for word in action.option_strings) or f"`{action.dest.upper()}`"
        kind = " or ".join(map(str, action.choices)) if action.choices else getattr(action.type, "__name__", "")
        default = "" if action.default is None or action.nargs == 0 else shown(action.default)
        rows.append((words, kind or "", default, require_meaning(words, name, action.help or "")))
    return "\n".join(
        [f"### {name}\n", first_sentence(module), "", *rows_of(("option", "type", "default", "meaning"), rows), ""]
    )


def first_sentence(module: Any) -> str:
    """The first paragraph of a module's docstring."""
    return " ".join(inspect.cleandoc(module.__doc__ or "").split("\n\n")[0].split())


def require_meaning(name: str, where: object, meaning: str) -> str:
    """The meaning without a full stop; ValueError where there is none."""
    if not meaning:
        place = f"the docstring of {where.__name__}" if isinstance(where, type) else str(where)
        raise ValueError(
            f"option {name} has no meaning: write `name: meaning` into {place}, or a comment above it in conf/"
        )
    return meaning if meaning.endswith("...") else meaning.rstrip(".")


def default_of(field: dataclasses.Field[Any]) -> Any:
    """A field's default, made where it has a factory."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default


def table(options: list[Option]) -> list[str]:
    """Rows of options."""
    rows = [(f"`{one.name}`", one.type, one.default, one.meaning) for one in options]
    return rows_of(("option", "type", "default", "meaning"), rows)
