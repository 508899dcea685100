"""Hostile inputs: texts, files and runs that somebody may put where Holdfast reads."""

from __future__ import annotations

import os
import re
import socket
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.store.lines import seal
from tests.support.specs import write_spec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXTS = {
    "title": "\x1b]0;pwned\x07",
    "clear": "\x1b[2J\x1b[H",
    "clipboard": "\x1b]52;c;cHduZWQ=\x07",
    "link": "\x1b]8;;https://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "c1": "\x9b2J\x9d0;pwned\x9c",
    "nul": "a\x00b",
    "return": "really\rnothing",
    "backspace": "ok\x08\x08no",
    "delete": "x\x7fy",
    "right to left": "\u202egnp.exe\u202c",
    "isolate": "\u2066abc\u2069",
    "invisible": "a\u200bb\ufeff",
}
"""what a terminal would obey, or show as something else"""
ALL = " ".join(TEXTS.values())
FORMULAS = ["=HYPERLINK(1)", "+1+cmd", "-1+cmd", "@SUM(1)", "\t=1", "\r=1"]
HTML = "<script>alert(1)</script><img src=x onerror=alert(2)>"
OBEYED = re.compile(
    "\x1b[^\\[]|\x1b\\[[\\d;?]*[^\\d;?mKAlhG]|\x1b\\[H|[\x00\x07\x08\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069\ufeff]"
)
"""what must not reach a terminal; the colours and cursor movements of a live display may"""


def assert_harmless(screen: str, *, terminal: bool = False) -> None:
    """Check that a terminal would obey nothing in an output; into a pipe there is no style either."""
    match = OBEYED.search(screen) or (None if terminal else re.search("[\x1b\r]", screen))
    assert match is None, f"{match[0]!r} in {screen[max(0, match.start() - 200) : match.end() + 50]!r}"


AGENT = """\
TEXT = {text!r}


def reply(prompt, context):
    if "broken" in context.sample_id:
        raise ValueError(TEXT)
    return TEXT


def grade(output, **_):
    return {{"score": 0.0, "feedback": TEXT, "details": {{TEXT: TEXT}}}}
"""


def hostile_eval(folder: Path, text: str = ALL, **keys: Any) -> Path:
    """Write an eval in which ids, fields, outputs, errors and feedback are a hostile text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.py").write_text(AGENT.format(text=text))
    rows = [
        {"id": f"{number} {name} {text}", "question": text, "kind": text} for number, name in enumerate(["a", "broken"])
    ]
    changes: dict[str, Any] = {
        "samples": rows,
        "target": {"python": "agent.py:reply"},
        "graders": [{"type": "python", "function": "agent.py:grade", "name": "judge"}],
        "by": "kind",
        "limits": {"retries": 0},
    }
    return write_spec(folder, **changes | keys)


# Files of a run

NESTED = b"[" * 200_000
DEEP = b'{"schemaVersion":"1.0","more":' + NESTED


def pipe(path: Path) -> None:
    """Put a pipe, which nobody writes to, in place of a file."""
    os.mkfifo(path)


def device(path: Path) -> None:
    """Put a link to a device that never ends in place of a file."""
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    """Put a folder in place of a file."""
    path.mkdir()


def socket_file(path: Path) -> None:
    """Put a socket in place of a file."""
    before = os.getcwd()  # noqa: PTH109 - the name of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        try:
            os.chdir(path.parent)
            server.bind(path.name)
        finally:
            os.chdir(before)


def loop(path: Path) -> None:
    """Put a link to itself in place of a file."""
    path.symlink_to(path.name)


def nested(path: Path) -> None:
    """Write 200,000 brackets, sealed in a journal."""
    path.write_bytes(seal(b'{"key":"sha256:k","a":' + NESTED + b"}") if path.suffix == ".jsonl" else DEEP)


def empty(path: Path) -> None:
    """Write nothing."""
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    """Write bytes that are neither text nor JSON."""
    path.write_bytes(b"\xff\xfe\x00{]\n" * 3)


def other_types(path: Path) -> None:
    """Write JSON of another shape, sealed in a journal."""
    line = {"key": 1, "sample": [], "messages": {}, "usage": None, "timing": "", "schemaVersion": "1.0"}
    data = msgspec.json.encode(line)
    path.write_bytes(seal(data) if path.suffix == ".jsonl" else data)


def huge(path: Path) -> None:
    """Make a file of a terabyte without a line break, which takes no room."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


SPECIAL: dict[str, Callable[[Path], None]] = {each.__name__: each for each in (pipe, device, folder, socket_file, loop)}
"""what is no regular file"""
DAMAGED: dict[str, Callable[[Path], None]] = {
    each.__name__: each for each in (nested, empty, garbage, other_types, huge)
}
"""regular files that are not what they should be"""
FILES = ("manifest.json", "metrics.json", "results.json", "outputs.jsonl", "grades.jsonl", "errors.jsonl", "run.log")


def put(path: Path, make: Callable[[Path], None]) -> None:
    """Replace a file."""
    path.unlink(missing_ok=True)
    make(path)
