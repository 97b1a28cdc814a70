"""T contracts, I - J is coercive, and where kappa(M'M) <= 1/gamma JFB is a descent direction, also near u*.

The paper's Assumptions, Lemma, Theorem and Corollary, measured over training: on the weight snapshots of runs by
`python -m reproduction train`, and on training images, since JFB is to lower their loss. A snapshot takes minutes
on a CPU and is recorded at once. Slips in the proofs are in pages/theory.md, with a test.

Everything is in float64, so that the network is measured and not the rounding. For one image, with theta_S the
weights of S, theta_T those of Q and R, and ' for transposed, the paper's matrices are

    J = dT/du,   J~ = diag(I, I - J),   M = diag((dS/dtheta_S)', (dT/dtheta_T)'),   v = (dl/dy, (dS/du)' dl/dy)
    gradient = M J~'^-1 v,   JFB's direction p = -M v

J is complete. M has the columns of one channel and some others: the eigenvalues of a principal part of M'M are
between those of M'M (Cauchy), so its kappa is a lower bound, enough to show where the Assumption fails.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from banach import Implicit, Tolerance, contraction_factor, data, diagnose
from reproduction import jobs
from reproduction.rundir import SNAPSHOTS
from reproduction.study import Claim, Options, draw_band, panels, read, store, table
from reproduction.table1 import TITLES
from reproduction.train import train

RECORDS = "theory.jsonl"
RUNS = tuple(f"{name}-jfb-seed0" for name in ("mnist", "svhn", "cifar10"))
QUICK = "digits-jfb-seed0"
TIGHT = Tolerance(atol=0.0, rtol=1e-10, max_steps=1000)
OTHERS = 64  # columns of M besides those of one channel
CHUNK = 256  # rows of J at a time
DISTANCES = (1e-3, 1e-2, 3e-2, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)  # |u - u*| / |u*|
LEFT = 0.1  # share of the descent that is left at the largest distance that counts
ASCENTS = 5
ROUNDING = 1e-10  # slack for comparing float64 sums with their bounds
Loss = Callable[[Any], Tensor]
_COSINE = "cosine of JFB with the exact gradient"
# Key of the measured cases -> text, condition and, where its value alone decides, whether a case holds.
STATEMENTS: dict[str, tuple[str, str, Callable[[float], bool] | None]] = {
    "sigma": ("sigma_max(dT/du), eval mode", "< 1", lambda x: x < 1),
    "rate": ("observed rate, eval mode", "< 1", lambda x: x < 1),
    "training.sigma": ("sigma_max(dT/du), training mode", "< 1", lambda x: x < 1),
    "training.rate": ("observed rate, training mode", "< 1", lambda x: x < 1),
    "L": ("sigma_max(dT/dd), eval mode", "finite", math.isfinite),
    "cosine": (f"{_COSINE}, where the solver stops", "> 0", lambda x: x > 0),
    "exact.cosine": (f"{_COSINE}, at u*", "> 0", lambda x: x > 0),
    "training.cosine": (f"{_COSINE}, training mode", "> 0", lambda x: x > 0),
    "image.cosine": (f"{_COSINE}, single images", "> 0", lambda x: x > 0),
    "lemma": ("coercivity of I - J, gamma < 1", ">= 1 - gamma", None),
    "beyond": ("coercivity of I - J, gamma >= 1", "none", lambda x: x > 0),
    "kappa": ("kappa(M'M), at least", "<= 1/gamma", None),
    "rank": ("dependent columns of M, eval mode", "0", lambda x: x == 0),
    "training.rank": ("dependent columns of M, R in training mode", "0", lambda x: x == 0),
    "own": ("|u - u*| / |u*| where the solver stops", "none", None),
    "radius": ("|u - u*| / |u*| with 10% of the descent left", "> 0", lambda x: x > 0),
}
DRAWN = (
    ("rate", "observed rate"),
    ("sigma", "sigma_max(dT/du)"),
    ("cosine", "cosine of JFB with the exact gradient"),
)


@dataclass(frozen=True)
class Cases:
    """The cases of one statement: their values without NaN, and for those that can be judged whether they hold."""

    values: tuple[float, ...] = ()
    held: tuple[bool, ...] = ()

    @staticmethod
    def of(key: str, values: Iterable[float]) -> "Cases":
        """Return the cases of a statement that its values alone decide."""
        known, holds = tuple(x for x in values if not math.isnan(x)), STATEMENTS[key][2]
        return Cases(known, tuple(map(holds, known)) if holds else ())

    def __add__(self, other: "Cases") -> "Cases":
        return Cases(self.values + other.values, self.held + other.held)

    low = property(lambda self: min(self.values, default=math.nan))
    high = property(lambda self: max(self.values, default=math.nan))
    mean = property(lambda self: fmean(self.values or [math.nan]))
    count = property(lambda self: len(self.held))
    holding = property(lambda self: sum(self.held))

    def __str__(self) -> str:
        """Return the mean of the values and, if they differ, their range."""
        mean, low, high = (f"{x:.3g}" for x in (self.mean, self.low, self.high))
        return mean if low == high else f"{mean} ({low} to {high})"


@dataclass(frozen=True)
class Row:
    """One snapshot of a run. `length`: epochs of a complete training. `images` were measured."""

    run: str
    model: str
    epoch: int
    length: int
    images: int
    measured: dict[str, Cases]


def run(options: Options) -> list[Row]:
    """Measure the snapshots below `options.runs` that have no record yet; quick: train and measure digits."""
    path, names = options.records / RECORDS, (QUICK,) if options.quick else RUNS
    if options.quick:
        train([jobs.get(QUICK)], options)
    known = {(row.run, row.epoch) for row in read(Row, path)}
    for job in map(jobs.get, names):
        folder = options.runs / job.name
        snapshots = (folder / SNAPSHOTS).glob("epoch-*.safetensors")
        files = {int(file.stem.removeprefix("epoch-")): file for file in snapshots}
        if not files:
            options.say(f"no snapshots in {folder}; run `python -m reproduction train {job.name}`")
            continue
        for epoch in (0, max(files)) if options.quick else (0, *sorted(files)):
            if (job.name, epoch) not in known:
                options.say(f"{job.name}: measuring epoch {epoch}")
                store(path, [_measured(job, epoch, files.get(epoch), options)], append=True)
    return read(Row, path)


def _measured(job: jobs.Job, epoch: int, weights: Path | None, options: Options) -> Row:
    images, dense = (8, 1) if options.quick else (32, 2)
    net = job.build()
    if weights:
        net.load_state_dict(load_file(weights))
    few = data.load(str(job.settings.data), "train+validation", options.data_dir).take(range(images))
    d, smoothing = few.normalise(few.pixels).double(), job.settings.label_smoothing
    numbers = measure(net, d, few.labels, dense=dense, smoothing=smoothing)
    return Row(job.name, str(job.settings.model), epoch, job.settings.epochs, images, numbers)


def measure(net: Any, d: Tensor, labels: Tensor, *, dense: int, smoothing: float = 0.0) -> dict[str, Cases]:
    """Return the cases of every statement for a network, which stays as it is.

    Args:
        net: the network.
        d: images in float64. Those without a fixed point count against the rate only.
        labels: of the images.
        dense: so many of the first images are measured with dense matrices.
        smoothing: of the labels, in the cross entropy.
    """
    net = copy.deepcopy(net).double().eval()
    training, loss = copy.deepcopy(net).train(), partial(cross_entropy, label_smoothing=smoothing)
    with torch.random.fork_rng([]), warnings.catch_warnings():
        torch.manual_seed(0)  # dropout in training mode: the same masks at every epoch
        warnings.simplefilter("ignore")  # missing fixed points are counted
        here, there = (diagnose.measure_contraction(tight(one), d) for one in (net, training))
        found = here.solution.converged
        at = diagnose.network_map(tight(net), d)
        # sigma_max(dT/dd) at u*, as that of (d, u) -> (0, T(u*; d)), which keeps its shape.
        L = contraction_factor(lambda z: (torch.zeros_like(z[0]), at.T(at.u, net.Q(z[0]))), (d, at.u))
        per_image = here.sigma, here.rate, L
        sigma, rate, lipschitz = (x.where(found, math.nan).tolist() for x in per_image)
        own, train = (_cosines(one, d, partial(loss, target=labels)) for one in (net, training))
        chosen = [slice(i, i + 1) for i in range(dense) if bool(found[i])]
        single = [Image(net, d[one], partial(loss, target=labels[one])).cases() for one in chosen]
    values: dict[str, Sequence[float]] = {"sigma": sigma, "rate": rate}
    values |= {f"training.{name}": [float(getattr(there, name).max())] for name in ("sigma", "rate")}
    values |= {"L": lipschitz, "cosine": own[:1], "exact.cosine": own[1:], "training.cosine": train[:1]}
    measured = {key: Cases.of(key, some) for key, some in values.items()}
    measured["rate"] += Cases((), (False,) * int((~found).sum()))
    for one in single:
        measured |= {key: measured.get(key, Cases()) + cases for key, cases in one.items()}
    return measured


def tight(net: Any) -> Any:
    """Return the same network with a solver that goes to the fixed point, in the network's own norm."""
    other = copy.copy(net)
    other.tolerance = replace(TIGHT, norm=net.tolerance.norm)
    return other


def _cosines(net: Any, d: Tensor, loss: Loss) -> tuple[float, float]:
    """Return the cosine of JFB where the solver stops and at u*, NaN unless every image has a fixed point."""
    own, exact = diagnose.descent_check(net, d, loss), diagnose.descent_check(tight(net), d, loss)
    known = bool(exact.solution.converged.all())
    return (own.cosine, exact.cosine) if known else (math.nan, math.nan)


def lemma(J: Tensor) -> tuple[float, float, bool]:
    """Return gamma = |J|, the coercivity of I - J, and whether both bounds of the Lemma hold.

    <x, (I - J) x> >= (1 - gamma) |x|^2 and <x, (I - J)^-1 x> >= (1 - gamma) / (1 + gamma)^2 |x|^2; the least such
    quotients are the least eigenvalues of the symmetric parts. Supposes gamma < 1.
    """
    A = torch.eye(len(J), dtype=J.dtype) - J
    inverse, info = torch.linalg.inv_ex(A)
    # Not by singular values, which take minutes at n = 4,096.
    gamma = float(torch.linalg.eigvalsh(J.mT @ J)[-1].clamp(min=0).sqrt())
    least, other = (float(torch.linalg.eigvalsh((B + B.mT) / 2)[0]) for B in (A, A if int(info) else inverse))
    holds = least >= 1 - gamma - ROUNDING and other >= (1 - gamma) / (1 + gamma) ** 2 - ROUNDING
    return gamma, least, holds and not int(info)


def conditioning(M: Tensor) -> tuple[float, int]:
    """Return kappa(M'M), infinity if columns of M are dependent, and how many are.

    Batch norm that ends R in train mode rules full rank out: it holds the mean of T fixed, one direction per
    channel (and its variance, but for eps: a second one that is nearly lost).
    """
    s = torch.linalg.svdvals(M)  # the small singular values of M'M are lost in rounding
    dependent = M.shape[1] - int((s > s.max() * max(M.shape) * torch.finfo(M.dtype).eps).sum())
    return math.inf if dependent else float((s.max() / s.min()) ** 2), dependent


class Image:
    """One image d of a network in eval mode: its matrices, and p(u) = -d/dtheta loss(S(R(u, Q(d)))) at any u."""

    def __init__(self, net: Any, d: Tensor, loss: Loss) -> None:
        self.net, self.d, self.loss = net, d, loss
        self.theta_S, self.theta_T = [*net.S.parameters()], [*net.Q.parameters(), *net.R.parameters()]
        self.weights = [*self.theta_S, *self.theta_T]
        self.u = diagnose.network_map(tight(net), d).u
        n, channel = self.u.numel(), self.u.shape[2:].numel()  # batch norm acts on whole channels
        others = torch.randperm(n - channel, generator=torch.Generator().manual_seed(0))[:OTHERS]
        self.columns = torch.cat([torch.arange(channel), channel + others])

    def cases(self) -> dict[str, Cases]:
        """Return the cases of the statements on single images."""
        gamma, coercivity, holds = lemma(self.J())
        kappa, dependent = conditioning(self.matrix())
        batch_norm = copy.deepcopy(self.net)
        batch_norm.R.train()
        in_training = conditioning(Image(batch_norm, self.d, self.loss).matrix())[1]
        distance = diagnose.network_map(self.net, self.d).u - self.u
        values = {
            "lemma" if gamma < 1 else "beyond": coercivity,  # beyond its premise the Lemma says nothing
            "kappa": kappa,
            "rank": dependent,
            "training.rank": in_training,
            "image.cosine": -float(torch.cosine_similarity(self.gradient, self.p(self.u), dim=0)),
            "own": float(distance.norm() / self.u.norm()),
            "radius": self.radius(),
        }
        cases = {key: Cases.of(key, [x]) for key, x in values.items()}
        judged = {"lemma": holds, "kappa": kappa * gamma <= 1}
        return cases | {key: Cases((values[key],), (held,)) for key, held in judged.items() if key in values}

    @cached_property
    def gradient(self) -> Tensor:
        """The exact gradient, by Implicit."""
        exact = tight(self.net)
        exact.backward = Implicit(tolerance=TIGHT)
        return _flat(torch.autograd.grad(self.loss(exact(self.d)), self.weights))

    def J(self) -> Tensor:
        """Return dT/du at u*."""
        with torch.no_grad():  # derivatives in u only; torch.func takes them all the same
            v = self.net.Q(self.d)
            return torch.func.jacrev(lambda u: self.net.R(u, v).flatten(), chunk_size=CHUNK)(self.u).flatten(1)

    def matrix(self) -> Tensor:
        """Return M with all columns of S and the chosen ones of T."""
        y, t = self.net.S(self.u).flatten(), self.net.R(self.u, self.net.Q(self.d)).flatten()[self.columns]
        return torch.block_diag(_rows(y, self.theta_S).mT, _rows(t, self.theta_T).mT)

    def p(self, u: Tensor, *, twice: bool = False) -> Tensor:
        """Return JFB's direction at u, flat; `twice`: with its graph, to be differentiated again."""
        y = self.net.S(self.net.R(u.view_as(self.u), self.net.Q(self.d)))
        return -_flat(torch.autograd.grad(self.loss(y), self.weights, create_graph=twice))

    def radius(self) -> float:
        """Return the relative distance from u* up to which more than LEFT of the descent remains at worst."""
        limit, size = -LEFT * abs(float(self.gradient @ self.p(self.u))), float(self.u.norm())
        return max(takewhile(lambda part: self.highest(size * part) < limit, DISTANCES), default=0.0)

    def highest(self, distance: float) -> float:
        """Return the largest <gradient, p(u)> that gradient ascent finds at this distance from u*."""
        centre = near = self.u.flatten()
        best = -math.inf
        for _ in range(ASCENTS):
            leaf = near.detach().clone().requires_grad_()
            slope = torch.autograd.grad(self.gradient @ self.p(leaf, twice=True), leaf)[0]
            near = centre + distance * slope / slope.norm().clamp(min=torch.finfo(slope.dtype).tiny)
            best = max(best, float(self.gradient @ self.p(near)))
        return best


def _rows(values: Tensor, weights: list[Tensor]) -> Tensor:
    found = [torch.autograd.grad(x, weights, retain_graph=True, materialize_grads=True) for x in values]
    return torch.stack([_flat(row) for row in found])


def _flat(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def shown(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return for each network the rows of the run with the most epochs, by epoch; digits only if alone."""
    ordered = sorted(rows, key=lambda row: row.epoch)
    longest = {row.model: row.run for row in ordered}  # the last one of a network stays
    known = [model for model in TITLES if model in longest and (model != "digits" or len(longest) == 1)]
    return {model: [row for row in ordered if row.run == longest[model]] for model in known}


def values(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the cases on trained snapshots by MODEL.STATEMENT and all.STATEMENT, the claim, the table."""
    found: dict[str, Any] = {f"{model}.{key}": Cases() for model in ("all", *TITLES) for key in STATEMENTS}
    found |= dict.fromkeys((f"{model}.{key}.last" for model in TITLES for key in STATEMENTS), math.nan)
    found |= dict.fromkeys((f"{model}.{key}" for model in TITLES for key in ("epoch", "length")), math.nan)
    lines = []
    for model, mine in shown(rows).items():
        found |= {f"{model}.epoch": mine[-1].epoch, f"{model}.length": mine[-1].length}
        for key, (text, condition, _) in STATEMENTS.items():
            per_epoch = {row.epoch: row.measured.get(key, Cases()) for row in mine}
            first, last = per_epoch.pop(0, Cases()), mine[-1].measured.get(key, Cases())
            trained = sum(per_epoch.values(), Cases())
            found[f"all.{key}"] += trained
            found |= {f"{model}.{key}": trained, f"{model}.{key}.last": last.mean}
            held = f"{trained.holding} of {trained.count}" if trained.held else None
            shown_cases = (some if some.values else None for some in (first, last))
            lines += [[model, text, condition, *shown_cases, held]] if first.values or last.values else []
    descends = found["all.cosine"]  # the claim: JFB descends on every batch
    found["claim"] = Claim.always(descends.holding, descends.count, len(shown(rows)))
    return found | {"table": table(lines, "network|statement|condition|epoch 0|last epoch|holds after training")}


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Draw contraction and cosine over training."""
    runs = shown(rows)
    figure, axes = panels(len(runs), width=4.2)
    for one, (model, mine) in zip(axes, runs.items(), strict=True):
        one.set_xscale("symlog", linthresh=1)
        for key, label in DRAWN:
            some = {row.epoch: row.measured.get(key, Cases()).values for row in mine}
            draw_band(one, {epoch: x for epoch, x in some.items() if x}, label, marker=".")
        one.axhline(1, color="black", linewidth=0.8)
        one.set(title=TITLES[model], xlabel="epoch (logarithmic from 1 on)", ylim=(0, 2.1))
    axes[0].set_ylabel("factor, or cosine")
    axes[0].legend(fontsize="small")
    return {"theory": figure}
