"""Environment variables and API keys of a job: named, never written down.

`host:NAME` takes the value from the environment at submission, `lit:VALUE` is the value itself, `runtime:NAME` is read
where the job runs. Without a prefix, as older configurations have it, a name means `host:` and anything else `lit:`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from holdfast.errors import ConfigError, Problem, UsageError
from holdfast.spec.grader_schema import PromptGrader
from holdfast.spec.redact import looks_secret
from holdfast.spec.schema import ModelTarget, ResponderBlock, is_embedded, urls_of
from holdfast.targets.endpoints import DEFAULT_BASE_URL

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from holdfast.cluster.config.provenance import Tree
    from holdfast.spec.document import Location
    from holdfast.spec.load import Eval


Kind = Literal["host", "lit", "runtime"]
WANDB_KEY = "WANDB_API_KEY"
_NAME = re.compile(r"[A-Za-z_]\w*")
_SHORTEST_SECRET = 16
"""a literal shorter than this is a placeholder such as EMPTY or dummy, which local servers are given"""


@dataclass(frozen=True)
class EnvVar:
    """One variable, and where its value comes from."""

    name: str
    kind: Kind
    value: str
    """the name of the other variable, or the literal"""
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}"


def read_variables(
    tree: Tree, location: Location, problems: list[Problem], notices: list[str], *, bare: Kind | None = None
) -> dict[str, EnvVar]:
    """The variables of one `env_vars:` block. `bare` says what a value without prefix is; None: name or literal."""
    block = tree.get(*location)
    if block is None:
        return {}
    if not isinstance(block, dict):
        problems.append(Problem(tree.where(location), "is a mapping of names to host:NAME, lit:VALUE or runtime:NAME"))
        return {}
    found: dict[str, EnvVar] = {}
    for name, written in block.items():
        place = (*location, name)
        variable = _variable(name, written, tree.origin(place), bare)
        if isinstance(variable, str):
            problems.append(Problem(tree.where(place), variable))
            continue
        if bare is None and str(variable) != str(written).removeprefix("$"):
            notices.append(f"{tree.where(place)}: {written} without a prefix is read as {variable}")
        found[name] = variable
    return found


def _variable(name: str, written: Any, origin: str, bare: Kind | None) -> EnvVar | str:
    """The variable, or what is wrong with it."""
    if not _NAME.fullmatch(name):
        return f"{name!r} cannot be the name of a variable"
    if written is None or isinstance(written, dict | list):
        return "needs a value: host:NAME, lit:VALUE or runtime:NAME"
    text = str(written).lower() if isinstance(written, bool) else str(written)
    prefix, colon, rest = text.removeprefix("$").partition(":")
    kind: Kind
    if colon and prefix in ("host", "runtime"):
        if not _NAME.fullmatch(rest):
            return f"{prefix}: takes the name of a variable, not {rest!r}"
        return EnvVar(name, "host" if prefix == "host" else "runtime", rest, origin)
    if colon and prefix == "lit":
        kind, text = "lit", rest
    else:
        kind = bare or ("host" if _NAME.fullmatch(text) else "lit")
    if kind == "lit" and looks_secret(name) and len(text) >= _SHORTEST_SECRET:
        return f"a secret is not written into files: write host:{name} and set it where you submit"
    return EnvVar(name, kind, text, origin)


def host_value(variable: EnvVar, environ: Mapping[str, str]) -> str | None:
    """Return the value of a `host:` variable here; W&B's API key also from where `wandb login` stores it."""
    if variable.value in environ:
        return environ[variable.value]
    if variable.value != WANDB_KEY:
        return None
    from holdfast.export.wandb import detect

    return detect(environ).api_key


def check_environment(variables: Iterable[EnvVar], environ: Mapping[str, str]) -> None:
    """Raise ConfigError naming every `host:` variable that is not set here. To be called before submitting."""
    unset = {(v.name, v.value): v for v in variables if v.kind == "host" and host_value(v, environ) is None}
    if any(variable.value == WANDB_KEY for variable in unset.values()):
        raise wandb_login_missing()
    if unset:
        raise ConfigError(
            [Problem(v.origin, f"{v.name} is host:{v.value}, and {v.value} is not set here") for v in unset.values()],
            remedy="Set it where you submit; write lit:VALUE for a value, runtime:NAME for one the cluster sets.",
        )


def wandb_login_missing() -> UsageError:
    """No login, and what to do about it."""
    return UsageError(
        "results go to W&B, and no W&B login was found: neither $WANDB_API_KEY nor an entry in ~/.netrc",
        remedy="Run `wandb login` here, or set WANDB_API_KEY; project and entity belong under [wandb] in env.toml. "
        "To do without, take `wandb` out of execution.auto_export.",
    )


_Asked = ModelTarget | ResponderBlock | PromptGrader


def check_keys(
    spec: Eval,
    passed: Collection[str],
    environ: Mapping[str, str],
    problems: list[Problem],
    notices: list[str],
    *,
    serves: bool,
) -> None:
    """Name every key that is not `passed` to the job: as a problem where nothing is answered without it, and in a
    notice where it is set here. A model that the job `serves` needs none.
    """
    target = spec.target
    near = target.base_url if isinstance(target, ModelTarget) else None
    for location, block in _asked(spec):
        name = block.api_key_env or "OPENAI_API_KEY"
        served = serves and (block is target or block.base_url == near)
        if served or name in passed or not looks_secret(name):
            continue
        urls = urls_of(block.base_url) or [environ.get("OPENAI_BASE_URL") or DEFAULT_BASE_URL]
        needed = any(url.rstrip("/") == DEFAULT_BASE_URL for url in urls)
        if not needed and not environ.get(name):
            continue
        why = f"needs {name}, which the job does not have" if needed else f"{name} is set here, and not in the job"
        say = f"write `env_vars: {{{name}: host:{name}}}` into the configuration"
        place, said = spec.document.where(location), f"{why}: {say}, or `env_vars.{name}=host:{name}` in the command"
        if needed:
            problems.append(Problem(place, said))
        else:
            notices.append(f"{place}: {said}")


def _asked(spec: Eval) -> Iterator[tuple[Location, _Asked]]:
    """Every block of an eval that names a model to be asked for over HTTP."""
    found = (("target",), spec.target), (("responder",), spec.responder)
    judges = [(("graders", at), grader) for at, grader in enumerate(spec.graders)]
    for location, block in (*found, *judges):
        if isinstance(block, _Asked) and block.model is not None and not is_embedded(block.model):
            yield location, block
