"""Plain completions of a text, as base models have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from holdfast.dialects.chat import beside_message, check_choice, first_choice, is_first, read_tokens
from holdfast.dialects.reading import with_raw
from holdfast.dialects.types import Answer, Dialect, StreamReader, read_stop
from holdfast.errors import AttemptError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.dialects.types import Message, ModelRequest


class _Completions(Dialect):
    api = "completions"

    def path(self, model: str, *, stream: bool) -> str:
        return "/completions"

    def encode(self, request: ModelRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": request.model, **request.params, "prompt": plain_text(request.messages)}
        if request.max_tokens is not None:
            body.setdefault("max_tokens", request.max_tokens)
        if request.stream:
            body["stream"] = True
            body.setdefault("stream_options", {"include_usage": True})
        return body

    def read_reply(self, reply: Any) -> Answer:
        choice = first_choice(reply["choices"])
        check_choice(choice)
        return _answer(choice["text"], choice, reply)

    def reader(self) -> StreamReader:
        return _CompletionsReader()

    def conversation(self, body: Any) -> list[Message]:
        prompt = body.get("prompt") if isinstance(body, dict) else None
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []


class _CompletionsReader(StreamReader):
    def __init__(self) -> None:
        self._text: list[str] = []
        self._choice: dict[str, Any] = {}
        self._reply: dict[str, Any] = {}

    @property
    def ended(self) -> bool:
        return self._choice.get("finish_reason") is not None

    def take_event(self, event: Any) -> bool:
        self._reply |= {key: value for key, value in event.items() if value is not None}
        texts = []
        for choice in filter(is_first, event.get("choices") or ()):
            check_choice(choice)
            self._choice |= {key: value for key, value in choice.items() if value is not None}
            texts.append(choice.get("text") or "")
        self._text += texts
        return any(texts)

    def answer(self) -> Answer:
        return _answer("".join(self._text), self._choice, self._reply)


def _answer(text: Any, choice: dict[str, Any], reply: dict[str, Any]) -> Answer:
    if not isinstance(text, str):
        raise AttemptError("bad_reply", f"the answer is not a text: {str(choice)[:200]}")
    message = with_raw({"role": "assistant", "content": text}, "completions", beside_message(reply, choice))
    tokens = read_tokens(reply.get("usage"), reply.get("service_tier"))
    word, action = read_stop("completions", choice.get("finish_reason"), message)
    return Answer(message=message, tokens=tokens, stop=word, action=action)


def plain_text(messages: Sequence[Message]) -> str:
    """Return a conversation as the prompt of a completion."""
    return "\n\n".join(str(message["content"]) for message in messages)


DIALECT: Final = _Completions()
