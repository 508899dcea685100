"""Extension points: built-in kinds, and kinds of installed packages."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from holdfast.spec.plugins import Registry

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry with one built-in kind, and a package with three more."""
    info = tmp_path / "kitchen_extras-2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kitchen-extras\nVersion: 2.1\n")
    (info / "entry_points.txt").write_text(
        "[holdfast.sinks]\nstone = kitchen_extras:Stone\nsteel = kitchen_extras:Other\nbroken = kitchen_absent:Sink\n"
    )
    (tmp_path / "kitchen_extras.py").write_text("class Stone:\n    pass\n\n\nclass Other:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kitchen_extras", raising=False)
    return Registry("holdfast.sinks", "sink", {"steel": "holdfast.canonical:digest"})


def test_a_built_in_kind_is_found_without_looking_at_installed_packages(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.canonical import digest

    monkeypatch.setattr("importlib.metadata.entry_points", None)
    assert registry.load("steel") is digest and "steel" in registry


def test_a_kind_of_an_installed_package_is_imported_when_it_is_named(registry: Registry) -> None:
    assert "stone" in registry and "kitchen_extras" not in sys.modules
    assert registry.load("stone").__module__ == "kitchen_extras"


def test_an_unknown_name_lists_the_closest_the_built_in_ones_and_the_plugins(registry: Registry) -> None:
    with pytest.raises(ValueError, match="unknown sink 'ston'") as raised:
        registry.load("ston")
    assert str(raised.value) == (
        "unknown sink 'ston' (did you mean 'stone'?); one of steel; "
        "from plug-ins: broken (kitchen-extras 2.1), stone (kitchen-extras 2.1)"
    )
    with pytest.raises(ValueError, match=r"one of steel; no plug-ins are installed$"):
        Registry("holdfast.taps", "tap", {"steel": "x:y"}).load("brass")


def test_a_package_that_cannot_be_imported_is_named(registry: Registry) -> None:
    with pytest.raises(ValueError, match=r"'broken' of kitchen-extras 2\.1 cannot be imported from kitchen_absent:"):
        registry.load("broken")
