"""The training loop's own cost: fit()'s seconds outside Q, solve, attach, S, loss, backward and optimizer."""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from banach import ContractionMonitor, ImplicitNetwork
from banach.cli import assemble
from banach.cli.choose import choose
from banach.cli.session import Session
from banach.train import fit
from banach.train.board import open_board
from benchmarks.report import Result, Row, Target
from benchmarks.training.place import Place


@dataclass(frozen=True)
class Settings:
    """A CPU alone: there every call ends before the next begins, so that a clock around it tells its time."""

    networks: tuple[tuple[str, int], ...] = (("digits", 1257), ("mnist", 2000))
    epochs: int = 4


def run(place: Place, settings: Settings = Settings()) -> Result:
    torch.set_num_threads(1)
    rows = [_row(name, images, settings, place) for name, images in settings.networks]
    rows.append(_by_command(settings, place))
    targets = [Target(f"{row['data']}: the loop's own share", row["own share"], 0.05) for row in rows[:-1]]
    notes = [
        "seconds; validation after every epoch is counted in, as the same parts",
        "the last row is with a run directory, checkpoints on the disk after every epoch, and TensorBoard",
        "the contraction monitor measures after every epoch on 8 images, which is work of its own: a column",
    ]
    return Result("loopcost", "what does the loop itself cost?", rows, targets, notes, settings)


def _row(name: str, images: int, settings: Settings, place: Place) -> Row:
    chosen = choose({"data": name, "subset": images, "epochs": settings.epochs, "device": "cpu"})
    net = assemble.network(chosen)
    train, validation = (assemble.images(chosen, split, place.data_dir) for split in ("train", "validation"))
    clock: dict[str, float] = {}
    with _timed(clock), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        started = time.perf_counter()
        fit(net, train, validation, chosen)
        total = time.perf_counter() - started
    parts = sum(clock.values())
    return {"data": name, "images": images, "seconds": total, **clock, "own share": 1 - parts / total}


def _by_command(settings: Settings, place: Place) -> Row:
    """The whole of what `banach train` does between the first step and the last, on the smallest of data sets."""
    path = place.runs / "loopcost"
    shutil.rmtree(path, ignore_errors=True)
    session = Session.begin(choose({"epochs": settings.epochs, "device": "cpu"}), path, None)
    clock: dict[str, float] = {}
    with _timed(clock), warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        if (board := open_board(folder)) is not None:  # its import is no part of the loop
            board.close()
        started = time.perf_counter()
        session.train()
        total = time.perf_counter() - started
    own = 1 - sum(clock.values()) / total
    return {"data": "digits, by the command", "images": 1257, "seconds": total, **clock, "own share": own}


@contextmanager
def _timed(clock: dict[str, float]) -> Iterator[None]:
    """Inside, the time spent in each part is added up."""
    parts: dict[str, tuple[Any, str]] = {
        "monitor": (ContractionMonitor, "__call__"),
        "network": (ImplicitNetwork, "forward"),
        "loss": (F, "cross_entropy"),
        "backward": (torch.Tensor, "backward"),
        "optimizer": (torch.optim.Adam, "step"),
    }
    with ExitStack() as stack:
        for name, (owner, attribute) in parts.items():
            clock[name] = 0.0
            timed = _clocked(getattr(owner, attribute), clock, name)
            stack.enter_context(mock.patch.object(owner, attribute, timed))
        yield


def _clocked(function: Callable[..., Any], clock: dict[str, float], name: str) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            clock[name] += time.perf_counter() - started

    return timed
