"""Templates of pages. They escape everything that they are given; what models say is text in them and nothing else."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from holdfast.display.format import dollars, duration, share


def render(template: str, **values: Any) -> str:
    """Fill a template."""
    return environment().get_template(template).render(values)


@cache
def environment() -> Environment:
    """Return the environment of all templates."""
    templates = Environment(
        loader=FileSystemLoader(str(files("holdfast.pages").joinpath("templates"))),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"share": share, "dollars": dollars, "duration": duration, "segment": _segment}
    return templates


def _segment(text: str) -> str:
    """Quote a text as one segment of an address."""
    return quote(text, safe="")
