"""What is measured between epochs: the test set by two protocols, and the contraction. Nothing here changes a run.

Clean: eval mode, clean images, at the tolerance of the settings. Released, as the authors' code does it: training
mode (so dropout and batch statistics are on), batches of 400, on CIFAR-10 with augmented test images.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from banach import JFB, Implicit, ImplicitNetwork, Tolerance
from banach.data import Augmentation, Batches, Images
from banach.diagnose import descent_check, measure_contraction
from banach.fast import unchanged
from banach.fast.plan import arithmetic
from banach.train import Scorer, Totals, evaluate
from banach.train.metrics import MetricSums
from reproduction.jobs import Job

BATCH = 400  # of the released code's evaluation: in training mode the scores depend on it
WATCHED = 100  # training images on which the contraction is measured: as many as a training batch has
FINE, FINE_STEPS = 1e-4, 500  # a second, tighter tolerance for the last epoch
CLOSE = Tolerance(atol=0, rtol=1e-3, max_steps=200)  # of the exact gradient: enough for a cosine


class Measure:
    """Measures a network in training. `scorer` captures CUDA graphs once, so keep one object per process."""

    def __init__(self, job: Job, net: nn.Module, train: Images, test: Images) -> None:
        self.net, self.test = net, test
        self.scorer = Scorer(net, job.settings.precision)
        self.released = partial(released, net, test, self.scorer, augment=job.released_augmentation)
        watched = train.take(range(min(WATCHED, len(train)))).to(test.device)
        self.x, self.labels = watched.normalise(watched.pixels), watched.labels

    def both(self, epoch: int) -> dict[str, Any]:
        """Return the test set's totals by the clean and by the released protocol, in the training's precision."""
        clean = self._clean(self.net, self.scorer)
        return {"epoch": epoch, "clean": clean, "released": asdict(self.released(epoch))}

    def contraction(self, epoch: int) -> list[dict[str, Any]]:
        """Return sigma_max(dT/du), rate and residual on fixed training images; nothing for explicit networks.

        `eval`: the map as it predicts, per image. `train`: with batch statistics, one map for the whole batch.
        `cosine`: that of the JFB gradient with the exact one, as the network predicts.
        """
        if not _solves(self.net):
            return []
        loss, exact = partial(cross_entropy, target=self.labels), Implicit(tolerance=CLOSE)
        found = descent_check(self.net, self.x, loss, backward=JFB(), exact=exact, tolerance=CLOSE)
        values = {"epoch": epoch, "images": len(self.x), "cosine": found.cosine, "eval": self._contraction()}
        with _in_training(self.net):
            return [values | {"train": self._contraction()}]

    def final(self, epoch: int) -> dict[str, Any]:
        """Return the clean totals in fp32, at the settings' tolerance and at 1e-4, and the released ones."""
        net: Any = self.net
        implicit, fine = isinstance(net, ImplicitNetwork), None
        if _solves(net):
            close = copy.copy(net)
            close.tolerance = replace(net.tolerance, atol=FINE, rtol=0.0, max_steps=FINE_STEPS)
            fine = self._clean(close, Scorer(close))
        values = {"epoch": epoch, "test": self.test.title, "images": len(self.test)}
        values |= {"parameters": _count(net), "macs": self._macs()}
        values |= {"parts": {part: _count(getattr(net, part)) for part in "QRS"} if implicit else None}
        clean, other = self._clean(net, Scorer(net)), asdict(self.released(epoch))
        return values | {"clean": clean, "fine": fine, "released": other}

    def _clean(self, net: nn.Module, scorer: Scorer) -> dict[str, Any]:
        return asdict(evaluate(net, self.test, batch_size=BATCH, precision=scorer.precision, scorer=scorer))

    def _macs(self) -> float:
        """Return the multiplications of convolutions and matrix products for one test image, as torch counts."""
        first = self.test.take(range(1))
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.net(first.normalise(first.pixels))
        return counter.get_total_flops() / 2

    def _contraction(self) -> dict[str, Any]:
        found = measure_contraction(self.net, self.x, rtol=1e-3, seed=0)
        shown = slice(1) if found.coupled else slice(None)  # coupled samples share one value
        values = {name: getattr(found, name)[shown] for name in ("sigma", "rate", "residual")}
        return {**values, "violations": found.violations, "coupled": found.coupled}


def released(
    net: nn.Module, test: Images, scorer: Scorer, epoch: int = 0, *, augment: Augmentation | None = None
) -> Totals:
    """Return the totals of the test set by the released protocol, of a network in eval mode; it stays as it is."""
    devices = [test.device] if test.device.type == "cuda" else []
    sums = MetricSums(test.device)
    with _in_training(net), torch.random.fork_rng(devices), unchanged(net.buffers()):
        torch.manual_seed(0)
        with arithmetic(scorer.precision, test.device):
            for x, labels in Batches(test, BATCH, augment=augment, shuffle=False).epoch(epoch):
                output, found = scorer(x)
                sums.add(cross_entropy(output, labels), output, labels, found)
                sums.add_evaluations(net, len(labels))
    return sums.read()


@contextmanager
def _in_training(net: nn.Module) -> Iterator[None]:
    """Put the network into training mode for a while; between epochs it is in eval mode."""
    net.train()
    try:
        yield
    finally:
        net.eval()


def _solves(net: nn.Module) -> bool:
    return isinstance(net, ImplicitNetwork) and net.tolerance.max_steps > 0


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
