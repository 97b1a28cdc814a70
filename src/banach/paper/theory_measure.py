"""A network at one moment of its training: contraction, the quality of JFB on a batch, and some images closely."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from banach.diagnose import Descent, descent_check, measure_contraction
from banach.diagnose.still import undisturbed
from banach.paper.common import Place
from banach.paper.theory_cases import Moment, Trained
from banach.paper.theory_dense import Local, local
from banach.solve import Tolerance

TIGHT = Tolerance(atol=0.0, rtol=1e-10, max_steps=1000)


@dataclass(frozen=True)
class Batch:
    """JFB against the exact gradient of the batch's mean loss: where the network stops, and at its fixed point.

    `converged` is the share of images whose fixed point, the one behind the exact gradient, was reached. Unless
    that is all of them there is no such gradient, and the others are NaN.
    """

    cosine: float
    ratio: float
    at_fixed_point: float
    converged: float


@dataclass(frozen=True, eq=False)
class Reading:
    """One moment. `sigma` and `rate` have one number per image, in eval mode, at the fixed point; NaN where the
    iteration did not come to one (`found`).

    `training`, `training_sigma` and `training_rate` are of the network in training mode, where batch statistics
    make one map, and so one number, of the whole batch. `locals` are of those of the first few images that
    have a fixed point.
    """

    epoch: int
    accuracy: float
    found: tuple[bool, ...]
    sigma: tuple[float, ...]
    rate: tuple[float, ...]
    batch: Batch
    training: Batch
    training_sigma: float
    training_rate: float
    locals: tuple[Local, ...]
    warned: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Measured:
    """A network and its readings, by epoch. `whole_length`: the epochs of a training by its recipe. `places`:
    where each reading was measured."""

    name: str
    title: str
    epochs: tuple[int, ...]
    readings: Sequence[Reading]
    whole_length: int | None = None
    places: Sequence[Place] = ()

    @property
    def first(self) -> Reading:
        return self.readings[0]

    @property
    def last(self) -> Reading:
        return self.readings[-1]

    @property
    def close(self) -> list[Reading]:
        """The readings with images that were looked at by dense matrices."""
        return [reading for reading in self.readings if reading.locals]

    @property
    def locals(self) -> list[Local]:
        return [one for reading in self.readings for one in reading.locals]

    @property
    def whole(self) -> bool:
        return all(one.whole for one in self.locals)


def measure(moment: Moment, trained: Trained) -> Reading:
    """Everything in float64: what is measured is the network, not the rounding."""
    net, d = moment.net, trained.d
    closely = trained.case.dense_at(moment.epoch)
    with undisturbed(net, d), warnings.catch_warnings(record=True) as caught:
        torch.manual_seed(0)  # of dropout in training mode: the same masks at every epoch and in every run
        warnings.simplefilter("always")
        here = measure_contraction(_tight(net), d)
        training = _in_training(net)
        there = measure_contraction(_tight(training), d)
        batch, other = (_batch(one, trained) for one in (net, training))
        found = here.solution.converged
        looked = tuple(
            local(net, d[i : i + 1], trained.loss(trained.labels[i : i + 1]))
            for i in range(closely)
            if bool(found[i])
        )
    return Reading(
        moment.epoch,
        moment.accuracy,
        tuple(found.tolist()),
        tuple(here.sigma.where(found, math.nan).tolist()),
        tuple(here.rate.where(found, math.nan).tolist()),
        batch,
        other,
        _one(there.sigma),
        _one(there.rate),
        looked,
        tuple(sorted({str(warning.message) for warning in caught})),
    )


def _batch(net: Any, trained: Trained) -> Batch:
    loss = trained.loss(trained.labels)
    own: Descent = descent_check(net, trained.d, loss)
    exact = descent_check(_tight(net), trained.d, loss)
    converged = float(exact.solution.converged.double().mean())
    if converged < 1:
        return Batch(math.nan, math.nan, math.nan, converged)
    return Batch(own.cosine, own.ratio, exact.cosine, converged)


def _tight(net: Any) -> Any:
    """The same weights, and a solver that goes to the fixed point in the network's own norm."""
    other = copy.copy(net)  # modules are shared: measuring leaves them as they are
    other.tolerance = replace(TIGHT, norm=net.tolerance.norm)
    return other


def _in_training(net: Any) -> Any:
    return copy.deepcopy(net).train()


def _one(values: Tensor) -> float:
    return float(values.max())
