"""The files of conf/ as options by name, for what is chosen outside Hydra's own groups. Does not import Hydra."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

CONF = Path(__file__).resolve().parent.parent / "conf"

T = TypeVar("T")


def preset_names(group: str) -> list[str]:
    """Names of the files in conf/GROUP."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def read_preset(schema: type[T], group: str, name: str, values: Mapping[str, Any], option: str) -> T:
    """conf/GROUP/NAME.yaml as a `schema`, with these values in place of some of its own.

    option: what the user has set, for the ValueError of an unknown name, or of a value that the schema does not take.
    """
    if name not in (names := preset_names(group)):
        raise ValueError(f"{option} names {name!r}, which is unknown; choose one of {', '.join(names)}")
    try:
        file = OmegaConf.load(CONF / group / f"{name}.yaml")
        options = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), file, dict(values)))
    except OmegaConfBaseException as error:
        raise ValueError(f"{option} {name}: {str(error).splitlines()[0]}") from error
    assert isinstance(options, schema)
    return options
