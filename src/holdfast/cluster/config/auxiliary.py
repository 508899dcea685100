"""`auxiliary_deployments:`, servers beside that of the model: a judge, a simulated user.

The evaluation finds each by variables, `JUDGE_URL`, `JUDGE_CHAT_URL` and `JUDGE_MODEL_ID`, of which an eval file names
the first as `base_url: ${JUDGE_URL}`. Where a server is differs from job to job, so its URL is never part of a key.
With `type: none` one is left out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, cast

from holdfast.cluster.config.provenance import leaves
from holdfast.cluster.config.schema import DEPLOYMENTS, AuxiliaryBlock
from holdfast.errors import Problem
from holdfast.spec.validation import suggest, validate_block

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.cluster.config.provenance import Tree
    from holdfast.cluster.config.servers import Deployment
    from holdfast.spec.document import Location

SECTION: Final = "auxiliary_deployments"
_LOGS: Final = ("main", "worker", "deployment", "slurm", "export")
"""what other logs are called"""
_REFERENCE: Final = re.compile(rf"{SECTION}\.([\w-]+)\.(\w+)")
_TAKEN: Final = ("SLURM", "HOLDFAST", "OPENAI_BASE")
"""prefixes of variables that mean something else"""
_URLS: Final = ("base_url", "http", "url")
"""keys of an eval file whose values may name variables"""


def read_auxiliary(tree: Tree, problems: list[Problem]) -> Iterator[tuple[str, AuxiliaryBlock, Location]]:
    """Each by its name and with its place; what is wrong with one is added to `problems`."""
    listed = tree.get(SECTION)
    prefixes: dict[str, str] = {}
    for name, raw in listed.items() if isinstance(listed, dict) else ():
        here: Location = (SECTION, name)
        kinds = [kind for kind in DEPLOYMENTS if kind != "none"]
        kind = raw.get("type") if isinstance(raw, dict) else None
        if kind == "none":
            continue
        said = None
        if not re.fullmatch(r"[A-Za-z][\w-]*", name) or name in _LOGS:
            said = f"cannot be called so: letters, digits, - and _, and not {', '.join(_LOGS)}"
        elif kind not in kinds and isinstance(raw, dict):
            said = "needs a type: " if kind is None else f"unknown type {kind!r}{suggest(str(kind), kinds)}; "
            said += f"one of {', '.join(kinds)}"
        if said is not None:
            problems.append(Problem(tree.where(here), said))
            continue
        block = cast("AuxiliaryBlock | None", validate_block(AuxiliaryBlock, raw, here, tree, problems))
        if block is None:
            continue
        prefix = prefix_of(name, block)
        if prefix in prefixes or prefix in _TAKEN:
            whose = prefixes.get(prefix, "another program")
            message = f"its variables would be {prefix}_…, as those of {whose}; give it an env_prefix"
            problems.append(Problem(tree.where(here), message))
        prefixes[prefix] = name
        yield name, block, here


def prefix_of(name: str, block: AuxiliaryBlock) -> str:
    """What the variables that say where it is begin with."""
    return block.env_prefix or name.upper().replace("-", "_")


def needed_nodes(nodes: int, served: Deployment, auxiliary: Sequence[Deployment]) -> int:
    """The nodes of a job: the model's, if it serves one, and those of the servers beside it."""
    beside = sum(each.nodes for each in auxiliary)
    return nodes + beside if served.serves or not beside else beside


def check_ports(tree: Tree, served: Deployment, auxiliary: Sequence[Deployment], problems: list[Problem]) -> None:
    """On one machine every server needs a port of its own."""
    taken = {served.port + number: "the model" for number in range(served.instances)}
    for each in auxiliary:
        own = [each.port + number for number in range(each.instances)]
        for port in [port for port in own if port in taken][:1]:
            said = f"{port} is the port of {taken[port]} too, on this machine; give each its own"
            problems.append(Problem(tree.where((SECTION, each.name, "port")), said))
        taken |= dict.fromkeys(own, each.name)


def fill_references(tree: Tree, auxiliary: Sequence[Deployment], problems: list[Problem]) -> None:
    """`auxiliary_deployments.judge.base_url` in a task's overrides becomes the variable that says it in the job.

    The model's name is known, and written out. A URL may stand only where it is in no key.
    """
    known = {each.name: each for each in auxiliary}
    tasks = tree.get("evaluation", "tasks")
    for at, task in enumerate(tasks if isinstance(tasks, list) else ()):
        overrides = task.get("overrides") if isinstance(task, dict) else None
        for place, text in list(leaves(overrides)) if isinstance(overrides, dict) else ():
            match = _REFERENCE.fullmatch(text) if isinstance(text, str) else None
            if match is None:
                continue
            here: Location = ("evaluation", "tasks", at, "overrides", *place)
            found = _meant(match[1], match[2], str(place[-1]).rpartition(".")[2], known)
            if isinstance(found, Problem):
                problems.append(Problem(tree.where(here), f"{text}: {found.message}"))
                continue
            node: Any = overrides
            for part in place[:-1]:
                node = node[part]
            node[place[-1]] = found


def _meant(name: str, what: str, key: str, known: dict[str, Deployment]) -> str | Problem:
    if name not in known:
        return Problem("", f"there is no {name!r} in {SECTION}{suggest(name, known)}")
    served = known[name]
    words = ["model_id", "base_url", *(f"{kind}_url" for kind in served.endpoints if kind != "health")]
    if what not in words:
        return Problem("", f"unknown key {what!r}{suggest(what, words)}; one of {', '.join(words)}")
    if what == "model_id":
        return served.served_model_name or ""
    if key not in _URLS:
        said = f"differs from job to job, so it cannot be part of what is measured; read ${served.prefix}_URL instead"
        return Problem("", f"{said}, or give it as a base_url")
    return f"${{{served.prefix}_{'URL' if 'base_url' in (what, key) else what.upper()}}}"
