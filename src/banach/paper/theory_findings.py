"""What the theory study comes to in words: where an assumption fails and the method still works."""

from __future__ import annotations

import math
from collections.abc import Sequence

from banach.paper.theory_measure import Measured


def findings_of(m: Measured) -> list[str]:
    """Where an assumption fails and the method still works, and what was left out."""
    of = "" if m.whole_length is None else f" of {m.whole_length}"
    notes = [f"{m.name}: {m.title}, JFB, {m.last.epoch}{of} epochs, measured at epochs {_listed(m)}."]
    notes += _on_missing(m)
    beyond = [x for r in m.readings for x in r.sigma if x >= 1]
    if beyond:
        notes.append(_on_sigma(m, beyond))
    if m.close:
        notes += [*_on_lemma(m), *_on_assumption(m), _on_distance(m)]
    missing = sorted(set(m.epochs) - {r.epoch for r in m.readings})
    if missing:
        notes.append(f"{m.name}: the weights of epochs {missing} were not kept, and are not measured.")
    unmet = {
        "eval": [r.epoch for r in m.readings if r.batch.converged < 1],
        "training": [r.epoch for r in m.readings if r.training.converged < 1],
    }
    where = [f"in {mode} mode at epochs {epochs}" for mode, epochs in unmet.items() if epochs]
    if where:
        notes.append(
            f"{m.name}: {' and '.join(where)} not all images of the batch reached u* to 1e-10: the exact gradient "
            "of its mean loss is not known there, and the cosine with it is left out."
        )
    known = [r for r in m.readings if all(r.epoch not in epochs for epochs in unmet.values())]
    return notes + sorted({f"{m.name}: {said}" for r in known for said in r.warned})


def _on_missing(m: Measured) -> list[str]:
    lost = {r.epoch: r.found.count(False) for r in m.readings if not all(r.found)}
    if not lost:
        return []
    where = ", ".join(f"{count} at epoch {epoch}" for epoch, count in lost.items())
    said = (
        f"{m.name}: the iteration in eval mode comes to no fixed point at {sum(lost.values())} of "
        f"{sum(len(r.found) for r in m.readings)} images and epochs ({where}): the paper's assumption fails "
        "there, and nothing is measured at them."
    )
    if set(lost) == {0}:
        said += " It is eval mode before training: the statistics of batch norm are of no data yet."
    return [said]


def _on_sigma(m: Measured, beyond: list[float]) -> str:
    total = sum(sum(r.found) for r in m.readings)
    rates = [x for r in m.readings for x in r.rate if not math.isnan(x)]
    return (
        f"{m.name}: T is no contraction in the Euclidean norm at {len(beyond)} of {total} fixed points (sigma_max "
        f"up to {max(beyond):.3g}), so the paper's first assumption fails there; the largest observed rate is "
        f"{max(rates, default=math.nan):.3g}."
    )


def _on_lemma(m: Measured) -> list[str]:
    beyond = [one.lemma for one in m.locals if one.lemma.gamma >= 1]
    if not beyond:
        return []
    positive, least = sum(found.coercivity > 0 for found in beyond), min(found.coercivity for found in beyond)
    count = f"all the same coercive at {positive}" if positive else "coercive at none"
    said = (
        f"{m.name}: where gamma >= 1 the Lemma's premise fails, and I - J is {count} of {len(beyond)} such images "
        f"(least quotient {least:.3g})."
    )
    return [said]


def _on_assumption(m: Measured) -> list[str]:
    total, descending = len(m.locals), sum(one.descends for one in m.locals)
    held = sum(one.conditioning.holds for one in m.locals)
    least = min(one.conditioning.kappa for one in m.locals)
    columns, ranks = m.locals[0].conditioning.columns, {one.statistics for one in m.locals}
    verdict = f"holds at {held}" if m.whole else f"is refuted at {total - held}"
    said = (
        f"{m.name}: the Assumption kappa(M'M) <= 1/gamma {verdict} of {total} images and epochs (kappa at least "
        f"{least:.2g}); JFB descends at {descending} of them."
    )
    if not held:
        said += " So the Theorem certifies none of these descents: where its bound is positive it says nothing."
    short = (
        f"{m.name}: with batch statistics in R, {_span(ranks)} of {columns} columns of M are independent: the "
        "batch norm that ends R holds the mean of every channel fixed. In training mode the Assumption cannot "
        "hold, whatever kappa, and JFB trains the network all the same. (By the statistics of the one image.)"
    )
    return [said, short] if max(ranks) < columns else [said]


def _on_distance(m: Measured) -> str:
    """How large may epsilon be? By what is left of the descent: far out its sign alone says little."""
    last = [one.perturbed for one in m.close[-1].locals]
    own, weak = [one.own for one in last], [one.weak_radius for one in last]
    pairs = [(p, *pair) for p in last for pair in zip(p.distance, p.worst, strict=True)]
    left = [-inner for p, distance, inner in pairs if p.weak_radius < distance <= p.worst_radius]
    said = (
        f"{m.name}: how far from u* may JFB be taken? At epoch {m.close[-1].epoch} a tenth of its descent is left "
        f"up to |u - u*| / |u*| = {_range(weak)} in the worst direction found; the solver stops at {_range(own)}."
    )
    if left:
        said += (
            f" Farther out, where it still descends, {_range(left)} of it is left: the loss saturates, the search "
            "for the direction ends, and the sign says little."
        )
    return said


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}"


def _listed(m: Measured) -> str:
    return ", ".join(str(r.epoch) for r in m.readings)


def _span(numbers: set[int]) -> str:
    return str(min(numbers)) if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"
