"""What each of several gloo processes does in the tests of distributed training."""

import errno
import json
import math
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from banach import JFB, Anderson, Implicit, ImplicitNetwork, Mode, Picard, Tolerance
from banach.cli.app import main
from banach.data import Augmentation, Images
from banach.models import Cosine
from banach.train import DivergenceError, Run, Settings, checkpoint, distributed, fit, steps
from banach.train.words import augment
from train import parts_train

# Imported once, in the process from which all others are forked.
SERVER = (
    *("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"),
    *("banach.cli.train", "banach.fast.step", "sklearn.datasets", "matplotlib.pyplot"),
)
DEADLINE = 120.0


def start(job: str, count: int, folder: Path, *given: Any) -> list[int]:
    """Run `job` in so many processes and return their exit codes; one that hangs is killed, and is -9."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(SERVER))
    processes = [
        context.Process(target=_work, args=(rank, count, str(folder), job, given)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + DEADLINE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    return [int(process.exitcode or 0) for process in processes]


def _work(rank: int, count: int, folder: str, job: str, given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        if job != "command":
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/rendezvous-{job}-{count}",
                rank=rank,
                world_size=count,
                timeout=timedelta(seconds=60),
            )
        code = globals()[job](rank, count, Path(folder), *given)
        if job != "command":
            dist.barrier()
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code or 0)  # no threads of the group are joined: that has been seen to hang


def whole(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return sharded tensors gathered from all ranks."""
    return {name: v.full_tensor() if checkpoint.is_sharded(v) else v for name, v in tensors.items()}


def layouts(rank: int, count: int, folder: Path) -> None:
    """Store tensors that are sharded in several ways, and the checksums of their files."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (count,))
    placed = {"rows": Shard(0), "one": Shard(0), "columns": Shard(1), "copies": Replicate()}
    given = {name: distribute_tensor(value, mesh, [placed[name]]) for name, value in several().items()}
    written = checkpoint.write_shards(given, None if rank else folder)
    (folder / f"layouts-{rank}.json").write_text(json.dumps(written))


def several() -> dict[str, Tensor]:
    """Return tensors of several shapes and types; of one, some ranks have no row."""
    shapes = {"rows": (5, 2), "one": (1, 3), "columns": (4, 5), "copies": (3,)}
    return {name: torch.arange(math.prod(s)).reshape(s).to(torch.bfloat16) for name, s in shapes.items()}


def images(count: int) -> Images:
    """Digits, half of them dark, whose fixed points need other numbers of steps than the rest."""
    found = parts_train.images(count)
    pixels = found.pixels.clone()
    pixels[: count // 2] //= 16
    return replace(found, pixels=pixels)


def changes() -> Augmentation:
    found = augment("flip+crop:1")
    assert found is not None
    return found


def one_step(count: int, backward: Mode, *, anderson: bool = False, **changed: Any) -> dict[str, Tensor]:
    """Return the weights after one step of SGD with a rate of 1, so that they change by minus the gradient."""
    solver = Anderson() if anderson else Picard()
    net = parts_train.plain_network(backward=backward, solver=solver)
    options: dict[str, Any] = {"epochs": 1, "batch_size": count, "optimizer": "sgd", "lr": 1.0, **changed}
    fit(net, images(count), None, parts_train.settings(**options), augment=changes())
    return whole(net.state_dict())


def gradients(rank: int, count: int, folder: Path, modes: list[tuple[Mode, dict[str, Any]]], size: int) -> None:
    """Store the weights after one step in every mode, and the depths that ranks needed for the same batch."""
    found = [one_step(size, mode, **options) for mode, options in modes]
    net = parts_train.plain_network()
    own = images(size).pixels.float().tensor_split(count)[rank]
    depth = net(own, solution=True)[1].steps.max().item()
    torch.save((found, depth), folder / f"gradients-{rank}.pt")


def synchronised(rank: int, count: int, folder: Path) -> None:
    """Store weights and buffers after one step on a GPU that all ranks share, with batch norm in Q and R."""
    net = parts_train.network(tolerance=Tolerance(atol=1e-7, max_steps=60))
    net.S.drop.p = 0.0  # type: ignore[union-attr]
    options: dict[str, Any] = {"epochs": 1, "batch_size": 16, "optimizer": "sgd", "lr": 0.1, "fast": False}
    fit(net, images(16), None, parts_train.settings(device="cuda", **options))
    kinds = {type(module).__name__ for module in net.R.modules()}  # type: ignore[union-attr]
    state = {name: value.cpu() for name, value in net.state_dict().items()}
    torch.save((state, "SyncBatchNorm" in kinds), folder / f"synchronised-{count}-{rank}.pt")


def run_settings(**changed: Any) -> Settings:
    """Everything that a resume must bring back: Adam's moments, averages, a schedule, sums of an epoch."""
    extra: dict[str, Any] = {"ema": 0.9, "clip": 1.0, "schedule": Cosine(), "batch_size": 15, "epochs": 2}
    return parts_train.settings(**{**extra, **changed})


def training(rank: int, count: int, folder: Path, name: str, stop_at: int, changed: dict[str, Any]) -> None:
    """Train or resume a run. At step `stop_at` the last rank alone gets a SIGTERM."""
    net, settings, path = parts_train.plain_network(), run_settings(**changed), folder / name
    ranks = distributed.Ranks.here()
    resumed = path.exists()
    run = Run(ranks.from_first(lambda: (Run.open(path) if resumed else Run.create(path, settings)).path), settings)
    taken = 0

    def on_step(position: Any) -> None:
        nonlocal taken
        taken += 1
        if taken == stop_at and rank == count - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    held = parts_train.images(31, "validation")
    history = fit(net, images(53), held, settings, run=run, on_step=on_step)
    figures = parts_train.figures(history)
    (folder / f"{name}-{count}-{rank}.json").write_text(json.dumps([taken, history.stopped_by, figures]))


class Broken(nn.Module):
    """S, whose output is NaN at one call on the last rank."""

    def __init__(self, S: nn.Module, bad_at: int) -> None:
        super().__init__()
        self.S, self.bad_at, self.calls = S, bad_at, 0

    def forward(self, u: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.S(u)
        return y * torch.nan if self.training and self.calls == self.bad_at else y


def diverging(rank: int, count: int, folder: Path, policy: str, changed: dict[str, Any]) -> None:
    """Train where the loss of the last rank alone becomes NaN in the second step."""
    net, settings = parts_train.plain_network(), run_settings(on_nonfinite=policy, epochs=1, **changed)
    net.S = Broken(net.S, 2 if rank == count - 1 else 0)
    ranks, said = distributed.Ranks.here(), ""
    path = ranks.from_first(lambda: Run.create(folder / policy, settings).path)
    try:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            fit(net, images(53), None, settings, run=Run(path, settings))
    except DivergenceError as error:
        said = str(error)
    torch.save((said, whole(net.state_dict())), folder / f"{policy}-{rank}.pt")


def nested(rank: int, count: int, folder: Path) -> None:
    """Call a network whose R is sharded by itself, inside a sharded network."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, own, said = init_device_mesh("cpu", (count,)), images(12).pixels.float().tensor_split(count)[rank], ""
    modes: list[Mode] = [JFB(), JFB(), Implicit()]
    for reshard, mode in zip((False, True, False), modes, strict=True):
        net = parts_train.plain_network(backward=mode)
        fully_shard(net.R, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(net, mesh=mesh)
        for grad in (False, True):
            try:
                with torch.set_grad_enabled(grad):
                    y = net(own).sum()
                if grad:
                    y.backward()
            except RuntimeError as error:
                said += f"{reshard}, {type(mode).__name__}, {grad}: {error}\n"
    (folder / f"nested-{rank}").write_text(said)


class Synchronised(nn.SyncBatchNorm):
    """Centres by the mean over all ranks, on a CPU too: couples ranks as synchronised batch norm does."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_reduce

        return x - all_reduce(x.mean(0, keepdim=True)) / dist.get_world_size()


def coupled_network() -> ImplicitNetwork:
    net = parts_train.plain_network(Tolerance(atol=1e-8, max_steps=100), coupled=True)
    net.R.inner = nn.Sequential(net.R.inner, Synchronised(12, affine=False, track_running_stats=False))
    return net


def coupled(rank: int, count: int, folder: Path) -> None:
    """Solve and differentiate with an R that waits for all ranks at every evaluation."""
    net, pixels = coupled_network(), images(12).pixels.float().tensor_split(count)[rank]
    distributed.shard(net)  # DDP refuses synchronised batch norm on a CPU
    output, found = distributed.Parallel(net, count, lambda: 12, sharded=True)(pixels, solution=True)
    output.square().mean().backward()
    found_here = whole({name: weight.grad for name, weight in net.named_parameters()})
    torch.save((int(found.steps.max()), output.detach(), found_here), folder / f"coupled-{rank}.pt")


def command(rank: int, count: int, folder: Path, line: list[str], killed_at: int) -> int:
    """Run a command as torchrun does; the last rank kills itself before a step, or its disk is full (-1)."""
    port = (folder / "port").read_text()
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": str(count), "RANK": str(rank), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    take, calls = steps.Stepper.take, iter(range(1, 10**6))

    def taken(self: Any) -> None:
        if next(calls) == killed_at and rank == count - 1:
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        take(self)

    def full(path: Path, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    steps.Stepper.take = taken  # type: ignore[method-assign]
    if killed_at < 0 and rank == count - 1:
        checkpoint.whole_file = full  # type: ignore[assignment]
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / f"{name}-{rank}", os.O_CREAT | os.O_WRONLY), number)
    return main(line)
