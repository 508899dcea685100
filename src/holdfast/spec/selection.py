"""Selects rows by globs over their ids and tags."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Selection(msgspec.Struct, frozen=True):
    """Globs for ids and for tags. Where both are set, a row has to match both."""

    ids: Sequence[str] = ()
    """one has to match the row's id or `name`"""
    tags: Sequence[str] = ()
    """one has to match one of the row's `tags`"""

    @classmethod
    def of(cls, **globs: Any) -> Selection:
        """Make a selection from single values or lists."""
        return cls(
            **{
                key: [str(one) for one in (value if isinstance(value, list) else [value])]
                for key, value in globs.items()
            }
        )

    def takes(self, row: Mapping[str, Any], sample_id: object) -> bool:
        """Return True for a row that is selected."""
        names = [str(name) for name in (sample_id, row.get("name")) if name is not None]
        tags = row.get("tags")
        tagged = [tags] if isinstance(tags, str) else [str(tag) for tag in tags] if isinstance(tags, list) else []
        return _any(self.ids, names) and _any(self.tags, tagged)


def _any(globs: Sequence[str], words: list[str]) -> bool:
    return not globs or any(fnmatchcase(word, glob) for glob in globs for word in words)
