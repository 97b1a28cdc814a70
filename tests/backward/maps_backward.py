"""Maps whose fixed point, Jacobian and parameter derivative are computed densely, by torch.func.jacrev.

A `Case` is T(z, *inputs) with every tensor that should get a gradient (closed over, or an input). The dense
matrices treat the whole batch as one vector, so a map that mixes samples needs no other formula.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from banach.latent import Latent, leaves, leaves_like, rebuild
from problems import contraction, normal

# build(*theta) gives T and its inputs; so T can be rebuilt from other values, or from traced ones.
Build = Callable[..., tuple[Callable[..., Latent], tuple[Any, ...]]]


@dataclass(frozen=True)
class Case:
    name: str
    build: Build
    theta: tuple[Tensor, ...]
    z_star: Latent
    coupled: bool = False

    def fresh(self) -> tuple[Tensor, ...]:
        """theta as new leaves that want a gradient."""
        return tuple(t.detach().clone().requires_grad_() for t in self.theta)

    def evaluate(self, z: Latent, *theta: Tensor) -> Latent:
        T, inputs = self.build(*theta)
        return T(z, *inputs)

    def flat(self, z: Tensor, *theta: Tensor) -> Tensor:
        """T on the whole batch as one vector."""
        parts = z.split([leaf.numel() for leaf in leaves(self.z_star)])
        nest = rebuild(self.z_star, [p.view_as(a) for p, a in zip(parts, leaves(self.z_star), strict=True)])
        return self.vector(self.evaluate(nest, *theta))

    def vector(self, nest: Latent) -> Tensor:
        return torch.cat([leaf.reshape(-1) for leaf in leaves_like(self.z_star, nest, "T")])

    def dense(self, z: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """J = dT/dz and P = dT/dtheta at z (the fixed point by default), as matrices."""
        z = self.vector(self.z_star) if z is None else z
        J = torch.func.jacrev(self.flat)(z, *self.theta)
        which = tuple(range(1, 1 + len(self.theta)))
        P = torch.func.jacrev(self.flat, argnums=which)(z, *self.theta)
        return J, torch.cat([block.reshape(len(z), -1) for block in P], 1)

    def cotangent(self, seed: int = 40) -> Tensor:
        return normal(len(self.vector(self.z_star)), seed=seed)


def case(name: str, build: Build, theta: tuple[Tensor, ...], z0: Latent, coupled: bool = False) -> Case:
    """The case at its fixed point, found by a plain loop of our own, to rounding."""
    start = Case(name, build, theta, z0, coupled)
    with torch.no_grad():
        for _ in range(400):
            z0 = start.evaluate(z0, *theta)
    parts = [leaf.clone() for leaf in leaves_like(start.z_star, z0, "T")]
    found = Case(name, build, theta, rebuild(start.z_star, parts), coupled)
    z = found.vector(found.z_star)
    assert float((found.flat(z, *theta) - z).abs().max()) < 1e-14
    return found


def layer(batch: int = 3, n: int = 5, gamma: float = 0.7) -> Case:
    """tanh(W z + x + b): W and b are closed over, x is an input."""

    def build(W: Tensor, b: Tensor, x: Tensor) -> Any:
        return lambda z, x: torch.tanh(z @ W.T + x + b), (x,)

    theta = (contraction(n, gamma), normal(n, seed=20), normal(batch, n, seed=21))
    return case("layer", build, theta, torch.zeros(batch, n, dtype=torch.float64))


def closure(batch: int = 3, n: int = 5) -> Case:
    """T closes over tensors that are not leaves, and over the data."""

    def build(A: Tensor, s: Tensor, x: Tensor) -> Any:
        W, y = s.sigmoid() * (A - A.T), torch.sin(x)
        return lambda z: torch.tanh(z @ W.T) + y, ()

    theta = (contraction(n, 0.5), normal(1, seed=22), normal(batch, n, seed=23))
    return case("closure of non-leaves", build, theta, torch.zeros(batch, n, dtype=torch.float64))


def images(batch: int = 2) -> Case:
    """A convolution, channels_last in memory."""

    def build(K: Tensor, x: Tensor) -> Any:
        return lambda z, x: torch.tanh(torch.conv2d(z, K, padding=1) + x), (x,)

    kernel = normal(2, 2, 3, 3, seed=24)
    kernel = 0.8 * kernel / torch.linalg.matrix_norm(kernel, 2, dim=(0, 1)).sum()
    x = normal(batch, 2, 3, 3, seed=25)
    z0 = torch.zeros_like(x).to(memory_format=torch.channels_last)
    return case("images", build, (kernel, x), z0)


def nested(batch: int = 3) -> Case:
    """A dict holding a tuple. T returns the keys in another order, and "b" depends on no parameter."""

    def build(W: Tensor, x: Tensor) -> Any:
        def T(z: Latent, x: Tensor) -> Latent:
            (u, v), b = z["a"], z["b"]
            joined = torch.cat([u, v.flatten(1), b[:, None]], 1)
            new = torch.tanh(joined @ W.T + x)
            return {"b": 0.5 * torch.sin(u.sum(1)), "a": (new[:, :2], new[:, 2:].view_as(v))}

        return T, (x,)

    zeros = torch.zeros(batch, 7, dtype=torch.float64)
    z0 = {"a": (zeros[:, :2], zeros[:, 2:6].view(batch, 2, 2)), "b": zeros[:, 6]}
    return case("nested", build, (contraction(7, 0.5)[:6], normal(batch, 6, seed=26)), z0)


def curvature(batch: int = 2, n: int = 2) -> Case:
    """T holds a Hessian by torch.func: a transform of its own, in which another one is."""

    def build(b: Tensor, x: Tensor) -> Any:
        def energy(z: Tensor) -> Tensor:
            return torch.cos(z + b).sum() ** 2

        hessian = torch.func.vmap(torch.func.jacrev(torch.func.grad(energy)))
        return lambda z, x: 0.1 * hessian(z).sin().sum(2) + x, (x,)

    theta = normal(n, seed=30), normal(batch, n, seed=31)
    return case("curvature", build, theta, torch.zeros(batch, n, dtype=torch.float64))


def batch_norm(batch: int = 4, n: int = 3) -> Case:
    """Train-mode batch norm: every sample depends on every other."""

    def build(W: Tensor, weight: Tensor, x: Tensor) -> Any:
        def T(z: Tensor, x: Tensor) -> Tensor:
            y = torch.nn.functional.batch_norm(z @ W.T + x, None, None, weight=weight, training=True)
            return 0.5 * torch.tanh(y)

        return T, (x,)

    theta = (contraction(n, 0.6), 1 + 0.1 * normal(n, seed=27), normal(batch, n, seed=28))
    return case("batch norm", build, theta, torch.zeros(batch, n, dtype=torch.float64), coupled=True)


def _cosine(name: str, d: Tensor) -> Case:
    def build(a: Tensor, d: Tensor) -> Any:
        return lambda z, d: 0.5 * torch.cos(a * z) + d, (d,)

    return case(name, build, (torch.tensor(0.7, dtype=torch.float64), d), torch.zeros_like(d))


def scalar() -> Case:
    """A 0-d latent: one sample."""
    return _cosine("scalar", torch.tensor(0.2, dtype=torch.float64))


def vector(batch: int = 4) -> Case:
    """One number per sample: a latent of shape (batch,)."""
    return _cosine("vector", normal(batch, seed=29))


def feedforward(batch: int = 3, n: int = 4) -> Case:
    """T does not read z: J = 0."""

    def build(b: Tensor, x: Tensor) -> Any:
        return lambda z, x: torch.sin(x) * b, (x,)

    theta = (normal(n, seed=30), normal(batch, n, seed=31))
    return case("feedforward", build, theta, torch.zeros(batch, n, dtype=torch.float64))


def all_cases() -> list[Case]:
    return [layer(), closure(), images(), nested(), batch_norm(), scalar(), vector(), feedforward()]
