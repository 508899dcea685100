"""Plain completions of a text."""

from __future__ import annotations

from typing import Any

from tests.support.providers import Asked, Refused, Say, Wire, path_of, words
from tests.support.providers.chat import WIRE as CHAT


class _Completions(Wire):
    def check(self, asked: Asked) -> None:
        if path_of(asked) != "/v1/completions":
            raise Refused(f"Unknown request URL: POST {asked.path}", 404)
        if not isinstance(asked.body.get("prompt"), str):
            raise Refused("you must provide a prompt")

    def whole(self, say: Say, asked: Asked) -> Any:
        usage = {"prompt_tokens": say.input_tokens, "completion_tokens": say.output_tokens}
        choice = {"index": 0, "text": say.text, "logprobs": None, "finish_reason": say.stop}
        return {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage}

    def events(self, say: Say, asked: Asked) -> list[tuple[str | None, Any]]:
        whole = self.whole(say, asked)
        choices = [{"index": 0, "text": part, "finish_reason": None} for part in words(say.text)]
        choices.append({"index": 0, "text": "", "finish_reason": say.stop})
        chunks: list[Any] = [{"id": "cmpl-1", "choices": [choice]} for choice in choices]
        if (asked.body.get("stream_options") or {}).get("include_usage"):
            chunks.append({"id": "cmpl-1", "choices": [], "usage": whole["usage"]})
        return [*((None, chunk) for chunk in chunks), (None, "[DONE]")]

    def error(self, status: int, message: str) -> Any:
        return CHAT.error(status, message)

    def error_event(self, message: str) -> tuple[str | None, Any]:
        return CHAT.error_event(message)


WIRE = _Completions()
