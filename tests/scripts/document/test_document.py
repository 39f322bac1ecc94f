"""docs/options.md and docs/api.md are what the command writes, and what cannot be written is told."""

import dataclasses
import re
import typing
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from scripts.document import __main__ as command
from scripts.document import api, options
from scripts.document.api import PUBLIC, ROOT, entry
from scripts.document.options import COMMANDS, OF_KINDS, PARSERS, SHARED, command_options, render_options
from scripts.document.tables import flat, type_name
from train.runtime.presets import CONF, preset_names

CHANGED = "is not what the code says: run `make docs` and look at what has changed"


@pytest.fixture(scope="module")
def page() -> str:
    return render_options()


def rows(text: str) -> dict[str, list[str]]:
    """Option -> its other cells, of all tables in which the first cell is one name."""
    found = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", text, flags=re.M)
    return {name: [cell.strip() for cell in re.split(r"(?<!\\) \| ", rest)] for name, rest in found}


def section(text: str, title: str) -> str:
    return text.split(f"\n### {title}\n")[1].split("\n### ")[0]


def test_pages_are_what_the_command_writes(page: str) -> None:
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == page, f"docs/options.md {CHANGED}"
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == api.render_api(), f"docs/api.md {CHANGED}"


def test_command_writes_both(tmp_path: Path) -> None:
    assert command.main(tmp_path) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["api.md", "options.md"]


def test_every_command_and_group_is_there() -> None:
    entries = {path.stem for path in CONF.glob("*.yaml")}
    assert set(COMMANDS) == entries
    assert {*SHARED, *OF_KINDS, *options.BUNDLES} == {path.name for path in CONF.iterdir() if path.is_dir()}


@pytest.mark.parametrize("name", COMMANDS)
def test_defaults_are_those_of_the_composed_command(name: str, page: str) -> None:
    """An independent way to them: Hydra composes the command, as it is started, and every leaf is compared."""
    module, schema = COMMANDS[name]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose(name, ["+model=tiny"])
    chosen = options.group_defaults(CONF / f"{name}.yaml")
    table = rows(section(page, module.__name__))
    leaves = dict(leaves_of(schema))
    shown = {key for key in leaves if key.partition(".")[0] not in chosen}
    assert shown == set(table)
    for key in shown:
        container = OmegaConf.to_container(composed, resolve=False)
        for part in key.split("."):
            container = container[part]
        default = table[key][1]
        if isinstance(container, dict) and container:
            assert default == "see the file"
            continue
        read = OmegaConf.to_container(OmegaConf.create(f"x: {default.strip('`')}"), resolve=False)
        assert read == {"x": container}, key


def leaves_of(schema: Any, prefix: str = "") -> typing.Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(schema):
        kind = typing.get_type_hints(schema)[field.name]
        if dataclasses.is_dataclass(kind):
            yield from leaves_of(kind, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", kind


@pytest.mark.parametrize("group", [*SHARED, *OF_KINDS, *options.BUNDLES])
def test_every_file_of_a_group_is_described(group: str, page: str) -> None:
    text = section(page, group)
    for name in preset_names(group):
        (line,) = re.findall(rf"^\| `\+?{group}={name}` \| (.*) \|$", text, flags=re.M)
        assert len(line.split(" | ")[0]) > 5


@pytest.mark.parametrize("group", OF_KINDS)
def test_every_value_of_a_kind_is_explained(group: str, page: str) -> None:
    """Each key of each file of the group has a row that names the file."""
    text = section(page, group)
    for name in preset_names(group):
        for key in flat(OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))):
            if key not in ("kind", "spec"):
                assert re.search(rf"^\| `{group}\.{key}` \| [^|]*\b{name}\b", text, flags=re.M), (
                    f"{group}={name}: {key}"
                )


@dataclasses.dataclass
class Silent:
    """Says nothing."""

    number: int = 1


def test_an_option_without_a_meaning_is_refused() -> None:
    with pytest.raises(
        ValueError, match="option number has no meaning: write `name: meaning` into the docstring of Si"
    ):
        list(command_options(Silent, {}, {}, {}))
    (found,) = command_options(Silent, {}, {"number": "Of something."}, {})
    assert (found.type, found.default, found.meaning) == ("int", "`1`", "Of something")


def test_an_argument_without_help_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = ArgumentParser()
    parser.add_argument("--silent")
    monkeypatch.setitem(PARSERS, "scripts.generate", (options.generate, parser))
    assert command.main(Path("/nowhere")) == 2
    assert "error: option `--silent` has no meaning" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("annotation", "name"),
    [
        (int, "int"),
        (float | None, "float or null"),
        (list[str], "list of str"),
        (dict[str, Any], "mapping"),
        (Any, "any"),
    ],
)
def test_types(annotation: Any, name: str) -> None:
    assert type_name(annotation) == name


# The Python interface


@pytest.mark.parametrize("name", [name for names in PUBLIC.values() for name in names])
def test_public_names_can_be_imported(name: str) -> None:
    """The page is read from the source; what it says to import must be there when imported, too."""
    module, _, path = name.partition(":")
    found = __import__(module, fromlist=["x"])
    for part in path.split("."):
        found = getattr(found, part)
    assert entry(name).startswith(f"### {path}\n")


def test_names_are_listed_once() -> None:
    names = [name for names in PUBLIC.values() for name in names]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("models.target.model:nothing", "models.target.model:nothing is not defined there"),
        ("models.nothing:x", "models.nothing is no module here"),
        ("models.verification.options:LosslessRule", "is not defined there"),
    ],
)
def test_names_that_are_gone(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        entry(name)


def test_signatures() -> None:
    text = entry("models.decoding.decoder:Decoder")
    assert "\n    num_draft_tokens: int = 0,\n" in text
    assert "`num_draft_tokens` is K, the longest block" in text  # of __init__
    assert "self" not in text.split("```")[1]
    assert "    tokens: list[int]  # a closing EOS included" in entry("models.decoding.rows:DecodeResult")
    assert "load_target(options: TargetOptions) -> Target\n" in entry("models.target.model:load_target")
