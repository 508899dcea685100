"""Build the documentation site with Sphinx from the same Markdown files that are read on GitHub.

`index.md` is the table of contents: each of its headings is a group, and each link below it a page.
"""

import re

from sphinx.application import Sphinx

import holdfast

project = "Holdfast"
release = version = holdfast.__version__
html_title = f"Holdfast {version}"
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
extensions = ["myst_parser"]
smartquotes = False  # `--option` is no dash
myst_heading_anchors = 4  # as on GitHub

_GROUP = re.compile(r"^## (.+)$", re.MULTILINE)
_PAGE = re.compile(r"^- \[[^\]]+\]\(([\w-]+)\.md\)", re.MULTILINE)


def _add_contents(_app: Sphinx, name: str, source: list[str]) -> None:
    if name == "index":
        groups = _GROUP.split(source[0])[1:]
        for title, body in zip(groups[::2], groups[1::2], strict=True):
            pages = "\n".join(_PAGE.findall(body))
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n"


def setup(app: Sphinx) -> None:
    """Turn the groups of `index.md` into the navigation of the site."""
    app.connect("source-read", _add_contents)
