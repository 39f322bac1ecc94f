"""From a name in the configuration to a reward function, and the check of what such a function returned.

A reward has trl's signature: f(prompts, completions, completion_ids, <dataset columns>, trainer_state, log_extra,
log_metric, **kwargs) -> list of numbers, one per completion; our commands add `completion_answers`. Every argument is
passed by name. A module here that offers one has `make_reward(**options)`, which returns it.
"""

import functools
import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from eval.rewards.reading.thoughts import behind_thoughts

Reward = Callable[..., list[float]]
MAKER = "make_reward"
PACKAGE = "eval.rewards"
# What a reward is called with beside the dataset's columns: trl's arguments, and each completion's answer, which is its
# text behind the model's thoughts (`eval.rewards.reading.thoughts`).
ANSWERS = "completion_answers"
ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", ANSWERS)


@dataclass
class RewardOptions:
    """conf/reward/NAME.yaml. spec: a name (gsm8k, rouge, code, ...) or module:function. options: keywords for it."""

    spec: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def reward_names() -> list[str]:
    """The names that `load_reward` knows: modules of this package that make a reward."""
    folder = Path(__file__).parent
    modules = [module.name for module in pkgutil.iter_modules([str(folder)]) if not module.ispkg]
    return sorted(name for name in modules if f"\ndef {MAKER}(" in (folder / f"{name}.py").read_text("utf-8"))


def load_reward(spec: str, options: Mapping[str, Any] | None = None) -> tuple[Reward, str]:
    """The reward that `spec` names, and its name for logs.

    spec: one of `reward_names()`, or "module:function". options: keywords for the named reward's `make_reward`, or
    bound to the user's function. ValueError for an unknown name, a module that cannot be imported, a function with
    another signature, or an option that it does not take.
    """
    options = dict(options or {})
    if ":" in spec:
        return load_function(spec, options), spec.rpartition(":")[2]
    names = reward_names()
    if spec not in names:
        raise ValueError(
            f"reward={spec!r} is no reward here; choose one of {', '.join(names)}, or name your own as module:function"
        )
    make = getattr(importlib.import_module(f"{PACKAGE}.{spec}"), MAKER)
    require_options(spec, make, options)
    return make(**options), spec


def require_options(spec: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """ValueError for an option that is no parameter of `function`."""
    taken = [
        name for name, given in inspect.signature(function).parameters.items() if given.kind is not given.VAR_KEYWORD
    ]
    unknown = sorted(set(options) - set(taken))
    if unknown:
        raise ValueError(f"reward={spec!r} has no option {', '.join(unknown)}; it takes {', '.join(taken) or 'none'}")


def load_function(spec: str, options: Mapping[str, Any]) -> Reward:
    """The user's own function, with the options bound. ValueError that says what is wrong with it."""
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise ValueError(f"reward={spec!r} lacks the module or the function; write module:function")
    function = getattr(import_module(spec, module_name), name, None)
    if function is None:
        raise ValueError(f"reward={spec!r}: module {module_name} has no {name!r}")
    if not callable(function):
        raise ValueError(f"reward={spec!r} is a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"reward={spec!r} is async; rewards are called and not awaited: make it a plain function")
    require_trl_signature(spec, function, options)
    if not options:
        return function
    require_options(spec, function, options)
    return functools.update_wrapper(functools.partial(function, **options), function)


def import_module(spec: str, name: str) -> ModuleType:
    """The user's module; what goes wrong in it is told, not hidden."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise ValueError(
                f"reward={spec!r}: there is no module {error.name!r}; run from the folder that holds it, or install it"
            ) from error
        raise ValueError(f"reward={spec!r}: its module needs {error.name!r}, which is not installed") from error
    except Exception as error:
        raise ValueError(f"reward={spec!r}: importing {name} raised {type(error).__name__}: {error}") from error


def require_trl_signature(spec: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """ValueError unless trl's arguments, with any columns beside them, can be passed to it by name."""
    parameters = inspect.signature(function).parameters.values()
    if not any(given.kind is given.VAR_KEYWORD for given in parameters):
        raise ValueError(
            f"reward={spec!r} must end in **kwargs: it is called with {', '.join(ARGUMENTS)} and the dataset's "
            "columns, all by name"
        )
    positional = [given.name for given in parameters if given.kind is given.POSITIONAL_ONLY]
    if positional:
        raise ValueError(f"reward={spec!r}: {', '.join(positional)} cannot be passed by name; remove the / before them")


def check_rewards(values: object, count: int, name: str) -> list[float]:
    """The rewards as floats. ValueError for None, NaN, infinity, what is no number, or another length than `count`."""
    where = f"reward {name!r}"
    if hasattr(values, "tolist"):  # a tensor or an array
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise ValueError(f"{where} returned a {type(values).__name__}; it must return a list of {count} numbers")
    if len(values) != count:
        raise ValueError(f"{where} returned {len(values)} values for {count} completions; it must return one for each")
    return [check_reward(value, f"{where}, completion {index} of {count}") for index, value in enumerate(values)]


def check_reward(value: object, where: str) -> float:
    """One of them, as a float."""
    if value is None:
        raise ValueError(f"{where}: None; every completion needs a number (give 0 to one that cannot be judged)")
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, int | float):
        raise ValueError(f"{where}: {value!r} is a {type(value).__name__}, not a number")
    if not math.isfinite(value):
        raise ValueError(f"{where}: {value!r}; a reward must be finite, or the update is lost")
    return float(value)


def completion_text(completion: object) -> str:
    """The text of a completion as trl gives it: a string, or a conversation whose last message holds it."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and completion and isinstance(completion[-1], Mapping):
        content = completion[-1].get("content")
        if isinstance(content, str):
            return content
    raise ValueError(f"a completion must be text, or messages whose last has text as content, not {completion!r:.80}")


def answer_texts(completions: Sequence[Any], answers: Sequence[str] | None = None) -> list[str]:
    """What each completion answers, without its thoughts; "" where a thought never ended.

    answers: the argument `completion_answers` of a reward. Without it, from the completions' texts, which do not tell
    of a thought that the prompt began.
    """
    if answers is not None:
        return list(answers)
    return [behind_thoughts(completion_text(completion)) for completion in completions]


def require_column(values: Sequence[Any] | None, column: str, name: str, count: int) -> Sequence[Any]:
    """The dataset's column, one value a completion. ValueError that names it when it is missing."""
    if values is None:
        raise ValueError(f"reward {name!r} needs the dataset column {column!r}; add it, or rename yours")
    if len(values) != count:
        raise ValueError(f"reward {name!r}: column {column!r} has {len(values)} values for {count} completions")
    return values
