"""Training on several ranks, the processes that torchrun starts: DDP, FSDP2, and what the ranks agree on."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from banach.backward import Implicit
from banach.data.images import own_part
from banach.latent import Space
from banach.network import ImplicitNetwork
from banach.nn.layers import modules_of
from banach.solve import Picard
from banach.solve.context import assigned
from banach.solve.tolerance import Norm
from banach.train.metrics import MetricSums
from banach.train.run import RunError
from banach.train.settings import Settings

Value = TypeVar("Value")
_LOST = ("gloo", "nccl", "connection", "socket", "timed out", "process group", "broken pipe")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train one network, by default the only one. The first one writes files."""

    rank: int = 0
    count: int = 1

    @staticmethod
    def here() -> "Ranks":
        """Return the ranks of the process group; refuse processes without one, which would all train the same."""
        if dist.is_available() and dist.is_initialized():
            return Ranks(dist.get_rank(), dist.get_world_size())
        if (count := _started()) > 1:
            advice = "call torch.distributed.init_process_group() before fit"
            raise RunError(f"torchrun started {count} processes, but there is no process group; {advice}")
        return Ranks()

    @property
    def first(self) -> bool:
        return self.rank == 0

    def check(self, net: Any, images: int, settings: Settings) -> None:
        """Refuse what several ranks cannot train, by a ValueError."""
        if self.count == 1:
            return
        if settings.tune:  # each rank would choose its own step size
            raise ValueError(f"tune needs one process, got {self.count} ranks; pass --no-tune")
        if "cpu:" not in dist.get_backend_config():
            raise ValueError('ranks agree on the CPU: call init_process_group("cpu:gloo,cuda:nccl")')
        count, accumulate = self.count, settings.accumulate
        for size in {min(settings.batch_size, images), images % settings.batch_size or settings.batch_size}:
            # Every rank needs a part, and `accumulate` must cut all parts alike.
            parts = [torch.empty(size)[own_part(size, rank, count)] for rank in range(count)]
            if not all(map(len, parts)) or len({len(part.chunk(accumulate)) for part in parts}) > 1:
                who = f"{count} ranks" + (f" that accumulate {accumulate}" if accumulate > 1 else "")
                text = f"a batch of {size} images cannot be cut into parts for {who}"
                raise ValueError(f"{text}; choose another --batch-size or --subset, or start fewer processes")
        synchronised = _has_in_R(net, _BatchNorm if settings.torch_device.type == "cuda" else nn.SyncBatchNorm)
        if synchronised and (type(net.solver) is not Picard or isinstance(net.backward, Implicit)):
            # Some ranks would evaluate R another number of times.
            needs = "batch norm in R is synchronised between ranks: it needs picard and a mode other than implicit"
            raise ValueError(f"{needs}, got {net.solver} and {net.backward}; choose those, or --no-batch-norm")

    def prepare(self, net: nn.Module, settings: Settings) -> None:
        """Synchronise batch norm and shard the weights, in place."""
        if self.count == 1:
            return
        if settings.torch_device.type == "cuda":
            nn.SyncBatchNorm.convert_sync_batchnorm(net)
        elif self.first and any(isinstance(module, _BatchNorm) for module in net.modules()):
            text = "batch norm uses the statistics of each rank's part of a batch: PyTorch synchronises them"
            warnings.warn(f"{text} on GPUs only; for those of the whole batch use one process", stacklevel=3)
        if settings.sharded:
            shard(net)

    def agree(self, signals: list[int]) -> int:
        """Return a signal that some rank has received, 0 if none has; raise at once if a rank has ended."""
        own = signals[0] if signals else 0
        return own if self.count == 1 else int(_reduced(torch.tensor(own), dist.ReduceOp.MAX))

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of each value on any rank; infinity for NaN, which a maximum may lose."""
        if self.count == 1:
            return values
        return _reduced(torch.nan_to_num(values, nan=torch.inf, posinf=torch.inf), dist.ReduceOp.MAX)

    def from_first(self, make: Callable[[], Value]) -> Value:
        """Return make() of the first rank, on all of them."""
        if self.count == 1:
            return make()
        made = [make() if self.first else None]
        dist.broadcast_object_list(made)
        return made[0]  # type: ignore[return-value]

    def add(self, metrics: MetricSums) -> None:
        """Replace the sums of each rank by those of all."""
        if self.count > 1:
            _reduced(metrics.sums)
            _reduced(metrics.most, dist.ReduceOp.MAX)

    def pool(self, state: Any) -> None:
        """Replace the sums of each rank by those of all, and buffers by those of the first rank."""
        if self.count > 1:
            self.add(state.metrics)
            _reduced(state.counted)
            for buffer in state.net.buffers():
                dist.broadcast(buffer, 0)

    def go_on(self, state: Any) -> None:
        """After `pool`, in the middle of an epoch: the first rank keeps the sums, others start at zero."""
        if not self.first:
            state.metrics.reset()
            state.counted.zero_()


class Parallel:
    """The network as one rank calls it in a training step: inside DDP, or sharded.

    If batch norm in R is synchronised, every evaluation of R waits for all ranks, so the stopping test is over all
    ranks too. `total()` is the number of samples of the batch, on all `count` ranks.
    """

    def __init__(self, net: Any, count: int, total: Callable[[], int], *, sharded: bool) -> None:
        self.net, self.count, self.total = net, count, total
        self.coupled = _has_in_R(net, nn.SyncBatchNorm)
        self.call = net if sharded else nn.parallel.DistributedDataParallel(net)

    def __call__(self, *d: Any, **options: Any) -> Any:
        if not self.coupled:
            return self.call(*d, **options)
        own = self.net.tolerance
        with assigned([(self.net, "tolerance", replace(own, norm=LargestOnRanks(own.norm)))]):
            return self.call(*d, **options)

    def weight(self, own: int) -> float:
        """Return the weight of the mean loss of this rank's samples: DDP and FSDP2 average over ranks."""
        return own * self.count / self.total()


@dataclass(frozen=True)
class LargestOnRanks:
    """The largest norm on any rank, so that coupled solves on all ranks end after the same step."""

    norm: Norm

    def measure(self, rows: Tensor, space: Space) -> Tensor:
        return Ranks.here().largest(self.norm.scale(space) * self.norm.measure(rows, space))

    def scale(self, space: Space) -> float:
        return 1.0


@contextmanager
def joined(settings: Settings) -> Iterator[Ranks]:
    """Join the processes that torchrun started, if any, in the block; if another rank ends, raise a RunError."""
    if dist.is_initialized() or _started() == 1:
        yield Ranks.here()
        return
    backend = "gloo"
    if settings.torch_device.type == "cuda":
        own, here = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if settings.torch_device.index is not None or own >= here:
            text = f"every rank needs its own GPU, got {here} GPUs and --device {settings.device}"
            raise ValueError(f"{text}; write --device cuda, with --nproc-per-node {here} at most")
        torch.cuda.set_device(own)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    ranks = Ranks.here()
    try:
        yield ranks
        ranks.agree([])  # a barrier: no rank leaves while another one needs it
    except RuntimeError as error:
        said = " ".join(str(error).split())
        from_torch = type(error) is RuntimeError or isinstance(error, dist.DistError)
        if not from_torch or not any(word in said.lower() for word in _LOST):
            raise
        text = f"rank {ranks.rank} of {ranks.count} stopped, because another rank has ended"
        raise RunError(f"{text}; resume the run from its last checkpoint ({said[:200]})") from error
    dist.destroy_process_group()


def shard(net: nn.Module) -> None:
    """Shard weights, gradients and optimizer state over all ranks by FSDP2, in place.

    Weights of R are gathered once per pass, not at every evaluation, and so must fit on one device: a solve then
    waits for no other rank, whatever their depths are.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for weight in net.parameters():
        weight.data = weight.data.contiguous()  # FSDP2 does not take channels_last
    mesh = init_device_mesh(next(net.parameters()).device.type, (dist.get_world_size(),))
    for part in (net.Q, net.S) if isinstance(net, ImplicitNetwork) else ():
        if isinstance(part, nn.Module) and any(True for _ in part.parameters()):
            fully_shard(part, mesh=mesh)
    fully_shard(net, mesh=mesh, reshard_after_forward=False)


def placed(tensors: Mapping[str, Tensor], likes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, sharded like those of the state; all ranks call this together."""
    found = dict(tensors)
    for name in sorted(tensors):  # each one is a collective, and a file may be read in another order on every rank
        like: Any = likes.get(name)
        if hasattr(like, "placements") and tensors[name].shape == like.shape:
            from torch.distributed.tensor import distribute_tensor

            found[name] = distribute_tensor(tensors[name].to(like.device), like.device_mesh, like.placements)
    return found


def _reduced(value: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce a tensor over all ranks in place."""
    dist.all_reduce(value, operation)
    return value


def _has_in_R(net: Any, kind: type[nn.Module]) -> bool:
    return isinstance(net, ImplicitNetwork) and any(isinstance(module, kind) for module in modules_of(net.R))


def _started() -> int:
    """Return how many processes torchrun started, 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if dist.is_torchelastic_launched() else 1
