"""From Hydra's composed configuration to a checked dataclass, and the frame that every entry point runs in.

Owns how a user's mistake in an option is told: one line, before any model loads. The one module that imports Hydra;
only entry points use it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from train.presets import CONF, preset_names

# Set to 1, a user's error is shown with its traceback.
FULL_ERROR = "HYDRA_FULL_ERROR"
INTERRUPTED = 130

T = TypeVar("T")


def exit_interrupted(step: int) -> NoReturn:
    """End a command that was asked to stop, and has saved what it did up to this step."""
    print(f"stopped at step {step}; the same command goes on from there")
    sys.exit(INTERRUPTED)


def checked(cfg: DictConfig, schema: type[T]) -> T:
    """Resolve, and merge into a fresh schema: an unknown key, a stray `+key=` or a wrong type is a ValueError."""
    if "model" in getattr(schema, "__dataclass_fields__", {}) and OmegaConf.is_missing(cfg, "model"):
        names = ", ".join(preset_names("model"))
        raise ValueError(f"no target model is chosen; add +model=NAME with NAME one of {names}")
    try:
        container = OmegaConf.to_container(cfg, resolve=True)
        merged = OmegaConf.merge(OmegaConf.structured(schema), container)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        where = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
        raise ValueError(f"bad option {where}{reason}; `--cfg job` prints all options with their values") from error
    assert isinstance(config, schema)
    return config


def entry(schema: type[T], config_name: str) -> Callable[[Callable[[T], Any]], Callable[[], Any]]:
    """Turns `main(config)` into a command that reads conf/<config_name>.yaml and the command line.

    A ValueError or a lack of disk ends it with one line and code 2; Ctrl-C with code 130.
    """

    # Gives every option of the schema a place that the command line can override, typed from the start.
    ConfigStore.instance().store(name=f"{config_name}_schema", node=schema)

    def decorate(main: Callable[[T], Any]) -> Callable[[], Any]:
        def run(cfg: DictConfig) -> Any:
            try:
                return main(checked(cfg, schema))
            except KeyboardInterrupt:
                print("\nstopped; the same command goes on from here", file=sys.stderr)
                sys.exit(INTERRUPTED)
            except (ValueError, OSError) as error:
                if os.environ.get(FULL_ERROR) == "1":
                    raise
                print(f"error: {error}\n(set {FULL_ERROR}=1 for the traceback)", file=sys.stderr)
                sys.exit(2)

        wrapped: Callable[[], Any] = hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(run)
        return wrapped

    return decorate
