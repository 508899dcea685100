"""The target of an eval: its identity, its construction, how many requests are in flight, and the cores for them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from holdfast.http.urls import is_public
from holdfast.spec.eval import TARGET, Origin, code_sees_row, named_inputs, with_named_inputs
from holdfast.spec.plugins import load_reference
from holdfast.spec.providers import endpoint_of
from holdfast.spec.schema import is_embedded
from holdfast.spec.target_schema import TARGETS, ModelTarget
from holdfast.spec.template import normal_expression, normal_form
from holdfast.spec.trial_limits import is_agent

if TYPE_CHECKING:
    from holdfast.spec.eval import Eval
    from holdfast.targets.types import Target

DEFAULT_CONCURRENCY: Final = 64
_LIKELIHOODS: Final = 16
"""log-probabilities of a prompt take a server much memory"""
_AGENTS: Final = 8
EMBEDDED_SLOTS: Final = 4
"""requests that the embedded model's server works on at once"""


def build_target(spec: Eval) -> Target:
    """Build the target, ready to be opened."""
    target = target_class(spec).build(spec.target, _origin(spec))
    if TARGETS.is_builtin(spec.target.kind):
        return target
    guarded: Target = load_reference("holdfast.targets.guard:GuardedTarget")(target, _origin(spec))
    return guarded


def target_identity(spec: Eval) -> dict[str, Any]:
    """Return everything of the target that can change an answer."""
    kind = target_class(spec)
    block = spec.target
    identity = {"kind": block.kind, **kind.identity(block, _origin(spec))}
    identity |= {name: normal_form(identity[name]) for name in block.templates if name in identity}
    identity |= {name: normal_expression(identity[name]) for name in block.expressions if name in identity}
    if not TARGETS.is_builtin(block.kind):
        identity["source"] = load_reference("holdfast.functions.loading:module_source")(kind.__module__, spec.folder)
    return with_named_inputs(identity, named_inputs(spec, TARGET, runs_code=_runs_code(spec)))


def _runs_code(spec: Eval) -> bool:
    """Return True if outputs may depend on code of the user: on more than the texts of the eval and its rows."""
    tools = any(tool.scripted is None for tool in getattr(spec.target, "tools", ()))
    player = spec.responder is not None and spec.responder.python is not None
    return tools or player or spec.hooks is not None or spec.target.kind not in ("model", "http")


def target_sees_row(spec: Eval) -> bool:
    """Return True if answers may depend on more of the row than the fields that the eval file names for the target."""
    return code_sees_row(spec) or target_class(spec).sees_row(spec.target, _origin(spec))


def target_class(spec: Eval) -> type[Target]:
    """Return the class of the target's kind."""
    return cast("type[Target]", TARGETS.load(spec.target.kind))


def concurrency_of(spec: Eval) -> int | None:
    """Return the maximum number of requests in flight; None for `auto`, the default for services on the internet.

    A service has limits of its own, which are unknown here. A server nearby belongs to the user.
    """
    concurrency, target = spec.limits.concurrency, spec.target
    if concurrency is not None:
        return None if concurrency == "auto" else concurrency
    if is_agent(spec):
        return agents_at_once()
    model = target if isinstance(target, ModelTarget) else None
    embedded = model is not None and is_embedded(model.model)
    if spec.continuations is not None:
        return 1 if embedded else _LIKELIHOODS  # one by one, its requests share the row's context
    if embedded:
        return EMBEDDED_SLOTS
    urls = [] if model is None else endpoint_of(model.model, model.api, model.base_url, model.api_key_env).urls
    return None if len(urls) == 1 and is_public(urls[0]) else DEFAULT_CONCURRENCY


def agents_at_once() -> int:
    """Return how many agents run at once: each is a program of its own, and runs others such as compilers."""
    return max(1, min(_AGENTS, int(usable_cores())))


def _origin(spec: Eval) -> Origin:
    return Origin(spec, ("target",))


def usable_cores(root: Path = Path("/")) -> float:
    """Return the number of cores this process may use, at least 0.01: a control group may allow only a fraction."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0.01, min([affinity, *_quotas(root)]))


def _quotas(root: Path) -> list[float]:
    """Return the quotas, in cores, of this process's control group and its parents, from both versions of cgroups."""
    quotas: list[float] = []
    mount = root / "sys/fs/cgroup"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                quotas += [_v2(group) for group in _upwards(mount, path)]
            elif "cpu" in controllers.split(","):
                places = (mount / controllers, mount / "cpu")
                quotas += [_v1(group) for place in places for group in _upwards(place, path)]
    return [quota for quota in quotas if quota > 0]


def _upwards(mount: Path, path: str) -> list[Path]:
    """Return a group and its parents. Inside a container only the mount itself may exist."""
    group = mount / path.strip("/")
    return [place for place in (group, *group.parents) if place == mount or mount in place.parents]


def _v2(group: Path) -> float:
    """Read the quota of a group from `cpu.max`, such as `150000 100000` or `max 100000`; 0 without a quota."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    return 0.0


def _v1(group: Path) -> float:
    """Read the quota of a group from `cpu.cfs_quota_us`, which is -1 without a quota."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = ((group / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
        return int(quota) / int(period)
    return 0.0
