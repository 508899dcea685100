"""Eval files of every format that `holdfast eval` reads.

`waza`  waza's eval and task files
`nat`   configurations of NeMo Agent Toolkit
`providers`  tasks by name, from installed packages
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.spec.legacy import OURS, WAZA, is_nat, is_waza
from holdfast.spec.load import checked, laid_over

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.spec.document import Document
    from holdfast.spec.load import Eval
    from holdfast.spec.overrides import Override

CONFIGURATION = ("defaults", "execution", "deployment", "evaluation")
"""keys that only configurations have"""
EVAL = OURS | WAZA | {"graders", "responder", "checkpoints"}
"""keys that only eval files have"""


def is_configuration(document: Document) -> bool:
    """Whether a file is a configuration for a cluster."""
    return not document.data.keys().isdisjoint(CONFIGURATION)


def is_eval(document: Document) -> bool:
    """Whether a file is an eval file, of any kind that `holdfast eval` reads."""
    data = document.data
    return not is_configuration(document) and (is_waza(data) or is_nat(data) or not data.keys().isdisjoint(EVAL))


def load_any(document: Document, overrides: Sequence[Override] = ()) -> Eval:
    """Check an eval file of any kind as it was read, with values from the command line laid over it."""
    assert document.path is not None
    ours, left = in_our_words(document, overrides)
    return laid_over(ours, left, document.path.resolve().parent)


def in_our_words(document: Document, overrides: Sequence[Override] = ()) -> tuple[Document, list[Override]]:
    """An eval file of any kind as one of ours, and the overrides that are still to be laid over it."""
    if is_waza(document.data):
        from holdfast.formats.waza.read import translate  # evals of ours need nothing of it

        return translate(document, overrides)
    if is_nat(document.data):
        from holdfast.formats.nat.read import translate as translate_nat

        return translate_nat(document, overrides)
    return checked(document), list(overrides)
