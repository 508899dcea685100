"""Rows asked for by name: globs over their ids and tags."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Selection(NamedTuple):
    """What is asked for. Where ids and tags are both given, a row has to fit both."""

    ids: Sequence[str] = ()
    """of which a row's id, or its `name`, has to match one"""
    tags: Sequence[str] = ()
    """of which one of a row's `tags` has to match one"""

    @classmethod
    def of(cls, **given: Any) -> Selection:
        """From values as they are written: one, or a list."""
        return cls(
            **{
                key: [str(one) for one in (value if isinstance(value, list) else [value])]
                for key, value in given.items()
            }
        )

    def takes(self, row: Mapping[str, Any], sample_id: object) -> bool:
        """Whether a row is asked for."""
        names = [str(name) for name in (sample_id, row.get("name")) if name is not None]
        tags = row.get("tags")
        tagged = [tags] if isinstance(tags, str) else [str(tag) for tag in tags] if isinstance(tags, list) else []
        return _any(self.ids, names) and _any(self.tags, tagged)


def _any(globs: Sequence[str], words: list[str]) -> bool:
    return not globs or any(fnmatchcase(word, glob) for glob in globs for word in words)
