"""Keys: the key of a result covers everything that can change the result, and nothing else.

generation key   what the target sees of the sample, the conversation, the target, the trial number
verdict          on an output: the grader, and the digest of what it judged (what was said, and the row, if the grader
                 sees more of it than the target does)
set digest       all outputs of a run: verdicts of graders that look at them together carry it
run id           all of a run's parts, so that the same command finds the same directory

In none of them: concurrency, time-outs that are errors, retries, budgets, thresholds, weights, API keys, the base URL
of a model (unless `identity: url`), paths. Limits of a trial that score are a part of the conversation.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

from holdfast.canonical import digest, digest_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def work_digest(conversation: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    """Return the digest of conversation and target, which all trials of a run have in common."""
    return digest({"conversation": conversation, "target": target})


def generation_key(asked: str, trial: int, work: str) -> str:
    """Return the key of a trial, from the digest of what the target sees of the sample and the run's work digest."""
    return digest_bytes(f'{{"sample":"{asked}{_end_of_key(trial, work)}'.encode())


def _end_of_key(trial: int, work: str) -> str:
    return f'","trial":{trial},"work":"{work}"}}'


def generation_digests(asked: bytes, trials: int, work: str) -> list[bytes]:
    """Return the 16 bytes of the keys of all trials of many samples, whose digests follow each other in `asked`."""
    texts = asked.hex()
    ends = [_end_of_key(trial, work) for trial in range(1, trials + 1)]
    return [
        sha256(f'{{"sample":"sha256:{texts[start : start + 32]}{end}'.encode()).digest()[:16]
        for start in range(0, len(texts), 32)
        for end in ends
    ]


def set_digest(outputs: Iterable[tuple[str, str]]) -> str:
    """Return the digest of all outputs of a run, from their keys and digests in any order."""
    return digest_bytes("".join(sorted(key + output for key, output in outputs)).encode())


def run_id(name: str, parts: Mapping[str, Any]) -> str:
    """Return eight hex digits that identify everything that defines a run."""
    return digest({"name": name, "parts": parts}).removeprefix("sha256:")[:8]
