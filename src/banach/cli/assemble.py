"""From settings to things: data, augmentation, network, and a run with its trained weights."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from banach import data, models
from banach.cli import words
from banach.data import Augmentation, DataSet, Images
from banach.fast import channels_side_by_side
from banach.solve import Tolerance
from banach.train import CheckpointError, Position, Run, RunError, Settings
from banach.train.work import check_identity, described


@dataclass(frozen=True, eq=False)
class Opened:
    """A run with its network: in eval mode, on its device, with the newest weights, averaged ones if any."""

    run: Run
    settings: Settings
    net: nn.Module
    dataset: DataSet
    device: torch.device
    position: Position


def images(settings: Settings, split: str, data_dir: Path | None = None) -> Images:
    """A split of the settings' data, on the CPU; `subset` and `whole` concern the training images alone."""
    cut = "train+validation" if split == "train" and settings.whole else split
    found = data.load(str(settings.data), cut, data_dir)
    if split != "train" or settings.subset is None:
        return found
    if settings.subset > len(found):
        raise ValueError(f"subset must be at most the {len(found):,} training images, got {settings.subset:,}")
    return found.subset(settings.subset)


def augmentation(settings: Settings) -> Augmentation | None:
    return words.augment(settings.augment or "none")


def network(settings: Settings) -> nn.Module:
    """The settings' network with fresh weights, on the CPU; the seed decides them, the global state stays.

    If it is to stay there, its channels lie side by side, unless `fast` is off.
    """
    dataset, model = data.get(str(settings.data)), models.get(str(settings.model))
    with torch.random.fork_rng([]):
        torch.manual_seed(settings.seed)
        net = models.build(
            model.name,
            image=dataset.shape,
            classes=len(dataset.classes),
            batch_norm=settings.batch_norm,
        )
    _set_fixed_point(net, settings)
    stays = settings.torch_device.type == "cpu"
    return channels_side_by_side(net) if model.channels_last and settings.fast and stays else net


def _set_fixed_point(net: Any, settings: Settings) -> None:
    """How u* is found and differentiated, for a network that has one."""
    if not hasattr(net, "tolerance"):
        return
    net.solver = words.solver(settings.solver or "picard")
    net.backward = words.backward(settings.backward or "jfb")
    net.tolerance = tolerance(settings, net.tolerance)


def tolerance(settings: Settings, default: Tolerance) -> Tolerance:
    """The default where the settings are silent."""
    given = {"atol": settings.eps, "rtol": settings.rtol, "max_steps": settings.max_steps}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if settings.norm is not None:
        changes["norm"] = words.norm(settings.norm)
    return replace(default, **changes)


def open_run(path: Path, device: str = "auto") -> Opened:
    """A run that has a checkpoint, and its network as that left it."""
    run = Run.open(path)
    if run.settings.data is None or run.settings.model is None:
        raise RunError(f"{path} was made from Python, and does not name its data and model; use it from there")
    settings = replace(run.settings, device=device)
    where = usable_device(settings)
    checkpoint = run.latest()
    if checkpoint is None:
        raise RunError(
            f"{path} has no checkpoint yet; train it first: banach train --resume {shlex.quote(str(path))}"
        )
    net = network(settings)
    weights = {**checkpoint.under("net"), **checkpoint.under("average")}
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        why = " ".join(str(error).split())
        raise CheckpointError(f"{checkpoint.path} is of another network: {why[:300]}") from None
    now = described(net, run.settings)
    check_identity({name: kept for name, kept in checkpoint.state["identity"].items() if name in now}, now)
    position = Position(checkpoint.state["epoch"], checkpoint.state["step"])
    return Opened(run, settings, net.to(where).eval(), data.get(str(settings.data)), where, position)


def usable_device(settings: Settings) -> torch.device:
    """The device of the settings, refused where this machine does not have it."""
    return usable(settings.torch_device, settings.device)


def usable(device: torch.device, asked: str) -> torch.device:
    """The device, refused where this machine does not have it."""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no {device} here ({torch.cuda.device_count()} GPUs); choose --device cpu")
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {asked!r}")
    return device
