"""`banach diagnose`: does T contract, how fast does the solver converge, how good is the cheap gradient?"""

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
from banach.cli.assemble import Opened, images, open_run
from banach.cli.console import console
from banach.cli.diagnose_plot import draw, show
from banach.data import Images
from banach.diagnose import Contraction, Descent, descent_checks, measure_contraction, network_map, verdict
from banach.diagnose.still import undisturbed
from banach.network import ImplicitNetwork
from banach.provenance import Summary, provenance, write_json
from banach.solve import Solution, Status, Tolerance, solve
from banach.train.plot import PlotError
from banach.train.precision import arithmetic

EPILOG = """\b
Examples:
  banach diagnose runs/digits-1
  banach diagnose runs/cifar10-1 --samples 64 --device cuda"""

MODES: tuple[Mode, ...] = (JFB(), Neumann(1), Neumann(2), Neumann(5))
CLOSE = 1e-5  # relative: how far the reference fixed point and adjoint are solved; fp32 can do it


@dataclass(frozen=True, eq=False)
class Gradient:
    """How a mode compares with the exact gradient. `sound`: that was solved for as far as asked."""

    name: str
    training: bool
    descent: Descent
    adjoint: bool

    @property
    def sound(self) -> bool:
        return self.adjoint and bool(self.descent.solution.converged.all())


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What was measured. `far`: the network's own solver, gone on past its tolerance; `gradients[0]`: its mode."""

    contraction: Contraction
    far: Solution
    gradients: tuple[Gradient, ...]
    tolerance: Tolerance

    @property
    def own(self) -> Solution:
        """The solve as the network does it."""
        return self.contraction.solution

    @property
    def trace(self) -> Tensor:
        """(steps, samples): the residuals of `far`; NaN is as bad as infinity."""
        assert self.far.trace is not None
        return self.far.trace.double().cpu().nan_to_num(nan=math.inf, posinf=math.inf)

    @property
    def curve(self) -> dict[str, Tensor]:
        """Residuals over the samples after each step."""
        at = {"low": 0.1, "median": 0.5, "high": 0.9, "worst": 1.0}
        # Nearest, since between infinities there is nothing to interpolate.
        return {name: self.trace.quantile(q, 1, interpolation="nearest") for name, q in at.items()}

    @property
    def words(self) -> str:
        """The verdict."""
        own, found, steps = self.gradients[0], self.own, self.own.steps.double()
        pace = f"with {float(steps.mean()):.1f} steps on average and {int(steps.max())} at most."
        said = [f"The tolerance of the run is met on {int(found.converged.sum())} of {len(steps)} samples, {pace}"]
        said.append(verdict(self.contraction, own.descent).replace(str(own.descent.backward), own.name))
        for g in self.gradients:
            if g.training:
                figures = f"cosine {g.descent.cosine:.3g}, norm ratio {g.descent.ratio:.3g}"
                said.append(f"In train mode, as training sees it, {g.name} has {figures}.")
        if not all(g.sound for g in self.gradients):
            said.append(f"The exact gradient could not be solved for to {CLOSE:.0e}: read the cosines with care.")
        return " ".join(said)

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
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
    data_dir: Annotated[Path | None, typer.Option(help="Where the data lies.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of dropout masks and power iterations.")] = 0,
) -> None:
    """Measure a trained network on validation images: contraction, convergence, gradients.

    Prints a verdict and writes diagnose.json and diagnose.png into the run; changes nothing else. All is
    computed in fp32.
    """
    opened = open_run(run, device)
    _check_fixed_point(opened)
    found = images(opened.settings, "validation", data_dir)
    samples = min(32, len(found)) if samples is None else samples
    if not 2 <= samples <= len(found):
        raise ValueError(f"samples must lie between 2 and {len(found)}, the validation images, got {samples}")
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
    """Everything, on the device of the images; the network (in eval mode) and random states stay as they are."""
    d = images.normalise(images.pixels)

    def loss(output: Tensor) -> Tensor:
        return F.cross_entropy(output, images.labels, label_smoothing=label_smoothing)

    modes = (net.backward, *(mode for mode in MODES if mode != net.backward))
    # What the measurements would warn of is among the figures.
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
    """The network's own solver until rounding stops it."""
    steps = min(max(100, net.tolerance.max_steps), 1000)
    tolerance = Tolerance(atol=0.0, max_steps=steps, norm=net.tolerance.norm)
    at = network_map(net, d)
    return solve(at.T, at.z0, net.solver, inputs=at.inputs, tolerance=tolerance, coupled=at.coupled, record=True)


def _compare(
    net: Any, d: Tensor, loss: Callable[[Tensor], Tensor], modes: Sequence[Mode], *, seed: int
) -> tuple[Gradient, ...]:
    """The modes against the exact gradient; sound where that could be solved for."""
    torch.manual_seed(seed)  # of dropout, in train mode
    ends = list[Status]()
    near = Tolerance(atol=0.0, rtol=CLOSE, max_steps=200, norm=net.tolerance.norm)
    # GMRES needs one J-product a step; the normal equations need two, and more steps.
    limits = Tolerance(atol=0.0, rtol=CLOSE, max_steps=150)
    exact = Implicit(GMRES(restart=50), limits, report=lambda products, residual, status: ends.extend(status))
    found = descent_checks(net, d, loss, modes=modes, exact=exact, tolerance=near)
    sound = all(end is Status.CONVERGED for end in ends)
    return tuple(Gradient(_name(one.backward), net.training, one, sound) for one in found)


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


def _gradient_figures(g: Gradient) -> dict[str, Any]:
    parts = {name: {"cosine": part.cosine, "ratio": part.ratio} for name, part in g.descent.parts.items()}
    own = {"mode": g.name, "training": g.training, "sound": g.sound, "loss": g.descent.loss}
    return {**own, "cosine": g.descent.cosine, "ratio": g.descent.ratio, "parts": parts}


def _values(values: Tensor) -> dict[str, Any]:
    """Every value, and in short those that are known."""
    known = [x for x in values.double().tolist() if not math.isnan(x)]
    return {"summary": Summary.of(known) if known else None, "max": max(known, default=None), "values": values}


def _name(mode: Mode) -> str:
    if isinstance(mode, Neumann):
        return f"Neumann {mode.order}"
    if isinstance(mode, Unroll):
        return f"Unroll {mode.steps}"
    return f"Implicit {type(mode.method).__name__}" if isinstance(mode, Implicit) else type(mode).__name__
