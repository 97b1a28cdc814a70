"""Run directories and checkpoints: what is in them, and what is refused."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from banach import JFB, ImplicitNetwork, Neumann
from banach.provenance import digest
from banach.train import CheckpointError, Position, Run, RunError, fit, read_checkpoint
from banach.train.checkpoint import checkpoints, write_checkpoint
from banach.train.state import load_weights
from train.parts_train import STATE, images, network, plain_network, same_weights, settings

MADE = settings(checkpoint_every=4)
HELD = images(20, "validation")


@pytest.fixture
def trained(tmp_path: Path) -> Run:
    run = Run.create(tmp_path / "run", MADE)
    fit(plain_network(), images(), HELD, MADE, run=run)
    return run


def resume(run: Run, net: nn.Module | None = None) -> nn.Module:
    net = net or plain_network(seed=9)
    fit(net, images(), HELD, MADE, run=run)
    return net


def test_what_is_in_a_run(trained: Run, tmp_path: Path) -> None:
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    names = sorted(path.name for path in trained.path.iterdir())
    assert names == [".lock", "checkpoints", "environment.json", "metrics.jsonl", "settings.json"]
    kept = checkpoints(trained.path / "checkpoints")
    assert [path.name for path in kept] == [Position(1, 4).name, Position(2, 0).name]
    for path in kept:
        assert sorted(file.name for file in path.iterdir()) == ["state.json", "tensors.safetensors"]
    environment = json.loads((trained.path / "environment.json").read_text())
    assert environment["settings"] == MADE.to_dict()
    assert environment["versions"]["torch"] == torch.__version__
    assert Run.open(trained.path) == trained
    assert [epoch.epoch for epoch in trained.metrics()] == [1, 2]


def test_averages_of_tied_weights_are_loaded(tmp_path: Path) -> None:
    """The second name of a tied weight held the weight itself, which replaced its average."""
    made = settings(ema=0.9, lr=0.05)

    def tied(seed: int = 0) -> ImplicitNetwork:
        net = plain_network(seed=seed)
        net.Q.append(net.R.inner)
        return net

    net, run = tied(), Run.create(tmp_path / "run", made)
    fit(net, images(), HELD, made, run=run)  # which leaves the averages in the network
    checkpoint, loaded = run.latest(), tied(seed=9)
    assert checkpoint is not None
    raw = checkpoint.under("net")
    assert not torch.equal(raw["R.inner.weight"], net.R.inner.weight)  # the weights differ from their averages
    load_weights(loaded, checkpoint)
    assert loaded.Q[3] is loaded.R.inner
    assert same_weights(loaded, net)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def swap(path: Path) -> None:
    path.write_bytes(pickle.dumps(Hostile()))


@pytest.mark.parametrize(
    ("damage", "name"),
    [(cut, "state.json"), (swap, "tensors.safetensors"), (Path.unlink, "state.json")],
)
def test_a_damaged_checkpoint_is_skipped(
    damage: Any, name: str, trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    older, newest = checkpoints(trained.path / "checkpoints")
    damage(newest / name)
    with pytest.raises(CheckpointError, match=f"{newest.name} is damaged"):
        read_checkpoint(newest)
    with pytest.warns(RuntimeWarning, match="is damaged.*the one before it is tried"):
        net = resume(trained)
    whole = plain_network()
    fit(whole, images(), HELD, MADE)
    assert same_weights(net, whole)
    assert same_weights(net, resume(Run.open(trained.path)))
    assert checkpoints(trained.path / "checkpoints") == [older, newest]
    assert not (tmp_path / "executed").exists()


def write(folder: Path, step: int = 1, **tensors: torch.Tensor) -> Path:
    state = {**STATE, "step": step}
    return write_checkpoint(folder, tensors or {"x": torch.ones(1)}, state, 2, None)


def test_tied_weights_and_an_empty_tensor(tmp_path: Path) -> None:
    x = torch.randn(3, 4).T
    read = read_checkpoint(write(tmp_path, a=x, b=x, c=torch.ones(0)))
    assert torch.equal(read.tensors["a"], x)
    assert torch.equal(read.tensors["b"], x)
    assert read.tensors["c"].shape == (0,)
    assert read.state == {**STATE, "step": 1}


def test_the_last_two_are_kept_and_a_sound_one_is_not_replaced(tmp_path: Path) -> None:
    for step in (1, 2, 3, 7, 5):  # later ones than the last were refused, and go
        write(tmp_path, step)
    assert [path.name for path in checkpoints(tmp_path)] == [Position(0, 3).name, Position(0, 5).name]
    file = write(tmp_path, 5) / "state.json"
    before = file.stat().st_ino
    assert (write(tmp_path, 5) / "state.json").stat().st_ino == before
    cut(file)
    assert read_checkpoint(write(tmp_path, 5)).state == {**STATE, "step": 5}


@pytest.mark.parametrize(
    "change",
    [
        *({"epoch": 10**12}, {"epoch": True}, {"done": [{}]}, {"identity": []}, {"seconds": -1}, {"more": 1}),
        *({"tensors": "abc"}, {"tensors": -1}, {"done": 1}, {"epoch": 1, "done": [1]}),
    ],
)
def test_a_state_of_another_type_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """Its checksum is right. A list of 10^12 epochs would not fit into memory."""
    path = write_checkpoint(tmp_path, {}, {**STATE, **change}, 2, None)
    with pytest.raises(CheckpointError, match=r"is damaged: ([\w.]+ must|\w+Error)"):
        read_checkpoint(path)


def test_a_directory_is_not_used_twice(trained: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is a run in"):
        Run.create(trained.path, MADE)
    with pytest.raises(RunError, match="is not an empty directory"):
        Run.create(tmp_path, MADE)
    with pytest.raises(RunError, match="no run in"):
        Run.open(tmp_path)


def test_going_on_with_something_else_is_refused(trained: Run) -> None:
    with pytest.raises(RunError, match=r"started with lr=0\.005, got 0\.1"):
        fit(plain_network(), images(), HELD, settings(checkpoint_every=4, lr=0.1), run=trained)
    with pytest.raises(CheckpointError, match="started with train="):
        fit(plain_network(), images(80), HELD, MADE, run=trained)
    with pytest.raises(CheckpointError, match="started with backward=JFB"):
        resume(trained, plain_network(backward=Neumann(2)))
    with pytest.raises(CheckpointError, match="does not hold this run"):
        resume(trained, network(tolerance=plain_network().tolerance, backward=JFB()))


def test_metrics_hold_what_json_cannot(trained: Run) -> None:
    epoch = trained.metrics()[0]
    trained.write_metrics([replace(epoch, loss=float("inf"))])
    text = (trained.path / "metrics.jsonl").read_text()
    assert json.loads(text)["loss"] == "inf"
    assert trained.metrics()[0].loss == float("inf")


WRONG: dict[str, Any] = {
    r"state\.json must have .*missing or unknown: \['done'\]": lambda state: state.pop("done"),
    r"tensors must be .*got 'abc'": lambda state: state.update(tensors="abc"),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_checkpoint_that_is_refused_is_written_again(words: str, trained: Run) -> None:
    """It has its checksum, but not the state of a run, as if it were of another version."""
    path = checkpoints(trained.path / "checkpoints")[-1] / "state.json"
    content = json.loads(path.read_text())
    wanted = {**content["state"]}
    WRONG[words](content["state"])
    content["sha256"] = digest(content["state"])
    path.write_text(json.dumps(content))
    with pytest.warns(RuntimeWarning, match=rf"is damaged: {words}.*; the one before it is tried"):
        resume(trained)
    again = json.loads(path.read_text())["state"]
    assert (again["epoch"], len(again["done"])) == (wanted["epoch"], len(wanted["done"]))


@pytest.mark.parametrize("content", [b"{bad", b"", b"\xff\xfe", b"[1]", b'{"a": 1}', None])
def test_a_damaged_environment_does_not_stop_a_run(tmp_path: Path, content: bytes | None) -> None:
    """Nothing is read from that file; the plan is added to what is left of it."""
    run = Run.create(tmp_path / "run", settings())
    path = run.path / "environment.json"
    path.unlink() if content is None else path.write_bytes(content)
    run.write_plan({"task": "training step"})
    kept = {"a": 1} if content == b'{"a": 1}' else {}
    assert json.loads(path.read_text()) == {**kept, "plan": {"task": "training step"}}
