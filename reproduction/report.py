"""The report: docs/reproduction.md, its appendix pages, an HTML page and figures, from records and templates.

Templates are hand-written Markdown in pages/. `{STUDY.KEY}` is replaced by a value of a study, `{STUDY.KEY:.2f}`
by a formatted one, `{STUDY.KEY.FIELD}` by a field of a value; `values` of a study lists its keys. The same records
give the same bytes.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from banach.provenance import whole_file
from reproduction.study import Options, origins, read

PAGES = Path(__file__).parent / "pages"
MAIN, HTML = "reproduction.md", "report.html"
NOT_RUN = "not run"
_PLACEHOLDER = re.compile(r"\{([a-z0-9]+)\.([A-Za-z0-9_.\-]+)(?::([^{}]*))?\}")
_LINK = re.compile(r'(href|src)="(?:reproduction/)?([\w-]+)\.(md|svg)"')


def write(studies: Mapping[str, Any], options: Options, docs: Path = Path("docs")) -> Path:
    """Write the main page, appendix pages, the HTML page and figures into `docs`; return the main page's path.

    Raises:
        ValueError: if a page names a value that no study has.
    """
    import matplotlib

    known: dict[str, dict[str, Any]] = {}
    folder = docs / "reproduction"
    folder.mkdir(parents=True, exist_ok=True)
    for name, study in studies.items():
        rows = read(study.Row, path := options.records / study.RECORDS)
        known[name] = {"origin": origins(path), **study.values(rows)} if rows else {}
        figures = study.figures(rows) if rows and hasattr(study, "figures") else {}
        with matplotlib.rc_context(
            {"svg.hashsalt": "banach", "svg.fonttype": "none"}
        ):  # the same bytes every time
            for title, figure in figures.items():
                figure.savefig(folder / f"{title}.svg", metadata={"Date": None})
    pages = {name: fill(text, known) for name, text in _templates(options.quick, studies).items()}
    files = {docs / name if name == MAIN else folder / name: text for name, text in pages.items()}
    for path, text in (files | {folder / HTML: html(pages)}).items():
        with whole_file(path) as file:
            file.write(text)
    return docs / MAIN


def fill(text: str, values: Mapping[str, Mapping[str, Any]]) -> str:
    """Replace the placeholders of a template. "not run": a study without records, and a value that is NaN."""

    def value(match: re.Match[str]) -> str:
        study, key, spec = match.groups()
        if study not in values:
            return match.group()
        if not values[study]:
            return NOT_RUN
        head, _, field = key.rpartition(".")
        found = values[study].get(key, getattr(values[study].get(head), field, None))
        if found is None:
            raise ValueError(f"a page names {study}.{key}; {study} has {', '.join(sorted(values[study]))}")
        if isinstance(found, float) and math.isnan(found):
            return NOT_RUN
        return found if isinstance(found, str) else format(found, spec or "")

    return _PLACEHOLDER.sub(value, text)


def html(pages: Mapping[str, str]) -> str:
    """Return all pages as one HTML page, the main one first; links between pages become anchors."""
    from markdown_it import MarkdownIt

    names = sorted(pages, key=lambda name: (name != MAIN, name))
    render = MarkdownIt("commonmark", {"html": False}).enable("table").render
    parts = [f'<section id="{Path(name).stem}">\n{render(pages[name])}</section>\n' for name in names]
    body = _LINK.sub(lambda m: f'{m[1]}="#{m[2]}"' if m[3] == "md" else f'{m[1]}="{m[2]}.svg"', "".join(parts))
    return (PAGES / HTML).read_text(encoding="utf-8").replace("{body}", body)


def _templates(quick: bool, studies: Mapping[str, Any]) -> dict[str, str]:
    """Return pages by name. A quick run has other data, so its only page is the table of every study."""
    if not quick:
        return {path.name: path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("*.md"))}
    parts = [
        f"## {name}\n\nThe claim: {(study.__doc__ or '').splitlines()[0]}\n\n{{{name}.table}}\n"
        for name, study in studies.items()
    ]
    about = "Short trainings on 8x8 images: they show that every study runs, and decide no claim of the paper.\n\n"
    return {MAIN: f"# Quick run on digits\n\n{about}" + "\n".join(parts)}
