"""Responses of recorded calls, as they stand in `steps.jsonl`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.store.records import ProxiedResponse, ToolResponse

RECORDED: list[tuple[bytes, Any]] = [
    (b'{"model":null,"whole":{"data":[]},"free":true}', ProxiedResponse(None, whole={"data": []}, free=True)),
    (b'{"model":"m","whole":{"id":1},"counts":null}', ProxiedResponse("m", whole={"id": 1}, counts=None)),
    (b'{"model":"m","events":[{}],"counts":{"n":1}}', ProxiedResponse("m", events=[{}], counts={"n": 1})),
    (b'{"tool":"t","arguments":{"a":1},"result":"r"}', ToolResponse("t", {"a": 1}, "r")),
    (b'{"tool":"t","arguments":{},"result":"Error","traceback":"T"}', ToolResponse("t", {}, "Error", traceback="T")),
    (
        b'{"tool":"t","arguments":{},"result":null,"function":null,"files":{"a":"sha256:1"}}',
        ToolResponse("t", {}, None, function=None, files={"a": "sha256:1"}),
    ),
]


@pytest.mark.parametrize(("line", "response"), RECORDED)
def test_a_response_has_its_documented_bytes(line: bytes, response: Any) -> None:
    assert msgspec.json.encode(response) == line
    assert msgspec.json.encode(msgspec.to_builtins(response)) == line
    assert msgspec.convert(msgspec.json.decode(line), type(response)) == response
