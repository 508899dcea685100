"""Templates that are filled in without Jinja2 read as Jinja2 reads them."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from holdfast.spec.template import Template, TemplateError

_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)

PIECES = [
    *("{{ a }}", "{{b}}", "{{  a\n}}", "{{ missing }}", "{{ none }}", "{{ True }}", "{{ self }}", "{{ range }}"),
    *("{{- a -}}", "{{ a|upper }}", "{{ 'x' }}", "{{ a.b }}", "{% if a %}", "{% endif %}", "{# note #}", "{{", "}}"),
    *("{", "}", "%}", "#}", " ", "\n", "\r\n", "\r", "text", "ä", "{{ ä }}", "{{ n }}", "{{ list }}", "{{ in }}"),
]
FIELDS: dict[str, Any] = {"a": "A{{ b }}", "b": "B\n", "n": 3, "list": [1], "ä": "Ä", "self": "S", "none": "no"}


def by_jinja(source: str) -> str | None:
    if not any(mark in source for mark in ("{{", "{%", "{#")):
        return source  # Jinja2 would replace line breaks of other systems
    try:
        return _ENVIRONMENT.from_string(source).render(FIELDS)
    except (jinja2.TemplateError, TypeError):
        return None


def by_us(source: str) -> str | None:
    try:
        return Template(source).render(FIELDS)
    except (TemplateError, TypeError):
        return None


@given(st.lists(st.sampled_from(PIECES), max_size=5).map("".join))
def test_a_template_renders_as_with_jinja(source: str) -> None:
    assert by_us(source) == by_jinja(source)


@pytest.mark.parametrize("source", ["{{ a }}", "Q: {{ a }}\nA: {{ b }}\n"])
def test_a_template_of_texts_and_fields_names_what_it_needs(source: str) -> None:
    template = Template(source)
    assert template.names == {"a", "b"} & {*source} and template.value(FIELDS) == by_jinja(source)
