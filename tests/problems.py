"""Fixed points known exactly: by dense linear algebra, or chosen first and the map made to fit.

Every function returns a `Problem`: T(z, *inputs), a start, the inputs (one row per sample, so that a batch
can be cut), and the fixed point, or None where there is none. All are seeded, so a test sees the same problem.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from banach.latent import Latent, leaves, leaves_like, select


@dataclass(frozen=True)
class Problem:
    """z = T(z, *inputs). `matrix` is dT/dz, (n, n), where T is affine with one matrix for all samples."""

    name: str
    T: Callable[..., Latent]
    z0: Latent
    inputs: tuple[Latent, ...]
    solution: Latent | None
    matrix: Tensor | None = None

    def closed(self, z: Latent) -> Latent:
        """T as a closure over its inputs."""
        return self.T(z, *self.inputs)

    def samples(self, *index: int) -> "Problem":
        """The same problem for these samples alone."""
        rows = torch.tensor(index)
        solution = None if self.solution is None else select(self.solution, rows)
        return replace(self, z0=select(self.z0, rows), inputs=select(self.inputs, rows), solution=solution)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Normal numbers; the same ones, rounded, in every dtype."""
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed)).to(dtype)


def contraction(n: int, gamma: float, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    """A matrix whose largest singular value is gamma; neither symmetric nor normal."""
    A = normal(n, n, seed=seed)
    return (gamma * A / torch.linalg.matrix_norm(A, 2)).to(dtype)


def orthogonal(n: int, seed: int = 2) -> Tensor:
    return torch.linalg.qr(normal(n, n, seed=seed))[0]


def linear(name: str, A: Tensor, batch: int, dtype: torch.dtype = torch.float64) -> Problem:
    """T(z) = A z + b, whose fixed point is (I - A)^-1 b by a dense solve in float64."""
    b = normal(batch, len(A), dtype=dtype, seed=3)
    A = A.to(dtype)
    eye = torch.eye(len(A), dtype=torch.float64)
    solution = torch.linalg.solve(eye - A.double(), b.double().T).T.to(dtype)
    return Problem(name, lambda z, b: z @ A.T + b, torch.zeros_like(b), (b,), solution, A)


def affine(batch: int = 3, n: int = 8, gamma: float = 0.7, dtype: torch.dtype = torch.float64) -> Problem:
    """A contraction with largest singular value gamma."""
    return linear("affine", contraction(n, gamma), batch, dtype)


def symmetric(batch: int = 4, n: int = 512, top: float = 0.95, dtype: torch.dtype = torch.float64) -> Problem:
    """A symmetric with eigenvalues evenly on [0, top]: where Anderson gains most."""
    V = orthogonal(n)
    return linear("symmetric", V @ torch.diag(torch.linspace(0, top, n, dtype=V.dtype)) @ V.T, batch, dtype)


def rotation(batch: int = 4, n: int = 512, gamma: float = 0.95, dtype: torch.dtype = torch.float64) -> Problem:
    """gamma times an orthogonal matrix, eigenvalues all round the circle: no polynomial in A beats A^k."""
    return linear("rotation", gamma * orthogonal(n), batch, dtype)


def averaged(batch: int = 3, n: int = 6, dtype: torch.dtype = torch.float64) -> Problem:
    """A quarter turn in every plane: gamma = 1, so Picard goes round for ever and only damping converges."""
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    return linear("averaged", torch.block_diag(*[quarter] * (n // 2)), batch, dtype)


def tanh_network(batch: int = 3, n: int = 8, gamma: float = 0.8, dtype: torch.dtype = torch.float64) -> Problem:
    """T(z) = tanh(W z + x): the fixed point is chosen, and x = atanh(u) - W u."""
    W, u = contraction(n, gamma), 0.9 * torch.tanh(normal(batch, n, seed=4))
    x = (torch.atanh(u) - u @ W.T).to(dtype)
    W = W.to(dtype)
    return Problem("tanh", lambda z, x: torch.tanh(z @ W.T + x), torch.zeros_like(x), (x,), u.to(dtype))


def relu_network(batch: int = 3, n: int = 8, gamma: float = 0.8, dtype: torch.dtype = torch.float64) -> Problem:
    """T(z) = relu(W z + x): not smooth, with about half of the units dead at the fixed point."""
    W, before = contraction(n, gamma), normal(batch, n, seed=5)
    u = before.relu()
    x = (before - u @ W.T).to(dtype)
    W = W.to(dtype)
    return Problem("relu", lambda z, x: torch.relu(z @ W.T + x), torch.zeros_like(x), (x,), u.to(dtype))


def convolution(
    batch: int = 3, channels: int = 4, size: int = 5, gamma: float = 0.8, dtype: torch.dtype = torch.float64
) -> Problem:
    """T(z) = tanh(W * z + x), images; |W * z| <= gamma |z| since gamma bounds the sum of the kernel's norms."""
    kernel = normal(channels, channels, 3, 3, seed=6)
    kernel = kernel * gamma / torch.linalg.matrix_norm(kernel, 2, dim=(0, 1)).sum()
    u = 0.9 * torch.tanh(normal(batch, channels, size, size, seed=7))
    x = (torch.atanh(u) - torch.conv2d(u, kernel, padding=1)).to(dtype)
    kernel = kernel.to(dtype)

    def T(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(torch.conv2d(z, kernel, padding=1) + x)

    return Problem("convolution", T, torch.zeros_like(x), (x,), u.to(dtype))


def toy(batch: int = 5, dtype: torch.dtype = torch.float64) -> Problem:
    """The paper's y = d + y^5, latents of shape (batch,): |T'| = 5 y^4 < 1 at every y chosen here."""
    y = torch.linspace(-0.6, 0.6, batch, dtype=torch.float64)
    d = (y - y**5).to(dtype)
    return Problem("toy", lambda y, d: d + y**5, torch.zeros_like(d), (d,), y.to(dtype))


def nested(batch: int = 3, gamma: float = 0.7, dtype: torch.dtype = torch.float64) -> Problem:
    """A dict and a tuple of tensors of several ranks, every entry of which depends on every other."""
    flat = affine(batch, 9, gamma, dtype)

    def pack(rows: Tensor) -> Latent:
        a, b, c = rows.split([4, 4, 1], 1)
        return {"state": (a, b.reshape(len(rows), 2, 2)), "level": c[:, 0]}

    def unpack(z: Latent) -> Tensor:
        a, b = z["state"]
        return torch.cat([a, b.flatten(1), z["level"][:, None]], 1)

    def T(z: Latent, b: Latent) -> Latent:
        return pack(flat.T(unpack(z), unpack(b)))

    inputs = (pack(flat.inputs[0]),)
    return Problem("nested", T, pack(flat.z0), inputs, pack(flat.solution), flat.matrix)  # type: ignore[arg-type]


def turns_nan(
    batch: int = 6,
    n: int = 8,
    bad: tuple[int, ...] = (1, 4),
    near: float = 1e-3,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """`affine`, but T is NaN for the samples in `bad` once they come within `near` (RMS) of the fixed point."""
    base = affine(batch, n, 0.7, dtype)
    assert isinstance(base.solution, Tensor)
    reach = torch.zeros(batch, dtype=dtype)
    reach[list(bad)] = near * math.sqrt(n)

    def T(z: Tensor, b: Tensor, u: Tensor, reach: Tensor) -> Tensor:
        close = torch.linalg.vector_norm(z - u, dim=1) < reach
        return torch.where(close[:, None], torch.nan, base.T(z, b))

    return Problem("turns_nan", T, base.z0, (*base.inputs, base.solution, reach), base.solution, base.matrix)


def translation(batch: int = 3, n: int = 4, dtype: torch.dtype = torch.float64) -> Problem:
    """T(z) = z + x: no fixed point, and a residual that never changes."""
    x = normal(batch, n, dtype=dtype, seed=9)
    return Problem("translation", lambda z, x: z + x, torch.zeros_like(x), (x,), None)


def constant(batch: int = 3, n: int = 4, dtype: torch.dtype = torch.float64) -> Problem:
    """T(z) = x: hit exactly by the first step, and every difference after it is zero."""
    x = normal(batch, n, dtype=dtype, seed=10)
    return Problem("constant", lambda z, x: x.clone(), torch.zeros_like(x), (x,), x)


def mixed_rates(
    batch: int = 16, n: int = 4, low: float = 0.2, high: float = 0.95, dtype: torch.dtype = torch.float64
) -> Problem:
    """T(z) = q z + b with another rate q for every sample: some are done long before the others."""
    rate = torch.linspace(low, high, batch, dtype=dtype)[:, None]
    b = normal(batch, n, dtype=dtype, seed=11)
    return Problem("mixed_rates", lambda z, q, b: q * z + b, torch.zeros_like(b), (rate, b), b / (1 - rate))


def distance(a: Latent, b: Latent) -> float:
    """The largest difference of any two entries, in float64."""
    pairs = zip(leaves(a), leaves_like(a, b, "the solution"), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs if x.numel())
