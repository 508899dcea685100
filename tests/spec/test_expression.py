"""Expressions over a row's fields."""

from __future__ import annotations

import pytest

from holdfast.spec.template import TemplateError, TemplateSyntaxError, expression


@pytest.mark.parametrize("name", ["choices", "range", "self"])
def test_a_bare_name_is_the_field_of_that_name(name: str) -> None:
    value = ["a", "b"]
    assert expression(name)({name: value}) is value
    assert expression(f"({name})")({name: value}) is value


def test_a_field_that_a_row_lacks_is_undefined() -> None:
    with pytest.raises(TemplateError, match="'choices' is undefined"):
        expression("choices").required({})
    assert expression("choices")({}) is None
    assert expression("choices").names == {"choices"}


def test_a_keyword_of_the_language_is_not_a_field() -> None:
    assert expression("true")({"true": "no"}) is True
    assert expression("none").names == frozenset()


def test_a_filter_that_does_not_exist_is_a_mistake_in_the_expression() -> None:
    with pytest.raises(TemplateSyntaxError, match="No filter named 'nothing'"):
        expression("choices | nothing")
