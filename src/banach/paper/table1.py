"""The paper's first table: test accuracy of networks trained by JFB, of their explicit twins, and of rivals.

Claim: "JFBs are an effective way to train implicit networks, substantially outperform all the ODE-based networks
as well as MONs using similar or fewer parameters", and match explicit networks of the same size.

Settings: the paper's networks with the authors' released settings (eps, depth, learning rate, weight decay,
batch 100, Adam), 3 seeds, all training images; MNIST and SVHN in fp32, SVHN over fewer epochs than the paper's
100, CIFAR-10 in bf16 over fewer than 1000 with the milestones of its schedule in proportion; ResNet-56 by the
settings of He et al., shortened likewise. Beside them MNIST and SVHN with a learning rate that decays, SVHN
with random shifts too. Two protocols. Clean: eval mode, clean test images, last epoch, fp32, at the settings'
own eps and at 1e-4. Released, as the authors' code does it: training mode, and the best epoch on the test set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

from banach import models
from banach.paper.common import Subject, percent, summary, where
from banach.paper.jobs import Job
from banach.paper.marks import FINE, FINE_STEPS, Marks, take
from banach.paper.study import Findings, Options, Part, Row, Study
from banach.paper.table_figures import accuracy_figure
from banach.provenance import Summary

CLAIM = "networks trained by JFB match explicit ones of the same size and outperform other implicit ones"
DECAYED, SHIFTED = ", the rate decaying to 0", " and images shifted"  # after the name of a method
TWIN = "explicit: the twin S(R(0, Q(d)))"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row that is trained: `tag` names its runs, `paper` and `size` are the printed accuracy and parameters."""

    subject: Subject
    method: str
    tag: str
    paper: float | None = None
    size: int | None = None
    explicit: bool = False

    def jobs(self) -> list[Job]:
        name = f"table1-{self.subject.data}-{self.tag}"
        return [self.subject.job(name, seed, explicit=self.explicit) for seed in range(self.subject.seeds)]


MNIST = Subject(data="mnist", model="mnist", epochs=100, seeds=3, whole=True)
SVHN = Subject(data="svhn", model="svhn", epochs=40, seeds=3, whole=True)
CIFAR10 = Subject(data="cifar10", model="cifar10", epochs=20, seeds=3, whole=True, precision="bf16")
RESNET = replace(CIFAR10, model="resnet56")
DIGITS = Subject(data="digits", model="digits", epochs=3, seeds=2, whole=True, subset=600)


def _decayed(subject: Subject) -> Subject:
    """By the recipe whose learning rate decays, at its own length; SVHN shifted by up to 2 pixels."""
    shift = 2 if subject.data == "svhn" else None
    return replace(subject, by="decayed", epochs=models.recipe(subject.model, "decayed").epochs, shift=shift)


FULL = (
    Entry(subject=MNIST, method="JFB", tag="jfb", paper=99.4, size=54_000),
    Entry(subject=SVHN, method="JFB", tag="jfb", paper=94.1, size=164_000),
    Entry(subject=_decayed(MNIST), method="JFB" + DECAYED, tag="jfb-decayed", paper=99.4, size=54_000),
    Entry(subject=_decayed(SVHN), method="JFB" + DECAYED + SHIFTED, tag="jfb-decayed", paper=94.1, size=164_000),
    Entry(subject=CIFAR10, method="JFB", tag="jfb", paper=93.7, size=840_000),
    Entry(subject=MNIST, method=TWIN, tag="twin", paper=99.4, size=54_000, explicit=True),
    Entry(subject=SVHN, method=TWIN, tag="twin", paper=93.7, size=164_000, explicit=True),
    Entry(
        subject=_decayed(MNIST), method=TWIN + DECAYED, tag="twin-decayed", paper=99.4, size=54_000, explicit=True
    ),
    Entry(
        subject=_decayed(SVHN),
        method=TWIN + DECAYED + SHIFTED,
        tag="twin-decayed",
        paper=93.7,
        size=164_000,
        explicit=True,
    ),
    Entry(subject=CIFAR10, method=TWIN, tag="twin", explicit=True),
    Entry(subject=RESNET, method="explicit: ResNet-56", tag="resnet56", paper=93.0, size=850_000),
)
QUICK = (
    Entry(subject=DIGITS, method="JFB", tag="jfb"),
    Entry(subject=DIGITS, method=TWIN, tag="twin", explicit=True),
    Entry(
        subject=replace(DIGITS, model="resnet56", epochs=1, seeds=1, subset=100),
        method="explicit: ResNet-56",
        tag="resnet56",
    ),
)
# Data, method, parameters and accuracy as printed; the first two are quoted there from others, MON too.
RIVALS: tuple[tuple[str, str, int, float], ...] = (
    ("MNIST", "Neural ODE", 84_000, 96.4),
    ("MNIST", "augmented Neural ODE", 84_000, 98.2),
    ("MNIST", "monotone operator network", 84_000, 99.2),
    ("SVHN", "Neural ODE", 172_000, 81.0),
    ("SVHN", "augmented Neural ODE", 172_000, 83.5),
    ("SVHN", "monotone operator network", 170_000, 92.3),
    ("CIFAR-10", "monotone operator network", 1_010_000, 89.7),
    ("CIFAR-10", "multiscale DEQ", 10_000_000, 93.8),
)


def run(options: Options) -> Findings:
    entries = _entries(options)
    rows: list[Row] = []
    details: dict[str, Any] = {}
    for entry in entries:
        marks = {job.name: take(job, options) for job in entry.jobs()}
        rows.append(_row(entry, list(marks.values())))
        details |= {name: _detail(one) for name, one in marks.items()}
    rows += [_rival(*rival) for rival in RIVALS]
    places = where((detail["device"], detail["commit"], None) for detail in details.values())
    curves = [_course(entry, [details[job.name]["curve"] for job in entry.jobs()]) for entry in entries]
    notes = [*_notes(entries, rows), *filter(None, curves), places, *_shared(details.values())]
    figures = {"table1": partial(accuracy_figure, rows)}
    return Findings("table1", CLAIM, rows, notes, figures, _settings(entries), details)


def parts(options: Options) -> list[Part]:
    return [partial(take, job) for job in trainings(options)]


def trainings(options: Options) -> list[Job]:
    return [job for entry in _entries(options) for job in entry.jobs()]


def _entries(options: Options) -> Sequence[Entry]:
    return QUICK if options.quick else FULL


STUDY = Study("table1", CLAIM, run, parts, trainings)

_CLEAN = (
    f"clean: eval mode, clean test images, last epoch, fp32; at the settings' own eps, and at {FINE:g} with up "
    f"to {FINE_STEPS} steps. Residuals are means over the test images"
)
_RELEASED = (
    "released: training mode and the best epoch on the test set, in batches of 400, as the authors' code has it; "
    "on CIFAR-10 the test images are augmented like those of the training, too; in the precision of the training. "
    "Of ResNet-56, which the code does not have: the same on clean images"
)
_TRAINED = (
    "networks are trained on all training images, as in the paper: they choose nothing, so nothing is held out. "
    "Explicit means the twin S(R(0, Q(d))), which has the network's own parameters and takes no step, or "
    "ResNet-56; on CIFAR-10 the paper has the latter alone. The paper writes S(Q(d)) for its explicit networks, "
    "and gives them as many parameters as the implicit ones: S and Q alone have 17,360 on MNIST, the twin 54,352"
)
_DECAYED = (
    "at a constant rate accuracy moves from epoch to epoch, and the last epoch is one draw of it. So there "
    "are second rows, where the rate goes down to 0 by a cosine, from a higher start and in fewer epochs; on "
    'SVHN images are shifted at random by up to 2 pixels, too. These are our settings (recipe "decayed"), not '
    "the paper's; they were chosen on validation images, by one training of the JFB network each at a few "
    "rates, with shifts and without (benchmarks/training/choice.py, results/training/decayed-choice.log; SVHN "
    "there over 20 epochs, here over 25). The twins were not tuned"
)
_PRINTED = (
    "the settings are those of the released code. The paper prints others for MNIST, eps 1e-4 and a rate of 1e-4 "
    '(here the recipe "paper", which was not trained; released: 1e-1 and 2e-4); 70 and 30 per cent of the weights '
    "of CIFAR-10 in Q and R (84.5 and 13.1 in the released network, which is ours); and 256 more parameters on "
    "SVHN, of two batch norms that the released network never uses"
)
_CROPPED = (
    "SVHN re-cropped from the originals: the cropped digits, 73,257 to train with and 26,032 to test with, "
    "were remade from the publishers' street images and boxes; 1,083 genuine crops that could be compared "
    "agree bit for bit, but the published MD5s of the files do not. The paper's were the publishers' own"
)
_RIVALS = "rivals: the paper's numbers, which it quotes from others; they are not trained here"


def _row(entry: Entry, marks: Sequence[Marks]) -> Row:
    """One row over its seeds; accuracies are in per cent."""
    own, fine = [one.own for one in marks], [one.fine for one in marks if one.fine is not None]
    asked = entry.subject.recipe().epochs
    return {
        "data": marks[0].title,
        "method": entry.method,
        "paper: parameters": entry.size,
        "parameters": marks[0].parameters,
        "paper %": entry.paper,
        "clean %": percent(totals.accuracy for totals in own),
        "eps": marks[0].eps,
        "residual": summary(totals.residual for totals in own),
        "clean % at 1e-4": percent(totals.accuracy for totals in fine) if fine else None,
        "residual at 1e-4": summary(totals.residual for totals in fine),
        "converged at 1e-4": summary(totals.converged for totals in fine),
        "released %": percent(one.released for one in marks),
        "clean - released": percent(one.own.accuracy - one.released for one in marks),
        "epochs": f"{entry.subject.epochs} of {asked}",
        "seconds per epoch": Summary.of(one.seconds for one in marks),
        "device": ", ".join(sorted({one.device for one in marks})),
        "at once": max(one.at_once for one in marks),
    }


def _detail(one: Marks) -> dict[str, Any]:
    """Of one training: where and when it ran, how it went, and what was said."""
    return {name: getattr(one, name) for name in ("device", "commit", "at_once", "seconds", "curve", "heard")}


def _course(entry: Entry, curves: Sequence[Sequence[Mapping[str, float]]]) -> str:
    """Of a JFB training that was shortened, its accuracy by quarters: would more epochs have helped?"""
    if not entry.subject.lack() or not entry.method.startswith("JFB"):
        return ""
    length = len(curves[0])
    bounds = [round(k * length / 4) for k in range(5)]
    spans = [(first, last) for first, last in pairwise(bounds) if last > first]
    kinds = [kind for kind in ("clean", "released") if all(kind in p for curve in curves for p in curve)]
    told = [
        f"{first + 1} to {last}: "
        + ", ".join(f"{100 * fmean(p[kind] for curve in curves for p in curve[first:last]):.2f}" for kind in kinds)
        for first, last in spans
    ]
    return (
        f"{entry.subject.data}, {entry.method}: {' and '.join(kinds)} per cent, the mean over seeds and epochs "
        + "; ".join(told)
    )


def _shared(details: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence where trainings shared the device: their time is not what they need."""
    most = max((detail["at_once"] for detail in details), default=1)
    sentence = (
        f"up to {most} trainings ran at once on the device: the seconds here are longer than a training alone "
        "takes, and ratios of them say nothing; the second table has those"
    )
    return [sentence] if most > 1 else []


def _rival(data: str, method: str, parameters: int, paper: float) -> Row:
    return {"data": data, "method": method, "paper: parameters": parameters, "paper %": paper, "clean %": None}


def _settings(entries: Sequence[Entry]) -> dict[str, Any]:
    return {job.name: job.settings.to_dict() for entry in entries for job in entry.jobs()[:1]}


def _notes(entries: Sequence[Entry], rows: Sequence[Row]) -> list[str]:
    short = [
        f"{entry.subject.data}, {entry.method}: {lack}" for entry in entries if (lack := entry.subject.lack())
    ]
    decayed = [_DECAYED] if any(DECAYED in entry.method for entry in entries) else []
    printed = [_PRINTED] if any(entry.paper is not None for entry in entries) else []
    shortened = [f"shortened: {sentence}, its schedule in proportion" for sentence in short]
    coarse = [f"{e.subject.data}, {e.method}" for e in entries if e.subject.precision != "fp32"]
    precision = [f"trained in bf16: {'; '.join(coarse)}; all others in fp32"] if coarse else []
    cropped = [_CROPPED] if any("re-cropped" in row["data"] for row in rows) else []
    return [_CLEAN, _RELEASED, *printed, _TRAINED, *decayed, *cropped, _RIVALS, *precision, *shortened]
