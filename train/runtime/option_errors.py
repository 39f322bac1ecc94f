"""Saying in one line what is wrong with a command line's options. Beside `config` the one module with Hydra.

Hydra tells most mistakes over several lines, and those of its grammar by a lexer's name. Here each names the word that
was given and, where its value only lacks quotes, the word that works as it is pasted into a shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_type_hints

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from train.runtime.presets import CONF, preset_names

# An option as Hydra takes it, before its value.
KEY = re.compile(r"(?P<sign>~|\+{0,2})(?P<name>[A-Za-z_$][\w$/.-]*(?:@[\w$.]*)?)", re.ASCII)
# Within double quotes a shell, and bash's history, leaves everything but these alone.
ACTIVE_IN_SHELL = frozenset('"$`\\!')
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\x85\u2028\u2029]")
ALL_OPTIONS = "`--cfg job` prints all options with their values"
NO_SUCH_KEY = re.compile(r"Could not override '(?P<key>[^']*)'\.")
AMBIGUOUS = re.compile(r"Ambiguous value for argument '(?P<word>.*)'$", re.S)


class OptionError(ValueError):
    """A mistake in an option: its line says all, and a traceback would add nothing."""


def option_error(error: Exception, words: Sequence[str], schema: type) -> OptionError:
    """Hydra's and OmegaConf's errors, and those that Hydra has no class for, as one line; words: the command line."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        return OptionError(_of_grammar(error, words))
    if (ambiguous := AMBIGUOUS.match(text.split("\n1. ")[0])) is not None:
        word = ambiguous["word"]
        return OptionError(
            f"{word}: several values; for a text with commas quote it: {quoted(word)}, for a list write [A,B], to try "
            "each value add --multirun"
        )
    if isinstance(error, MissingConfigException):
        return OptionError(_of_missing_file(error))
    if (missing := NO_SUCH_KEY.match(text)) is not None:
        return OptionError(_of_unknown_option(missing["key"], schema))
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return OptionError(_one_line(text))
    lines = [text, str(error.__cause__)] if isinstance(error.__cause__, OmegaConfBaseException) else [text]
    reason = "; ".join(_first_lines(line) for line in lines)
    return OptionError(f"bad option: {reason}; {ALL_OPTIONS}")


def quoted(word: str) -> str | None:
    """KEY=VALUE with its value taken as it is written, as it can be pasted into a shell.

    None where KEY is none, or the value has line breaks or other signs that control a terminal.
    """
    key, _, value = word.partition("=")
    if KEY.fullmatch(key) is None or CONTROL.search(value) is not None:
        return None
    # `${` would be an interpolation: a backslash takes that from it, and those before it then count double.
    text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
    hydra = f"{key}={QuotedString(text, Quote.single).with_quotes()}"
    return _for_shell(hydra)


def _for_shell(word: str) -> str:
    return shlex.quote(word) if set(word) & ACTIVE_IN_SHELL else f'"{word}"'


def _of_grammar(error: OverrideParseException, words: Sequence[str]) -> str:
    word = error.override
    key, has_value, _ = word.partition("=")
    shown = _one_line(word)
    if not has_value:
        before = _word_before(word, words)
        joined = quoted(before) if before else None
        hint = f"; if it belongs to the value before it, quote both: {joined}" if joined else ""
        return f"{shown!r} is no option: options are written NAME=VALUE{hint}"
    if CONTROL.search(word) is not None:
        return f"{shown!r} has a line break or another control character in it; leave it out"
    joined = _word_before(word, words) or word
    if joined != word and joined.partition("=")[2].startswith(("[", "{")):
        return f"{shown!r} cannot be read: a list with spaces is quoted for the shell: {_for_shell(joined)}"
    instead = quoted(joined)
    if instead is None:
        return f"{shown!r} is no option: {_one_line(key)!r} is no name; {ALL_OPTIONS}"
    return (
        f"{shown!r} cannot be read: a text with quotes, brackets, signs such as = , ~ # & or letters beyond a-z "
        f"is quoted for Hydra: {instead}"
    )


def _word_before(word: str, words: Sequence[str]) -> str | None:
    """The option before this word, with all words from there on that are none: a value that a shell has taken apart."""
    if word not in words:
        return None
    end = list(words).index(word)
    start = next((index for index in range(end, -1, -1) if "=" in words[index]), None)
    if start is None or words[start].startswith("-"):
        return None
    while words[end + 1 :] and "=" not in words[end + 1] and not words[end + 1].startswith("-"):
        end += 1
    return " ".join(words[start : end + 1])


def _of_missing_file(error: MissingConfigException) -> str:
    missing = error.missing_cfg_file or ""
    group, _, name = missing.rpartition("/")
    if not group or not (CONF / group).is_dir():
        return _first_lines(str(error))
    option = "+model" if group == "model" else group
    return f"{option}={name}: there is no conf/{missing}.yaml; choose one of {', '.join(preset_names(group))}"


def _of_unknown_option(key: str, schema: type) -> str:
    if key in ("model", "+model"):
        return f"model is chosen with a plus: +model=NAME with NAME one of {', '.join(preset_names('model'))}"
    if key and (CONF / key).is_dir():
        if key in _option_names(schema):
            return f"{key} is chosen by its name: {key}=NAME with NAME one of {', '.join(preset_names(key))}"
        return f"{key}=NAME is no option of this command; {ALL_OPTIONS}"
    close = get_close_matches(key, list(_option_names(schema)), n=3)
    instead = f"did you mean {' or '.join(close)}? " if close else ""
    return f"there is no option {_one_line(key)!r}; {instead}{ALL_OPTIONS}"


def _option_names(schema: type, prefix: str = "") -> Iterator[str]:
    """Every option of a dataclass, by its whole name."""
    hints: dict[str, Any] = get_type_hints(schema)
    for field in fields(schema):
        name = f"{prefix}{field.name}"
        yield name
        if is_dataclass(kind := hints[field.name]):
            yield from _option_names(kind, f"{name}.")  # type: ignore[arg-type]


def _first_lines(text: str) -> str:
    """What a message says before its list of places or types."""
    kept = []
    for line in text.strip().splitlines():
        if not line.strip() or line.startswith(("See https", "Config search path", "    full_key:", "Available")):
            break
        kept.append(line.strip())
    return _one_line(" ".join(kept) or text)


def _one_line(text: str) -> str:
    return " ".join(text.split())
