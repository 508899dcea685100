"""Recognizes configurations of NeMo Agent Toolkit. What reads them is imported with the first one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.spec.formats import Format

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.spec.document import Document
    from holdfast.spec.overrides import Override


class Nat(Format):
    """Configurations of NeMo Agent Toolkit, which have no versions."""

    def recognizes(self, data: Mapping[str, Any]) -> bool:
        sections = any(isinstance(data.get(key), dict) for key in ("workflow", "eval"))
        return (sections or isinstance(data.get("base"), str)) and data.keys().isdisjoint(("graders", "schemaVersion"))

    def translate(self, document: Document, overrides: Sequence[Override]) -> tuple[Document, list[Override]]:
        from holdfast.formats.nat.read import translate

        return translate(document, overrides)
