"""The rows of the second table: backward modes, with batch norm in R and without, one by one or captured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from banach.backward import JFB, Implicit, Mode, NormalCG
from banach.paper.common import Subject
from banach.paper.jobs import Job
from banach.paper.records import Adjoints
from banach.paper.released import ReleasedCG
from banach.solve import Euclidean, Tolerance

JACOBIAN = "jacobian"  # the recipe
RELATIVE, STEPS = 1e-3, 20
# The released code's: the eps of its forward pass.
ABSOLUTE = {"mnist": 1e-1, "svhn": 1e-4, "cifar10": 1e-4, "digits": 1e-1}
FEW = {"mnist": 3_000, "svhn": 1_000, "cifar10": 500}  # training images for CG with batch norm in R
LONGER = {"mnist": 5, "svhn": 3, "cifar10": 3}  # epochs, on all images, where steps are captured
CG = {
    "absolute": "Jacobian-based, CG as released",
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

    `cg` is its stopping rule: "absolute", "relative", or "fixed" at so many steps; None is JFB. `few`: on few
    images. `captured`: by steps that ask the host nothing, on all images; there JFB goes the way of CG, at no step
    of it.
    """

    tag: str
    batch_norm: bool
    cg: str | None = None
    recipe: str | None = None
    few: bool = False
    captured: bool = False

    @property
    def name(self) -> str:
        if self.cg is None:
            return "JFB, on the same few images" if self.few else "JFB"
        return CG[self.cg]

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
        if self.cg == "absolute":
            limits = Tolerance(atol=ABSOLUTE[subject.data], rtol=0, max_steps=cap, norm=Euclidean())
            return Implicit(ReleasedCG(), limits, report=Adjoints())
        return Implicit(NormalCG(), Tolerance(atol=0, rtol=RELATIVE, max_steps=cap), report=Adjoints())

    def part(self, subject: Subject) -> Subject:
        """How far this way goes with it."""
        if self.captured and subject.data in LONGER:
            return replace(subject, subset=None, epochs=LONGER[subject.data], fast=True)
        return replace(subject, subset=FEW.get(subject.data, subject.subset)) if self.few else subject

    def job(self, subject: Subject) -> Job:
        return self.part(subject).job(
            f"table2-{subject.data}-{self.tag}",
            backward=self.mode(subject),
            recipe=self.recipe,
            batch_norm=self.batch_norm,
        )


JFB_PAPER = Way(tag="jfb-bn", batch_norm=True)
JFB_PLAIN = Way(tag="jfb-plain", batch_norm=False, recipe=JACOBIAN)
JFB_FEW = Way(tag="jfb-few-bn", batch_norm=True, recipe=JACOBIAN, few=True)
CG_ABSOLUTE = Way(tag="cg-absolute-plain", batch_norm=False, cg="absolute", recipe=JACOBIAN)
CG_RELATIVE = Way(tag="cg-relative-plain", batch_norm=False, cg="relative", recipe=JACOBIAN)
JFB_CAPTURED = Way(tag="jfb-captured-bn", batch_norm=True, captured=True)
JFB_PLAIN_CAPTURED = Way(tag="jfb-captured-plain", batch_norm=False, recipe=JACOBIAN, captured=True)
CG_CAPTURED = Way(tag="cg-captured-plain", batch_norm=False, cg="fixed", recipe=JACOBIAN, captured=True)
WAYS = (
    JFB_PAPER,
    JFB_PLAIN,
    CG_ABSOLUTE,
    CG_RELATIVE,
    JFB_FEW,
    Way(tag="cg-absolute-bn", batch_norm=True, cg="absolute", recipe=JACOBIAN, few=True),
    Way(tag="cg-relative-bn", batch_norm=True, cg="relative", recipe=JACOBIAN, few=True),
    JFB_CAPTURED,
    JFB_PLAIN_CAPTURED,
    CG_CAPTURED,
)


def as_in_the_paper(way: Way) -> Way:
    """JFB with batch norm in R and its own settings, by the same path."""
    return JFB_CAPTURED if way.captured else JFB_PAPER


def like_for_like(way: Way) -> Way:
    """JFB with the same R, the same settings and images, by the same path."""
    if way.captured:
        return JFB_PLAIN_CAPTURED
    return JFB_FEW if way.few else JFB_PLAIN
