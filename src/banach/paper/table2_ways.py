"""The rows of the second table: backward modes, with batch norm in R and without, one by one or captured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from banach.backward import JFB, Implicit, Mode, NormalCG
from banach.paper.common import Subject
from banach.paper.jobs import Continued, Job
from banach.paper.records import Adjoints
from banach.paper.released import ReleasedCG
from banach.solve import Euclidean, Tolerance

JACOBIAN = "jacobian"  # the recipe
RELATIVE, STEPS = 1e-3, 20
# The released code's: the eps of its forward pass.
ABSOLUTE = {"mnist": 1e-1, "svhn": 1e-4, "cifar10": 1e-4, "digits": 1e-1}
FEW = {"mnist": 3_000, "svhn": 1_000, "cifar10": 500}  # training images for CG with batch norm in R
LONGER = {"mnist": 15, "svhn": 3, "cifar10": 3}  # epochs, on all images, where steps are captured
# Epochs of JFB before the ones that are timed late, on all images, and their precision: for networks with which CG
# makes fewer steps in the first epochs than later.
LATE = {"cifar10": (20, "bf16"), "digits": (1, "fp32")}
# Steps of CG that the paper's trainings made on average, per image, for networks with which ours makes far fewer;
# digits, so that the quick table has such a row.
AS_MANY, FEWER = 19, ("cifar10", "digits")
CG = {
    "absolute": "Jacobian-based, CG as released",
    "as many": f"Jacobian-based, CG as released but {AS_MANY} steps",
    "relative": f"Jacobian-based, CG to a relative {RELATIVE:g}",
    "fixed": f"Jacobian-based, {STEPS} steps of CG",
}


@dataclass(frozen=True, kw_only=True)
class Printed:
    """What the paper prints for a method on one data set: seconds per epoch, J-products, accuracy."""

    seconds: float
    products: float
    accuracy: float


PAPER = {
    ("mnist", "JFB"): Printed(seconds=17.6, products=0, accuracy=99.4),
    ("svhn", "JFB"): Printed(seconds=36.9, products=0, accuracy=94.1),
    ("cifar10", "JFB"): Printed(seconds=146.6, products=0, accuracy=93.67),
    ("mnist", "CG"): Printed(seconds=28.4, products=6.0e6, accuracy=99.2),
    ("svhn", "CG"): Printed(seconds=92.8, products=1.4e7, accuracy=90.1),
    ("cifar10", "CG"): Printed(seconds=530.9, products=9.7e8, accuracy=87.9),
}


@dataclass(frozen=True, kw_only=True)
class Way:
    """A backward mode with or without batch norm in R.

    `cg` is its stopping rule: "absolute"; "as many", the same but not before as many steps as in the paper;
    "relative"; or "fixed" at so many steps; None is JFB. `few`: on few images. `captured`: by steps that ask the
    host nothing, on all images; there JFB goes the way of CG, at no step of it. `late`: from weights that JFB
    trained before, with the same R.
    """

    tag: str
    batch_norm: bool
    cg: str | None = None
    recipe: str | None = None
    few: bool = False
    captured: bool = False
    late: bool = False

    @property
    def name(self) -> str:
        if self.cg is None:
            return "JFB, on the same few images" if self.few else "JFB"
        return CG[self.cg]

    @property
    def as_released(self) -> bool:
        """By the released code's CG, with all that goes with it."""
        return self.cg in {"absolute", "as many"}

    def printed(self, data: str) -> Printed | None:
        """What the paper has of this row, if it does."""
        if self.few or self.batch_norm != (self.cg is None):
            return None
        return PAPER.get((data, "JFB" if self.cg is None else "CG"))

    def mode(self, subject: Subject) -> Mode:
        cap = subject.recipe(JACOBIAN).max_steps  # of the forward pass, and so of CG
        if self.captured:
            steps = 0 if self.cg is None else STEPS
            return Implicit(NormalCG(), Tolerance(atol=0, max_steps=steps, check_every=0))
        if self.cg is None:
            return JFB()
        if self.as_released:
            limits = Tolerance(atol=ABSOLUTE[subject.data], rtol=0, max_steps=cap, norm=Euclidean())
            at_least = AS_MANY if self.cg == "as many" else 1
            return Implicit(ReleasedCG(at_least), limits, report=Adjoints())
        return Implicit(NormalCG(), Tolerance(atol=0, rtol=RELATIVE, max_steps=cap), report=Adjoints())

    def part(self, subject: Subject) -> Subject:
        """How far this way goes with it."""
        if self.captured and subject.data in LONGER:
            return replace(subject, subset=None, epochs=LONGER[subject.data], fast=True)
        return replace(subject, subset=FEW.get(subject.data, subject.subset)) if self.few else subject

    def before(self, subject: Subject) -> Job | None:
        """The training whose weights this way begins with, if it does."""
        if not self.late:
            return None
        epochs, precision = LATE[subject.data]
        whole = replace(subject, subset=None, epochs=epochs, precision=precision, fast=True)
        name = f"table2-{subject.data}-before-{'bn' if self.batch_norm else 'plain'}"
        return whole.job(name, batch_norm=self.batch_norm)

    def seeds(self, subject: Subject) -> range:
        """Captured ways are quick enough for several."""
        return range(subject.seeds if self.captured else 1)

    def job(self, subject: Subject, seed: int = 0) -> Job:
        job = self.part(subject).job(
            f"table2-{subject.data}-{self.tag}",
            seed,
            backward=self.mode(subject),
            recipe=self.recipe,
            batch_norm=self.batch_norm,
        )
        before = self.before(subject)
        return job if before is None else Continued(**vars(job), after=before)

    def path(self, subject: Subject) -> str:
        """How its steps are made, and from where: what is compared goes one path."""
        if self.late:
            return f"one by one, after {LATE[subject.data][0]} epochs of JFB"
        return "captured" if self.captured else "one by one"


JFB_PAPER = Way(tag="jfb-bn", batch_norm=True)
JFB_PLAIN = Way(tag="jfb-plain", batch_norm=False, recipe=JACOBIAN)
JFB_FEW = Way(tag="jfb-few-bn", batch_norm=True, recipe=JACOBIAN, few=True)
CG_ABSOLUTE = Way(tag="cg-absolute-plain", batch_norm=False, cg="absolute", recipe=JACOBIAN)
CG_AS_MANY = Way(tag="cg-printed-plain", batch_norm=False, cg="as many", recipe=JACOBIAN)
CG_RELATIVE = Way(tag="cg-relative-plain", batch_norm=False, cg="relative", recipe=JACOBIAN)
JFB_CAPTURED = Way(tag="jfb-captured-bn", batch_norm=True, captured=True)
JFB_PLAIN_CAPTURED = Way(tag="jfb-captured-plain", batch_norm=False, recipe=JACOBIAN, captured=True)
CG_CAPTURED = Way(tag="cg-captured-plain", batch_norm=False, cg="fixed", recipe=JACOBIAN, captured=True)
JFB_LATE, JFB_PLAIN_LATE, CG_ABSOLUTE_LATE, CG_RELATIVE_LATE = (
    replace(way, tag=f"{way.tag}-late", late=True) for way in (JFB_PAPER, JFB_PLAIN, CG_ABSOLUTE, CG_RELATIVE)
)
WAYS = (
    JFB_PAPER,
    JFB_PLAIN,
    CG_ABSOLUTE,
    CG_AS_MANY,
    CG_RELATIVE,
    JFB_FEW,
    Way(tag="cg-absolute-bn", batch_norm=True, cg="absolute", recipe=JACOBIAN, few=True),
    Way(tag="cg-relative-bn", batch_norm=True, cg="relative", recipe=JACOBIAN, few=True),
    JFB_CAPTURED,
    JFB_PLAIN_CAPTURED,
    CG_CAPTURED,
    JFB_LATE,
    JFB_PLAIN_LATE,
    CG_ABSOLUTE_LATE,
    CG_RELATIVE_LATE,
)


def ways(subject: Subject) -> list[Way]:
    """Late ones where `LATE` has a length, the one with more steps of CG where ours makes far fewer."""
    late, more = subject.data in LATE, subject.data in FEWER
    return [way for way in WAYS if (late or not way.late) and (more or way is not CG_AS_MANY)]


def before(subject: Subject) -> list[Job]:
    """The trainings that some ways go on from."""
    return list({job.name: job for way in ways(subject) if (job := way.before(subject)) is not None}.values())


def jobs(subject: Subject) -> list[Job]:
    """All trainings of the table."""
    return before(subject) + [way.job(subject, seed) for way in ways(subject) for seed in way.seeds(subject)]


def as_in_the_paper(way: Way) -> Way:
    """JFB with batch norm in R and its own settings, by the same path."""
    if way.late:
        return JFB_LATE
    return JFB_CAPTURED if way.captured else JFB_PAPER


def like_for_like(way: Way) -> Way:
    """JFB with the same R, the same settings and images, by the same path."""
    if way.late:
        return JFB_PLAIN_LATE
    if way.captured:
        return JFB_PLAIN_CAPTURED
    return JFB_FEW if way.few else JFB_PLAIN
