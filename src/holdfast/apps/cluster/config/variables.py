"""Environment variables and API keys of a job: named, never written down.

`host:NAME` takes the value from the environment at submission, `lit:VALUE` is the value itself, `runtime:NAME` is read
in the job. Without a prefix, as in older configurations, a name means `host:` and anything else `lit:`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from holdfast.apps.cluster.config.tree import leaves
from holdfast.errors import ConfigError, Problem, UsageError, suggest
from holdfast.plugins.exporters.wandb import detect, login_command, same_server
from holdfast.spec.eval_schema import ResponderBlock
from holdfast.spec.grader_schema import PromptGrader
from holdfast.spec.providers import OPENAI, endpoint_of
from holdfast.spec.redact import looks_secret
from holdfast.spec.schema import is_embedded, urls_of
from holdfast.spec.target_schema import ModelTarget

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from holdfast.apps.cluster.config.tree import Tree
    from holdfast.plugins.exporters.wandb import Login
    from holdfast.spec.document import Location
    from holdfast.spec.eval import Eval
    from holdfast.spec.schema import Findings


Kind = Literal["host", "lit", "runtime"]
WANDB_KEY = "WANDB_API_KEY"
WANDB_URL = "WANDB_BASE_URL"
WANDB_SETTINGS = {"WANDB_PROJECT": "project", "WANDB_ENTITY": "entity", WANDB_URL: "base_url"}
"""variables of W&B, and the key of `run.wandb` that each one stands for"""
SCOPES = ("deployment", "evaluation", "export")
"""of environment variables in the older dialect"""
_NAME = re.compile(r"[A-Za-z_]\w*")
_SHORTEST_SECRET = 16
"""a literal shorter than this is a placeholder such as EMPTY or dummy, which local servers are given"""
_PLACEHOLDER = re.compile(r"(?i)placeholder|dummy|not[-_ ]?(needed|used|required)|change[-_ ]?me")


@dataclass(frozen=True)
class EnvVar:
    """One variable, and the source of its value."""

    name: str
    kind: Kind
    value: str
    """the name of the other variable, or the literal"""
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}"


def read_variables(
    tree: Tree, location: Location, findings: Findings, *, bare: Kind | None = None
) -> dict[str, EnvVar]:
    """Read an `env_vars:` block. `bare` is the kind of values without a prefix; None: a name or a literal."""
    block = tree.get(*location)
    if block is None:
        return {}
    if not isinstance(block, dict):
        findings.wrong(tree, location, "must be a mapping of names to host:NAME, lit:VALUE or runtime:NAME")
        return {}
    variables: dict[str, EnvVar] = {}
    for name, value in block.items():
        place = (*location, name)
        try:
            variable = _parse_variable(name, value, tree.origin(place), bare)
        except ValueError as error:
            findings.wrong(tree, place, str(error))
            continue
        if bare is None and str(variable) != str(value).removeprefix("$"):
            findings.notice(tree, place, f"{value} without a prefix is read as {variable}")
        variables[name] = _from_wandb(tree, variable)
    return variables


def read_scope(tree: Tree, findings: Findings, scope: str, *inner: str) -> dict[str, EnvVar]:
    """Read the variables of a part: the profile's, the shared ones, the older dialect's, and its own."""
    variables = read_variables(tree, ("run", "env", "env_vars"), findings, bare="lit")
    older = tree.get("execution", "env_vars")
    if isinstance(older, dict):
        message = "deprecated: use env_vars under deployment, evaluation and export"
        findings.notice(tree, ("execution", "env_vars"), message)
        for name in sorted(set(older) - set(SCOPES)):
            message = f"unknown key{suggest(name, SCOPES)}; known here: {', '.join(SCOPES)}"
            findings.wrong(tree, ("execution", "env_vars", name), message)
    for location in (("env_vars",), ("execution", "env_vars", scope), (scope, *inner, "env_vars")):
        variables |= read_variables(tree, location, findings)
    key = tree.get("target", "api_endpoint", "api_key_name")
    if scope == "evaluation" and isinstance(key, str):
        origin = tree.origin(("target", "api_endpoint", "api_key_name"))
        variables.setdefault(key, EnvVar(key, "host", key, origin))
    add_wandb_server(tree, variables)
    return variables


def _from_wandb(tree: Tree, variable: EnvVar) -> EnvVar:
    """Return `host:WANDB_PROJECT` and `host:WANDB_ENTITY` as the values of `[wandb]`, which exports use too."""
    key = WANDB_SETTINGS.get(variable.value) if variable.kind == "host" else None
    setting = None if key is None else tree.get("run", "wandb", key)
    if key is None or setting is None:
        return variable
    return EnvVar(variable.name, "lit", str(setting), tree.origin(("run", "wandb", key)))


def _parse_variable(name: str, value: Any, origin: str, bare: Kind | None) -> EnvVar:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot be the name of a variable")
    if value is None or isinstance(value, dict | list):
        raise ValueError("needs a value: host:NAME, lit:VALUE or runtime:NAME")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    prefix, colon, rest = text.removeprefix("$").partition(":")
    kind: Kind
    if colon and prefix in ("host", "runtime"):
        if not _NAME.fullmatch(rest):
            raise ValueError(f"{prefix}: takes the name of a variable, not {rest!r}")
        return EnvVar(name, "host" if prefix == "host" else "runtime", rest, origin)
    if colon and prefix == "lit":
        kind, text = "lit", rest
    else:
        kind = bare or ("host" if _NAME.fullmatch(text) else "lit")
    if kind == "lit" and looks_secret(name) and len(text) >= _SHORTEST_SECRET and not _PLACEHOLDER.search(text):
        raise ValueError(f"secrets do not belong in files: write host:{name} and set it where you submit")
    return EnvVar(name, kind, text, origin)


def place_wandb_server(tree: Tree, environ: Mapping[str, str], *, exports: bool) -> None:
    """Set `run.wandb.base_url`, unless it is given, if the job `exports` to W&B or a part of it gets the API key."""
    everywhere = (("env_vars",), ("run", "env", "env_vars"))
    if tree.get("run", "wandb", "base_url") or any(tree.get(*location, WANDB_URL) for location in everywhere):
        return
    passed = (WANDB_KEY, f"host:{WANDB_KEY}", f"$host:{WANDB_KEY}")
    if exports or any(value in passed for _, value in leaves(tree.data)):
        login = detect(environ).check()
        tree.put(("run", "wandb", "base_url"), login.base_url, login.url_source or "W&B's default")


def add_wandb_server(tree: Tree, variables: dict[str, EnvVar]) -> None:
    """Add the W&B server to the variables of a part that gets the API key.

    Without it the key would go to the server that the node's settings name, or to the public service.
    """
    gets_key = any(variable.kind == "host" and variable.value == WANDB_KEY for variable in variables.values())
    base_url = tree.get("run", "wandb", "base_url")
    if gets_key and base_url and WANDB_URL not in variables:
        variables[WANDB_URL] = EnvVar(WANDB_URL, "lit", base_url, tree.origin(("run", "wandb", "base_url")))


def wandb_login(variables: Iterable[EnvVar], environ: Mapping[str, str]) -> Login:
    """Return the W&B login for the server that the variables name. UsageError if it belongs to another server."""
    servers = {str(variable): variable for variable in variables if variable.name == WANDB_URL}
    if len(servers) > 1:
        named = " and ".join(f"{text} ({variable.origin})" for text, variable in servers.items())
        raise UsageError(
            f"parts of the job have different W&B servers, and there is one API key: {named}",
            remedy=f"Write one {WANDB_URL} under env_vars.",
        )
    login = detect(environ)
    if not servers:
        return login.check()
    (variable,) = servers.values()
    url = {"lit": variable.value, "host": environ.get(variable.value)}.get(variable.kind)
    if url is None and variable.kind == "host":
        return login  # the variable is not set, which `check_environment` reports
    # A key in the environment belongs to the server in the environment, if any; other keys are looked up by server.
    paired = login.source == WANDB_KEY and login.url_source == WANDB_URL
    if url is None:
        known = login.source is None or (login.source == WANDB_KEY and not paired)
    else:
        known = not paired or same_server(url, login.base_url)
    if not known:
        raise UsageError(
            f"the W&B API key ({login.source}) is for {login.base_url}, and {variable.origin} names another server: "
            f"{WANDB_URL} is {variable}",
            remedy=f"Set {WANDB_KEY} and {WANDB_URL} here to the key and the address of one server.",
        )
    return login if url is None else detect({**environ, WANDB_URL: url}).check()


def host_values(variables: Iterable[EnvVar], environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the values of `host:` variables by name; for W&B's API key also the one that `wandb login` stored."""
    variables = list(variables)
    values = {variable.value: environ.get(variable.value) for variable in variables if variable.kind == "host"}
    if WANDB_KEY in values:
        values[WANDB_KEY] = wandb_login(variables, environ).api_key
    return values


def check_environment(variables: Iterable[EnvVar], environ: Mapping[str, str]) -> None:
    """Raise ConfigError naming every `host:` variable that is not set here."""
    variables = list(variables)
    values = host_values(variables, environ)
    unset = {(v.name, v.value): v for v in variables if v.kind == "host" and values[v.value] is None}
    if any(variable.value == WANDB_KEY for variable in unset.values()):
        raise wandb_login_missing(wandb_login(variables, environ).base_url)
    if unset:
        raise ConfigError(
            [Problem(v.origin, f"{v.name} is host:{v.value}, and {v.value} is not set here") for v in unset.values()],
            remedy="Set it where you submit; write lit:VALUE for a value, runtime:NAME for one the cluster sets.",
        )


def wandb_login_missing(base_url: str) -> UsageError:
    """Return the error for a missing W&B login."""
    return UsageError(
        f"results go to W&B, and no W&B login was found for {base_url}: "
        "neither $WANDB_API_KEY nor an entry in ~/.netrc",
        remedy=f"Run `{login_command(base_url)}` here, or set WANDB_API_KEY; project and entity belong under [wandb] "
        "in env.toml. To do without, take `wandb` out of execution.auto_export.",
    )


_ModelBlock = ModelTarget | ResponderBlock | PromptGrader


def check_api_keys(
    spec: Eval, passed: Collection[str], environ: Mapping[str, str], findings: Findings, *, serves: bool
) -> None:
    """Report API keys that are not `passed` to the job.

    A missing key is an error if the model cannot be used without it, and a notice if the key is set here. A model that
    the job itself `serves` needs no key.
    """
    target = spec.target
    target_url = target.base_url if isinstance(target, ModelTarget) else None
    for location, block in _model_blocks(spec):
        if serves and (block is target or block.base_url == target_url):
            continue
        assert isinstance(block.model, str)
        key_env, needs = _variables_of(block.model, block.base_url, block.api_key_env, environ)
        for name in dict.fromkeys((*needs, key_env)):
            needed = name in needs
            if name in passed or not (needed or (looks_secret(name) and environ.get(name))):
                continue
            why = f"needs {name}, which the job does not have" if needed else f"{name} is set here, and not in the job"
            message = f"{why}: write `env_vars: {{{name}: host:{name}}}` into the configuration"
            report = findings.wrong if needed else findings.notice
            report(spec.document, location, f"{message}, or `env_vars.{name}=host:{name}` in the command")


def _variables_of(
    model: str, base_url: str | list[str] | None, key_env: str | None, environ: Mapping[str, str]
) -> tuple[str, tuple[str, ...]]:
    """Return the variable for the API key of a model, and the variables without which it cannot be asked.

    A variable in a `base_url` gets its value in the job.
    """
    if base_url is None:
        endpoint = endpoint_of(model, None, None, key_env, environ)
        return endpoint.key_env, endpoint.needs
    name = key_env or OPENAI.key_env[0]
    return name, (name,) if any(url.rstrip("/") == OPENAI.base_url for url in urls_of(base_url)) else ()


def _model_blocks(spec: Eval) -> Iterator[tuple[Location, _ModelBlock]]:
    """Yield the blocks of an eval that name a model with an HTTP API."""
    blocks = (("target",), spec.target), (("responder",), spec.responder)
    for location, block in (*blocks, *spec.placed_graders()):
        if isinstance(block, _ModelBlock) and isinstance(block.model, str) and not is_embedded(block.model):
            yield location, block
