"""A deterministic model for the test server: its log-probabilities are a pure function of the tokens before."""

from __future__ import annotations

import re
import zlib
from typing import Any, NamedTuple

BOS, EOS = "<s>", "</s>"
_PIECE = re.compile(r"</?s>| ?\w{1,4}|\s|[^\w\s]")


class Step(NamedTuple):
    """A token, how likely it is after those before it, and how likely the most likely one is."""

    piece: str
    logprob: float
    best: float

    @property
    def top(self) -> dict[str, float]:
        return {self.piece: self.logprob} if self.logprob == self.best else {"?": self.best, self.piece: self.logprob}


class TokenModel:
    """Short pieces of words are tokens. Ids are given out as pieces come; BOS is 1 and EOS is 2."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {"": 0, BOS: 1, EOS: 2}
        self._pieces = list(self._ids)

    def encode(self, text: str) -> list[int]:
        return [self._id(piece) for piece in _PIECE.findall(text)]

    def decode(self, ids: list[int]) -> str:
        return "".join(self._pieces[number] for number in ids)

    def steps(self, ids: list[int]) -> list[Step]:
        """Judge every token. The digits of the numbers are many, so that the order of a sum shows."""
        steps, state = [], 1
        for number in ids:
            piece = self._pieces[number]
            state = zlib.crc32(f"{piece}\0".encode(), state)
            logprob = -(state % 7919 + 1) / 1009
            best = logprob if state % 3 == 0 else max(logprob, -((state >> 8) % 997 + 1) / 2003)
            steps.append(Step(piece, logprob, best))
        return steps

    def _id(self, piece: str) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]


def echoed(model: TokenModel, ids: list[int]) -> dict[str, Any]:
    """Return a choice as vLLM does for `echo` with `logprobs: 1` and `max_tokens: 1`."""
    steps = model.steps([*ids, model.encode(".")[0]])
    offsets, place = [], 0
    for step in steps:
        offsets.append(place)
        place += len(step.piece)
    logprobs = {
        "text_offset": offsets,
        "tokens": [step.piece for step in steps],
        "token_logprobs": [None, *(step.logprob for step in steps[1:])],
        "top_logprobs": [None, *(step.top for step in steps[1:])],
    }
    return {"index": 0, "text": model.decode(ids) + ".", "logprobs": logprobs, "finish_reason": "length"}


def generated(model: TokenModel, ids: list[int]) -> dict[str, Any]:
    """Return the same as SGLang's /generate does."""
    steps = model.steps(ids)
    entries: list[Any] = [[step.logprob, number, None] for step, number in zip(steps, ids, strict=True)]
    tops: list[Any] = [[[step.best, -1, None]] for step in steps]
    entries[0][0], tops[0] = None, None
    meta = {"prompt_tokens": len(ids), "completion_tokens": 1}
    return {"text": ".", "meta_info": {**meta, "input_token_logprobs": entries, "input_top_logprobs": tops}}


def forced(model: TokenModel, body: dict[str, Any]) -> dict[str, Any]:
    """Return the same as llama.cpp's /completion does under a grammar of tokens."""
    ids = [int(number) for number in re.findall(r"<\[(\d+)\]>", body["grammar"])]
    steps = model.steps([*body["prompt"], *ids])[len(body["prompt"]) :]
    probabilities = [
        {"id": number, "logprob": step.logprob, "top_logprobs": [{"id": -1, "logprob": step.best}]}
        for number, step in zip(ids, steps, strict=True)
    ]
    return {
        "content": model.decode(ids),
        "completion_probabilities": probabilities,
        "tokens_evaluated": len(body["prompt"]),
        "tokens_predicted": len(ids),
        "truncated": False,
    }
