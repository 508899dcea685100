"""Templates of pages. They escape everything that they are given; what models say is text in them and nothing else.

A reader may ask for Markdown as HTML. It stays inert: HTML in it is text, links open only after a click and carry no
referrer, and images become links, since showing one would send a request to whoever the model names.
"""

from __future__ import annotations

import re
import time
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from holdfast.display.format import dollars, duration, latency, share
from holdfast.display.terminal import printable
from holdfast.report.overview import FEW
from holdfast.store.records import ANSWER_CLASSES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from markdown_it import MarkdownIt
    from markdown_it.renderer import RendererHTML
    from markdown_it.token import Token
    from markdown_it.utils import EnvType, OptionsDict

MOST_TEXT: Final = 20_000
"""characters shown of one text"""
_PLAIN_NAME: Final = re.compile(r"[\w.@/][\w.@/-]*")


def render(template: str, **values: Any) -> str:
    """Fill a template."""
    return environment().get_template(template).render(values)


def generate(template: str, **values: Any) -> Iterator[str]:
    """Fill a template piece by piece."""
    return environment().get_template(template).generate(values)


def compile_templates(names: Iterable[str]) -> None:
    """Compile templates, which takes longer than filling them, before somebody waits for a page."""
    for name in names:
        environment().get_template(name)


def read_asset(name: str) -> str:
    """Return a stylesheet or a script of the templates."""
    return files("holdfast.pages").joinpath("templates", name).read_text()


@cache
def environment() -> Environment:
    """Return the environment of all templates."""
    templates = Environment(
        loader=FileSystemLoader(str(files("holdfast.pages").joinpath("templates"))),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_spell_out,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals |= {"few": FEW, "answer_classes": ANSWER_CLASSES}
    templates.filters |= {
        "share": share,
        "dollars": dollars,
        "duration": duration,
        "latency": latency,
        "number": "{:,}".format,
        "when": _when,
        "measure": _measure,
        "words": _words,
        "pretty": pretty,
        "cut": cut,
        "markdown": render_markdown,
        "segment": _segment,
        "status_query": _status_query,
        "field_query": _field_query,
    }
    return templates


def cut(text: Any) -> str:
    """Shorten a text, with the number of characters that are not shown."""
    whole = text if isinstance(text, str) else pretty(text)
    hidden = len(whole) - MOST_TEXT
    return whole if hidden <= 0 else f"{whole[:MOST_TEXT]}\n… {hidden:,} characters more in outputs.jsonl"


def pretty(value: Any) -> str:
    """Return a value as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _spell_out(value: Any) -> Any:
    """Spell out control characters, which would be invisible or reorder a line, even in joined texts."""
    if isinstance(value, Markup):
        return Markup(printable(value))  # noqa: S704 - what is spelled out is no markup
    return printable(value) if isinstance(value, str) else value


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) + " UTC"


def _measure(value: float, unit: str) -> str:
    match unit:
        case "seconds":
            return latency(value) if value else "0"
        case "dollars":
            return dollars(value)
        case "score":
            return f"{value:.1f}"
        case _:
            return f"{value:,.0f}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _segment(text: str) -> str:
    """Quote a text as one segment of an address."""
    return quote(text, safe="")


def _term(text: str) -> str:
    """Return a name or value as the filter of trials reads it."""
    return text if _PLAIN_NAME.fullmatch(text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _status_query(grader: str, status: str) -> str:
    """Return the filter for trials with a status, of one grader or overall."""
    status = {"errors": "error", "left_out": "skipped"}.get(status, status)
    return status if grader == "overall" else f"{_term(grader)}:{status}"


def _field_query(field: str, value: str) -> str:
    """Return the filter for trials whose row has a value in a field."""
    return f"{_term(field)}={_term(value)}"


MOST: Final = 100_000
"""characters that are rendered; longer texts stay as they are"""


def render_markdown(text: str) -> Markup:
    """Return Markdown as HTML; a very long text stays as it is."""
    text = printable(text)
    if len(text) > MOST:
        return Markup('<div class="text">{}</div>').format(text)
    return Markup(_parser().render(text))  # noqa: S704 - the parser escapes HTML


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False, "linkify": False}).enable(["table", "strikethrough"])
    parser.add_render_rule("image", _image)
    parser.add_render_rule("link_open", _link)
    return parser


def _image(_: RendererHTML, tokens: Sequence[Token], place: int, _options: OptionsDict, _env: EnvType) -> str:
    token = tokens[place]
    return f"[image: {escape(token.content)} {escape(str(token.attrs.get('src', '')))}]"


def _link(renderer: RendererHTML, tokens: Sequence[Token], place: int, options: OptionsDict, env: EnvType) -> str:
    token = tokens[place]
    token.attrs |= {"rel": "noreferrer noopener nofollow", "target": "_blank"}
    return renderer.renderToken(tokens, place, options, env)
