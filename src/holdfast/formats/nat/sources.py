"""The local Python modules in which the components of a configuration are registered, read and never imported.

NAT finds components through the entry points of installed packages. A package that is installed from a folder, as
`pip install -e` does, is somebody's own code and may change between two runs: it is fingerprinted as other local code
is. Other installed packages are not.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final

from holdfast.spec.fingerprint import local_module, source_files, source_fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_GROUPS: Final = ("nat.components", "nat.plugins", "nat.evaluators", "nat.authentication_providers")


def component_sources(types: Iterable[str], folder: Path) -> dict[str, str]:
    """Digests of the local modules that register components of these types, and of what those modules import."""
    wanted = {kind.rpartition("/")[2] for kind in types}  # `package/name` names a component exactly
    installed = entry_points()
    modules = sorted({point.module for group in _GROUPS for point in installed.select(group=group)})
    found: dict[str, str] = {}
    for module in modules:
        if module.partition(".")[0] == "nat" or (entry := local_module(module)) is None:
            continue
        if not any(_registers(path, wanted) for path in source_files(entry, folder)):
            continue
        for name, digest in source_fingerprint(entry, folder).items():
            found[f"{module.replace('.', '/')}.py" if name == entry.name else name] = digest
    return dict(sorted(found.items()))


def _registers(path: Path, wanted: Iterable[str]) -> bool:
    """Tell whether a file holds one of the names as a literal, as the class of a component's configuration does."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return any(f"{quote}{name}{quote}" in text for name in wanted for quote in "\"'")
