"""From Hydra's composed configuration to a checked dataclass, and the frame that every entry point runs in.

Owns when a user's mistake in an option is told: in one line, before any model loads (`train.runtime.option_errors` has
the words). Only entry points use it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import wraps
from importlib import import_module
from typing import Any, NoReturn, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from models.text_files import require_words, tolerate
from train.runtime.option_errors import ALL_OPTIONS, OptionError, option_error
from train.runtime.presets import CONF, preset_names
from train.runtime.ranks import is_main, num_ranks, rank, take_up_launcher
from train.runtime.tab_completion import script_for
from train.runtime.wandb_run import wandb_run

# Set to 1, a user's error is shown with its traceback.
FULL_ERROR = "HYDRA_FULL_ERROR"
# What the user has set it to: Hydra itself is told 1, so that it raises what it would otherwise print in its own way.
USERS_FULL_ERROR = "FORETOKEN_FULL_ERROR"
INTERRUPTED = 130
# What the deepspeed launcher and older ones put before a program's own words; the environment says the same.
LOCAL_RANK = ("--local_rank", "--local-rank")
# Every process composes the same options; one of them writes down which.
WRITES_NOTHING = ("hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")

# Mappings with names that no schema knows: whatever they are for checks them.
FREE_MAPPINGS = ("data.chat_template_kwargs", "reward.options")

T = TypeVar("T")


def exit_interrupted(step: int) -> NoReturn:
    """End a command that was asked to stop, and has saved what it did up to this step."""
    print(f"stopped at step {step}; the same command goes on from there")
    sys.exit(INTERRUPTED)


def checked(cfg: DictConfig, schema: type[T]) -> T:
    """Resolve, and merge into a fresh schema: an unknown key, a stray `+key=` or a wrong type is a ValueError."""
    if "model" in getattr(schema, "__dataclass_fields__", {}) and OmegaConf.is_missing(cfg, "model"):
        names = ", ".join(preset_names("model"))
        raise OptionError(f"no target model is chosen; add +model=NAME with NAME one of {names}")
    try:
        container = OmegaConf.to_container(cfg, resolve=True)
        merged = OmegaConf.merge(OmegaConf.structured(schema), container)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        where = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
        raise OptionError(f"bad option {where}{reason}; {ALL_OPTIONS}") from error
    assert isinstance(config, schema)
    return config


def words_of_rank(words: Sequence[str]) -> list[str]:
    """A command line's words as this process gives them to Hydra: no `--local_rank=N`, and only rank 0 writes files."""
    kept = [word for word in words if word.partition("=")[0] not in LOCAL_RANK]
    if is_main():
        return kept
    # Behind the last override: Hydra's parser takes them in one piece, with flags such as --multirun around it.
    overrides = [index for index, word in enumerate(kept, start=1) if "=" in word and not word.startswith("-")]
    end = overrides[-1] if overrides else len(kept)
    return [*kept[:end], *WRITES_NOTHING, *kept[end:]]


def _started_as(main: Callable[[Any], Any]) -> str | None:
    """The module's own name where `python -m` has loaded it as __main__.

    A launcher that sends a command to other machines, as submitit does, sends its functions by their module's name.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if main.__module__ == "__main__" and spec is not None else None


def with_free_mappings(schema: type[Any]) -> DictConfig:
    """The schema, with mappings that take new names from the command line without a `+`."""
    config: DictConfig = OmegaConf.structured(schema)
    for key in FREE_MAPPINGS:
        if OmegaConf.select(config, key) is not None:
            OmegaConf.set_struct(OmegaConf.select(config, key), False)
    return config


@contextmanager
def quiet_unless_main() -> Iterator[None]:
    """Prints of all processes but the first go nowhere; their errors, on the other stream, are told."""
    if is_main():
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Within it, the environment has this value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _tell(error: Exception) -> NoReturn:
    """End the command with the error's line, or as it is where the user wants its traceback."""
    if os.environ.get(USERS_FULL_ERROR) == "1":
        raise error
    who = "" if is_main() else f"rank {rank()}: "
    hint = "" if isinstance(error, OptionError) else f"\n(set {FULL_ERROR}=1 for the traceback)"
    print(f"{who}error: {error}{hint}", file=sys.stderr)
    sys.exit(2)


def _run_hydra(wrapped: Callable[[], Any], schema: type) -> Any:
    """Hydra's frame, in which whatever it has against the words of the command line is told in one line."""
    words = sys.argv[1:]
    with (
        _environment(USERS_FULL_ERROR, os.environ.get(FULL_ERROR, "")),
        _environment(FULL_ERROR, "1"),
    ):
        try:
            return wrapped()
        # ValueError and OSError: of Hydra's flags, and of its output folder. The command's own are told in `entry`.
        except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
            if os.environ[USERS_FULL_ERROR] == "1":
                raise
            _tell(option_error(error, words, schema))


def entry(
    schema: type[T], config_name: str, many_processes: bool = False
) -> Callable[[Callable[[T], Any]], Callable[[], Any]]:
    """Turns `main(config)` into a command that reads conf/<config_name>.yaml and the command line.

    A ValueError or a lack of disk ends it with one line and code 2; Ctrl-C with code 130. many_processes: whether
    torchrun and the like may start it as several.
    """

    # Gives every option of the schema a place that the command line can override, typed from the start.
    ConfigStore.instance().store(name=f"{config_name}_schema", node=with_free_mappings(schema))

    def decorate(main: Callable[[T], Any]) -> Callable[[], Any]:
        def run(cfg: DictConfig) -> Any:
            try:
                take_up_launcher()
                config = checked(cfg, schema)
                if num_ranks() > 1 and not many_processes:
                    raise ValueError(
                        f"WORLD_SIZE={num_ranks()}: {config_name} runs in one process; start it with python -m"
                    )
                own = os.environ.get(USERS_FULL_ERROR, "")
                with _environment(FULL_ERROR, own), quiet_unless_main(), wandb_run(config):
                    return main(config)
            except KeyboardInterrupt:
                print("\nstopped; the same command goes on from here", file=sys.stderr)
                sys.exit(INTERRUPTED)
            except (ValueError, OSError) as error:
                _tell(error)

        wrapped: Callable[[], Any] = hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(run)

        @wraps(main)
        def command() -> Any:
            if (spec := _started_as(main)) is not None:
                return getattr(import_module(spec), main.__name__)()
            if (script := script_for(sys.argv[1:])) is not None:
                print(script)
                return None
            tolerate(sys.stdout)
            try:
                require_words(sys.argv[1:])
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr)
                sys.exit(2)
            sys.argv[1:] = words_of_rank(sys.argv[1:])
            return _run_hydra(wrapped, schema)

        return command

    return decorate
