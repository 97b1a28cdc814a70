"""The table of the theory study: each statement of the paper beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from banach.paper.study import Row
from banach.paper.theory_dense import Local
from banach.paper.theory_measure import Measured, Reading
from banach.paper.theory_perturb import DISTANCES
from banach.provenance import Summary


def rows_of(measured: Measured) -> list[Row]:
    rows = [*_contraction_rows(measured), *_batch_rows(measured)]
    if measured.close:
        rows += [*_lemma_rows(measured), *_assumption_rows(measured), *_perturbed_rows(measured)]
    if measured.close and measured.whole:
        rows += _theorem_rows(measured)
    whole = measured.whole_length
    length = f"{measured.last.epoch} of {whole}" if whole is not None else str(measured.last.epoch)
    return [{"network": measured.name, **row, "epochs": length} for row in rows]


def _contraction_rows(m: Measured) -> list[Row]:
    training = [r.training_sigma for r in m.readings]
    sigma = _row("sigma_max(dT/du), eval mode", "< 1", m, lambda r: _summary(r.sigma), None)
    rate = _row("observed rate, eval mode", "< 1", m, lambda r: _summary(r.rate), None)
    return [
        sigma | {"holds": _by_training(m, lambda r: [x < 1 for x in r.sigma if not math.isnan(x)])},
        rate | {"holds": _by_training(m, _shrinks)},
        _row("sigma_max, training mode", "< 1", m, lambda r: r.training_sigma, [x < 1 for x in training]),
        _row("observed rate, training mode", "< 1", m, lambda r: r.training_rate, _below(m, "training_rate")),
        _row("accuracy, validation images", None, m, lambda r: r.accuracy, None),
    ]


def _batch_rows(m: Measured) -> list[Row]:
    name = "cosine of JFB with the exact gradient of the batch"
    own, exact, training = (
        [value > 0 for r in m.readings if (value := pick(r)) is not None] for pick in (_own, _exact, _training)
    )
    return [
        _row(f"{name}, where the solver stops", "> 0", m, _own, own),
        _row(f"{name}, at the fixed point", "> 0", m, _exact, exact),
        _row(f"{name}, training mode", "> 0", m, _training, training),
    ]


def _lemma_rows(m: Measured) -> list[Row]:
    told = [one.lemma for one in m.locals if one.lemma.gamma < 1]  # the Lemma's premise
    near = [found.coercivity >= found.coercivity_bound - 1e-10 for found in told]
    inverse = [found.inverse >= found.inverse_bound - 1e-10 for found in told]
    bound, bound_inverse = (_least(m, key) for key in ("coercivity_bound", "inverse_bound"))
    return [
        _close_row(
            "coercivity of I - J (holds: where gamma < 1)",
            f">= 1 - gamma = {bound:.3g}",
            m,
            lambda x: x.lemma.coercivity,
            near,
        ),
        _close_row(
            "coercivity of its inverse (holds: where gamma < 1)",
            f">= (1 - gamma) / (1 + gamma)^2 = {bound_inverse:.3g}",
            m,
            lambda x: x.lemma.inverse,
            inverse,
        ),
    ]


def _assumption_rows(m: Measured) -> list[Row]:
    last = m.close[-1].locals[0]
    which = "M" if last.whole else f"{last.conditioning.columns} columns of M"
    kappa = "kappa(M'M)" if last.whole else f"kappa(M'M), at least (from {which})"
    full = [one.conditioning.rank == one.conditioning.columns for one in m.locals]
    statistics = [one.statistics == one.conditioning.columns for one in m.locals]
    columns = last.conditioning.columns
    return [
        _close_row(
            f"{kappa}, least over the images",
            f"<= 1/gamma = {last.conditioning.limit:.3g}",
            m,
            lambda x: x.conditioning.kappa,
            [one.conditioning.holds for one in m.locals],
            least=True,
        ),
        _close_row(f"rank of {which}, eval mode", columns, m, lambda x: x.conditioning.rank, full, least=True),
        _close_row(
            f"rank of {which}, batch statistics in R", columns, m, lambda x: x.statistics, statistics, least=True
        ),
        _close_row(
            "cosine of JFB with the exact gradient, one image",
            "> 0",
            m,
            lambda x: x.cosine,
            [one.descends for one in m.locals],
        ),
    ]


def _perturbed_rows(m: Measured) -> list[Row]:
    most = max(DISTANCES)
    start = "JFB descends up to this |u - u*| / |u*|"
    upto = "" if m.whole else ", at most"
    certain = [one.perturbed.allowed > 0 for one in m.locals]
    return [
        _close_row(
            f"{start}, random directions ({most:g} is the largest tried)",
            "> 0",
            m,
            lambda x: x.perturbed.random_radius,
        ),
        _close_row(f"{start}, worst direction found", "> 0", m, lambda x: x.perturbed.worst_radius),
        _close_row(
            "and a tenth of its descent is left up to this, worst direction found",
            None,
            m,
            lambda x: x.perturbed.weak_radius,
        ),
        _close_row("the same quotient where the network's solver stops", None, m, lambda x: x.perturbed.own),
        _close_row(
            "Picard steps from 0 after which JFB descends", None, m, lambda x: _known(x.perturbed.first_step)
        ),
        _close_row(
            f"|p(u) - p(u*)| that the Corollary allows{upto}", "> 0", m, lambda x: x.perturbed.allowed, certain
        ),
    ]


def _theorem_rows(m: Measured) -> list[Row]:
    found = [one.theorem for one in m.locals if one.theorem is not None]
    identities = [one.identity for one in m.locals if one.identity is not None]
    applies = [case.applies for case in found]
    return [
        _count_row("images and epochs to which the Theorem applies", applies),
        _count_row("its bound is negative, and so says something", [case.bound < 0 for case in found]),
        _count_row("its bound as printed is kept", [case.printed_holds for case in found]),
        _count_row("its bound mended is kept", [case.holds for case in found]),
        _count_row("<gradient, p> < 0", [case.descends for case in found]),
        _close_row(
            "error of p = -(M J~' M^+) gradient",
            0,
            m,
            lambda x: math.nan if x.identity is None else x.identity.error,
            [one.error < 1e-6 for one in identities],
        ),
        _close_row(
            "error of it without the transpose",
            None,
            m,
            lambda x: math.nan if x.identity is None else x.identity.error_printed,
        ),
    ]


def _row(what: str, paper: Any, m: Measured, value: Callable[[Reading], Any], held: Sequence[bool] | None) -> Row:
    return {"what": what, "paper": paper, "fresh": value(m.first), "ours": value(m.last), "holds": _of(held)}


def _close_row(
    what: str,
    paper: Any,
    m: Measured,
    value: Callable[[Local], float],
    held: Sequence[bool] | None = None,
    *,
    least: bool = False,
) -> Row:
    """Of the images that were looked at closely: a summary, or the least."""
    first, last = ([value(one) for one in reading.locals] for reading in (m.close[0], m.close[-1]))
    gather: Callable[[Sequence[float]], Any] = min if least else _summary
    fresh = gather(first) if m.close[0].epoch == 0 else None
    return {"what": what, "paper": paper, "fresh": fresh, "ours": gather(last), "holds": _of(held)}


def _count_row(what: str, held: Sequence[bool]) -> Row:
    return {"what": what, "paper": len(held), "fresh": None, "ours": sum(held), "holds": _of(held)}


def _of(held: Sequence[bool] | None) -> str | None:
    return None if held is None else f"{sum(held)} of {len(held)}"


def _summary(values: Iterable[float]) -> Summary | None:
    known = [value for value in values if not math.isnan(value)]
    return Summary.of(known) if known else None


def _below(m: Measured, name: str) -> list[bool]:
    return [getattr(r, name) < 1 for r in m.readings if not math.isnan(getattr(r, name))]


def _least(m: Measured, name: str) -> float:
    found: list[float] = [getattr(one.lemma, name) for one in m.close[-1].locals]
    return min(found)


def _by_training(m: Measured, held: Callable[[Reading], list[bool]]) -> str:
    """Fresh weights and trained ones are not one population."""
    parts = {
        "fresh": [one for r in m.readings if r.epoch == 0 for one in held(r)],
        "trained": [one for r in m.readings if r.epoch > 0 for one in held(r)],
    }
    return ", ".join(f"{_of(answers)} {name}" for name, answers in parts.items() if answers)


def _shrinks(r: Reading) -> list[bool]:
    """Is there a fixed point, and a rate below 1? Left out: those that come to it before a rate is seen."""
    both = zip(r.found, r.rate, strict=True)
    return [found and rate < 1 for found, rate in both if not (found and math.isnan(rate))]


def _own(r: Reading) -> float | None:
    return _if_known(r.batch.cosine)


def _exact(r: Reading) -> float | None:
    return _if_known(r.batch.at_fixed_point)


def _training(r: Reading) -> float | None:
    return _if_known(r.training.cosine)


def _if_known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _known(step: int | None) -> float:
    return math.nan if step is None else float(step)
