"""The report: docs/reproduction.md, its appendix pages and figures, from records and templates.

Templates are hand-written Markdown in pages/. `{STUDY.KEY}` is replaced by a value of a study, `{STUDY.KEY:.2f}`
by a formatted one; `values` of a study lists its keys. The same records give the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from banach.provenance import whole_file
from reproduction import codec
from reproduction.study import Options, origins, table

PAGES = Path(__file__).parent / "pages"
MAIN = "reproduction.md"
NOT_RUN = "not run"
_PLACEHOLDER = re.compile(r"\{([a-z0-9]+)\.([A-Za-z0-9_.\-]+)(?::([^{}]*))?\}")


def write(studies: Mapping[str, Any], options: Options, docs: Path = Path("docs")) -> Path:
    """Write the main page, appendix pages and figures into `docs`.

    Args:
        studies: modules by name, as `study.py` describes them.
        options: `records` is the folder of the .jsonl files.
        docs: folder for reproduction.md and reproduction/.

    Returns:
        The path of the main page.

    Raises:
        ValueError: if a page names a value that no study has.
    """
    rows = {name: codec.read(study.Row, options.records / study.RECORDS) for name, study in studies.items()}
    known = {name: _values(studies[name], some, options) for name, some in rows.items()}
    folder = docs / "reproduction"
    for name, some in rows.items():
        if some:
            draw(studies[name].figures(some), folder)
    for name, text in _templates(options.quick, studies).items():
        with whole_file(docs / name if name == MAIN else folder / name) as file:
            file.write(fill(text, known))
    return docs / MAIN


def fill(text: str, values: Mapping[str, Mapping[str, Any]]) -> str:
    """Replace the placeholders of a template. A study without records gives "not run" everywhere."""

    def value(match: re.Match[str]) -> str:
        study, key, spec = match.groups()
        if study not in values:
            return match.group()
        if not values[study]:
            return NOT_RUN
        if key not in values[study]:
            raise ValueError(f"a page names {study}.{key}; {study} has {', '.join(sorted(values[study]))}")
        found = values[study][key]
        return found if isinstance(found, str) else format(found, spec or "")

    return _PLACEHOLDER.sub(value, text)


def draw(figures: Mapping[str, Any], folder: Path) -> None:
    """Write figures as SVG, the same bytes every time."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "banach", "svg.fonttype": "none"}):
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def _values(study: Any, rows: list[Any], options: Options) -> dict[str, Any]:
    if not rows:
        return {}
    found = {"origin": origins(options.records / study.RECORDS), "table": table(rows)}
    return found | study.values(rows)


def _templates(quick: bool, studies: Mapping[str, Any]) -> dict[str, str]:
    """Return pages by name. A quick run has other data, so its only page is the table of every study."""
    if not quick:
        return {path.name: path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("*.md"))}
    parts = [
        f"## {name}\n\n{(study.__doc__ or '').splitlines()[0]}\n\n{{{name}.table}}\n"
        for name, study in studies.items()
    ]
    return {MAIN: "# Quick run on digits\n\n" + "\n".join(parts)}
