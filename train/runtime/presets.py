"""The files of conf/ as options by name, for what is chosen outside Hydra's own groups. Does not import Hydra."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

CONF = Path(__file__).resolve().parents[2] / "conf"

T = TypeVar("T")


def read_words(words: Sequence[str], option: str) -> DictConfig:
    """OPTION=VALUE ... as a command line has them. ValueError, which begins with `option`, for words that are not."""
    for word in words:
        if not word.partition("=")[0].strip() or "=" not in word:
            raise ValueError(f"{option}: {word!r} is no option; options are written NAME=VALUE")
        try:
            OmegaConf.to_container(OmegaConf.from_dotlist([word]))
        except (OmegaConfBaseException, YAMLError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{option}: {word!r} cannot be read ({reason})") from error
    return OmegaConf.from_dotlist(list(words))


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
