"""Recognizes waza's eval files. What reads them is imported with the first one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import ConfigError, Problem
from holdfast.spec.formats import Format

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.spec.document import Document
    from holdfast.spec.overrides import Override

_KEYS: Final = ("skill", "tasks", "tasks_from")
"""keys that only waza's eval files have"""


class Waza(Format):
    """Eval files of waza, which have versions of their own."""

    def recognizes(self, data: Mapping[str, Any]) -> bool:
        config = data.get("config")
        return not data.keys().isdisjoint(_KEYS) or (isinstance(config, dict) and "executor" in config)

    def translate(self, document: Document, overrides: Sequence[Override]) -> tuple[Document, list[Override]]:
        from holdfast.formats.waza.read import translate

        return translate(document, overrides)

    def check(self, document: Document) -> None:
        from holdfast.formats.waza.config import version_problem

        if (problem := version_problem(document.data)) is not None:
            raise ConfigError([Problem(document.where(("schemaVersion",)), problem)])
