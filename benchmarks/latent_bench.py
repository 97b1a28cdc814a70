"""`python -m benchmarks.latent_bench [--quick]`: a whole solve as one kernel, checked, then timed against modules.

For each of the paper's networks: errors of a few steps against float64, then microseconds an evaluation of R and
milliseconds a solve at the network's own tolerance, in training (the batch stops as one) and in prediction (every
image on its own). `--quick` runs the plain twin on a CPU at tiny sizes, and measures nothing.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from banach.kernels import repeated_stack
from banach.kernels.compare import distance
from banach.kernels.latent import latent_solve
from banach.kernels.latent_form import LatentForm, LatentMap, Stop, latent_map
from banach.kernels.latent_plain import plain_latent_solve
from banach.models import cifar10, mnist, svhn
from banach.models.cifar10 import CIFARLatent
from banach.provenance import provenance, write_json
from benchmarks.kernel_bench import Bench

SHORT, LONG = 4, 24  # evaluations, whose difference in time tells that of one


@dataclass(frozen=True)
class Case:
    """A network as the paper trains it."""

    name: str
    make: Any
    image: tuple[int, int, int]
    stop: Stop
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case("mnist", mnist, (1, 28, 28), Stop(1e-1, max_steps=50)),
    Case("svhn", svhn, (3, 32, 32), Stop(1e-4, max_steps=200), torch.float32),
    Case("cifar10", cifar10, (3, 32, 32), Stop(1e-1, max_steps=50)),
)


@dataclass(frozen=True)
class Given:
    """R in a mode, as modules and as the kernel takes it, and v = Q(d) for a batch."""

    case: Case
    R: Any
    known: LatentMap
    v: Tensor


def form_of(R: Any) -> LatentForm:
    if isinstance(R, CIFARLatent):
        return LatentForm(inner=R.gamma, late=True)
    return LatentForm(outer=R.gamma, slope_after=0.1**2)


@torch.no_grad()
def given(bench: Bench, case: Case, batch: int, *, train: bool) -> Given:
    torch.manual_seed(0)
    parts = case.make()
    Q, R = parts.Q.to(bench.device).train(), parts.R.to(bench.device).train()
    v = Q(torch.randn(max(batch, 16), *case.image, device=bench.device)).contiguous(
        memory_format=torch.channels_last
    )
    z = torch.zeros_like(v)
    for _ in range(20):  # so that running statistics are those of the fixed point
        z = R(z, v)
    R.train(train)
    return Given(case, R, latent_map(R, form_of(R)), v[:batch].contiguous(memory_format=torch.channels_last))


def correctness(bench: Bench, case: Case, batch: int, *, train: bool) -> None:
    """Three steps against float64, and a solve at the tolerance: its residual over eps, by the kernel itself."""
    of = given(bench, case, batch, train=train)
    mode = "train" if train else "eval"
    bound = 1e-4 if case.dtype == torch.float32 else 1e-2

    def error() -> dict[str, float]:
        stop = Stop(0.0, max_steps=3)
        got = latent_solve(of.known, of.v, stop=stop, dtype=case.dtype)
        exact = plain_latent_solve(_double(of.known), of.v.double(), None, stop, torch.float64)
        return {"error": distance(got.value, exact.value), "residual": distance(got.residual, exact.residual)}

    found = bench.line(f"{case.name} {batch} {mode}, three steps", error)
    good = bool(found) and found["error"] < bound and found["residual"] < bound
    bench.line(f"{'ok' if good else 'WRONG'}  {case.name} {batch} {mode}", lambda: {"bound": bound})
    bench.line(f"{case.name} {batch} {mode}, at eps", _at_eps, of)


def _double(R: LatentMap) -> LatentMap:
    known = None if R.known is None else R.known.double()
    return LatentMap(R.form, R.weights.double(), R.biases.double(), R.eps, known)


def _at_eps(of: Given) -> dict[str, float]:
    found = latent_solve(of.known, of.v, stop=of.case.stop, dtype=of.case.dtype)
    return {
        "converged": float(found.converged.float().mean()),
        "steps": float(found.steps.float().mean()),
        "most steps": float(found.steps.max()),
        "residual / eps": float(found.residual.max()) / of.case.stop.atol,
    }


def timing(bench: Bench, case: Case, batch: int, *, train: bool) -> None:
    of = given(bench, case, batch, train=train)
    name = f"{case.name} {batch} {'train' if train else 'eval'}"
    bench.line(f"{name}, kernel", _kernel, bench, of)
    bench.line(f"{name}, modules", _modules, bench, of)
    if isinstance(of.R, CIFARLatent):
        bench.line(f"{name}, fused stack", _stack, bench, of)


def _kernel(bench: Bench, of: Given, **how: Any) -> dict[str, float]:
    """An evaluation from two depths; a solve of its own depth, packing of weights included."""

    def ms(stop: Stop) -> float:
        return bench.milliseconds([lambda: _solve(of, stop, **how)])

    short, long = (ms(Stop(0.0, max_steps=depth)) for depth in (SHORT, LONG))
    return {
        "us an evaluation": (long - short) * 1e3 / (LONG - SHORT),
        "ms a solve": ms(of.case.stop),
        "steps": float(_solve(of, of.case.stop, **how).steps.float().mean()),
    }


def _solve(of: Given, stop: Stop, **how: Any) -> Any:
    if not how:
        return latent_solve(of.R, of.v, stop=stop, form=form_of(of.R), dtype=of.case.dtype)
    from banach.kernels.latent_launch import kernel_latent_solve

    return kernel_latent_solve(of.known, of.v, None, stop, of.case.dtype, **how)


def _modules(bench: Bench, of: Given) -> dict[str, float]:
    R, half = copy.deepcopy(of.R), of.case.dtype == torch.bfloat16

    @torch.no_grad()
    def evaluate() -> Tensor:
        with torch.autocast(bench.device.type, dtype=torch.bfloat16, enabled=half):
            out: Tensor = R(of.v, of.v)
            return out

    return {"us an evaluation": 1e3 * bench.milliseconds([evaluate])}


def _stack(bench: Bench, of: Given) -> dict[str, float]:
    x = of.v.bfloat16()
    stack = repeated_stack(of.R.blocks, x)
    return {"us an evaluation": 1e3 * bench.milliseconds([lambda: stack(x)])}


def tiles(bench: Bench, case: Case, batch: int, *, train: bool) -> None:
    """Other tiles than the one in use."""
    from banach.kernels.latent_launch import plan
    from banach.kernels.latent_tiles import LatentTile

    of = given(bench, case, batch, train=train)
    used = plan(of.v, train, case.dtype, None, None).tile
    stages = (2, 3) if case.dtype == torch.float32 else (2, 3, 4)
    options = {LatentTile(rows, warps, stage) for rows, warps in ((64, 4), (64, 8), (128, 8)) for stage in stages}
    options |= {replace(used, near=False)}
    if not train and case.dtype == torch.bfloat16:
        options |= {LatentTile(64, 4, 2, places=2), LatentTile(64, 4, 2, places=3)}
    if case.dtype == torch.bfloat16 and batch > 132:  # more programs than multiprocessors, by fewer registers
        options |= {LatentTile(128, 8, stage, places=2, registers=128) for stage in (1, 2)}
        options |= {LatentTile(64, 4, 2, places=3, registers=168)}
    mode = "train" if train else "eval"
    for tile in sorted(options - {used}, key=str):
        bench.line(f"{case.name} {batch} {mode}, {tile}", lambda how: _kernel(bench, of, tile=how), tile)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="on a CPU, at tiny sizes: measures nothing")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "results/gpu")))
    parser.add_argument("--seconds", type=float, default=55.0)
    chosen = parser.parse_args(arguments)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    bench = Bench(torch.device("cpu" if chosen.quick else "cuda"), seconds=chosen.seconds)
    batches = (2,) if chosen.quick else (100, 512)
    for case in CASES:
        for train in (True, False):
            correctness(bench, case, batches[-1] if chosen.quick else 300, train=train)
    for batch in batches:
        for case in CASES:
            for train in (True, False):
                timing(bench, case, batch, train=train)
    if not chosen.quick:
        for case in CASES:
            timing(bench, case, 1, train=False)
        for case in CASES:
            for batch in batches:
                for train in (True, False):
                    tiles(bench, case, batch, train=train)
    bad = [name for name, value in bench.found.items() if name.startswith("WRONG") or "failed" in value]
    chosen.out.mkdir(parents=True, exist_ok=True)
    source = provenance({"batches": batches, "seconds": chosen.seconds}, device=bench.device)
    write_json(chosen.out / "latent.json", {"provenance": source, "found": bench.found})
    print(
        f"{len(bad)} wrong or failed: {'; '.join(bad) or 'none'}; written to {chosen.out}/latent.json", flush=True
    )
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
