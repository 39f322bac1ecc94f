"""A chat template of one's own, from a file."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2

from ..text_files import read_text

# transformers' own mark of what an assistant writes, which plain Jinja does not know.
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def read_template(file: str) -> str:
    """The text of a chat template. ValueError for no such file, or what is no Jinja template."""
    path = Path(file).expanduser()
    try:
        text = read_text(path)
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", text))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"model.chat_template={file!r} is no Jinja template (line {error.lineno}: {error.message})"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.chat_template={file!r} cannot be read ({error}); give a file that holds a Jinja template"
        ) from error
    return text
