"""The maps that CPU benchmarks iterate: fixed points with a known contraction, from one fixed seed each."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """T(z, *inputs) from z0. `weights` are what a training step differentiates in."""

    name: str
    T: Callable[..., Tensor]
    z0: Tensor
    inputs: tuple[Tensor, ...] = ()
    weights: list[Tensor] = field(default_factory=list)


class Recorder:
    """T, watched from outside: how many rows it was given, and each sample's residual at each evaluation.

    No solver's own statistics are used. The first evaluation is number 1.
    """

    def __init__(self, T: Callable[..., Tensor]) -> None:
        self.T = T
        self.rows = 0
        self.residuals: list[Tensor] = []

    def __call__(self, z: Tensor, *inputs: Tensor) -> Tensor:
        value = self.T(z, *inputs)
        self.rows += len(z)
        self.residuals.append((value - z).detach().flatten(1).square().mean(1).sqrt())
        return value

    @property
    def evaluations(self) -> int:
        return len(self.residuals)

    def first_below(self, tolerance: float) -> Tensor:
        """(batch,): the evaluation at which each sample first met the tolerance; infinity if it never did."""
        below = torch.stack(self.residuals) <= tolerance
        numbers = torch.arange(1, len(below) + 1, dtype=torch.float64)[:, None]
        return torch.where(below, numbers, math.inf).amin(0)


def symmetric(n: int = 512, batch: int = 16, *, top: float = 0.95) -> Problem:
    """T(z) = A z + b, A symmetric with eigenvalues evenly on [0, top]; float64; one b per sample."""
    Q, b = orthogonal(n, torch.float64), _noise(batch, n, dtype=torch.float64)
    A = (Q * torch.linspace(0.0, top, n, dtype=torch.float64)) @ Q.T
    return Problem("symmetric", lambda z, b: z @ A + b, torch.zeros_like(b), (b,))


def rotation(n: int = 512, batch: int = 16, *, radius: float = 0.95, planes: int | None = None) -> Problem:
    """T(z) = radius * (z turned in n/2 planes) + b, the angles evenly on the half circle; float64.

    With many different angles the eigenvalues fill a circle around 0. No polynomial p with p(1) = 1 is
    smaller on that circle than the power Picard takes, so nothing built from the iterates beats it.
    `planes` many different angles: with few of them Anderson needs few steps.
    """
    planes = n // 2 if planes is None else planes
    angles = (torch.arange(n // 2) % planes + 0.5) * math.pi / planes
    cos, sin = radius * angles.double().cos(), radius * angles.double().sin()
    b = _noise(batch, n, dtype=torch.float64)

    def T(z: Tensor, b: Tensor) -> Tensor:
        x, y = z.chunk(2, 1)
        return torch.cat([cos * x - sin * y, sin * x + cos * y], 1) + b

    return Problem(f"rotation, {planes} angles", T, torch.zeros_like(b), (b,))


def rates(batch: int, n: int, span: tuple[float, float], *, layers: int = 1) -> Problem:
    """T(z, rate, b) = rate * z Q + b, Q orthogonal: sample i contracts by exactly its own rate; float32."""
    factors = [orthogonal(n, seed=layer) for layer in range(layers)]
    rate, b = torch.linspace(*span, batch)[:, None], _noise(batch, n)

    def T(z: Tensor, rate: Tensor, b: Tensor) -> Tensor:
        for Q in factors:
            z = z @ Q
        return torch.addcmul(b, z, rate)

    return Problem(f"rates {span[0]} to {span[1]}", T, torch.zeros_like(b), (rate, b))


def elementwise(batch: int, n: int) -> Problem:
    """T(z) = tanh(w z + x), entry by entry: almost nothing to compute, slopes all different."""
    w, x = torch.linspace(-0.9, 0.9, n).requires_grad_(), 0.1 * _noise(batch, n)
    return Problem("tanh(wz+x)", lambda z, x: torch.tanh(torch.addcmul(x, z, w)), torch.zeros_like(x), (x,), [w])


def dense(batch: int, n: int, *, gamma: float = 0.9) -> Problem:
    """T(z) = tanh(W z + x), W a scaled orthogonal matrix."""
    W, x = (gamma * orthogonal(n)).requires_grad_(), 0.3 * _noise(batch, n)
    return Problem("tanh(Wz+x)", lambda z, x: torch.tanh(torch.addmm(x, z, W)), torch.zeros_like(x), (x,), [W])


def linear(batch: int, n: int, *, gamma: float = 0.9) -> Problem:
    """T(z) = W z + x, W a scaled orthogonal matrix."""
    W, x = (gamma * orthogonal(n)).requires_grad_(), _noise(batch, n)
    return Problem("Wz+x", lambda z, x: torch.addmm(x, z, W), torch.zeros_like(x), (x,), [W])


def two_layers(batch: int, n: int, *, device: str = "cpu") -> Problem:
    """T(z) = tanh(B relu(A z) + x), four times as wide inside, so that T holds more than a latent."""
    A, B = ((0.9 * orthogonal(4 * n)[:, :n]).to(device).requires_grad_() for _ in range(2))
    x = _noise(batch, n).to(device)

    def T(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(torch.addmm(x, torch.relu(z @ A.T), B))

    return Problem("two layers", T, torch.zeros_like(x), (x,), [A, B])


def conv(batch: int, channels: int, side: int, *, gamma: float = 0.9) -> Problem:
    """T(z) = tanh(W * z + x), W a 3 x 3 convolution whose Lipschitz constant is about gamma."""
    W, x = _noise(channels, channels, 3, 3, seed=100), 0.3 * _noise(batch, channels, side, side)
    v = _noise(1, channels, side, side, seed=1)
    for _ in range(30):  # power iteration on W'W, at the true spatial size
        v = torch.nn.functional.conv_transpose2d(torch.nn.functional.conv2d(v, W, padding=1), W, padding=1)
        size = v.norm()
        v = v / size
    W = (gamma * W / size.sqrt()).requires_grad_()

    def T(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(torch.nn.functional.conv2d(z, W, padding=1) + x)

    return Problem("tanh(conv)", T, torch.zeros_like(x), (x,), [W])


def orthogonal(n: int, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Tensor:
    """A random orthogonal matrix, drawn apart from the data."""
    return torch.linalg.qr(_noise(n, n, dtype=torch.float64, seed=100 + seed))[0].to(dtype)


def _noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    # Drawn from a generator of its own, so that no benchmark depends on what ran before it.
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
