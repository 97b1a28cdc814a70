"""`python -m benchmarks.gpu_kernels [--quick]`: the fused kernels, each against float64, then against cuDNN.

The lines that say most come first, and what fails is said and left out. `--quick` runs the plain twins on a CPU at
tiny sizes: it measures nothing, and shows that the program runs to its end.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.kernels import Plain, repeated_stack, residual_stack
from banach.kernels.compare import compare, distance
from banach.kernels.operations import Operations
from banach.kernels.tiles import CONVOLUTIONS, WEIGHTS, Tile, Tiles
from banach.models.cifar10 import CHANNELS, Block
from banach.provenance import provenance, write_json
from benchmarks.kernel_bench import LAYOUT, Bench, Call

DROPOUT = 0.15


def correctness(bench: Bench) -> None:
    """Relative errors of all kernels against float64, at a batch of at most 64."""
    side = bench.sides[0]
    errors: dict[str, float] = {}
    bench.line("compared", lambda: errors.update(_compare(bench, side)) or {"operations": len(errors)})
    for name, error in errors.items():
        bench.line(f"{'ok' if error < 1e-2 else 'WRONG'}  {name}", lambda value: {"error": value}, error)


def _compare(bench: Bench, side: int) -> dict[str, float]:
    return compare(bench.operations(), LAYOUT, (min(64, bench.batch), side, side), bench.device)


def bodies(bench: Bench) -> None:
    """The two stages of Q and R as stacks, and what they add up to in a training step."""
    counts = (bench.blocks, bench.blocks, 5)
    first, second, last = (stack(bench, *of) for of in zip(bench.sides, counts, strict=True))
    if first and second and last:
        body = first["both ms"] + second["both ms"] + last["both ms"] + 10 * last["ms"]
        bench.line("body of a step, 10 evaluations of R and one with gradient", lambda: {"ms": body})


def stack(bench: Bench, side: int, count: int) -> dict[str, float]:
    """A stack of blocks, forward and with its backward pass."""
    dropout = DROPOUT if side != bench.sides[-1] else 0.0
    blocks = nn.Sequential(*(Block(dropout=dropout) for _ in range(count))).to(bench.device)
    of = blocks, bench.images(side), bench.operations()
    name, pixels = f"stack of {count}, {side}x{side}", bench.batch * side * side
    flops, moved = 2 * 9 * CHANNELS**2 * pixels * 2 * count, 2 * LAYOUT.pitch * pixels * count
    # R is evaluated many times with the same weights.
    once = (lambda x: _without(blocks, x, of[2])) if dropout else repeated_stack(blocks, of[1], operations=of[2])
    forward = bench.line(f"{name}, forward", bench.rates, [lambda: once(of[1])], flops, 5 * moved)
    both = bench.line(f"{name}, both ways", bench.rates, [lambda: _with(*of)], 3 * flops, 19 * moved)
    return {"ms": forward["ms"], "both ms": both["ms"]} if forward and both else {}


def _without(blocks: nn.Sequential, x: Tensor, ops: Operations) -> Tensor:
    with torch.no_grad():
        return residual_stack(blocks, x, operations=ops)


def _with(blocks: nn.Sequential, x: Tensor, ops: Operations) -> object:
    leaf = x.detach().requires_grad_()
    out = residual_stack(blocks, leaf, operations=ops)
    return torch.autograd.grad(out, [leaf, *blocks.parameters()], x)


def candidates(bench: Bench, sides: Sequence[int]) -> None:
    """Each tile at each size: the convolutions with all that is fused to them, and a gradient of weights."""
    for side in sides:
        for tile in CONVOLUTIONS:
            operation(bench, side, "join", tile)
        for tile in WEIGHTS:
            operation(bench, side, "weights", tile)
        for name in ("hidden", "gate", "add", "unnormalise"):
            operation(bench, side, name, None)


def operation(bench: Bench, side: int, name: str, tile: Tile | None) -> None:
    """One operation, with a tile of its own or with the ones in use."""
    title = f"{side}x{side} {name}" + ("" if tile is None else f", {tile}")
    uses = ("weights",) if name == "weights" else ("convolution", "small")
    ops = bench.operations(Tiles() if tile is None else Tiles().but(**dict.fromkeys(uses, tile)))
    bench.line(title, _measured, bench, ops, side, name)


# How many whole tensors an operation reads and writes.
TENSORS = {"hidden": 2, "join": 3, "gate": 3, "add": 4, "weights": 2, "unnormalise": 3}


def _measured(bench: Bench, ops: Operations, side: int, name: str) -> dict[str, float]:
    """Time, rates, and the difference from the plain twin on the same input."""
    pixels = bench.batch * side * side
    calls = [_call(bench, ops, side, name) for _ in range(bench.copies(side))]
    rates = bench.rates(calls, 2 * 9 * CHANNELS**2 * pixels, TENSORS[name] * 2 * LAYOUT.pitch * pixels)
    results = []
    for way in (ops, Plain(LAYOUT, torch.bfloat16)):
        torch.manual_seed(1)
        result = _call(bench, way, side, name)()
        results.append(result[0] if isinstance(result, tuple) else result)
    return rates | {"error": distance(*results)}


def _call(bench: Bench, ops: Operations, side: int, name: str) -> Callable[[], Tensor | tuple[Tensor, Tensor]]:
    """One operation on tensors of its own."""
    x, y, z = (ops.enter(bench.images(side)) for _ in range(3))
    w = torch.randn(1, CHANNELS, CHANNELS, 3, 3, device=bench.device) * 0.05
    stats = LAYOUT.wide(torch.ones(1, 3, CHANNELS, device=bench.device))
    packed, stat = ops.fold(w, w[:, 0, :, 0, 0].contiguous(), stats)[0], stats[0]
    mask = ops.masks(torch.rand(1, bench.batch, CHANNELS, device=bench.device) > DROPOUT)[0]
    sums = ops.enter_gradient(bench.images(side), y)[1]
    calls: dict[str, Callable[[], Tensor | tuple[Tensor, Tensor]]] = {
        "hidden": lambda: ops.hidden(x, packed, mask),
        "join": lambda: ops.join(x, packed, y, stat, True),
        "gate": lambda: ops.gate(x, packed, y, True),
        "add": lambda: ops.add(x, packed, y, z),
        "weights": lambda: ops.weights(x, y, stat),
        "unnormalise": lambda: ops.unnormalise(x, y, stat, sums, x.shape[:3].numel()),
    }
    return calls[name]


def rivals(bench: Bench) -> None:
    """cuDNN's three convolutions at several widths, and the stack in eager modules padded to 64 channels."""
    for channels in (64, 48, 40, 35):
        for side in bench.sides[:2]:
            bench.line(f"cuDNN, {channels} channels, {side}x{side}", _cudnn, bench, side, channels)
    side, count = bench.sides[0], bench.blocks
    title = f"eager, {count} blocks padded to 64, {side}x{side}, both ways"
    bench.line(title, lambda: {"ms": bench.milliseconds([_padded(bench, side, count)], repeats=5)})


def _cudnn(bench: Bench, side: int, channels: int) -> dict[str, float]:
    w = torch.randn(channels, channels, 3, 3, device=bench.device).bfloat16()
    w = w.contiguous(memory_format=torch.channels_last)
    sets = [(bench.images(side, channels), bench.images(side, channels)) for _ in range(bench.copies(side))]

    def back(g: Tensor, x: Tensor, which: list[bool]) -> Call:
        one, nothing = [1, 1], [0, 0]
        return lambda: torch.ops.aten.convolution_backward(g, x, w, None, one, one, one, False, nothing, 1, which)

    return {
        "forward ms": bench.milliseconds([lambda x=x: F.conv2d(x, w, padding=1) for x, _ in sets]),  # type: ignore[misc]
        "input ms": bench.milliseconds([back(g, x, [True, False, False]) for x, g in sets]),
        "weights ms": bench.milliseconds([back(g, x, [False, True, False]) for x, g in sets]),
    }


def _padded(bench: Bench, side: int, count: int) -> Call:
    """The same blocks with 64 channels throughout, bf16, channels_last, as a user would write them."""
    x = bench.images(side, 64).requires_grad_()
    shapes = [((64, 64, 3, 3), (64,)) for _ in range(2 * count)]
    pairs = [[(0.05 * torch.randn(s, device=bench.device)).requires_grad_() for s in pair] for pair in shapes]

    def run() -> object:
        y = x
        with torch.autocast(bench.device.type, dtype=torch.bfloat16):
            for (w1, b1), (w2, b2) in zip(pairs[::2], pairs[1::2], strict=True):
                hidden = F.dropout2d(F.leaky_relu(F.conv2d(y, w1, b1, padding=1), 0.1), DROPOUT)
                joined = F.leaky_relu(y + F.conv2d(hidden, w2, b2, padding=1), 0.1)
                y = F.batch_norm(joined, None, None, training=True)
        return torch.autograd.grad(y, [x, *(p for pair in pairs for p in pair)], x.detach())

    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; the exit status is 1 if a kernel was wrong or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes on a CPU: measures nothing")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "results/gpu")))
    chosen = parser.parse_args(arguments)
    if not chosen.quick and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; give --quick to see the program run")
    bench = Bench(torch.device("cpu"), 2, (4, 3, 2), 2) if chosen.quick else Bench(torch.device("cuda"))
    torch.backends.cudnn.benchmark = not chosen.quick
    source = provenance({"batch": bench.batch, "blocks": bench.blocks}, device=bench.device)
    torch.manual_seed(0)
    parts: list[Call] = [
        lambda: correctness(bench),
        lambda: bodies(bench),
        lambda: candidates(bench, bench.sides[:1]),
        lambda: rivals(bench),
        lambda: candidates(bench, bench.sides[1:]),
    ]
    for part in parts:
        part()
        write_json(chosen.out / "kernels.json", {"provenance": source, "found": bench.found})
    bad = [name for name, of in bench.found.items() if "failed" in of or not of.get("error", 0.0) < 1e-2]
    print(
        f"{len(bad)} wrong or failed: {', '.join(bad) or 'none'}; written to {chosen.out}/kernels.json", flush=True
    )
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
