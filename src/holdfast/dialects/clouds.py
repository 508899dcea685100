"""Anthropic's API as clouds offer it: the model is named by the path, and the version of the API by the body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from holdfast.dialects import dialect_of
from holdfast.dialects.types import Dialect

if TYPE_CHECKING:
    from holdfast.dialects.types import Answer, Message, ModelRequest, StreamReader
    from holdfast.errors import AttemptError, Fault
    from holdfast.spec.providers import Access, ModelEndpoint

_VERSIONS: Final[dict[Access, str]] = {"aws": "bedrock-2023-05-31", "gcp": "vertex-2023-10-16"}


def dialect_at(endpoint: ModelEndpoint) -> Dialect:
    """Return the dialect in which a model is asked where it is."""
    dialect = dialect_of(endpoint.api)
    is_cloud = endpoint.api == "messages" and endpoint.access in _VERSIONS
    return _CloudMessages(dialect, endpoint.access) if is_cloud else dialect


class _CloudMessages(Dialect):
    api = "messages"

    def __init__(self, messages: Dialect, cloud: Access) -> None:
        self._messages = messages
        self._cloud = cloud

    def path(self, model: str, *, stream: bool) -> str:
        name = quote(model, safe="")  # an ARN has slashes
        if self._cloud == "aws":
            return f"/model/{name}/invoke"
        return f"/models/{name}:{'streamRawPredict' if stream else 'rawPredict'}"

    def encode(self, request: ModelRequest) -> dict[str, Any]:
        body = self._messages.encode(request)
        del body["model"]
        return {"anthropic_version": _VERSIONS[self._cloud], **body}

    def read(self, reply: Any) -> Answer:
        return self._messages.read(reply)

    def reader(self) -> StreamReader:
        return self._messages.reader()

    def join(self, paused: Message, rest: Message) -> Message:
        return self._messages.join(paused, rest)

    def explain(self, error: AttemptError | Fault) -> str | None:
        return self._messages.explain(error)

    def conversation(self, body: Any) -> list[Message]:
        return self._messages.conversation(body)
