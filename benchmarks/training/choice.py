"""Which decaying rate, and whether to shift the images: chosen on validation images, for the recipes "decayed".

    python -m benchmarks.training.choice --data-dir DATA [--device cuda] [names]

One training each, seed 0, nothing else changed; the test set is not loaded. What was printed when the recipes were
chosen, on an H200, is results/training/decayed-choice.log.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from banach import data, models
from banach.data import Crop
from banach.models import Cosine
from banach.provenance import provenance, write_json
from banach.train import Settings, fit


@dataclass(frozen=True)
class Plan:
    model: str
    epochs: int
    lr: float
    shift: int = 0
    optimizer: str = "adam"
    weight_decay: float | None = None  # that of the recipe


PLANS = {
    "m1": Plan("mnist", 30, 1e-3),
    "m2": Plan("mnist", 30, 2e-3),
    "m3": Plan("mnist", 30, 1e-3, shift=2),
    "m4": Plan("mnist", 30, 5e-4),
    "s1": Plan("svhn", 20, 5e-4),
    "s2": Plan("svhn", 20, 1e-3),
    "s3": Plan("svhn", 20, 1e-3, shift=2),
    "s5": Plan("svhn", 20, 2e-3),
    "s6": Plan("svhn", 20, 1e-3, optimizer="adamw", weight_decay=5e-2),
}


def carry_out(plan: Plan, folder: Path, device: str, subset: int | None = None) -> dict[str, Any]:
    """Train and validate; accuracies of every epoch, in per cent."""
    train, validation = (data.load(plan.model, split, folder) for split in ("train", "validation"))
    recipe = models.recipe(plan.model)
    changes: dict[str, Any] = {"lr": plan.lr, "schedule": Cosine(), "optimizer": plan.optimizer, "device": device}
    changes |= {} if plan.weight_decay is None else {"weight_decay": plan.weight_decay}
    settings = Settings.of_recipe(recipe, model=plan.model, data=plan.model, norm=None, monitor=False)
    settings = replace(settings, epochs=plan.epochs, **changes)
    with torch.random.fork_rng([]):
        torch.manual_seed(settings.seed)
        net: Any = models.build(plan.model)
    net.tolerance = recipe.tolerance
    images = train if subset is None else train.subset(subset)
    history = fit(net, images, validation, settings, augment=Crop(plan.shift) if plan.shift else None)
    accuracies = [100 * epoch.validated for epoch in history.epochs]
    return {"last": accuracies[-1], "best": max(accuracies), "epochs": accuracies, "loss": history.last.loss}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(PLANS), metavar="name", help=", ".join(PLANS))
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/training/decayed-choice.json"))
    chosen = parser.parse_args(arguments)
    found = {}
    for name in chosen.names:
        found[name] = {"plan": str(PLANS[name]), **carry_out(PLANS[name], chosen.data_dir, chosen.device)}
        print(f"{name} {PLANS[name]}: {found[name]['last']:.2f} per cent of the validation images", flush=True)
    write_json(chosen.out, {"rows": found, "provenance": provenance(PLANS, device=chosen.device)})


if __name__ == "__main__":
    main()
