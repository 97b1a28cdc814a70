"""A run that was interrupted ends bit by bit as if it had not been."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from banach.data import Crop, Flip
from banach.data.augment import Chain
from banach.diagnose import ContractionWarning
from banach.train import Epoch, History, Position, Run, Settings, fit
from banach.train.state import described
from train.parts_train import expanding_network, figures, images, network, same_weights, settings

AUGMENT = Chain(Flip(), Crop(1))
STEPS = 6  # batches an epoch: 96 images, 16 at a time
KINDS: dict[str, dict[str, Any]] = {
    "adam": {"ema": 0.9, "clip": 1.0, "checkpoint_every": 2},
    "sgd": {"optimizer": "sgd", "momentum": 0.9, "lr": 0.05, "checkpoint_every": 4, "accumulate": 2},
    "penalties": {"jacobian_penalty": 0.7, "correction": 0.4, "correction_steps": (1, 2), "checkpoint_every": 2},
}


class Interrupted(Exception):
    pass


def train(run: Run | None, made: Settings, net: nn.Module) -> History:
    return fit(net, images(), images(20, "validation"), made, augment=AUGMENT, run=run)


def interrupt(net: nn.Module, step: int, action: Any) -> None:
    """Call `action` when training pass `step` begins (counted from 1)."""
    passes = [0]

    def count(module: nn.Module, inputs: Any) -> None:
        passes[0] += module.training
        if module.training and passes[0] == step:
            action()

    net.register_forward_pre_hook(count)


def fail() -> None:
    raise Interrupted


@pytest.fixture(scope="module")
def whole() -> dict[str, tuple[nn.Module, History]]:
    """Uninterrupted runs, without a run directory."""
    made = {}
    for kind, changes in KINDS.items():
        net = network()
        made[kind] = net, train(None, settings(**changes), net)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", sorted(random.Random(0).sample(range(1, 2 * STEPS + 1), 4)))
def test_after_an_error_at_any_step(kind: str, step: int, tmp_path: Path, whole: Any) -> None:
    made = settings(**KINDS[kind])
    run = Run.create(tmp_path / "run", made)
    net = network()
    interrupt(net, step * made.accumulate, fail)
    with pytest.raises(Interrupted):
        train(run, made, net)
    begun = any(run.path.glob("checkpoints/epoch-*"))
    assert begun == (step > made.checkpoint_every)
    again = network(seed=9 if begun else 0)  # other weights: all must come from the checkpoint
    history = train(Run.open(run.path), made, again)
    assert same_weights(again, whole[kind][0])
    assert figures(history) == figures(whole[kind][1])
    assert [epoch.epoch for epoch in run.metrics()] == [1, 2]


def test_at_a_default_dtype_of_bf16(tmp_path: Path, whole: Any) -> None:
    made = settings(**KINDS["adam"])
    run, net, again = Run.create(tmp_path / "run", made), network(), network(seed=9)
    interrupt(net, STEPS, fail)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(Interrupted):
            train(run, made, net)
        history = train(run, made, again)
    finally:
        torch.set_default_dtype(torch.float32)
    assert same_weights(again, whole["adam"][0])
    assert figures(history) == figures(whole["adam"][1])


@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, 1), (signal.SIGTERM, 6), (signal.SIGHUP, 9)])
def test_after_a_signal(number: int, step: int, tmp_path: Path, whole: Any) -> None:
    made = settings(**KINDS["adam"])
    run = Run.create(tmp_path / "run", made)
    before = signal.getsignal(number)
    net = network()
    interrupt(net, step, lambda: os.kill(os.getpid(), number))
    history = train(run, made, net)
    assert not history.finished
    assert signal.getsignal(number) is before
    latest: Any = run.latest()
    assert latest.position == (Position(0, step) if step <= STEPS else Position(1, step - STEPS))
    again = network(seed=9)
    history = train(run, made, again)
    assert history.finished
    assert same_weights(again, whole["adam"][0])
    assert figures(history) == figures(whole["adam"][1])
    assert [epoch.warm_up for epoch in whole["adam"][1].epochs] == [True, False]
    assert [epoch.warm_up for epoch in history.epochs] == [True, step >= STEPS]  # which begins in a new process
    assert run.metrics() == history.epochs


def test_a_finished_run_is_read_again(tmp_path: Path, whole: Any) -> None:
    made = settings(**KINDS["adam"])
    run = Run.create(tmp_path / "run", made)
    train(run, made, network())
    seen: list[Epoch] = []
    again = network(seed=9)
    history = fit(again, images(), images(20, "validation"), made, augment=AUGMENT, run=run, on_epoch=seen.append)
    assert seen == []
    assert same_weights(again, whole["adam"][0])
    assert figures(history) == figures(whole["adam"][1])


def test_the_monitor_warns_once_also_over_a_resume(tmp_path: Path) -> None:
    made = settings(monitor=True, lr=0.0)
    run = Run.create(tmp_path / "run", made)
    net = expanding_network()
    interrupt(net, STEPS + 1, fail)
    with pytest.warns(ContractionWarning), pytest.raises(Interrupted):
        train(run, made, net)
    sigma: Any = train(run, made, expanding_network()).last.sigma  # a second warning would be an error
    assert sigma > 1


def test_a_run_of_an_older_version_has_the_same_identity() -> None:
    """It has no rtol, which was 0 for every named model, and its backward mode did not count."""
    words = {"solver": "picard", "backward": "implicit:cg", "norm": "rms", "eps": 1e-3, "max_steps": 18}
    older = Settings.from_dict({"data": "cifar10", "model": "mdeq-tiny", **words, "rtol": None})
    found = described(older.build(), older)
    rest = "norm=RMS(), check_every=None)"
    assert found["tolerance"] == f"Tolerance(atol=0.001, rtol=0.0, max_steps=18, {rest}"
    adjoint = f"Tolerance(atol=0, rtol=0.001, max_steps=500, {rest}"
    assert found["backward"] == f"Implicit(method=NormalCG(), tolerance={adjoint}, report=None, order=1)"
