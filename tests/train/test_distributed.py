"""Several ranks train what one process trains: same gradients, same curve, one run directory."""

import json
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from banach import JFB, Anderson, Implicit, Neumann, Picard, Tolerance, Unroll
from banach.data import Batches
from banach.train import CheckpointError, Run, RunError, fit, read_checkpoint
from banach.train.checkpoint import _read_tensors
from banach.train.distributed import Ranks, joined
from train import parts_train
from train.ranks_train import changes, coupled_network, images, one_step, run_settings, several, start

SHARDS_HERE = hasattr(torch.cpu.Stream, "record_event")  # 2.6 has not
needs_shards = pytest.mark.skipif(not SHARDS_HERE, reason="this PyTorch shards on GPUs only")
DDP_AND_FSDP = [pytest.param(False, id="ddp"), pytest.param(True, id="fsdp", marks=needs_shards)]
EXACT = Implicit(tolerance=Tolerance(atol=0, rtol=1e-12, max_steps=200))
MODES: list[tuple[Any, dict[str, Any]]] = [
    (JFB(), {}),
    (JFB(), {"accumulate": 2}),
    (JFB(), {"anderson": True}),
    (Neumann(3), {}),
    (Unroll(3, checkpoint=True), {}),
    (EXACT, {}),
    (JFB(), {"sharded": True}),
    (Unroll(2), {"sharded": True}),
    (EXACT, {"sharded": True}),
    (JFB(), {"sharded": True, "correction": 0.5, "clip": 0.1}),
]
SHARDS = ("rank-00000.safetensors", "rank-00001.safetensors")
SIZE = 14  # parts of 7 and 7 on two ranks, and of 3, 4, 3 and 4 on four


def alone(mode: Any, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights less the gradient of the whole batch, by autograd in one process, without `fit`."""
    net = parts_train.plain_network(backward=mode, solver=Anderson() if options.get("anderson") else Picard())
    x, y = next(Batches(images(SIZE), SIZE, augment=changes()).epoch(0))
    F.cross_entropy(net(x), y).backward()
    return {
        name: weight.detach() - weight.grad for name, weight in net.named_parameters() if weight.grad is not None
    }


@pytest.mark.parametrize("count", [2, 4])
def test_gradients_equal_those_of_one_process(count: int, tmp_path: Path) -> None:
    """Also in uneven parts, with augmentation, and where ranks need different depths."""
    left_out = {"accumulate"} if count == 4 else set[str]()
    left_out |= set() if SHARDS_HERE else {"sharded"}
    modes = [(mode, options) for mode, options in MODES if left_out.isdisjoint(options)]
    assert start("gradients", count, tmp_path, modes, SIZE) == [0] * count
    found = [torch.load(tmp_path / f"gradients-{rank}.pt") for rank in range(count)]
    assert len({depth for _, depth in found}) > 1, "the ranks needed the same depth: the test shows nothing"
    for index, (mode, options) in enumerate(modes):
        expected = alone(mode, options) if "correction" not in options else one_step(SIZE, mode, **options)
        start_at = dict(parts_train.plain_network().named_parameters())
        for states, _ in found:
            for name, value in expected.items():
                error = (states[index][name] - value).norm() / (value - start_at[name].detach()).norm()
                assert error < 1e-9, f"{mode}, {options}: the gradient of {name} is off by {error:.1e}"


@pytest.mark.parametrize("sharded", DDP_AND_FSDP)
def test_a_run_stops_on_all_ranks_and_resumes_on_another_number(sharded: bool, tmp_path: Path) -> None:
    """A signal to one rank stopped that rank alone, and the others waited for it."""
    changed: dict[str, Any] = {"sharded": sharded}
    net = parts_train.plain_network()
    whole = fit(net, images(53), parts_train.images(31, "validation"), run_settings(**changed))
    assert start("training", 2, tmp_path, "run", 5, changed) == [0, 0]
    stopped = [json.loads((tmp_path / f"run-2-{rank}.json").read_text()) for rank in range(2)]
    assert [one[:2] for one in stopped] == [[5, 15], [5, 15]]
    assert stopped[0][2] == stopped[1][2]
    shutil.copytree(tmp_path / "run", tmp_path / "on-one")
    files = {path.name for path in (tmp_path / "run/checkpoints").glob("*/*")}
    assert files == {"state.json", *SHARDS} if sharded else files == {"state.json", "tensors.safetensors"}
    run = Run.open(tmp_path / "on-one")
    one = parts_train.plain_network()
    again = fit(one, images(53), parts_train.images(31, "validation"), run.settings, run=run)
    _check_curves(parts_train.figures(again), parts_train.figures(whole))
    torch.testing.assert_close(one.state_dict(), net.state_dict(), rtol=1e-9, atol=1e-12)
    assert start("training", 4, tmp_path, "run", 0, {"sharded": SHARDS_HERE}) == [0] * 4
    resumed = [json.loads((tmp_path / f"run-4-{rank}.json").read_text()) for rank in range(4)]
    for _, stopped_by, figures in resumed:
        assert stopped_by is None
        _check_curves(figures, parts_train.figures(whole))
    assert [epoch.loss for epoch in Run.open(tmp_path / "run").metrics()] == [e["loss"] for e in resumed[0][2]]
    of_four, of_one = (Run.open(tmp_path / name).latest() for name in ("run", "on-one"))
    assert of_four is not None
    assert of_one is not None
    kept = of_four.under("optimizer") | of_four.under("net")  # of ten rows in S the last rank has one
    torch.testing.assert_close(kept, of_one.under("optimizer") | of_one.under("net"), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("sharded", DDP_AND_FSDP)
@pytest.mark.parametrize("policy", ["stop", "skip", "rewind"])
def test_all_ranks_follow_the_policy_where_the_loss_of_one_is_nan(
    policy: str, sharded: bool, tmp_path: Path
) -> None:
    """The loss of one rank reached that rank alone; its weights then differed from those of the others."""
    assert start("diverging", 2, tmp_path, policy, {"sharded": sharded}) == [0, 0]
    (first, weights), (second, others) = (torch.load(tmp_path / f"{policy}-{rank}.pt") for rank in range(2))
    assert ("in step 2 of epoch 1" in first and "in step 2 of epoch 1" in second) == (policy == "stop")
    for name, value in weights.items() if policy != "stop" else ():
        assert torch.equal(value, others[name])
        assert bool(value.isfinite().all())


@needs_shards
def test_a_sharded_r_that_would_wait_forever_is_refused(tmp_path: Path) -> None:
    """fully_shard(net.R) gathers weights at every evaluation: a rank with more steps waited for the others.

    It frees them after every J-product of `Implicit`, which then failed, or waited for ranks with fewer products.
    """
    assert start("nested", 2, tmp_path) == [0, 0]
    for rank in range(2):
        *first, second = (tmp_path / f"nested-{rank}").read_text().splitlines()  # no more: Implicit may predict
        for grad, line in zip((False, True), first, strict=True):
            assert line.startswith(f"True, JFB, {grad}: fully_shard makes a part of R gather its weights")
        assert second.startswith("False, Implicit, True: fully_shard makes a part of R free its weights")


@needs_shards
def test_solves_end_together_where_ranks_share_statistics(tmp_path: Path) -> None:
    """Each evaluation of R waits for all ranks: a rank that stopped earlier would leave the others waiting."""
    assert start("coupled", 2, tmp_path) == [0, 0]
    found = [torch.load(tmp_path / f"coupled-{rank}.pt") for rank in range(2)]
    assert found[0][0] == found[1][0] > 5
    net = coupled_network()
    net.R.inner[1].forward = lambda x: x - x.mean(0, keepdim=True)
    output = net(images(12).pixels.float())
    output.square().mean().backward()
    torch.testing.assert_close(torch.cat([one[1] for one in found]), output, rtol=1e-6, atol=1e-7)
    for name, weight in net.named_parameters():
        torch.testing.assert_close(found[0][2][name], weight.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
def test_batch_norm_is_synchronised_on_a_gpu(tmp_path: Path) -> None:
    """Two ranks share the GPU by gloo; the parts of the batch have other statistics than the whole."""
    for count in (1, 2):
        assert start("synchronised", count, tmp_path) == [0] * count
    (alone, plain), *ranks = (torch.load(tmp_path / f"synchronised-{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert not plain
    for state, is_synchronised in ranks:
        assert is_synchronised
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4, msg=name)


@needs_shards
def test_damaged_shards_and_those_of_older_versions_are_refused(tmp_path: Path) -> None:
    """Older versions wrote shards whose metadata was a pickle."""
    assert start("training", 2, tmp_path, "run", 5, {"sharded": True}) == [0, 0]
    folder = sorted((tmp_path / "run/checkpoints").iterdir())[-1]
    assert read_checkpoint(folder).tensors["net.R.inner.weight"].shape == (12, 12)
    parts = [load_file(folder / name)["net.R.inner.weight"] for name in SHARDS]
    assert [part.shape for part in parts] == [(6, 12), (6, 12)]
    content = json.loads((folder / "state.json").read_text())
    for name in (".metadata", "../rank-00002.safetensors"):
        (folder / "state.json").write_text(json.dumps({**content, "tensors": {**content["tensors"], name: ""}}))
        with pytest.raises(CheckpointError, match=f"is damaged: tensors must be in .* files .*, got '{name}'"):
            read_checkpoint(folder)
    (folder / "state.json").write_text(json.dumps(content))
    (folder / SHARDS[1]).write_bytes(b"x" + (folder / SHARDS[1]).read_bytes()[1:])
    with pytest.raises(CheckpointError, match="SHA-256"):
        read_checkpoint(folder)


@needs_shards
def test_every_layout_of_shards_is_read_whole(tmp_path: Path) -> None:
    assert start("layouts", 2, tmp_path) == [0, 0]
    first, second = (json.loads((tmp_path / f"layouts-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    found = _read_tensors(tmp_path, first)
    torch.testing.assert_close(found, several(), rtol=0, atol=0)


COMMAND = ["train", "--epochs", "2", "--subset", "160", "--no-tensorboard", "--no-batch-norm", "--device", "cpu"]


def test_the_command_trains_one_run_on_two_ranks(tmp_path: Path) -> None:
    """torchrun trained the same network twice, into two directories."""
    out = tmp_path / "run"
    assert _command(tmp_path, [*COMMAND, "--out", str(out)], 0) == [0, 0]
    assert (tmp_path / "out-1").read_text() == ""
    assert "validation accuracy" in (tmp_path / "out-0").read_text()
    assert len(Run.open(out).metrics()) == 2
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"run"}
    assert {"test.json", "training.png", "checkpoints"} <= {path.name for path in out.iterdir()}


def test_all_ranks_end_with_the_reason_when_one_is_killed(tmp_path: Path) -> None:
    assert _command(tmp_path, [*COMMAND, "--out", str(tmp_path / "run")], 3) == [2, -9]
    assert time.time() - (tmp_path / "killed").stat().st_mtime < 30
    assert "because another rank has ended; resume the run" in (tmp_path / "err-0").read_text()


@needs_shards
def test_a_full_disk_of_one_rank_is_a_sentence_on_all(tmp_path: Path) -> None:
    """torch.distributed.checkpoint raised a BaseException, so all ranks ended in a traceback."""
    assert _command(tmp_path, [*COMMAND, "--sharded", "--out", str(tmp_path / "run")], -1) == [2, 2]
    first, last = ((tmp_path / f"err-{rank}").read_text().splitlines()[-1] for rank in range(2))
    assert first.startswith("banach: rank 0 of 2 stopped, because another rank has ended")
    assert last.startswith("banach: ")
    assert "No space left on device; free some space and run it again" in last


def test_a_command_that_ranks_cannot_train_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    line = [*COMMAND, "--out", str(tmp_path / "run"), "--batch-size", "159"]
    assert _command(tmp_path, line, 0) == [2, 2]
    assert "a batch of 1 images cannot be cut into parts for 2 ranks" in (tmp_path / "err-0").read_text()
    assert not (tmp_path / "run").exists()


def test_processes_that_do_not_know_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fit` in a script that torchrun started trained the same network in every process."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RunError, match="torchrun started 2 processes, but there is no process group"):
        fit(parts_train.plain_network(), images(16), None, parts_train.settings())
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined(parts_train.settings()) as ranks:
        assert ranks == Ranks()


@pytest.mark.parametrize("size", [1, 5, 14, 64])
def test_the_parts_of_all_ranks_are_the_batch(size: int) -> None:
    whole = Batches(images(64), size, seed=3, augment=changes())
    parts = [Batches(images(64), size, seed=3, augment=changes(), part=(rank, 3)) for rank in range(3)]
    for together, *cut in zip(whole.epoch(1), *(one.epoch(1) for one in parts), strict=True):
        for k in range(2):
            torch.testing.assert_close(torch.cat([part[k] for part in cut]), together[k], rtol=0, atol=0)


def _command(folder: Path, line: list[str], killed_at: int) -> list[int]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        (folder / "port").write_text(str(free.getsockname()[1]))
    return start("command", 2, folder, line, killed_at)


def _check_curves(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for name in ("loss", "accuracy", "validation_loss", "validation_accuracy", "depth", "max_depth", "converged"):
        assert [e[name] for e in got] == pytest.approx([e[name] for e in expected], rel=1e-9), name
