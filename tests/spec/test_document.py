"""A mapping in JSON is the mapping that YAML reads, with the same lines and the same problems."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.spec.document import parse_document

FILE = Path("e.yaml")
texts = st.text(max_size=8) | st.sampled_from(["<<", "=", "1", "true", "~", "a: b", "#", "\u2028", "\x85", "\ud83d"])
values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda nested: st.lists(nested, max_size=3) | st.dictionaries(texts, nested, max_size=3),
    max_leaves=6,
)


def read(text: str) -> tuple[str, dict[Any, int]] | str:
    """Return the data, with the types of numbers, and the lines, or the problem."""
    try:
        parsed = parse_document(text, FILE)
    except ConfigError as error:
        return str(error)
    return repr(parsed.data), dict(parsed.lines or {})


def read_as_yaml(text: str) -> tuple[str, dict[Any, int]] | str:
    return read(text + "\n# not in JSON\n")


@example({"a": math.nan}, None, True)
@settings(max_examples=200)
@given(st.dictionaries(texts, values, max_size=3), st.sampled_from([None, 1]), st.booleans())
def test_json_is_read_as_yaml_reads_it(data: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(data, indent=indent, ensure_ascii=ascii_only)
    assert read(text) == read_as_yaml(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1,\n "b": {"c": 1,\n "c": 2}}', "e.yaml:3: not valid YAML"),
        ('{"a": 1, "a": 2}', "e.yaml:1: not valid YAML"),
        ('{"a": 1,\n "b": ]}', "e.yaml:2: not valid YAML"),
        ('{"schemaVersion": 1.10}', 'e.yaml:1: schemaVersion: without quotes this is the number 1.1; .* "1.10"'),
        (r'{"a": "\ud83d"}', "half of a surrogate pair"),
        ('["a"]', "a mapping of keys"),
    ],
)
def test_a_problem_in_json_is_named_as_in_yaml(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_document(text, FILE)
