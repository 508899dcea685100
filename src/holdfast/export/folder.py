"""Results and transcripts in a folder of the user's.

`<model>/<dataset>/results_<time>_<id>.json` and, beside it, `samples_<time>_<id>.jsonl`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.export.samples import write_samples
from holdfast.store.durable import make_directory, replacing, slug
from holdfast.store.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from holdfast.export.run_reader import RunReader


def write_folder(reader: RunReader, folder: Path) -> list[Path]:
    """Write both; the results have the metrics and the eval that gave them."""
    manifest = reader.manifest
    sources = manifest.dataset.get("source") or ["samples"]
    place = folder / slug(manifest.target) / slug(Path(str(sources[0])).name.partition(".")[0] or manifest.name)
    make_directory(place)
    stamp = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}_{manifest.id}"
    results, samples = place / f"results_{stamp}.json", place / f"samples_{stamp}.jsonl"
    write_samples(reader.trials(), samples)
    metrics = reader.metrics()
    body = {
        "schemaVersion": SCHEMA_VERSION,
        "run": str(reader.rundir.path),
        "finished": metrics is not None,
        "metrics": metrics,
        "eval": manifest.eval,
    }
    with replacing(results) as file:
        file.write(msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n")
    return [results, samples]
