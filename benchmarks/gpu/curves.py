"""Loss curves with the fast path and with the plain loop: the same within the noise of seeds?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banach.cli import assemble
from banach.cli.choose import choose
from banach.provenance import Summary
from banach.train import fit
from banach.train.plot import write_figure
from benchmarks.report import Result, Row, Target


@dataclass(frozen=True)
class Settings:
    model: str = "mnist"
    subset: int = 20000
    epochs: int = 4
    seeds: tuple[int, ...] = (0, 1, 2)
    precision: str = "bf16"
    data_dir: str | None = None
    device: str = "cuda"


def run(settings: Settings = Settings(), plot: Path | None = None) -> Result:
    """Final loss and validation accuracy of both ways, per seed; their difference against the spread of seeds."""
    rows: list[Row] = []
    curves: dict[tuple[bool, int], list[float]] = {}
    for seed in settings.seeds:
        for fast in (False, True):
            history = _train(settings, seed, fast)
            curves[fast, seed] = [epoch.loss for epoch in history.epochs]
            last = history.last
            rows.append(
                {
                    "seed": seed,
                    "path": "fast" if fast else "plain",
                    "loss": last.loss,
                    "validation": last.validation_accuracy,
                    "depth": last.depth,
                    "met": last.converged,
                    "seconds": sum(epoch.seconds for epoch in history.epochs),
                }
            )
    fast_losses, plain_losses = (
        Summary.of(curves[way, seed][-1] for seed in settings.seeds) for way in (True, False)
    )
    noise = max(fast_losses.spread or 0.0, plain_losses.spread or 0.0)
    target = Target(
        "difference of mean final losses, in spreads over seeds",
        abs(fast_losses.mean - plain_losses.mean) / noise,
        2.0,
    )
    if plot is not None:
        _plot(curves, settings, plot)
    notes = ["training loss, the same seeds, batches and rates for both"]
    details = {f"{'fast' if fast else 'plain'}, seed {seed}": losses for (fast, seed), losses in curves.items()}
    return Result(
        "curves", "does the fast path learn the same?", rows, [target], notes, settings, settings.device, details
    )


def _train(settings: Settings, seed: int, fast: bool) -> Any:
    chosen = choose(
        {
            "data": settings.model,
            "subset": settings.subset,
            "epochs": settings.epochs,
            "precision": settings.precision,
            "seed": seed,
            "fast": fast,
            "monitor": False,
            "device": settings.device,
        }
    )
    train, validation = (assemble.images(chosen, split, settings.data_dir) for split in ("train", "validation"))  # type: ignore[arg-type]
    return fit(assemble.network(chosen), train, validation, chosen, augment=assemble.augmentation(chosen))


def _plot(curves: dict[tuple[bool, int], list[float]], settings: Settings, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for (fast, seed), losses in curves.items():
        label = ("fast path" if fast else "plain loop") if seed == settings.seeds[0] else None
        look: dict[str, Any] = (
            {"color": "C1", "linestyle": ":"} if fast else {"color": "C0", "linewidth": 3, "alpha": 0.5}
        )
        axes.plot(range(1, len(losses) + 1), losses, marker=".", label=label, **look)
    axes.set(
        xlabel="epoch",
        ylabel="training loss",
        yscale="log",
        title=f"{settings.model}, {len(settings.seeds)} seeds",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    write_figure(figure, path)
