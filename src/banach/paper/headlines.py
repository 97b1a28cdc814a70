"""What the studies come to, in a few rows: the paper's claims, its numbers beside ours, whether they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from banach.paper.study import Row, cell, shown

Content = Mapping[str, Any]  # the file of a study
COLUMNS = ("claim", "paper", "ours", "holds")
VERDICTS = (
    "Holds: yes or no, with ours rounded as the paper prints accuracies. Where ours falls short by less than "
    "twice its standard error, that is said instead. The error is over seeds; where there is one seed, it is "
    "that of the number of test images alone, and training adds its own. Of two numbers the first is the paper's "
    "comparison, of JFB with batch norm in R and Jacobian-based without; the second, with one R and one setting "
    "for both, is what JFB itself does. Both are judged, and where they differ both verdicts are told. "
    "At this length: the training was shorter than the paper's, so that neither yes nor no is final. Its solves "
    "miss eps: those of the Jacobian-based training did not come to a fixed point, so it is the cost and the "
    "accuracy of solves that ran to their cap. A dash: nothing is claimed. Counts are of images and epochs, or "
    "of cases."
)
_ALIKE = "with one R and one setting for both"


def headlines(contents: Iterable[Content]) -> list[Row]:
    """Rows of `COLUMNS`, from the files of studies; of a study that is not known here there are none."""
    return [row for content in contents for row in _KNOWN.get(content["name"], _nothing)(content["rows"])]


def _row(claim: str, paper: Any, ours: Any, holds: Any) -> Row:
    return dict(zip(COLUMNS, (claim, paper, ours, holds), strict=True))


def _nothing(rows: list[Row]) -> list[Row]:
    return []


def _table1(rows: list[Row]) -> list[Row]:
    """JFB against printed numbers, and against the twin."""
    trained = [row for row in rows if row.get("clean %") is not None]
    found: list[Row] = []
    for row in (row for row in trained if row["paper %"] is not None and row["method"].startswith("JFB")):
        how = "" if row["method"] == "JFB" else ", our settings"
        claim = f"{row['data']}: {row['method']}{how}, per cent by the {{}} protocol{_length(row)}"
        for protocol in ("clean", "released")[: 1 + (row["method"] == "JFB")]:
            value = row[f"{protocol} %"]
            short = round(_mean(value), 1) - row["paper %"]  # the paper prints one digit
            holds = _verdict(short if short >= 0 else _mean(value) - row["paper %"], _error(value), row)
            found.append(_row(claim.format(protocol), row["paper %"], shown(value), holds))
    return found + _against_twins(trained)


def _against_twins(trained: list[Row]) -> list[Row]:
    """JFB less the twin that was trained alike, or ResNet-56, with the standard error."""
    found = []
    for jfb in (row for row in trained if row["method"].startswith("JFB")):
        how = jfb["method"].removeprefix("JFB")
        explicit = [row for row in trained if row["data"] == jfb["data"] and row["method"].startswith("explicit")]
        for twin in (row for row in explicit if _after_comma(row["method"]) == how):
            gain = _mean(jfb["clean %"]) - _mean(twin["clean %"])
            error = _error(jfb["clean %"], twin["clean %"])
            ours = f"{gain:+.2f}" + ("" if error is None else f" ± {error:.2g} (standard error)")
            known = jfb["paper %"] is not None and twin["paper %"] is not None
            printed = f"{jfb['paper %'] - twin['paper %']:+.1f}" if known else None
            holds = None if error is None else _verdict(gain, error, jfb)
            name = "its explicit twin" if "twin" in twin["method"] else twin["method"].removeprefix("explicit: ")
            own = _length(twin)
            length = _length(jfb) + (f", its own{own.translate(_BARE)}" if own != _length(jfb) else "")
            claim = f"{jfb['data']}: JFB matches {name}{how}, points{length}"
            found.append(_row(claim, printed, ours, holds))
    return found


_BARE = str.maketrans("", "", "()")


def _error(*values: Any) -> float | None:
    """The standard error of a mean or of a difference of means; None where a spread is not known."""
    if not all(isinstance(one, Mapping) and one["spread"] is not None for one in values):
        return None
    return float(sum(one["spread"] ** 2 / one["count"] for one in values) ** 0.5)


def _verdict(gain: float, error: float | None, row: Row) -> bool | str:
    """Is it at least 0? By the same rule for all accuracies, in the words of `VERDICTS`."""
    if gain < 0 and error is not None and gain >= -2 * error:
        return "within two standard errors"
    if not _length(row):
        return gain >= 0
    return "yes, at this length" if gain >= 0 else "not at this length"


def _after_comma(method: str) -> str:
    """Of "explicit: the twin S(R(0, Q(d))), so trained" the last part, comma included."""
    name, comma, how = method.rpartition("), ")
    return comma.removeprefix(")") + how if name else ""


def _table2(rows: list[Row]) -> list[Row]:
    """JFB against Jacobian-based without batch norm, as in the paper, by each path; and what batch norm does."""
    found = []
    for data, path in dict.fromkeys((row["data"], row["steps"]) for row in rows):
        here = [row for row in rows if (row["data"], row["steps"]) == (data, path)]
        jfb = [row for row in here if row["method"] == "JFB"]
        with_norm = [row for row in jfb if row["batch norm in R"]]
        others = [row for row in here if not row["method"].startswith("JFB")]
        rivals = [row for row in others if not row["batch norm in R"]]
        if with_norm and rivals:
            found += [_faster(row, f"steps {path}{_length(with_norm[0])}") for row in rivals]
            found += [_as_accurate(f"steps {path}", jfb, row) for row in rivals]
        found += [_with_norm(row) for row in others if row["batch norm in R"] and "relative" in row["method"]]
    return found


def _faster(rival: Row, how: str) -> Row:
    """As many times as in the paper, or by less, or not at all."""
    printed, ratio, same = rival["paper: ratio"], rival["ratio"], rival.get("ratio, same settings")
    claim = f"{rival['data']}: an epoch of {rival['method']} takes so many times as long as JFB's, {how}"
    ours = f"{ratio:.3g}" + ("" if same is None else f"; {same:.3g} {_ALIKE}")
    holds = [_at_least(value, printed, rival) for value in (ratio, same) if value is not None]
    return _row(claim, printed, ours, _with_missed(_both(holds), rival))


def _at_least(ratio: float, printed: float | None, rival: Row) -> bool | str | None:
    if printed is None:
        return None
    holds = "longer, but by less than in the paper" if 1 < ratio < printed else ratio >= printed
    return "yes, at this length" if holds is True and _length(rival) else holds


def _both(verdicts: Sequence[bool | str | None]) -> bool | str | None:
    """On the paper's comparison, and on that with one R, if there is one and it ends otherwise."""
    first, *rest = verdicts
    return first if first is None or rest in ([], [first]) else f"{cell(first)}; with one R {cell(rest[0])}"


def _as_accurate(how: str, jfb: list[Row], rival: Row) -> Row:
    """With the standard error over seeds; of one seed, that of the test images."""
    told, verdicts, length = [], list[bool | str | None](), ""
    for row in sorted(jfb, key=lambda row: not row["batch norm in R"]):
        if not row["batch norm in R"] and rival.get("ratio, same settings") is None:
            continue  # it has another R or other settings
        gain = _mean(row["clean %"]) - _mean(rival["clean %"])
        over_seeds = _error(row["clean %"], rival["clean %"])
        error = (_variance(row) + _variance(rival)) ** 0.5 if over_seeds is None else over_seeds
        told.append(f"{gain:+.2f} ± {error:.2g}")
        verdicts.append(_verdict(gain, error, row))
        length = length or _length(row)
    seeds = rival["clean %"]["count"]
    how += ", one seed" if seeds == 1 else f", {seeds} seeds"
    claim = f"{rival['data']}: JFB is at least as accurate as {rival['method']}, points, {how}{length}"
    ours = "; ".join(told) + f" {_ALIKE}" * (len(told) > 1)
    return _row(claim, ">= 0", ours, _with_missed(_both(verdicts), rival))


def _with_missed(verdict: bool | str | None, rival: Row) -> bool | str | None:
    """A verdict on a rival whose forward solves, most of them, came to no fixed point says so."""
    if verdict is None or rival.get("forward converged", 1.0) >= 0.5:
        return verdict
    return f"{cell(verdict)}; its solves miss eps"


def _with_norm(row: Row) -> Row:
    """The released code's own test, on A'(g - A w), is passed by what |g - A w| says is not solved."""
    claim = f"{row['data']}: with batch norm in R CG fails to converge; adjoints that {row['method']} solved"
    claim += ", from fresh weights"
    solved = row["adjoints solved"]
    fails = solved < 0.5
    verdict = fails if fails or not _length(row) else "it converges, at this length"
    return _row(claim + _length(row), "fails", f"{solved:.1%}", verdict)


def _variance(row: Row) -> float:
    """Of an accuracy in per cent, by the number of test images."""
    share = _mean(row["clean %"]) / 100
    return float(1e4 * share * (1 - share) / row["test images"])


def _accelerate(rows: list[Row]) -> list[Row]:
    """What another solver than Picard needs to the same validation accuracy."""
    return [
        _row(
            f"{row['data']}: JFB with {row['solver']}, {row['what']} in one short training, times Picard's "
            "iterations; seconds",
            "promising" if row["solver"].startswith("Anderson") else None,
            f"{row['against Picard']:.3g}; {row['seconds against Picard']:.3g}",
            None,
        )
        for row in rows
        if row["what"].startswith("train") and row["solver"] != "Picard"
    ]


def _neumann(rows: list[Row]) -> list[Row]:
    found = []
    for data in dict.fromkeys(row["data"] for row in rows):
        against = {row["order k"]: row["seconds against k = 0"] for row in rows if row["data"] == data}
        worst = max(against)
        length = _length(next(row for row in rows if row["data"] == data))
        claim = f"{data}: an epoch is fastest without Neumann terms; with {worst}, times as long, one seed{length}"
        holds = all(ratio >= 1 for ratio in against.values())
        found.append(_row(claim, "> 1", against[worst], "yes, at this length" if holds and length else holds))
    return found


def _memory(rows: list[Row]) -> list[Row]:
    deepest = max(row["depth"] for row in rows)
    at = {row["scheme"]: row for row in rows if row["depth"] == deepest}
    (growth,) = (key for key in rows[0] if key.startswith("against depth"))
    says = {"JFB": "1", "unrolled": "proportional to depth"}
    return [
        _row(
            f"memory of a step at depth {deepest}, {name}, times {growth[8:]}'s",
            says[name],
            at[name][growth],
            at[name][growth] < 1.05 if name == "JFB" else None,
        )
        for name in says
    ]


def _toy(rows: list[Row]) -> list[Row]:
    judged = [row for row in rows if row.get("holds") is not None and row["paper"] is not None]
    held = sum(row["holds"] is True for row in judged)
    return (
        [_row("y = d + y^5: checks of the paper's statements that pass", len(judged), held, held == len(judged))]
        if judged
        else []
    )


_CASES = "of 2000 random cases where the Assumption holds, those that"
_THEORY = {  # how a row begins, and what it says
    "sigma_max(dT/du), eval mode": "T contracts in the Euclidean norm at u*: sigma_max of its Jacobian",
    "observed rate, eval mode": "the iteration converges: its observed rate",
    "cosine of JFB with the exact gradient of the batch, at the fixed point": "JFB descends: its cosine",
    "kappa(M'M)": "the Theorem's assumption: kappa(M'M), at least",
    f"{_CASES} violate the bound as printed": "its printed bound, violated in 2000 cases",
    f"{_CASES} descend": "its conclusion, JFB descends, of 2000 cases",
}


def _theory(rows: list[Row]) -> list[Row]:
    return [
        _row(f"{row['network']}: {name}{_length(row)}", row["paper"], shown(row["ours"]), row["holds"])
        for row in rows
        for words, name in _THEORY.items()
        if row["what"].startswith(words)
    ]


_KNOWN: Mapping[str, Callable[[list[Row]], list[Row]]] = {
    "table1": _table1,
    "table2": _table2,
    "neumann": _neumann,
    "accelerate": _accelerate,
    "memory": _memory,
    "toy": _toy,
    "theory": _theory,
}


def _length(row: Row) -> str:
    """Of a run that was shortened: how long it was."""
    made, _, whole = str(row.get("epochs") or "").partition(" of ")
    images = f", {row['training images']:,} images" if row.get("training images") else ""
    return f" ({made} of {whole} epochs{images})" if whole and made != whole else ""


def _mean(value: Any) -> float:
    return float(value["mean"] if isinstance(value, Mapping) else value)
