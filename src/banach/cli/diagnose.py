"""`banach diagnose`: contraction of T, convergence of the solver, quality of the cheap gradient."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from banach.backward import GMRES, JFB, Implicit, Mode, Neumann, Unroll
from banach.cli.console import console, table
from banach.cli.opened import Opened, open_run
from banach.data import Images
from banach.diagnose import Contraction, Descent, descent_checks, measure_contraction, network_map, verdict
from banach.diagnose.frozen import undisturbed
from banach.network import ImplicitNetwork
from banach.provenance import Summary, provenance, write_json
from banach.solve import Solution, Status, Tolerance, solve
from banach.train.plot import PlotError, new_figure, write_figure
from banach.train.precision import arithmetic

EPILOG = """\b
Examples:
  banach diagnose runs/digits-1
  banach diagnose runs/cifar10-1 --samples 64 --device cuda"""

MODES: tuple[Mode, ...] = (JFB(), Neumann(1), Neumann(2), Neumann(5))
CLOSE = 1e-5  # relative tolerance of the reference fixed point and adjoint, which fp32 can reach
BLUE, ORANGE, GREY = "#1f77b4", "#ff7f0e", "0.45"


@dataclass(frozen=True, eq=False)
class Gradient:
    """A mode compared with the exact gradient. `sound`: fixed point and adjoint of the exact one converged."""

    name: str
    training: bool
    descent: Descent
    sound: bool


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """All measurements. `far`: the network's solver beyond its tolerance; `gradients[0]`: the network's mode."""

    contraction: Contraction
    far: Solution
    gradients: tuple[Gradient, ...]
    tolerance: Tolerance

    @property
    def own(self) -> Solution:
        """The solve at the network's tolerance."""
        return self.contraction.solution

    @property
    def trace(self) -> Tensor:
        """(steps, samples): the residuals of `far`, with infinity for NaN."""
        assert self.far.trace is not None
        return self.far.trace.double().cpu().nan_to_num(nan=math.inf, posinf=math.inf)

    @property
    def curve(self) -> dict[str, Tensor]:
        """Quantiles of the residuals over the samples, after each step."""
        at = {"low": 0.1, "median": 0.5, "high": 0.9, "worst": 1.0}
        # Nearest: interpolation between infinities gives NaN.
        return {name: self.trace.quantile(q, 1, interpolation="nearest") for name, q in at.items()}

    @property
    def words(self) -> str:
        """The verdict in sentences."""
        own, found, steps = self.gradients[0], self.own, self.own.steps.double()
        pace = f"with {float(steps.mean()):.1f} steps on average and {int(steps.max())} at most."
        said = [f"The tolerance of the run is met on {int(found.converged.sum())} of {len(steps)} samples, {pace}"]
        said.append(verdict(self.contraction, own.descent).replace(str(own.descent.backward), own.name))
        for g in self.gradients:
            if g.training:
                figures = f"cosine {g.descent.cosine:.3g}, norm ratio {g.descent.ratio:.3g}"
                said.append(f"In train mode, as training sees it, {g.name} has {figures}.")
        if not all(g.sound for g in self.gradients):
            said.append(f"The exact gradient was not solved to {CLOSE:.0e}: the cosines are approximate.")
        return " ".join(said)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, for JSON."""
        c, t = self.contraction, self.tolerance
        return {
            "verdict": self.words,
            "contraction": {"sigma": _values(c.sigma), "rate": _values(c.rate), "violations": c.violations},
            "convergence": {
                "tolerance": {"atol": t.atol, "rtol": t.rtol, "max_steps": t.max_steps, "norm": str(t.norm)},
                "steps": _values(self.own.steps),
                "residual": _values(self.own.residual),
                "converged": int(self.own.converged.sum()),
                "least_residual": _values(self.trace.amin(0)),
                "curve": self.curve,
            },
            "gradients": [_gradient_figures(g) for g in self.gradients],
        }


def diagnose(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    samples: Annotated[int | None, typer.Option(help="Validation images to measure on.  [32, or all]")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="For dropout masks and power iterations.")] = 0,
) -> None:
    """Measure a trained network on validation images: contraction, convergence, gradients.

    Prints a verdict and writes diagnose.json and diagnose.png into the run; nothing else changes. The
    arithmetic is fp32.
    """
    opened = open_run(run, device)
    _check_fixed_point(opened)
    found = opened.settings.load("validation", data_dir)
    samples = min(32, len(found)) if samples is None else samples
    if not 2 <= samples <= len(found):
        raise ValueError(f"samples must be between 2 and {len(found)}, the validation images, got {samples}")
    chosen = found.subset(samples).to(opened.device)
    measured = measure(opened.net, chosen, label_smoothing=opened.settings.label_smoothing, seed=seed)
    content = _described(opened, chosen, {"samples": samples, "seed": seed}) | measured.to_dict()
    kind = "training" if opened.settings.whole else "validation"
    show(measured, f"{opened.settings.model} on {samples} {kind} images of {chosen.title}")
    console.print(f"figures: {write_json(opened.run.path / 'diagnose.json', content)}")
    try:
        console.print(f"plot: {draw(measured, opened.run.path / 'diagnose.png')}")
    except PlotError as error:
        console.print(f"no plot: {error}")


def measure(net: Any, images: Images, *, label_smoothing: float = 0.0, seed: int = 0) -> Diagnosis:
    """Measure a network in eval mode on images, on their device; network and random states do not change."""
    d = images.normalise(images.pixels)

    def loss(output: Tensor) -> Tensor:
        return F.cross_entropy(output, images.labels, label_smoothing=label_smoothing)

    modes = (net.backward, *(mode for mode in MODES if mode != net.backward))
    # The figures contain what the warnings would say.
    with arithmetic("fp32", images.device), undisturbed(net, d), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        contraction = measure_contraction(net, d, seed=seed)
        far = _go_far(net, d)
        gradients = _compare(net, d, loss, modes, seed=seed)
        net.train()
        try:
            gradients += _compare(net, d, loss, (JFB(),), seed=seed)
        finally:
            net.eval()
    return Diagnosis(contraction, far, gradients, net.tolerance)


def _go_far(net: Any, d: Tensor) -> Solution:
    """Run the network's solver until rounding stops it."""
    steps = min(max(100, net.tolerance.max_steps), 1000)
    tolerance = Tolerance(atol=0.0, max_steps=steps, norm=net.tolerance.norm)
    at = network_map(net, d)
    return solve(at.T, at.z0, net.solver, inputs=at.inputs, tolerance=tolerance, coupled=at.coupled, record=True)


def _compare(
    net: Any, d: Tensor, loss: Callable[[Tensor], Tensor], modes: Sequence[Mode], *, seed: int
) -> tuple[Gradient, ...]:
    """Compare the modes with the exact gradient."""
    torch.manual_seed(seed)  # for dropout, in train mode
    ends = list[Status]()
    near = Tolerance(atol=0.0, rtol=CLOSE, max_steps=200, norm=net.tolerance.norm)
    # GMRES needs one J-product a step; the normal equations need two, and more steps.
    limits = Tolerance(atol=0.0, rtol=CLOSE, max_steps=150)
    exact = Implicit(GMRES(restart=50), limits, report=lambda products, residual, status: ends.extend(status))
    found = descent_checks(net, d, loss, modes=modes, exact=exact, tolerance=near)
    adjoint = all(end is Status.CONVERGED for end in ends)
    return tuple(
        Gradient(_name(one.backward), net.training, one, adjoint and bool(one.solution.converged.all()))
        for one in found
    )


def _check_fixed_point(opened: Opened) -> None:
    net, path = opened.net, opened.run.path
    if not isinstance(net, ImplicitNetwork):
        raise ValueError(f"{path} holds {opened.settings.model}, which has no fixed point to diagnose")
    if net.tolerance.max_steps == 0:
        raise ValueError(f"{path} holds an explicit twin (max_steps 0), which has no fixed point to diagnose")


def _described(opened: Opened, chosen: Images, asked: dict[str, Any]) -> dict[str, Any]:
    settings = {**asked, "precision": "fp32", "run": opened.settings.to_dict()}
    return {
        "run": opened.run.path,
        "position": {"epoch": opened.position.epoch, "step": opened.position.step},
        "data": chosen.title,
        "split": chosen.split,
        "provenance": provenance(settings, device=opened.device),
    }


def show(measured: Diagnosis, title: str) -> None:
    """Print two tables and the verdict."""
    c, own = measured.contraction, measured.own
    figures = {
        "sigma_max(dT/du)": c.sigma,
        "observed rate": c.rate,
        "steps": own.steps,
        "residual after them": own.residual,
        "least residual, further on": measured.trace.amin(0),
    }
    overall = [(name, *_mean_and_worst(values)) for name, values in figures.items()]
    console.print(table(title, ("figure", "mean", "worst"), overall))
    console.print(f"T contracts on {len(c.sigma) - c.violations} of {len(c.sigma)} samples\n")
    parts = list(measured.gradients[0].descent.parts)
    title = "cosine with the exact gradient, and ratio of the norms"
    rows = [_row(g, parts) for g in measured.gradients]
    console.print(table(title, ("gradient", "all weights", *parts), rows))
    console.print(f"\n{measured.words}\n")


def _row(g: Gradient, parts: list[str]) -> tuple[str, ...]:
    found = [g.descent, *(g.descent.parts[part] for part in parts)]
    return (
        g.name + (", train mode" if g.training else ""),
        *(f"{x.cosine:.3f}  {_short(x.ratio)}" for x in found),
    )


def _short(ratio: float) -> str:
    return f"{ratio:.3f}" if 0.01 <= ratio < 100 else f"{ratio:.0e}"


def _mean_and_worst(values: Tensor) -> tuple[str, str]:
    known = values.double()[~values.isnan()]
    return (f"{float(known.mean()):.3g}", f"{float(known.max()):.3g}") if len(known) else ("-", "-")


def draw(measured: Diagnosis, path: Path) -> Path:
    """Write the plot: residuals by step, contraction by sample, cosines by mode."""
    figure = new_figure(13, 4)
    left, middle, right = figure.subplots(1, 3)
    _residuals(left, measured)
    _contraction(middle, measured)
    _cosines(right, measured)
    return write_figure(figure, path)


def _residuals(axes: Any, measured: Diagnosis) -> None:
    # The axis is logarithmic: a residual of zero is drawn as the least positive one.
    least = min((r for r in measured.trace.flatten().tolist() if r > 0), default=1.0)
    curve = {name: torch.where(r.isfinite(), r.clamp(min=least), torch.nan) for name, r in measured.curve.items()}
    steps = torch.arange(1, len(curve["median"]) + 1)
    axes.fill_between(steps, curve["low"], curve["high"], color=BLUE, alpha=0.25, linewidth=0, label="10-90%")
    axes.plot(steps, curve["median"], color=BLUE, label="median")
    axes.plot(steps, curve["worst"], color=ORANGE, linewidth=1, label="worst")
    if measured.tolerance.atol > 0:
        line = {"color": GREY, "linestyle": "--", "linewidth": 1}
        axes.axhline(measured.tolerance.atol, label="tolerance of the run", **line)
    if bool((~curve["worst"].isnan()).any()):
        axes.set_yscale("log")
    axes.set(title="convergence", xlabel="step", ylabel=f"residual, {type(measured.tolerance.norm).__name__}")
    axes.legend(fontsize="small")


def _contraction(axes: Any, measured: Diagnosis) -> None:
    sigma, rate = measured.contraction.sigma.cpu(), measured.contraction.rate.cpu()
    order = sigma.argsort()
    rank = torch.arange(1, len(sigma) + 1)
    axes.plot(rank, sigma[order], "o", color=BLUE, markersize=4, label="sigma_max(dT/du)")
    axes.plot(rank, rate[order], "x", color=ORANGE, markersize=4, label="observed rate")
    axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
    axes.set(title="contraction: below 1", xlabel="sample, by sigma_max", ylim=(0, None))
    axes.legend(fontsize="small")


def _cosines(axes: Any, measured: Diagnosis) -> None:
    names = [g.name + ("\n(train mode)" if g.training else "") for g in measured.gradients]
    cosines = [g.descent.cosine for g in measured.gradients]
    bars = axes.bar(range(len(names)), cosines, color=[ORANGE if g.training else BLUE for g in measured.gradients])
    axes.bar_label(bars, fmt="%.3f", fontsize="small")
    axes.set_xticks(range(len(names)), names, fontsize="small", rotation=20)
    axes.axhline(0.0, color=GREY, linewidth=1)
    axes.set(title="cosine with the exact gradient", ylim=(min([0.0, *cosines]) * 1.1, 1.1))


def _gradient_figures(g: Gradient) -> dict[str, Any]:
    parts = {name: {"cosine": part.cosine, "ratio": part.ratio} for name, part in g.descent.parts.items()}
    own = {"mode": g.name, "training": g.training, "sound": g.sound, "loss": g.descent.loss}
    return {**own, "cosine": g.descent.cosine, "ratio": g.descent.ratio, "parts": parts}


def _values(values: Tensor) -> dict[str, Any]:
    """Return every value, and the summary of those that are not NaN."""
    known = [x for x in values.double().tolist() if not math.isnan(x)]
    return {"summary": Summary.of(known) if known else None, "max": max(known, default=None), "values": values}


def _name(mode: Mode) -> str:
    if isinstance(mode, Neumann):
        return f"Neumann {mode.order}"
    if isinstance(mode, Unroll):
        return f"Unroll {mode.steps}"
    return f"Implicit {type(mode.method).__name__}" if isinstance(mode, Implicit) else type(mode).__name__
