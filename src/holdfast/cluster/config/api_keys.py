"""Keys of hosted models: a job has those that `env_vars` pass on, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.cluster.config.variables import looks_secret
from holdfast.errors import Problem
from holdfast.spec.grader_schema import PromptGrader
from holdfast.spec.schema import ModelTarget, ResponderBlock, is_embedded, urls_of
from holdfast.targets.endpoints import DEFAULT_BASE_URL

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from holdfast.spec.document import Location
    from holdfast.spec.load import Eval

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
