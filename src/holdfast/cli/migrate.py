"""`holdfast migrate`: eval files and runs of earlier versions, brought up to date."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.errors import show_error, show_warning
from holdfast.display.terminal import echo, echo_json
from holdfast.errors import ConfigError, Fault, HoldfastError, UsageError
from holdfast.spec.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.spec.migrate import Rewritten


@click.command("migrate")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH…")
@click.option("-d", "--dry-run", is_flag=True, help="Show what would change as a diff, without changing anything.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(paths: tuple[Path, ...], dry_run: bool, as_json: bool) -> int:
    """Update eval files and run directories of earlier versions.

    PATH is an eval file, a folder of eval files, or a run directory. A file is rewritten in place with its comments,
    and the original is kept as FILE.bak. Files that are up to date are not touched.
    """
    code, entries = 0, []
    for path in paths:
        for place in _places(path):
            try:
                entry = _migrate(place, dry_run)
            except HoldfastError as error:
                code = max(code, error.exit_code)
                where = path if isinstance(place, HoldfastError) else place
                entry = {"path": str(where), "status": "refused", "message": error.message, "remedy": error.remedy}
                show_error(error)
            entries.append(entry)
            if not as_json:
                _print(entry)
    if as_json:
        import msgspec

        echo_json(msgspec.json.encode(entries))
    return code


def _places(path: Path) -> Iterator[Path | HoldfastError]:
    """Yield a path itself, or the eval files in a folder that is not a run."""
    from holdfast.store.upgrade import is_run

    if not path.is_dir() or is_run(path):
        yield path
        return
    from holdfast.spec.document import read_document
    from holdfast.spec.formats import find_format
    from holdfast.spec.migrate import is_eval

    count = 0
    for file in sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml") and file.is_file()):
        try:
            data = read_document(file).data
        except ConfigError as error:
            show_warning(f"skipped: {error.message}")
            continue
        if is_eval(data) or find_format(data) is not None:
            count += 1
            yield file
    if not count:
        remedy = "Give an eval file, a folder that has some, or the path that `holdfast eval` printed as run:"
        yield UsageError(f"{path} is neither a run directory nor a folder with eval files", remedy=remedy)


def _migrate(place: Path | HoldfastError, dry_run: bool) -> dict[str, Any]:
    if isinstance(place, HoldfastError):
        raise place
    try:
        return _run(place, dry_run) if place.is_dir() else _eval(place, dry_run)
    except OSError as error:
        raise Fault(
            "disk",
            f"{place}: cannot be written: {error.strerror or error}",
            remedy="Files that were not written are unchanged. Fix the problem and run the same command again.",
        ) from error


def _eval(path: Path, dry_run: bool) -> dict[str, Any]:
    from holdfast.spec.document import read_document
    from holdfast.spec.formats import find_format
    from holdfast.spec.migrate import migrate

    document = read_document(path)
    if (foreign := find_format(document.data)) is not None:
        name, tool = foreign
        tool.check(document)
        return {"path": str(path), "kind": name, "from": document.data.get("schemaVersion"), "status": name}
    rewritten = migrate(path)
    entry: dict[str, Any] = {"path": str(path), "kind": "eval", "from": rewritten.version}
    if rewritten.after == rewritten.before:
        return {**entry, "status": "current"}
    entry |= {"to": SCHEMA_VERSION, "changes": rewritten.changes}
    if dry_run:
        return {**entry, "status": "would migrate", "diff": _diff(rewritten)}
    return {**entry, "status": "migrated", "backup": str(rewritten.save())}


def _run(path: Path, dry_run: bool) -> dict[str, Any]:
    from holdfast.store.records import SCHEMA_VERSION as RUN_VERSION
    from holdfast.store.rundir import RunDir
    from holdfast.store.upgrade import find_outdated, upgrade

    rundir = RunDir(path)
    changed = find_outdated(rundir) if dry_run else upgrade(rundir)
    entry: dict[str, Any] = {"path": str(path), "kind": "run"}
    if not changed:
        manifest = rundir.read_manifest()
        return {**entry, "from": manifest.schema_version if manifest else None, "status": "current"}
    return {
        **entry,
        "from": changed.get(rundir.manifest),
        "to": RUN_VERSION,
        "changes": [f"{file}: version {version or 'none'} is now {RUN_VERSION}" for file, version in changed.items()],
        "status": "would migrate" if dry_run else "migrated",
    }


def _diff(rewritten: Rewritten) -> str:
    import difflib

    before, after = (text.splitlines(keepends=True) for text in (rewritten.before, rewritten.after))
    name = str(rewritten.path)
    return "".join(
        line if line.endswith("\n") else f"{line}\n" for line in difflib.unified_diff(before, after, name, name)
    )


def _print(entry: dict[str, Any]) -> None:
    match entry["status"]:
        case "refused":
            pass  # the error was shown
        case "current":
            echo(f"{entry['path']}: already version {entry['from']}: nothing to do")
        case "would migrate" if "diff" in entry:
            echo(entry["diff"], nl=False)
        case "would migrate" | "migrated":
            for change in entry["changes"]:
                echo(change)
            if "backup" in entry:
                echo(f"{entry['path']}: version {entry['to']}; backup: {entry['backup']}")
        case name:
            echo(f"{entry['path']}: an eval file of {name}, which is read as it is: nothing to migrate")
