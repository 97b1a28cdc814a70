"""The page of the reproduction: what results/paper/ holds, as Markdown and as one self-contained HTML file."""

from __future__ import annotations

import base64
import html
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banach.paper.headlines import COLUMNS, VERDICTS, headlines
from banach.paper.study import shown
from banach.provenance import whole_file

ORDER = ("table1", "table2", "figures", "neumann", "accelerate", "memory", "toy", "theory")
TITLE = "The paper, reproduced"
SHORT = "In short"
LEAD = (
    "Every number below was written by a run. The commands that regenerate a section stand above its table: the "
    "first trains, the second, where there is one, reads the records of trainings that are kept, without data; "
    "below, where, when and by which commit the table was written, and, in the notes, where and by which "
    "commit its trainings were made. The paper is Fung, Heaton, Li, McKenzie, Osher, Yin, JFB: Jacobian-Free "
    "Backpropagation for Implicit Networks, AAAI 2022. The clean protocol evaluates in eval mode, on clean "
    "test images, at the last epoch, so that the test set chooses nothing; the released one is that of the "
    "authors' code, training mode and the best epoch on the test set, and the paper's numbers are of that "
    "kind. Records are kept without weights (the README beside them tells what was marked in them by hand); "
    "accelerate measures networks anew, so it trains in any case. The GPU machine has no git: the commit of a "
    "training there is that of the copy it was given."
)
RECORDS = "results/paper/trainings"
READ = ("table1", "table2", "figures", "neumann", "theory")  # from records alone
TERMS = (
    "Terms. Q, R, S: the parts of a network, which answers S(u) at the fixed point u = R(u, Q(d)) of an image "
    "d. Twin: the explicit network S(R(0, Q(d))), with the same parameters. Jacobian-based: the exact "
    "gradient at the fixed point, by an adjoint equation, which conjugate gradients (CG) solve on its normal "
    "equations by products with J, the Jacobian of R in u, and with its transpose: J-products. JFB needs "
    "none. Steps one by one: the host asks after each whether to go on. Captured: a training step is recorded "
    "once and replayed by the GPU as a whole; how deep it iterates is chosen from residuals of earlier steps, "
    "so that a few samples miss eps, or all where R does not contract, and the share that met it is told. Eps and "
    "residuals are in the released code's norm, not in the paper's, which is that of the whole latent: the norm "
    "over channels of what a step changes, at the pixel where it is largest. At once: how many trainings shared "
    "the GPU."
)
_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:62em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0;display:block;overflow-x:auto}"
    "td,th{border:1px solid #ccc;padding:.25em .6em;text-align:left;vertical-align:top}"
    "img{max-width:100%}small{color:#666}code{background:#f3f3f3;padding:0 .2em}"
)


class ReportError(ValueError):
    """Results that cannot be put on a page; the sentence says which and why."""


@dataclass(frozen=True)
class Section:
    """One study as it is shown."""

    name: str
    claim: str
    columns: list[str]
    rows: list[list[str]]
    short: list[list[str]]  # what it comes to, in `COLUMNS`
    notes: list[str]
    figures: list[Path]
    origin: str
    commands: list[str]


def write_report(folder: Path, page: Path) -> Path:
    """Write `page` and, beside it, the same as HTML, from the JSON files of a folder; both whole or not at all."""
    web = page.with_suffix(".html") if page.name else page
    if page.suffix != ".md" or page.is_dir() or web.is_dir():
        raise ReportError(f"the page must be a file that ends in .md, and {web.name} none but a file, got {page}")
    sections = [_section(path) for path in _results(folder)]
    for path, text in ((page, _markdown(sections, page.parent)), (web, _html(sections))):
        with whole_file(path) as file:
            file.write(text)
    return page


def _results(folder: Path) -> list[Path]:
    found = {path.stem: path for path in folder.glob("*.json")}
    if not found:
        raise ReportError(f"there are no results in {folder}; run: banach paper all")
    known = [found.pop(name) for name in ORDER if name in found]
    return known + [found[name] for name in sorted(found)]


def _section(path: Path) -> Section:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows, origin = content["rows"], content["provenance"]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        figures = [path.parent / name for name in content["figures"] if (path.parent / name).exists()]
        quick = " --quick" if content["quick"] else ""
        name = str(content["name"])
        commands = [str(content.get("command", f"banach paper {name}{quick}"))]
        commands += [f"banach paper {name} --runs {RECORDS}"] if name in READ and not quick else []
        return Section(
            name=name,
            claim=str(content["claim"]),
            columns=columns,
            rows=[[shown(row.get(column)) for column in columns] for row in rows],
            short=[[shown(row[column]) for column in COLUMNS] for row in headlines([content])],
            notes=[str(note) for note in content["notes"]],
            figures=figures,
            origin=_origin(origin),
            commands=commands,
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ReportError(
            f"{path} is not the result of a study ({type(error).__name__}: {error}); run it anew"
        ) from None


def _origin(origin: dict[str, Any]) -> str:
    versions = origin["versions"]
    commit = (origin["commit"] or "unknown")[:12] + (" with changes" if origin["dirty"] else "")
    software = f"torch {versions['torch']}, banach {versions['banach']}"
    return f"table and figures written {origin['date']}, {origin['device']}, {software}, commit {commit}"


def _markdown(sections: Sequence[Section], beside: Path) -> str:
    lines = [f"# {TITLE}", "", LEAD, "", TERMS, ""]
    if short := _short(sections):
        lines += [f"## {SHORT}", "", *_table(COLUMNS, short), VERDICTS, ""]
    lines += [missing, ""] if (missing := _missing(sections)) else []
    for section in sections:
        lines += [f"## {section.name}", "", section.claim, "", *(f"    {one}" for one in section.commands), ""]
        lines += _table(section.columns, section.rows)
        lines += [f"- {note}" for note in section.notes] + ([""] if section.notes else [])
        for figure in section.figures:
            lines += [f"![{figure.stem}]({Path(os.path.relpath(figure, beside)).as_posix()})", ""]
        lines += [f"<sub>{section.origin}</sub>", ""]
    return "\n".join(lines)


def _short(sections: Sequence[Section]) -> list[list[str]]:
    return [row for section in sections for row in section.short]


def _missing(sections: Sequence[Section]) -> str:
    """A page says what is not on it."""
    there = {section.name for section in sections}
    names = [name for name in ORDER if name not in there]
    return f"Not run yet (banach paper NAME): {', '.join(names)}." if names else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    return [_bar(columns), _bar(["---"] * len(columns)), *(_bar(row) for row in rows), ""]


def _bar(cells: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in cells) + " |"


def _html(sections: Sequence[Section]) -> str:
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(TITLE)}</title>",
        f"<style>{_STYLE}</style>",
        f"<h1>{html.escape(TITLE)}</h1><p>{html.escape(LEAD)}</p><p>{html.escape(TERMS)}</p>",
    ]
    if short := _short(sections):
        parts += [f"<h2>{SHORT}</h2>", *_web_table(COLUMNS, short), f"<p>{html.escape(VERDICTS)}</p>"]
    parts += [f"<p>{html.escape(missing)}</p>"] if (missing := _missing(sections)) else []
    for section in sections:
        parts.append(f"<h2>{html.escape(section.name)}</h2><p>{html.escape(section.claim)}</p>")
        parts += [f"<p><code>{html.escape(one)}</code></p>" for one in section.commands]
        parts += _web_table(section.columns, section.rows)
        parts.append("<ul>" + "".join(f"<li>{html.escape(note)}</li>" for note in section.notes) + "</ul>")
        parts += [_image(figure) for figure in section.figures]
        parts.append(f"<p><small>{html.escape(section.origin)}</small></p>")
    return "\n".join(parts) + "</html>\n"


def _web_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    head = f"<table><tr>{_cells('th', columns)}</tr>"
    return [head, *(f"<tr>{_cells('td', row)}</tr>" for row in rows), "</table>"]


def _cells(tag: str, texts: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)


def _image(figure: Path) -> str:
    data = base64.b64encode(figure.read_bytes()).decode()
    return f'<p><img alt="{html.escape(figure.stem)}" src="data:image/png;base64,{data}"></p>'
