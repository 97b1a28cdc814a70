"""JFB needs a fixed amount of memory and no Jacobian equation; plain backpropagation needs memory for every step.

The paper's diagram of backpropagation schemes, measured: peak memory and time of one step against the depth K.
The map is R of the SVHN network without batch norm, with initial weights, at random Q(d), in fp32. K steps from
u = 0, then the gradient of the mean square of u with respect to the weights of R. Unrolled: all K steps are
recorded. Checkpointed: one latent per step is kept, the rest is recomputed. Jacobian-based: K steps without
recording, then conjugate gradients on the normal equations to a relative 1e-3. JFB: K steps without recording,
then one that is recorded. Memory beyond weights and data: max_memory_allocated on a GPU, live storage on a CPU.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from benchmarks.timer import milliseconds_of, peak_bytes
from torch import Tensor

from banach import JFB, Implicit, Mode, NormalCG, Tolerance, Unroll, fixed_point, models
from banach.fast.plan import arithmetic
from banach.train import Settings
from reproduction.study import NOT_REPRODUCED, REPRODUCED, Claim, Options, panels, store, table

RECORDS = "memory.jsonl"
GROWTH = 1.05  # of the memory of a JFB step over all depths: what counts as fixed
ADJOINT = Tolerance(atol=0, rtol=1e-3, max_steps=500)
SCHEMES: Mapping[str, Callable[[int, Any], tuple[int, Mode]]] = {  # depth, report -> steps without recording, mode
    "JFB": lambda depth, report: (depth, JFB()),
    "Jacobian-based": lambda depth, report: (depth, Implicit(NormalCG(), ADJOINT, report=report)),
    "unrolled": lambda depth, report: (0, Unroll(depth)),
    "unrolled, checkpointed": lambda depth, report: (0, Unroll(depth, checkpoint=True)),
}


@dataclass(frozen=True)
class Row:
    """One scheme at one depth. `products`: J-products per sample, None where autograd makes them."""

    model: str
    batch: int
    scheme: str
    depth: int
    peak_bytes: int
    milliseconds: float
    products: float | None


def run(options: Options) -> list[Row]:
    """Measure all schemes at all depths."""
    model, batch, repeats = ("digits", 16, 3) if options.quick else ("svhn", 100, 10)
    depths = (1, 2, 4, 8, 16) if options.quick else (1, 2, 5, 10, 20, 50, 100, 200)
    R, v = example(model, batch, Settings(device=options.device).torch_device)
    points = [(name, depth) for name in SCHEMES for depth in depths]
    with arithmetic("fp32", v.device):  # TF32 cannot solve the adjoint equation to a relative 1e-3
        rows = [Row(model, batch, name, k, *_measure(name, k, R, v, repeats)) for name, k in points]
    store(options.records / RECORDS, rows, v.device)
    return rows


def values(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the growth of memory from the least to the largest depth by scheme, the claim on it, the table."""
    lines, columns = [astuple(row) for row in rows], "model|batch|scheme|depth|peak bytes|milliseconds|products"
    found: dict[str, Any] = {"table": table(lines, columns), "depth": max(row.depth for row in rows)}
    for name in SCHEMES:
        mine = sorted((row for row in rows if row.scheme == name), key=lambda row: row.depth)
        key = name.lower().replace(", ", "_").replace("-", "_")
        found[f"{key}.growth"] = mine[-1].peak_bytes / mine[0].peak_bytes
        found[f"{key}.milliseconds"] = mine[-1].milliseconds
    growth = found["jfb.growth"]
    verdict = REPRODUCED if growth <= GROWTH else NOT_REPRODUCED
    return found | {"claim": Claim("1", f"{growth:.2f}", 1, "one step", verdict)}


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Draw memory and time against the depth."""
    figure, (space, pace) = panels(2)
    for name in SCHEMES:
        mine = [row for row in rows if row.scheme == name]
        space.plot([row.depth for row in mine], [row.peak_bytes / 1e6 for row in mine], marker=".", label=name)
        pace.plot([row.depth for row in mine], [row.milliseconds for row in mine], marker=".")
    space.set(xlabel="depth K", ylabel="peak memory of a step, MB", xscale="log", yscale="log")
    pace.set(xlabel="depth K", ylabel="time of a step, ms", xscale="log", yscale="log")
    space.legend(fontsize="small")
    return {"memory": figure}


def example(model: str, batch: int, device: torch.device) -> tuple[Any, Tensor]:
    """Return R with initial weights and a random Q(d), the same ones every time."""
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(0)
        net: Any = models.build(model, batch_norm=False)
        v = net.Q(torch.randn(batch, *models.get(model).image))
    return net.R.to(device), v.to(device)


def _measure(name: str, depth: int, R: Any, v: Tensor, repeats: int) -> tuple[int, float, float | None]:
    products: list[int] = []
    solved, mode = SCHEMES[name](depth, lambda count, residual, status: products.append(count))
    tolerance = Tolerance(atol=0, max_steps=solved, check_every=0)  # check_every=0: exactly `solved` steps

    def step() -> None:
        R.zero_grad(set_to_none=True)
        u: Any = fixed_point(R, torch.zeros_like(v), inputs=(v,), tolerance=tolerance, backward=mode)
        u.square().mean().backward()

    milliseconds = milliseconds_of(step, v.device, repeats).median
    R.zero_grad(set_to_none=True)
    made = products[-1] / len(v) if products else (0.0 if isinstance(mode, JFB) else None)
    return peak_bytes(step, v.device), milliseconds, made
