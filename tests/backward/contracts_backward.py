"""What every backward mode must pass, on every map: gradients against dense algebra, and good manners."""

from typing import Any

import torch
from torch import Tensor

from backward.maps_backward import Case
from backward.systems_backward import METHODS
from banach import JFB, Implicit, Mode, Neumann, Tolerance, Unroll
from banach.latent import Latent, leaves, leaves_like, map_leaves

TIGHT = Tolerance(atol=0, rtol=1e-12, max_steps=2000)
EXACT = [Implicit(method, TIGHT) for method in METHODS]
PLAIN: list[Mode] = [JFB(), Neumann(0), Neumann(1), Neumann(6), Unroll(1), Unroll(4), Unroll(3, damping=0.3)]
CHECKPOINTED = [Unroll(3, checkpoint=True), Unroll(2, damping=0.4, checkpoint=True)]
MODES: list[Mode] = [*EXACT, *PLAIN, *CHECKPOINTED]


def name(mode: Mode) -> str:
    return str(mode.method) if isinstance(mode, Implicit) else str(mode)


def sensitivity(mode: Mode, case: Case) -> tuple[Tensor, Tensor]:
    """The value that `attach` should have, and the matrix of its derivative in theta, by dense algebra."""
    z = case.vector(case.z_star)
    J, P = case.dense()
    eye = torch.eye(len(z), dtype=z.dtype)
    if isinstance(mode, Implicit):
        return case.flat(z, *case.theta), torch.linalg.solve(eye - J, P)
    if isinstance(mode, Unroll):
        return _unrolled(case, z, mode.steps, mode.damping)
    order = mode.order if isinstance(mode, Neumann) else 0
    series = sum((torch.linalg.matrix_power(J, j) for j in range(1, order + 1)), eye)
    return case.flat(z, *case.theta), series @ P


def _unrolled(case: Case, z: Tensor, steps: int, d: float) -> tuple[Tensor, Tensor]:
    S = torch.zeros(len(z), sum(t.numel() for t in case.theta), dtype=z.dtype)
    for _ in range(steps):
        J, P = case.dense(z)
        S = d * S + (1 - d) * (J @ S + P)
        z = d * z + (1 - d) * case.flat(z, *case.theta)
    return z, S


def attach(mode: Mode, case: Case, theta: tuple[Tensor, ...]) -> Latent:
    T, inputs = case.build(*theta)
    return mode.attach(T, case.z_star, inputs, coupled=case.coupled)


def gradient(mode: Mode, case: Case, g: Tensor | None = None) -> Tensor:
    """d <g, attach> / d theta as one vector, by plain autograd."""
    theta = case.fresh()
    value = case.vector(attach(mode, case, theta))
    return flat_grad(value @ (case.cotangent() if g is None else g), theta)


def flat_grad(loss: Tensor, theta: tuple[Tensor, ...], **options: Any) -> Tensor:
    found = torch.autograd.grad(loss, theta, allow_unused=True, materialize_grads=True, **options)
    return torch.cat([part.reshape(-1) for part in found])


def error(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|."""
    a, b = a.detach(), b.detach()
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


def allowed(mode: Mode) -> float:
    return 1e-9 if isinstance(mode, Implicit) else 1e-12


def check_gradient(mode: Mode, case: Case) -> None:
    _, S = sensitivity(mode, case)
    assert error(gradient(mode, case), S.T @ case.cotangent()) <= allowed(mode)


def check_value(mode: Mode, case: Case) -> None:
    """The value is that of dense algebra, and bit for bit the same with and without grad mode."""
    value, _ = sensitivity(mode, case)
    recorded = attach(mode, case, case.fresh())
    with torch.no_grad():
        silent = attach(mode, case, case.fresh())
    assert error(case.vector(recorded), value) <= 1e-14
    assert torch.equal(case.vector(recorded), case.vector(silent))
    assert not any(leaf.requires_grad for leaf in leaves(silent))
    assert [leaf.shape for leaf in leaves_like(case.z_star, recorded, "T")] == [
        leaf.shape for leaf in leaves(case.z_star)
    ]


def check_no_gradient_to_z_star(mode: Mode, case: Case) -> None:
    """z* comes with a history; none of the gradient follows it, and z* keeps its value."""
    source = [leaf.detach().clone().requires_grad_() for leaf in leaves(case.z_star)]
    before = case.vector(case.z_star).clone()
    kept = iter(source)
    z_star = map_leaves(lambda leaf: next(kept) * 1.0, case.z_star)
    theta = case.fresh()
    T, inputs = case.build(*theta)
    value = case.vector(mode.attach(T, z_star, inputs, coupled=case.coupled))
    (value @ case.cotangent()).backward()
    assert all(leaf.grad is None for leaf in source)
    assert torch.equal(case.vector(z_star), before)


def check_retain_graph(mode: Mode, case: Case) -> None:
    theta = case.fresh()
    loss = case.vector(attach(mode, case, theta)) @ case.cotangent()
    first = flat_grad(loss, theta, retain_graph=True)
    assert torch.equal(first, flat_grad(loss, theta, retain_graph=True))
    assert torch.equal(first, flat_grad(loss, theta))


def check_used_many_times(mode: Mode, case: Case) -> None:
    """The same map three times in one graph, once on top of another's value: gradients add up."""
    theta, seeds = case.fresh(), (41, 42, 43)
    values = [case.vector(attach(mode, case, theta)) for _ in seeds]
    loss = torch.stack([v @ case.cotangent(s) for v, s in zip(values, seeds, strict=True)]).sum()
    expected = torch.stack([gradient(mode, case, case.cotangent(s)) for s in seeds]).sum(0)
    assert error(flat_grad(loss, theta), expected) <= 1e-12


def check_zero_cotangent(mode: Mode, case: Case) -> None:
    assert not gradient(mode, case, torch.zeros_like(case.cotangent())).any()


CHECKS = [
    check_gradient,
    check_value,
    check_no_gradient_to_z_star,
    check_retain_graph,
    check_used_many_times,
    check_zero_cotangent,
]
