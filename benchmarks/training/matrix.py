"""Every backward mode with every network of the paper, one epoch of 2,000 images: does the loss fall?"""

from __future__ import annotations

import copy
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from banach.cli import assemble
from banach.cli.choose import choose
from banach.data import Batches, Images
from banach.diagnose import ContractionWarning
from banach.train import Settings as TrainSettings
from banach.train import fit
from benchmarks.report import Result, Row, Target
from benchmarks.training.place import Place


@dataclass(frozen=True)
class Settings:
    networks: tuple[str, ...] = ("mnist", "svhn", "cifar10")
    modes: tuple[str, ...] = ("jfb", "neumann:5", "unroll:3", "implicit:cg", "implicit:gmres")
    images: int = 2000


def run(place: Place, settings: Settings = Settings()) -> Result:
    rows = [_row(name, mode, settings, place) for name in settings.networks for mode in settings.modes]
    risen = sum(row["loss after"] >= row["loss before"] for row in rows)
    others, most = sum(len(row["other warnings"]) for row in rows), max(row["monitor warnings"] for row in rows)
    targets = [
        Target("networks x modes whose loss did not fall", risen, 0),
        Target("warnings but the contraction monitor's", others, 0),
        Target("most warnings of the contraction monitor in a run", most, 1),
    ]
    notes = [
        "losses on the training images, in train mode without dropout, before the first step and after the last"
    ]
    device = str(choose({"device": place.device}).torch_device)
    return Result("matrix", f"one epoch of {settings.images:,} images", rows, targets, notes, settings, device)


def _row(name: str, mode: str, settings: Settings, place: Place) -> Row:
    chosen = choose(
        {"data": name, "backward": mode, "subset": settings.images, "epochs": 1, "device": place.device}
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        row = _train(chosen, place.data_dir)
    monitor = [w for w in seen if issubclass(w.category, ContractionWarning)]
    others = sorted({str(w.message).split(";")[0] for w in seen if not issubclass(w.category, ContractionWarning)})
    return {"network": name, "mode": mode, **row, "monitor warnings": len(monitor), "other warnings": others}


def _train(settings: TrainSettings, data_dir: Path | None) -> Row:
    net, device = assemble.network(settings).to(settings.torch_device), settings.torch_device
    train = assemble.images(settings, "train", data_dir).to(device)
    validation = assemble.images(settings, "validation", data_dir).subset(500)
    before = _train_mode_loss(net, train)
    started = time.perf_counter()
    last = fit(net, train, validation, settings, augment=assemble.augmentation(settings)).last
    return {
        "loss before": before,
        "loss after": _train_mode_loss(net, train),
        "depth": last.depth,
        "converged": last.converged,
        "J-products": last.products,
        "seconds": time.perf_counter() - started,
    }


@torch.no_grad()
def _train_mode_loss(net: nn.Module, images: Images) -> float:
    """Of a copy, by the statistics of each batch: those of an untrained network's buffers mean nothing."""
    copied = copy.deepcopy(net).train()
    for module in copied.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    losses = [F.cross_entropy(copied(x), y) for x, y in Batches(images, 100, shuffle=False).epoch()]
    return float(torch.stack(losses).mean())
