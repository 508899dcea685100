"""`command_mocks`: programs with scripted responses, in a folder of the workspace that is first on the PATH."""

from __future__ import annotations

import base64
import json
import re
from typing import TYPE_CHECKING, Any, Final

from holdfast.formats.waza.findings import at
from holdfast.formats.waza.graders import TranslatedGrader
from holdfast.formats.waza.repos import is_below

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.formats.waza.findings import WazaFindings
    from holdfast.formats.waza.tasks import WazaTask
    from holdfast.spec.document import Document, Location

FOLDER: Final = ".command-mocks"

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_RESPONSE: Final = ("args", "args_regex", "environment", "workdir", "stdout", "stderr", "exit_code", "fixture")

_PROGRAM: Final = """\
#!/usr/bin/env python3
import base64, json, os, re, sys

name, responses = json.loads(%s)
args, place = sys.argv[1:], os.environ["HOLDFAST_WORKSPACE"]


def fits(response):
    if "args" in response:
        same = response["args"] == args
    else:
        patterns = response["args_regex"]
        same = len(patterns) == len(args) and all(map(re.fullmatch, patterns, args))
    return (
        same
        and all(os.environ.get(key) == value for key, value in response["environment"].items())
        and response["workdir"] in (None, os.path.relpath(os.getcwd(), place))
    )


found = next((number for number, response in enumerate(responses) if fits(response)), -1)
answer = responses[found] if found >= 0 else {
    "stdout": "", "stderr": f"command mock: no response of {name} fits these arguments\\n", "exit_code": 127
}
with open(os.path.join(place, "%s", "calls.jsonl"), "a") as file:
    file.write(json.dumps({"command": name, "response": found, "exit_code": answer["exit_code"]}) + "\\n")
sys.stdout.buffer.write(base64.b64decode(answer["stdout"]))
sys.stdout.flush()
sys.stderr.write(answer["stderr"])
sys.exit(answer["exit_code"])
"""

_COUNT: Final = """\
import json, os, sys
path = ".command-mocks/calls.jsonl"
calls = [json.loads(line) for line in open(path)] if os.path.exists(path) else []
count = sum(call["command"] == sys.argv[1] for call in calls)
print(f"{sys.argv[1]} was called {count} times, {sys.argv[2]} were expected")
sys.exit(count != int(sys.argv[2]))
"""


def mock_commands(findings: WazaFindings, document: Document, task: WazaTask) -> None:
    """Put the mocked programs of a task into its workspace; the task's mocks replace the eval's."""
    source = task.document if task.document.data.get("command_mocks") is not None else document
    listed = source.data.get("command_mocks") or []
    if not isinstance(listed, list):
        findings.wrong(source, ("command_mocks",), "must be a list of {name: …, responses: …}")
        return
    for number in range(len(listed)):
        place: Location = ("command_mocks", number)
        findings.keys(source, place, ("name", "responses", "expect_calls"))
        block = at(source, place)
        name, expected = str(block.get("name") or ""), block.get("expect_calls")
        responses = list(_responses(findings, source, place))
        if not _NAME.fullmatch(name) or name in ("env", "python3"):
            findings.wrong(source, (*place, "name"), "names a program, and not env or python3, which run the mocks")
        elif f"{FOLDER}/{name}" in task.checkout:
            findings.wrong(source, (*place, "name"), f"duplicate program name {name!r}")
        elif not responses:
            findings.wrong(source, place, "needs `responses`, a list of {args: …, stdout: …}")
        else:
            script = _PROGRAM % (repr(json.dumps([name, responses])), FOLDER)
            task.checkout[f"{FOLDER}/{name}"] = {"text": script, "executable": True}
        if type(expected) is int and expected >= 0:
            fields = {"type": "program", "name": f"command_mock/{name}", "command": "python3"}
            task.graders.append(
                TranslatedGrader({**fields, "args": ["-c", _COUNT, name, str(expected)]}, source, place, {})
            )
        elif expected is not None:
            findings.wrong(source, (*place, "expect_calls"), f"must be a number from 0, not {expected!r}")


def _responses(findings: WazaFindings, source: Document, mock: Location) -> Iterator[dict[str, Any]]:
    listed = at(source, mock).get("responses")
    for number in range(len(listed) if isinstance(listed, list) else 0):
        place: Location = (*mock, "responses", number)
        findings.keys(source, place, _RESPONSE)
        block = at(source, place)
        kinds = [kind for kind in ("args", "args_regex") if block.get(kind) is not None]
        workdir, code = block.get("workdir"), block.get("exit_code") or 0
        if len(kinds) != 1:
            findings.wrong(source, place, "needs either args or args_regex")
            continue
        if type(code) is not int or not 0 <= code <= 255:
            findings.wrong(source, (*place, "exit_code"), f"must be a number from 0 to 255, not {code!r}")
            continue
        if workdir is not None and not is_below(str(workdir)):
            findings.wrong(source, (*place, "workdir"), "names a folder of the workspace, without `..`")
            continue
        stdout = block.get("stdout")
        data: bytes | None = b"" if stdout is None else str(stdout).encode()
        if stdout is not None and not isinstance(stdout, str):
            data = json.dumps(stdout, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
        if block.get("fixture"):
            data = findings.read(source, (*place, "fixture"), str(block["fixture"]))
        yield {
            kinds[0]: findings.texts(source, (*place, kinds[0])),
            "environment": findings.block(source, place, "environment"),
            "workdir": None if workdir is None else str(workdir),
            "stdout": base64.b64encode(data or b"").decode(),
            "stderr": str(block.get("stderr") or ""),
            "exit_code": code,
        }
