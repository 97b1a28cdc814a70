"""Training runs of the studies: resumable, with the test set watched for the curves, and choosing nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from banach import data, models
from banach.backward import JFB, Implicit, Mode
from banach.data import Augmentation, Images, paper_cifar10
from banach.fast import unchanged
from banach.network import ImplicitNetwork
from banach.paper.kept import read, reading
from banach.paper.released import ReleasedCG, as_released
from banach.paper.study import Options
from banach.provenance import write_json
from banach.solve import Picard, Solver, Tolerance
from banach.train import Epoch, Run, Scorer, Settings, Totals, evaluate, fit
from banach.train.checkpoint import checkpoints
from banach.train.evaluate import measure
from banach.train.run import CHECKPOINTS, METRICS, RunError

CURVE = "test-curve.json"
PAPER_AUGMENT = "paper"  # the command line's word for the authors' augmentation
RELEASED_BATCH = 400  # the authors' test batch: in training mode an answer depends on it


@dataclass(frozen=True, kw_only=True)
class Job:
    """One network to train. `tolerance=None`: that of the model's recipe; `explicit`: the twin S(R(0, Q(d)))."""

    name: str
    data: str
    model: str
    settings: Settings
    backward: Mode = JFB()
    solver: Solver = Picard()
    tolerance: Tolerance | None = None
    explicit: bool = False
    batch_norm: bool = True
    augment: Augmentation | None = None
    subset: int | None = None

    @property
    def released_augment(self) -> Augmentation | None:
        """What the released code does to test images, too, where it trains with it: on CIFAR-10."""
        return self.augment if self.settings.augment == PAPER_AUGMENT else None

    def build(self) -> nn.Module:
        """The network with the weights of the settings' seed; the global random state stays."""
        dataset = data.get(self.data)
        with torch.random.fork_rng([]):
            torch.manual_seed(self.settings.seed)
            net: Any = models.build(
                self.model,
                image=dataset.shape,
                classes=len(dataset.classes),
                batch_norm=self.batch_norm,
                explicit=self.explicit,
            )
        if isinstance(net, ImplicitNetwork):
            net.solver, net.backward = self.solver, self.backward
            if self.tolerance is not None and not self.explicit:
                net.tolerance = self.tolerance
        return net


@dataclass(frozen=True, kw_only=True)
class Continued(Job):
    """A job whose network has at the start the weights that another one ended with; its optimizer begins anew."""

    after: Job


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a job came to. `clean`: eval mode, clean test images, last epoch. `curve`: per epoch, test accuracy by
    the clean protocol and, if it was asked for, by the released one, which leaves the network in training mode.
    Both in the precision of the training; `scorer` is in fp32."""

    job: Job
    net: nn.Module
    epochs: tuple[Epoch, ...]
    curve: list[dict[str, float]]
    clean: Totals
    title: str
    scorer: Scorer

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.net.parameters())

    @property
    def released(self) -> float:
        """The accuracy the authors' protocol would report: the best epoch, in training mode."""
        return max((point.get("released", float("nan")) for point in self.curve), default=float("nan"))

    @property
    def seconds_per_epoch(self) -> float:
        return sum(epoch.seconds for epoch in self.epochs) / max(len(self.epochs), 1)

    def at(self, tolerance: Tolerance, test: Images) -> Totals:
        """The clean protocol at another tolerance, for a network with a fixed point."""
        net: Any = self.net
        own = net.tolerance
        net.tolerance = tolerance
        try:
            return evaluate(net, test, batch_size=RELEASED_BATCH, scorer=self.scorer)
        finally:
            net.tolerance = own


def carry_out(
    job: Job,
    options: Options,
    on_epoch: Callable[[Epoch, nn.Module], None] | None = None,
    *,
    released: bool = False,
) -> Outcome:
    """Train, or go on training, or read what was trained; then the test set by the clean protocol.

    `on_epoch` is told of every epoch that is trained, and given the network in eval mode, once its point of the
    curve is kept. `released`: the curve has that protocol, too, which takes as long again.
    """
    settings = replace(job.settings, device=options.device)
    device = settings.torch_device
    train, validation, test = _images(job, options)
    test = test.to(device)
    net = job.build()
    if isinstance(job, Continued):
        net.load_state_dict(carry_out(job.after, options).net.state_dict())
    run = open_run(job, settings, options)
    scorer = Scorer(net, settings.precision)  # the fast path, however it is trained: nothing hangs on its time
    watch = _Watch(scorer, test, run, partial(_released, job, scorer, test) if released else None)

    def after(epoch: Epoch) -> None:
        watch(epoch)
        if on_epoch is not None:
            on_epoch(epoch, net)

    announce(run, options)
    with _conditions(net):
        history = fit(net, train, validation, settings, augment=job.augment, run=run, on_epoch=after)
    if not history.finished or history.stopped_by is not None:
        raise KeyboardInterrupt  # the run is kept and is resumed next time
    _check_curve(run, watch.points, len(history.epochs))
    clean = evaluate(net, test, batch_size=RELEASED_BATCH, precision=settings.precision, scorer=scorer)
    exact = scorer if settings.precision == "fp32" else Scorer(net)
    return Outcome(job, net, history.epochs, watch.points[: len(history.epochs)], clean, test.title, exact)


def announce(run: Run, options: Options) -> None:
    """A training that begins or goes on; one that is read takes no time."""
    done, whole = len(run.metrics()), run.settings.epochs
    if done < whole:
        options.say(f"{run.path.name}: {whole} epochs" + (f", {done} are done" if done else ""))


def _check_curve(run: Run, points: Sequence[Mapping[str, float]], epochs: int) -> None:
    """An epoch that was trained by another command has no point, and no study can be made of that."""
    if [point["epoch"] for point in points[:epochs]] != list(range(1, epochs + 1)):
        path = run.path / CURVE
        raise RunError(f"{path} lacks epochs of this training; delete {run.path} to train it anew")


def _conditions(net: Any) -> AbstractContextManager[None]:
    """What goes with a mode besides its gradient."""
    mode = getattr(net, "backward", None)
    released = isinstance(mode, Implicit) and isinstance(mode.method, ReleasedCG)
    return as_released(net) if released else nullcontext()


def settings_for(model: str, recipe: str | None = None, **changes: Any) -> Settings:
    """The settings a network was tuned with, named for the run directory; `changes` go before them."""
    return Settings.of_recipe(models.recipe(model, recipe), model=model, recipe=recipe, **changes)


def augmentation_for(name: str) -> Augmentation | None:
    """The authors augment CIFAR-10 alone."""
    return paper_cifar10() if name == "cifar10" else None


def _images(job: Job, options: Options) -> tuple[Images, Images | None, Images]:
    """To train on, to validate with unless the settings train on all, and to test with."""
    whole = job.settings.whole
    train = data.load(job.data, "train+validation" if whole else "train", options.data_dir)
    validation = None if whole else data.load(job.data, "validation", options.data_dir)
    test = data.load(job.data, "test", options.data_dir)
    return train if job.subset is None else train.subset(job.subset), validation, test


def open_run(job: Job, settings: Settings, options: Options) -> Run:
    """The run of this name, or a new one. What has records and no weights is not trained over."""
    path = options.runs / job.name
    if not (path / "settings.json").exists():
        return Run.create(path, settings)
    if (path / METRICS).exists() and not checkpoints(path / CHECKPOINTS):
        raise RunError(
            f"{path} is of a training without its weights; choose another folder by --runs, or delete it"
        )
    return (
        replace(Run.open(path), settings=settings) if _same(Run.open(path).settings, settings) else Run.open(path)
    )


def _same(kept: Settings, asked: Settings) -> bool:
    """Up to the device; where they differ, `fit` refuses with the name of the setting."""
    return replace(kept, device=asked.device) == asked


class _Watch:
    """After every epoch: the test accuracy by the clean protocol and by another one, kept beside the run."""

    def __init__(
        self, scorer: Scorer, test: Images, run: Run, released: Callable[[int], float] | None = None
    ) -> None:
        self.scorer, self.test, self.path, self.released = scorer, test, run.path / CURVE, released
        self.points: list[dict[str, float]] = _read(self.path)

    def __call__(self, epoch: Epoch) -> None:
        net, scorer = self.scorer.net, self.scorer
        clean = evaluate(net, self.test, batch_size=RELEASED_BATCH, precision=scorer.precision, scorer=scorer)
        point = {"epoch": float(epoch.epoch), "seconds": epoch.seconds, "clean": clean.accuracy}
        point |= {"warm_up": epoch.warm_up}
        point |= {} if clean.converged is None else {"converged": clean.converged}
        point |= {} if self.released is None else {"released": self.released(epoch.epoch)}
        self.points = [*(old for old in self.points if old["epoch"] < epoch.epoch), point]
        write_json(self.path, self.points)


def _released(job: Job, scorer: Scorer, test: Images, epoch: int) -> float:
    return released_accuracy(scorer.net, test, scorer, job.released_augment, epoch)


def released_accuracy(
    net: nn.Module,
    test: Images,
    scorer: Scorer | None = None,
    augment: Augmentation | None = None,
    epoch: int = 0,
) -> float:
    """Test accuracy as the released code takes it: training mode, so dropout and batch statistics are on; test
    images augmented like those of the training, where there is an augmentation.

    Buffers and the random state are put back: measuring changes no run.
    """
    scorer = Scorer(net, fast=False) if scorer is None else scorer
    with _in_training(net, test.device):
        begin = partial(torch.manual_seed, 0)
        return measure(scorer, test, RELEASED_BATCH, begin, augment=augment, epoch=epoch).accuracy


@contextmanager
def _in_training(net: nn.Module, device: torch.device) -> Iterator[None]:
    """Training mode for the time of the block; then the mode, the buffers and the random state are as before."""
    training = net.training
    net.train()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), unchanged(net.buffers()):
            yield
    finally:
        net.train(training)


def _read(path: Any) -> list[dict[str, float]]:
    if not path.exists():
        return []
    with reading(path):
        return [dict(point.items()) for point in read(path)]
