"""Markdown as HTML, for readers who ask for it.

Whatever a model writes stays inert: HTML in it is text, links open only after a click and carry no referrer, and images
become links, since showing one would send a request to whoever the model names.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

from markupsafe import Markup, escape

from holdfast.display.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markdown_it import MarkdownIt
    from markdown_it.renderer import RendererHTML
    from markdown_it.token import Token
    from markdown_it.utils import EnvType, OptionsDict

MOST: Final = 100_000
"""characters that are rendered; longer texts stay as they are"""


def render_markdown(text: str) -> Markup:
    """Return a text of Markdown as HTML; a very long one as it is."""
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
