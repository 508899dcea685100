"""The number of requests in flight where an eval does not set it."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from holdfast.containment.cores import usable_cores
from holdfast.spec.providers import endpoint_of
from holdfast.spec.schema import is_embedded
from holdfast.spec.target_schema import ModelTarget
from holdfast.spec.trial_limits import is_agent

if TYPE_CHECKING:
    from holdfast.spec.eval import Eval

FIXED: Final = 64
"""where nothing speaks for another number"""
_LIKELIHOODS: Final = 16
"""log-probabilities of a prompt take a server much memory"""
_AGENTS: Final = 8


def concurrency_of(spec: Eval) -> int | None:
    """Return the maximum number of requests in flight; None for `auto`, the default for services on the internet.

    A service has limits of its own, which nobody here knows. A server nearby is the user's own.
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
        from holdfast.targets.embedded import PARALLEL  # which few evals need

        return PARALLEL
    urls = [] if model is None else endpoint_of(model.model, model.api, model.base_url, model.api_key_env).urls
    return None if len(urls) == 1 and is_public(urls[0]) else FIXED


def agents_at_once() -> int:
    """Return how many agents run at once: each is a program of its own, and runs others such as compilers."""
    return max(1, min(_AGENTS, int(usable_cores())))


def is_public(url: str) -> bool:
    """Return True for an address on the internet, and not on this machine or in its own network."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return "." in host and not host.endswith((".local", ".internal", ".lan", ".localhost", ".home.arpa"))
