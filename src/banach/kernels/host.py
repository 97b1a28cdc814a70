"""What the host code of the kernels shares: known blocks as tensors, constants of a launch, a second stream."""

import functools
import importlib.metadata
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Result = TypeVar("Result")
LAG = 4  # pieces of work in flight on the second stream: the tensors that they read stay allocated


@functools.cache
def lacks(device: torch.device) -> str:
    """Return what a GPU lacks for the kernels, "" if nothing. They ran on an H200, and compile for others."""
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (9, 0)
    if torch.version.hip or capability < (8, 0):  # older ones have less shared memory and no bf16
        return "an NVIDIA GPU of compute capability 8.0"
    least = (3, 8) if capability[0] == 10 else (3, 4)  # Triton 3.7 cannot compile `latent_solve` for a B200
    return "" if has_triton(least) else f"Triton {least[0]}.{least[1]}"


@functools.cache
def has_triton(least: tuple[int, int] = (3, 4)) -> bool:
    """Return True if this Triton or a later one is installed; from 3.4 on kernels can read a record's fields."""
    try:
        version = importlib.metadata.version("triton").split(".")
    except importlib.metadata.PackageNotFoundError:
        return False
    return (int(version[0]), int(version[1])) >= least


@functools.cache
def constants(record: Any) -> Any:
    """Return a frozen dataclass of sizes with its fields as `tl.constexpr`, for a kernel's argument K."""
    from triton.language import constexpr

    return replace(record, **{field.name: constexpr(getattr(record, field.name)) for field in fields(record)})


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use; those of an H200 where there is no GPU."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return properties.shared_memory_per_block_optin if properties else 227 * 1024


def ceil_div(whole: int, part: int) -> int:
    """Return whole / part, rounded up."""
    return -(-whole // part)


def power_of_two(least: int) -> int:
    """Return the least power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


def pixel_rows(x: Tensor) -> Tensor:
    """Return images as (N, H, W, C), contiguous. No copy if x is channels_last."""
    return x.detach().permute(0, 2, 3, 1).contiguous()


def padded(values: Tensor, columns: int) -> Tensor:
    """Return float32 numbers per channel, with zeros up to `columns` channels."""
    missing = columns - values.shape[-1]
    return (F.pad(values, (0, missing)) if missing else values).float().contiguous()


def declares(part: Any, name: str) -> bool:
    """Return True if the class that defines `forward` also defines attribute `name`, or the instance has it."""
    if "forward" in vars(part):
        return False
    owners = [next((c for c in type(part).__mro__ if word in vars(c)), None) for word in ("forward", name)]
    return name in vars(part) or (owners[1] is not None and owners[0] is owners[1])


def are_known(blocks: Sequence[Any], most: int) -> bool:
    """Return True if a kernel for at most `most` channels computes these blocks, all in one mode.

    conv1 and conv2 must be 3x3 convolutions with bias and padding 1, norm a BatchNorm2d without weights.
    """
    norms: list[Any] = [getattr(block, "norm", None) for block in blocks]
    if not all(type(norm) is nn.BatchNorm2d and not norm.affine and norm.track_running_stats for norm in norms):
        return False
    modes = {(norm.training, norm.eps, norm.momentum) for norm in norms}
    layers = [layer for block in blocks for layer in (block.conv1, block.conv2)]
    one_mode = len(modes) == 1 and None not in modes.pop()
    return one_mode and all(_is_plain(layer, layers[0].in_channels, most) for layer in layers)


def _is_plain(layer: Any, channels: int, most: int) -> bool:
    if type(layer) is not nn.Conv2d or layer.bias is None:
        return False
    shape = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode)
    plain = shape == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros")
    return plain and layer.in_channels == layer.out_channels == channels <= most


def gather(parameters: Sequence[Tensor]) -> Tensor:
    """Stack parameters into one contiguous tensor, in at least float32, without a gradient."""
    together = torch.stack([parameter.detach() for parameter in parameters])
    return together.to(torch.promote_types(together.dtype, torch.float32)).contiguous()


def running_statistics(blocks: Sequence[Any]) -> Tensor | None:
    """Return mean, 1 / deviation and variance of all norms, (3, blocks, C); None in train mode."""
    if blocks[0].norm.training:
        return None
    mean = torch.stack([block.norm.running_mean for block in blocks])
    variance = torch.stack([block.norm.running_var for block in blocks])
    return torch.stack([mean, (variance + blocks[0].norm.eps).rsqrt(), variance])


class SideStream:
    """Run weight-gradient kernels on a second CUDA stream, in parallel with the main chain. On a CPU: at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream = _second_stream(torch.cuda.current_stream(device)) if device.type == "cuda" else None
        self._in_flight: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def run(self, work: Callable[..., Result], *reads: Tensor) -> Result:
        """Start work(*reads). Use what it returns after `join` only."""
        if self.stream is None:
            return work(*reads)
        main = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            made = work(*reads)
            done = torch.cuda.Event()
            done.record(self.stream)
        self._in_flight.append((done, reads))  # keeps `reads` from being freed and overwritten
        while len(self._in_flight) > LAG:
            main.wait_event(self._in_flight.popleft()[0])
        return made

    def join(self) -> None:
        """Wait for all work. Without any, a wait would be an error during a capture, so there is none."""
        if self.stream is not None and self._in_flight:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        self._in_flight.clear()


@functools.cache  # for each stream another one, so that two of them do not wait for each other
def _second_stream(main: torch.cuda.Stream) -> torch.cuda.Stream:
    return torch.cuda.Stream(main.device)
