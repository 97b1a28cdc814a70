"""Finished runs as one file of JSON lines: everything that was recorded, without weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from banach.train import RunError
from reproduction.codec import read_lines, write_lines
from reproduction.rundir import CONTRACTION, FINAL, SEGMENTS, TEST


def collect(runs: Path, out: Path) -> list[str]:
    """Write one line per finished run under `runs` to `out`, and return the names of the runs.

    Runs that `out` already has and that are not under `runs` are kept. A finished run is never replaced by another
    one of the same name: a rerun is another sample, so give it another name.
    """
    kept = {line["job"]: line for line in read_lines(out)}
    for line in _finished(runs):
        before = kept.get(line["job"])
        if before is not None and before["segments"] != line["segments"]:
            raise RunError(f"{out} has another run of the name {line['job']}; rename the folder of the new one")
        kept[line["job"]] = line
    out.parent.mkdir(parents=True, exist_ok=True)
    write_lines(out, (kept[name] for name in sorted(kept)))
    return sorted(kept)


def _finished(runs: Path) -> Iterator[dict[str, Any]]:
    for folder in sorted(path.parent for path in runs.glob(f"*/{FINAL}")):
        yield {
            "job": folder.name,
            "settings": json.loads((folder / "settings.json").read_text(encoding="utf-8")),
            "segments": read_lines(folder / SEGMENTS),
            "final": json.loads((folder / FINAL).read_text(encoding="utf-8")),
            "test": _rounded(read_lines(folder / TEST)),
            "contraction": _rounded(read_lines(folder / CONTRACTION)),
            "epochs": _rounded(read_lines(folder / "metrics.jsonl")),
        }


def _rounded(value: Any) -> Any:
    """Return the value with six significant digits, which is more than any of these numbers is known to."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value
