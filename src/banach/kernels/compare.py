"""Every operation of a block on random input, against the same one in float64: relative errors by name."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from banach.kernels.layout import Layout
from banach.kernels.operations import Operations
from banach.kernels.plain import Plain


def distance(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted|. A NaN stays one."""
    wanted = wanted.double()
    return float((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-300))


def compare(
    operations: Operations, layout: Layout, shape: tuple[int, int, int], device: torch.device | str, seed: int = 0
) -> dict[str, float]:
    """Each operation gets the same input in both ways, so errors do not add up. shape: images, rows, columns."""
    source = torch.Generator("cpu").manual_seed(seed)
    return dict(_errors(operations, layout, _Inputs(layout, shape, torch.device(device), source)))


class _Inputs:
    """Random values as a network has them: weights as torch begins with, a mean that is not zero."""

    def __init__(self, layout: Layout, shape: tuple[int, int, int], device: torch.device, source: torch.Generator):
        N, H, W = shape
        C = layout.channels
        bound = (9 * C) ** -0.5

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=source).to(device)

        self.x, self.g, self.s, self.y = (normal(N, C, H, W) for _ in range(4))
        self.w = (torch.rand(2, C, C, 3, 3, generator=source) * 2 - 1).to(device) * bound
        self.b = (torch.rand(2, C, generator=source) * 2 - 1).to(device) * bound
        self.kept = (torch.rand(1, N, C, generator=source) > 0.15).to(device)
        variance = torch.rand(2, C, generator=source).to(device) + 0.5
        self.stats = layout.wide(torch.stack([0.3 * normal(2, C), variance.rsqrt(), variance], 1))
        self.count = N * H * W


def _errors(ops: Operations, layout: Layout, of: _Inputs) -> Iterator[tuple[str, float]]:
    exact, C = Plain(layout, torch.float64), layout.channels
    stats, wide = of.stats, of.stats.double()
    x = ops.enter(of.x)
    yield "enter", distance(x, exact.enter(of.x.double()))
    y, h = ops.enter(of.y), ops.hidden(x, ops.fold(of.w, of.b, stats)[0], ops.masks(of.kept)[0])
    g, sums = ops.enter_gradient(of.g, y)
    s, _ = ops.enter_gradient(of.s, y)
    X, Y, H, G, S = (value.double() for value in (x, y, h, g, s))
    yield "sums of a gradient", distance(sums.sum(0)[:, :C], exact.enter_gradient(of.g.double(), Y)[1][0, :, :C])
    packed, turned = ops.fold(of.w, of.b, stats), ops.turn(of.w)
    yield "fold", distance(packed, exact.fold(of.w.double(), of.b.double(), wide))
    yield "turn", distance(turned, exact.turn(of.w.double()))
    first, second, back = packed[0].double(), packed[1].double(), turned[0].double()
    kept = exact.masks(of.kept)[0]
    yield "hidden, dropped", distance(h, exact.hidden(X, first, kept))
    yield "hidden", distance(ops.hidden(x, packed[0], None), exact.hidden(X, first, None))
    out, sums = ops.join(h, packed[1], x, stats[0], True)
    wanted, total = exact.join(H, second, X, wide[0], True)
    yield "join", distance(out, wanted)
    yield "sums of y and y^2", distance(sums.sum(0)[:, :C], total[0, :, :C])
    measured, correct = torch.empty_like(stats[0]), torch.empty_like(wide[0])
    ops.measure(sums, of.count, 1e-5, measured)
    exact.measure(total, of.count, 1e-5, correct)
    yield "measure", distance(measured[:, :C], correct[:, :C])
    following = torch.zeros_like(packed[0])
    ops.measure_and_fold(sums, of.count, 1e-5, measured, (of.w[0], of.b[0]), following)
    yield "measure and fold", distance(following, exact.fold(of.w.double(), of.b.double(), correct[None])[0])
    _, sums = ops.enter_gradient(of.g, y)
    got = ops.unnormalise(g, y, stats[0], sums, of.count)
    yield "unnormalise", distance(got, exact.unnormalise(G, Y, wide[0], sums.double(), of.count))
    yield "gate, dropped", distance(ops.gate(g, turned[0], h, True), exact.gate(G, back, H, True))
    yield "gate", distance(ops.gate(g, turned[0], x, False), exact.gate(G, back, X, False))
    out, sums = ops.add(g, turned[0], s, y)
    wanted, total = exact.add(G, back, S, Y)
    yield "add", distance(out, wanted)
    yield "sums of what was added", distance(sums.sum(0)[:, :C], total[0, :, :C])
    for name, got, wanted in zip(
        ("weights", "bias"), ops.weights(x, g, stats[0]), exact.weights(X, G, wide[0]), strict=True
    ):
        yield f"gradient of {name}", distance(got, wanted)
    yield (
        "gradient of weights, channels last",
        distance(ops.weights(x, g, stats[0], channels_last=True)[0], exact.weights(X, G, wide[0])[0]),
    )
    yield "leave", distance(ops.leave(y, stats[0], torch.float32), exact.leave(Y, wide[0], torch.float64))
