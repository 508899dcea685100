"""From what the eval file says to a target, and to what of it belongs into the key."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from holdfast.canonical import digest_bytes
from holdfast.errors import ConfigError, Problem
from holdfast.functions import load_function, split_reference
from holdfast.spec.fields import CommandTarget, HttpTarget, ModelTarget, PythonTarget
from holdfast.spec.secrets import shown_url
from holdfast.spec.source import source_fingerprint
from holdfast.targets.prices import Prices

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.spec.load import Eval
    from holdfast.targets.types import Target


def build_target(spec: Eval) -> Target:
    """The target, ready to be opened. Kinds that are not used are not imported."""
    where = spec.document.where(("target",))
    match spec.target:
        case ModelTarget() as block:
            from holdfast.targets.model import Model

            return Model(block, Prices(block.model, spec.prices))
        case PythonTarget() as block:
            from holdfast.targets.python import PythonFunction

            function = spec.functions.get(block.python) or load_function(block.python, spec.folder, where)
            return PythonFunction(function, block.params, where)
        case HttpTarget() as block:
            from holdfast.targets.http import HttpWorkflow

            return HttpWorkflow(block, where)
        case CommandTarget() as block:
            from holdfast.targets.command import Command

            return Command(block, spec.folder)


def target_identity(spec: Eval) -> dict[str, Any]:
    """What of the target can change an answer."""
    match spec.target:
        case ModelTarget() as block:
            identity = block.model_dump(include={"model", "api", "params", "version"})
            if block.identity == "url":
                where = block.base_url or os.environ.get("OPENAI_BASE_URL") or ""
                identity["base_url"] = shown_url(where.rstrip("/"))
            return {"kind": "model", **identity}
        case PythonTarget() as block:
            path, name = split_reference(block.python, spec.folder)
            files = source_fingerprint(path, spec.folder)
            return {
                "kind": "python",
                "function": name,
                "source": files,
                "params": block.params,
                "version": block.version,
            }
        case HttpTarget() as block:
            identity = block.model_dump(include={"http", "request", "response", "version"})
            return {"kind": "http", **identity, "http": shown_url(block.http)}
        case CommandTarget() as block:
            behind: dict[str, str] = {}
            for argument in block.command:
                behind |= _files_behind(spec.folder, argument)
            return {"kind": "command", **block.model_dump(), "files": behind}


def _files_behind(folder: Path, argument: str) -> dict[str, str]:
    """The content of an argument that names a file in the eval's folder; of a Python program, also what it imports."""
    path = folder / argument
    try:
        if "{{" in argument or not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
            return {}
        if path.suffix == ".py":
            return source_fingerprint(path, folder)
        return {argument: digest_bytes(path.read_bytes())}
    except OSError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error}")]) from error
