"""A file that is not a mapping in YAML is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.spec.document import parse_document

FILE = Path("e.yaml")
texts = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]), max_size=8)
values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda nested: st.lists(nested, max_size=3) | st.dictionaries(texts, nested, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100)
@given(st.dictionaries(texts, values, min_size=1, max_size=3), st.booleans())
def test_a_mapping_in_json_is_read_with_the_line_of_each_key(data: dict[str, Any], ascii_only: bool) -> None:
    document = parse_document(json.dumps(data, indent=1, ensure_ascii=ascii_only), FILE)
    assert document.data == data
    lines = [line for location, line in (document.lines or {}).items() if len(location) == 1]
    assert lines == sorted(set(lines)) and lines[0] == 2


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
def test_a_problem_is_named_with_its_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_document(text, FILE)
