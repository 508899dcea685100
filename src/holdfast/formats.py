"""Eval files of every kind that is read: ours, and waza's as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.spec.document import read_document
from holdfast.spec.earlier import is_waza
from holdfast.spec.load import checked, laid_over

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from holdfast.spec.document import Document
    from holdfast.spec.load import Eval
    from holdfast.spec.overrides import Override


def load_any(path: Path, overrides: Sequence[Override] = ()) -> Eval:
    """Read and check an eval file of any kind, with values from the command line laid over it."""
    document, left = read_any(path, overrides)
    return laid_over(document, left, path.resolve().parent)


def read_any(path: Path, overrides: Sequence[Override] = ()) -> tuple[Document, list[Override]]:
    """An eval file as a document of ours, and the overrides that are still to be laid over it."""
    document = read_document(path)
    if is_waza(document.data):
        from holdfast.waza.read import translate  # evals of ours need nothing of it

        return translate(document, overrides)
    return checked(document), list(overrides)
