"""`banach diagnose`: contraction of T, convergence of the solver, quality of the cheap gradient."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from banach import checks
from banach.backward import GMRES, JFB, Implicit, Mode, Neumann
from banach.cli.console import console, table, wrapped
from banach.cli.shared import DataDir, Device, Imports, RunDir, number, open_run, show_plot
from banach.data import Images
from banach.diagnose import Contraction, Descent, descent_checks, measure_contraction, network_map, verdict
from banach.diagnose.contraction import worst
from banach.diagnose.frozen import undisturbed
from banach.fast.plan import arithmetic
from banach.network import ImplicitNetwork
from banach.provenance import provenance, write_json
from banach.solve import Status, Tolerance, solve
from banach.train.plot import BELOW, Chart, line_chart

EPILOG = """\b
Examples:
  banach diagnose runs/digits-1
  banach diagnose runs/cifar10-1 --samples 64 --device cuda"""

MODES: tuple[Mode, ...] = (JFB(), Neumann(1), Neumann(2), Neumann(5))
IN_TRAINING = "JFB, train mode"
CLOSE = 1e-5  # relative tolerance of the reference fixed point and adjoint, which fp32 can reach
QUANTILES = {"low": 0.1, "median": 0.5, "high": 0.9, "worst": 1.0}  # of the residuals, over the samples


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """All measurements, in fp32.

    `trace` (steps, samples): residuals of the network's solver beyond its tolerance, with infinity for NaN.
    `gradients`: modes compared with the exact gradient, the network's own first. `sound`: its fixed points and
    adjoints converged.
    """

    contraction: Contraction
    trace: Tensor
    gradients: Mapping[str, Descent]
    sound: bool
    tolerance: Tolerance

    @property
    def curve(self) -> dict[str, Tensor]:
        """Quantiles of the residuals after each step."""
        # Nearest: interpolation between infinities gives NaN.
        return {name: self.trace.quantile(q, 1, interpolation="nearest") for name, q in QUANTILES.items()}

    @property
    def words(self) -> str:
        """The verdict in sentences."""
        found, (name, own) = self.contraction.solution, next(iter(self.gradients.items()))
        steps, trained = found.steps.double(), self.gradients[IN_TRAINING]
        met = (self.trace <= self.tolerance.atol).all(1).nonzero()  # the steps after which all samples do
        pace = f"with {float(steps.mean()):.1f} steps on average and {int(steps.max())} at most."
        said = [f"The tolerance of the run is met on {int(found.converged.sum())} of {len(steps)} samples, {pace}"]
        if len(met) and not found.converged.all() and not self.tolerance.rtol:
            said.append(f"It would be met after {int(met[0]) + 1} steps: see --max-steps.")
        said.append(verdict(self.contraction, own).replace(str(own.backward), name))
        said.append(f"In train mode JFB has cosine {trained.cosine:.3g}, norm ratio {trained.ratio:.3g}.")
        if not self.sound:
            said.append(f"The exact gradient was not solved to {CLOSE:.0e}: the cosines are approximate.")
        return " ".join(said)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, for JSON."""
        c, found, t = self.contraction, self.contraction.solution, self.tolerance
        figures = {
            "sigma_max(dT/du)": c.sigma,
            "observed rate": c.rate,
            "steps": found.steps,
            "residual at the last step": found.residual,
            "least residual of more steps": self.trace.amin(0),
        }
        return {
            "verdict": self.words,
            "figures": {name: _figure(values) for name, values in figures.items()},
            "violations": c.violations,
            "converged": int(found.converged.sum()),
            "tolerance": {"atol": t.atol, "rtol": t.rtol, "max_steps": t.max_steps, "norm": str(t.norm)},
            "curve": self.curve,
            "gradients": {name: _parts(one) for name, one in self.gradients.items()},
            "sound": self.sound,
        }


def diagnose(
    run: RunDir,
    samples: Annotated[int | None, number(int, "Validation images to measure on.  [32, or all]")] = None,
    data_dir: DataDir = None,
    device: Device = "auto",
    seed: Annotated[int, number(int, "For dropout masks and power iterations.  [0]")] = 0,
    modules: Imports = None,
) -> None:
    """Measure a trained network on validation images: contraction, convergence, gradients.

    Prints a verdict and writes diagnose.json and diagnose.png into the run; nothing else changes. The
    arithmetic is fp32.
    """
    opened = open_run(run, device)
    net, settings = opened.net, opened.settings
    if not isinstance(net, ImplicitNetwork) or net.tolerance.max_steps == 0:
        raise ValueError(f"{run} holds an explicit network, which has no fixed point to diagnose")
    found = opened.load("validation", data_dir)
    samples = min(32, len(found)) if samples is None else checks.whole("samples", samples, 2, len(found))
    checks.whole("seed", seed, 0, 2**63 - 1)
    chosen = found.subset(samples).to(settings.torch_device)
    measured = measure(net, chosen, settings.label_smoothing, seed=seed)
    content, kind = measured.to_dict(), "training" if settings.whole else "validation"
    show(content, f"{settings.model} on {samples} {kind} images of {chosen.title}")
    given = {"samples": samples, "seed": seed, "precision": "fp32", "run": settings.to_dict()}
    content |= {"run": opened.run.path, "position": vars(opened.position), "data": chosen.title}
    content |= {"split": chosen.split, "provenance": provenance(given, device=chosen.device)}
    console.print(f"figures: {write_json(opened.run.path / 'diagnose.json', content)}")
    show_plot(lambda: charts(measured), opened.run.path / "diagnose.png")


def measure(net: Any, images: Images, label_smoothing: float = 0.0, *, seed: int = 0) -> Diagnosis:
    """Measure a network in eval mode on images, on their device; network and random states do not change."""
    d = images.normalise(images.pixels)
    loss = partial(F.cross_entropy, target=images.labels, label_smoothing=label_smoothing)
    modes = (net.backward, *(mode for mode in MODES if mode != net.backward))
    # The figures contain what the warnings would say.
    with arithmetic("fp32", images.device), undisturbed(), warnings.catch_warnings(action="ignore"):
        contraction, trace = measure_contraction(net, d, seed=seed), _go_far(net, d)
        found, sound = _compare(net, d, loss, modes, seed=seed)
        try:
            (trained,), also = _compare(net.train(), d, loss, (JFB(),), seed=seed)
        finally:
            net.eval()
    gradients = {_name(one.backward): one for one in found} | {IN_TRAINING: trained}
    return Diagnosis(contraction, trace, gradients, sound and also, net.tolerance)


def _go_far(net: Any, d: Tensor) -> Tensor:
    """Return the residuals of the network's solver until rounding stops it."""
    steps, at = min(max(100, net.tolerance.max_steps), 1000), network_map(net, d)
    tolerance = Tolerance(atol=0.0, max_steps=steps, norm=net.tolerance.norm)
    found = solve(at.T, at.z0, net.solver, inputs=at.inputs, tolerance=tolerance, coupled=at.coupled, record=True)
    trace: Any = found.trace
    return trace.double().cpu().nan_to_num(nan=math.inf, posinf=math.inf)


def _compare(
    net: Any, d: Tensor, loss: Callable[[Tensor], Tensor], modes: Sequence[Mode], *, seed: int
) -> tuple[tuple[Descent, ...], bool]:
    """Compare the modes with the exact gradient; return also whether its fixed point and adjoint converged."""
    torch.manual_seed(seed)  # for dropout, in train mode
    ends = list[Status]()
    near = Tolerance(atol=0.0, rtol=CLOSE, max_steps=200, norm=net.tolerance.norm)
    # GMRES needs one J-product a step; the normal equations need two, and more steps.
    limits = Tolerance(atol=0.0, rtol=CLOSE, max_steps=150)
    exact = Implicit(GMRES(restart=50), limits, report=lambda products, residual, status: ends.extend(status))
    found = descent_checks(net, d, loss, modes=modes, exact=exact, tolerance=near)
    return found, all(end is Status.CONVERGED for end in ends) and bool(found[0].solution.converged.all())


def _name(mode: Mode) -> str:
    if isinstance(mode, Implicit):
        return f"Implicit {type(mode.method).__name__}"
    size = getattr(mode, "order", getattr(mode, "steps", ""))  # of Neumann, of Unroll
    return f"{type(mode).__name__} {size}".strip()


def _parts(found: Descent) -> dict[str, dict[str, float]]:
    """Return cosine and norm ratio over all weights and by part."""
    return {name: {"cosine": x.cosine, "ratio": x.ratio} for name, x in {"all": found, **found.parts}.items()}


def _figure(values: Tensor) -> dict[str, Any]:
    """Return every value, and mean and largest of those that are not NaN."""
    known = values.double()[~values.isnan()]
    return {"mean": float(known.mean()), "max": worst(known), "values": values}


def show(content: Mapping[str, Any], title: str) -> None:
    """Print two tables and the verdict."""
    means = [(name, f"{x['mean']:.3g}", f"{x['max']:.3g}") for name, x in content["figures"].items()]
    console.print(table(title, ("figure", "mean", "worst"), means))
    console.print()
    shown = content["gradients"]
    pair = "{cosine:.3f} ({ratio:.2g})"
    rows = [(name, *(pair.format(**x) for x in row.values())) for name, row in shown.items()]
    title = "cosine with the exact gradient (ratio of the norms)"
    console.print(table(title, ("gradient", *shown[IN_TRAINING]), rows))
    console.print(f"\n{wrapped(content['verdict'])}\n")


def charts(measured: Diagnosis) -> list[Chart]:
    """Return residuals by step and contraction by sample."""
    lines = {f"{name} ({QUANTILES[name]:.0%})": line.tolist() for name, line in measured.curve.items()}
    residuals = {name: list(enumerate(line, 1)) for name, line in lines.items()}
    order, norm = measured.contraction.sigma.argsort(), type(measured.tolerance.norm).__name__
    factors = {"sigma_max(dT/du)": measured.contraction.sigma, "observed rate": measured.contraction.rate}
    ranked = {name: list(enumerate(values[order].tolist(), 1)) for name, values in factors.items()}
    tolerance = measured.tolerance.atol, "tolerance of the run"
    first = line_chart(f"Residual, {norm}", "step", residuals, "log", tolerance)
    second = line_chart("Factor per step", "sample, by sigma_max", ranked, "", BELOW)
    return [chart for chart in (first, second) if chart is not None]
