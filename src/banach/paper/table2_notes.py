"""What the second table says below its rows: how short the trainings are, and what their times are worth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from banach import data
from banach.paper import neumann
from banach.paper.common import Subject
from banach.paper.records import RECORD, Record, record_of
from banach.paper.released import LEFT_OUT, SCALED
from banach.paper.study import Options, cell
from banach.paper.table2_ways import (
    AS_MANY,
    CG_ABSOLUTE,
    CG_ABSOLUTE_LATE,
    CG_AS_MANY,
    CG_CAPTURED,
    FEW,
    JACOBIAN,
    JFB_CAPTURED,
    JFB_PAPER,
    LATE,
    STEPS,
    Printed,
    Way,
    as_in_the_paper,
    like_for_like,
)
from banach.provenance import Summary


def printed_steps(subject: Subject, printed: Printed) -> float:
    """What the paper calls J-products, per image and epoch of its whole training: there they are steps of CG."""
    return printed.products / (data.get(subject.data).counts["train"] * subject.recipe(JACOBIAN).epochs)


def steps(way: Way, products: float) -> float:
    """Steps of CG, from products per image. As released: A'g, one to have the transpose, A'A at the start, 3 A'A a
    step; else one for g - A w, two a step. One by one the last product of all tells the residual."""
    if way.cg is None:
        return 0.0
    if way.as_released:
        return (products - 5) / 6
    return (products - (1 if way.captured else 2)) / 2


def images_of(one: Record) -> int:
    """Images of an epoch: a subset, or as many as the data set has."""
    job = one.job
    return job.subset or data.get(job.data).counts["train"]


def batches_of(one: Record) -> int:
    """Of an epoch."""
    return -(-images_of(one) // one.job.settings.batch_size)


def pace(one: Record) -> float:
    """Seconds per training image."""
    return one.seconds / images_of(one)


def shortened(subject: Subject, all_ways: Iterable[Way]) -> list[str]:
    lack, few = subject.lack(), FEW.get(subject.data)
    if not lack:
        return []
    long = {way.part(subject).lack() for way in all_ways if way.captured}
    few_images = f" ({few:,} for CG with batch norm in R, and JFB beside it)" if few else ""
    seeds = "one seed" if subject.seeds == 1 else f"one seed, captured {subject.seeds} (times are of the first)"
    return [f"shortened: {subject.data}: one by one {lack}{few_images}; captured {', '.join(long)}; {seeds}"]


def late(subject: Subject, begun: Sequence[Record]) -> list[str]:
    """From where the late ways go on."""
    if not begun:
        return []
    kinds = [f"{'with' if one.job.batch_norm else 'without'} batch norm {100 * one.accuracy:.2f}" for one in begun]
    precision = begun[0].job.settings.precision
    told = (
        f"{subject.data}: late epochs begin with weights from {len(begun[0].epochs)} of JFB() on all training "
        f"images, in {precision}, at its own settings, whose rate has not gone down by then; the optimizer begins "
        "anew. Per cent there: " + ", ".join(kinds)
    )
    return [told]


def last_epochs(subject: Subject, done: Mapping[Way, Record]) -> list[str]:
    """At a constant rate the last epoch is one draw: the mean and spread over several, where there are enough."""
    long = {way: one for way, one in done.items() if len(one.curve) >= 2 * _SEVERAL}
    told = [
        f"{_kind(subject, way)} " + cell(Summary.of(100 * point["clean"] for point in one.curve[-_SEVERAL:]))
        for way, one in long.items()
    ]
    when = f"the last {_SEVERAL} epochs" + _first_seed(subject)
    return [f"{subject.data}: clean per cent of {when}: {'; '.join(told)}"] if told else []


def by_seed(subject: Subject, done: Mapping[Way, Record], more: Mapping[Way, Sequence[Record]]) -> list[str]:
    """Where there are several: accuracy, and what share of test images it was read off a fixed point for."""
    told = [
        f"{_kind(subject, way)} " + ", ".join(_scored(one) for one in (done[way], *others))
        for way, others in more.items()
        if others
    ]
    if not told:
        return []
    said = "clean per cent by seeds, and in brackets the share of test images whose solves met eps"
    return [f"{subject.data}: {said}: {'; '.join(told)}"]


def _scored(one: Record) -> str:
    share = one.curve[-1].get("converged")
    return f"{100 * one.accuracy:.2f}" + ("" if share is None else f" ({share:.1%})")


def once(subject: Subject, done: Mapping[Way, Record]) -> list[str]:
    """Where a time is that of one epoch, that of the other, which warms up, tells how sure it is."""
    pairs = {way: [e.seconds for e in one.epochs] for way, one in done.items() if len(one.epochs) == 2}
    told = [
        f"{_kind(subject, way)} {first:.3g} and {second:.3g}"
        for way, (first, second) in pairs.items()
        if not way.few
    ]
    said = "each time one by one is of one epoch. Seconds of that before, which warms up, and of it"
    return [f"{subject.data}: {said}: {'; '.join(told)}"] if told and subject.lack() else []


def _kind(subject: Subject, way: Way) -> str:
    return f"{way.name} {way.path(subject)}, with{'' if way.batch_norm else 'out'} batch norm"


def _first_seed(subject: Subject) -> str:
    return "" if subject.seeds == 1 else " of the first seed"


_SEVERAL = 5


def reckoned(subject: Subject, done: Mapping[Way, Record]) -> list[str]:
    """The ratio as released, if its steps of CG were as many as the paper's trainings made on average: measured
    one by one; reckoned there too, to see what that is worth, and elsewhere."""
    printed = CG_ABSOLUTE.printed(subject.data)
    if printed is None or CG_AS_MANY not in done:
        return []
    released = [way for way in (CG_ABSOLUTE, CG_ABSOLUTE_LATE) if way in done]
    products = {way: done[way].epochs[-1].products / images_of(done[way]) for way in (*released, CG_CAPTURED)}
    theirs = printed_steps(subject, printed)
    asked = 5 + 6 * AS_MANY  # as `steps` has it

    def ratio(cg: Way) -> float:
        jfb, plain = as_in_the_paper(cg), like_for_like(cg)
        one = (pace(done[cg]) - pace(done[plain])) / products[cg]
        return (pace(done[plain]) + one * asked) / pace(done[jfb])

    made = [f"{steps(way, products[way]):.2g} {way.path(subject)}" for way in released]
    ratios = [f"{ratio(way):.3g} {way.path(subject)}" for way in products]
    measured = pace(done[CG_AS_MANY]) / pace(done[as_in_the_paper(CG_AS_MANY)])
    told = (
        f"{subject.data}: steps of CG as released, per image in the last epoch: {'; '.join(made)}. The paper's "
        f"trainings made {theirs:.2g} on average. With {AS_MANY} the ratio to JFB is, measured one by one, "
        f"{measured:.3g}. From rows with other numbers of steps, if 6 products each took as long as there beyond "
        f"JFB with the same R, one would reckon: {'; '.join(ratios)}. At the 2 products a step that suffice, "
        f"{STEPS} steps were measured, captured"
    )
    return [told]


def elsewhere(subject: Subject, done: Mapping[Way, Record], options: Options) -> list[str]:
    """JFB captured, in another process: neumann has it at k = 0. Of the epochs that both have."""
    job = next((neumann.job(other, 0) for other in neumann.FULL if other.data == subject.data), None)
    if job is None or not (options.runs / job.name / RECORD).exists():
        return []
    other, here = record_of(job, options).epochs, done[JFB_CAPTURED].epochs
    pairs = [(b.seconds, a.seconds) for a, b in zip(other, here, strict=False) if not (a.warm_up or b.warm_up)]
    mine, theirs = (sum(seconds) / len(pairs) for seconds in zip(*pairs, strict=True))
    told = (
        f"{subject.data}: between processes times move. JFB captured took {mine:.3g} s per epoch here and "
        f"{theirs:.3g} in the same epochs of neumann at k = 0, the same training. Trust ratios no further. "
        "A cause may be that PyTorch keeps, in a process, the first algorithm of cuDNN's for a shape"
    )
    return [told]


def what_happens(subject: Subject, done: Mapping[Way, Record]) -> str:
    """With and without batch norm in R, in numbers, each beside JFB on the same images."""
    parts = []
    for way in (way for way in done if way is not JFB_PAPER):
        one, last = done[way], done[way].epochs[-1]
        where = "captured, with" if way.captured else "with"
        where = f"after {LATE[subject.data][0]} epochs of JFB, {where}" if way.late else where
        where += "" if way.batch_norm else "out"
        met = "a share not recorded" if one.adjoints_met is None else f"{one.adjoints_met:.1%}"
        solved = f"{met} of adjoints met the tolerance, " if way.cg == "relative" else ""
        if way.as_released:
            solved = f"of {batches_of(one) * len(one.epochs)} batches {one.heard[LEFT_OUT]} were left out, "
            solved += "" if way.batch_norm else f"R was scaled down before {one.heard[SCALED]}, "
        parts.append(
            f"{way.name.partition(', on')[0]} {where} batch norm, {images_of(one):,} images: {solved}loss "
            f"{last.loss:.3g}, {100 * one.accuracy:.2f} per cent"
        )
    return f"{subject.data}{_first_seed(subject)}: " + "; ".join(parts)
