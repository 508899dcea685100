"""Keys: what can change a result is in its key, and nothing else is.

generation key   the sample's content, the conversation, the target, the trial number
grade key        the generation key, the digest of what was said, the grader
run id           all of a run's parts, so that the same command finds the same directory

In none of them: concurrency, time-outs, retries, budgets, thresholds, weights, API keys, the base URL of a model
(unless `identity: url`), paths.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

from holdfast.canonical import digest, digest_as_written

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def work_digest(conversation: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    """Return the digest of conversation and target, which all trials of a run have in common."""
    return digest({"conversation": conversation, "target": target})


def work_digests(conversation: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the work digests of rows whose requests contain only texts, and of other rows, if there can be any.

    Earlier versions sent numbers, lists and objects in the body for an HTTP target as texts, so their answers do not
    count for requests that contain values.
    """
    if target.get("kind") != "http":
        return work_digest(conversation, target), None
    texts = {key: value for key, value in target.items() if key != "request_values"}
    return work_digest(conversation, texts), work_digest(conversation, {**texts, "request_values": "JSON"})


def generation_key(sample: str, trial: int, work: str) -> str:
    """Return the key of a trial, from the sample's digest and the run's work digest."""
    return digest_as_written({"sample": sample, "trial": trial, "work": work})


def grade_key(generation: str, output: str, grader: str, turn: int | None = None) -> str:
    """Return the key of a grade, from the output's digest and the grader's fingerprint."""
    return digest_as_written({"generation": generation, "grader": grader, "output": output, "turn": turn})


def generation_digests(samples: bytes, trials: int, work: str) -> list[bytes]:
    """Return the 16 bytes of the keys of all trials of many samples, whose digests follow each other in `samples`."""
    texts = samples.hex()
    ends = [f'","trial":{trial},"work":"{work}"}}' for trial in range(1, trials + 1)]
    return [
        sha256(f'{{"sample":"sha256:{texts[start : start + 32]}{end}'.encode()).digest()[:16]
        for start in range(0, len(texts), 32)
        for end in ends
    ]


def grade_digests(generations: Iterable[str], outputs: Iterable[bytes], grader: str) -> list[bytes]:
    """Return the 16 bytes of the keys of a grader's verdicts on many outputs, from their keys and digests."""
    return [
        sha256(
            f'{{"generation":"{generation}","grader":"{grader}","output":"sha256:{output.hex()}","turn":null}}'.encode()
        ).digest()[:16]
        for generation, output in zip(generations, outputs, strict=True)
    ]


def run_id(name: str, parts: Mapping[str, Any]) -> str:
    """Eight hex digits that stand for all that defines a run."""
    return digest({"name": name, "parts": parts}).removeprefix("sha256:")[:8]
