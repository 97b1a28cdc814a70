"""fit(): the one training loop, for every backward mode."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from banach.backward import Implicit
from banach.data import Augmentation, Batches, Images
from banach.fast.plan import Plan
from banach.provenance import write_json
from banach.train.checkpoint import Position
from banach.train.evaluate import Scorer, evaluate
from banach.train.history import Epoch, History
from banach.train.penalties import Penalties
from banach.train.precision import arithmetic
from banach.train.run import ENVIRONMENT, Run
from banach.train.settings import Settings
from banach.train.steps import Steps
from banach.train.stop import stop_on_signals
from banach.train.work import Work

_WATCHED = 8  # images on which the contraction is measured after every epoch


def fit(
    net: nn.Module,
    train: Images,
    validation: Images | None,
    settings: Settings,
    *,
    augment: Augmentation | None = None,
    run: Run | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    on_step: Callable[[Position], None] | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> History:
    """Train a network by cross entropy, on the device of the settings.

    Afterwards it is in eval mode, with the averaged weights if there are any. The global random state is restored.

    Args:
        net: the network; it is moved to the device.
        train: images to train on.
        validation: images to validate on after every epoch; None: nothing is validated.
        settings: how to train.
        augment: changes the training images.
        run: a run directory. Training goes on from its last checkpoint, on a CPU bit by bit as if it had never
            stopped. SIGINT and SIGTERM make it checkpoint and return.
        on_epoch, on_step: called after every epoch and step.
        on_plan: called once, before the first step, with the `Plan` that says how steps run.
    """
    device = settings.torch_device
    _check_splits(train, validation)
    if (penalties := Penalties.of(settings)) is not None:
        penalties.check(net)
    batches = Batches(train.to(device), settings.batch_size, settings.seed, augment)
    held = None if validation is None else validation.to(device)
    work = Work(net.to(device), batches, held, settings)
    identity = work.identity()

    def save() -> None:
        if run is not None:
            run.save(work.position, work.tensors(), work.state(identity))

    with ExitStack() as stack:
        if run is not None:
            stack.enter_context(run.locked())
            _resume(run, work, identity)
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(arithmetic(settings.precision, device, search=settings.fast or None))
        stack.enter_context(_counting(work))
        stop = stack.enter_context(stop_on_signals(run is not None))
        steps = Steps(work)
        scorer: Scorer | None = None
        if work.epoch < settings.epochs:
            steps.prepare()
            _report(steps.plan, run, on_plan)
        while work.epoch < settings.epochs and not stop.asked:
            net.train()
            for _ in range(work.step, len(batches)):
                steps.take()
                work.step += 1
                if on_step is not None:
                    on_step(work.position)
                if _is_due(work):
                    save()
                if stop.asked:
                    break
            else:
                # A capture that failed in training is not tried again: one warning is enough.
                fast = settings.fast and not steps.failed
                scorer = scorer or Scorer(net, settings.precision, fast=fast)
                work.end_epoch(_look_back(work, scorer))
                try:
                    if on_epoch is not None:
                        on_epoch(work.done[-1])
                finally:  # after it: what it writes is never behind a checkpoint, even if interrupted here
                    if run is not None:
                        save()
                        run.write_metrics(work.done)
                work.begin_clock()  # the next epoch's time and memory do not include callbacks and files
        if run is not None and (work.step or run.latest() is None):
            save()
    if work.average is not None:
        work.average.put_into(net)
    net.eval()
    return History(tuple(work.done), work.epoch >= settings.epochs, stop.asked)


def _report(made: Plan, run: Run | None, on_plan: Callable[[Plan], None] | None) -> None:
    """Write the plan to the run's environment.json, and call the user."""
    if run is not None:
        path = run.path / ENVIRONMENT
        write_json(path, {**json.loads(path.read_text(encoding="utf-8")), "plan": made.to_dict()})
    if on_plan is not None:
        on_plan(made)


def _look_back(work: Work, scorer: Scorer) -> Epoch:
    """Read what the epoch came to: the only host sync of the loop."""
    seen, lr, products = work.tally.read(), work.rate(work.step - 1), work.products
    seconds = work.seconds  # of training; the device has finished
    # Of training too: a validation in batches of another size has another peak.
    memory = torch.cuda.max_memory_allocated(work.device) if work.device.type == "cuda" else None
    work.net.eval()
    held = _validate(work, scorer)
    sigma = _contraction(work)
    return Epoch(
        epoch=work.epoch + 1,
        **vars(seen),
        **held,
        lr=lr,
        sigma=sigma,
        products=products,
        seconds=seconds,
        memory=memory,
        warm_up=work.warm_up,
    )


def _validate(work: Work, scorer: Scorer) -> dict[str, Any]:
    """Validate with the averaged weights if there are any, copied into the network, where the scorer sees them."""
    kept = ("loss", "accuracy", "depth", "converged")
    if work.validation is None:
        return {f"validation_{name}": None for name in kept}
    averaged = nullcontext() if work.average is None else work.average.inside(work.net)
    with averaged:
        found = evaluate(
            work.net,
            work.validation,
            batch_size=work.settings.batch_size,
            precision=work.settings.precision,
            scorer=scorer,
        )
    return {f"validation_{name}": getattr(found, name) for name in kept}


def _contraction(work: Work) -> float | None:
    """Return the largest sigma_max(dT/du) on a few training images, in eval mode."""
    net: Any = work.net
    if not work.settings.monitor or not work.implicit or net.tolerance.max_steps == 0:
        return None
    images = work.batches.images
    try:
        work.monitor(net, images.normalise(images.pixels[:_WATCHED]))
    except RuntimeError as error:  # such as of a layer without second derivative
        if len(work.done) == 0:
            said = " ".join(str(error).split())
            warnings.warn(f"the contraction of R cannot be measured, so it is skipped: {said}", stacklevel=2)
        return None
    return work.monitor.history[-1].sigma


def _is_due(work: Work) -> bool:
    """Return True if a checkpoint is due within the epoch; there is always one at its end."""
    every = work.settings.checkpoint_every
    return every > 0 and work.step % every == 0 and work.step < len(work.batches)


def _resume(run: Run, work: Work, identity: dict[str, str]) -> None:
    run.check(work.settings)
    checkpoint = run.latest()
    if checkpoint is not None:
        work.restore(checkpoint, identity)
        run.write_metrics(work.done)


def _check_splits(train: Images, validation: Images | None) -> None:
    for name, images in (("train", train), ("validation", validation)):
        if images is not None and images.split == "test":
            raise ValueError(
                f"{name} is the test split, which chooses nothing: give {name} images of another split"
            )


@contextmanager
def _counting(work: Work) -> Iterator[None]:
    """Count J-products and keep calling the user's `report`.

    Not with check_every=0, where a report would sync with the host at every step.
    """
    net: Any = work.net
    mode = net.backward if work.implicit else None
    if not isinstance(mode, Implicit) or not mode.checked:
        yield
        return

    def report(products: int, residual: Tensor, status: Any) -> None:
        work.products += products
        if mode.report is not None:
            mode.report(products, residual, status)

    net.backward = replace(mode, report=report)
    try:
        yield
    finally:
        net.backward = mode
