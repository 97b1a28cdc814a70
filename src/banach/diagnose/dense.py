"""A small network at one sample as dense matrices: what the paper's Lemma, Theorem and Corollary speak of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from banach.backward import JFB
from banach.diagnose.descent import gradient, tight_implicit, trained_weights
from banach.diagnose.frozen import Frozen, undisturbed
from banach.latent import Latent, Space, leaves_like, rebuild

LIMIT = 2**24  # entries of M and J~ together: 128 MiB in float64


@dataclass(frozen=True, eq=False)
class Linearised:
    """T(u; d) and S(u) linearised at u*, for one sample, with n latent numbers, c outputs and p weights.

    Jacobians are laid out as usual, one row per output: J = dT/du. With theta_S the weights of S, theta_T
    those of Q and R, and ' for transposed,

        M = diag((dS/dtheta_S)', (dT/dtheta_T)')   (p, c + n)
        J~ = diag(I, I - J)                        (c + n, c + n)
        v = (dl/dy, (dS/du)' dl/dy)                gradient = M J~'^-1 v,  direction = -M v

    `gradient` and `direction` come from the backward modes Implicit and JFB, not from M: that they agree is a
    measurement. Where S has no weights its c columns are zero and M could never have full rank: they are
    left out (`outputs` is 0), and the proofs go through without them.
    """

    J: Tensor
    M: Tensor
    v: Tensor
    gradient: Tensor
    direction: Tensor
    outputs: int
    u: Tensor | None = field(default=None, repr=False)
    direction_at: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)  # p at another u

    @property
    def J_tilde(self) -> Tensor:
        eye = torch.eye(len(self.v), dtype=self.J.dtype, device=self.J.device)
        eye[self.outputs :, self.outputs :] -= self.J
        return eye

    @property
    def gamma(self) -> float:
        """sigma_max(J): the contraction factor at u*."""
        return float(torch.linalg.matrix_norm(self.J.double(), 2))


def linearise(net: Any, d: Any, loss: Callable[[Any], Tensor], z0: Latent | None = None) -> Linearised:
    """The matrices of `net` at the fixed point of one sample d (a batch of length 1), for loss(net(d)).

    The fixed point is solved tightly first. Networks too large for dense matrices are refused.
    """
    with undisturbed(net, d):
        frozen = Frozen(net)
        theta_S, theta_T = _weights(net)
        weights = [*theta_S, *theta_T]
        with torch.enable_grad():
            v, _, final = frozen.settle(d, z0)
        u = final.value
        space = _one_sample(u)
        rows = space.rows(u)
        J, dT, y, dS_du, dS = _blocks(frozen, v, rows, space, (theta_S, theta_T))
        true = gradient(frozen, v, u, (tight_implicit(u, frozen.coupled), loss), weights)[1]
        g = _output_gradient(loss, y)

    def direction_at(near: Tensor) -> Tensor:
        with undisturbed(net, d):
            return -_flat(gradient(frozen, v, space.nest(near.reshape(1, -1)), (JFB(), loss), weights)[1])

    through = dS_du.mT @ g
    M = torch.block_diag(dS.mT, dT.mT) if theta_S else dT.mT
    v_paper = torch.cat([g, through]) if theta_S else through
    outputs = len(g) if theta_S else 0
    return Linearised(J, M, v_paper, _flat(true), direction_at(rows), outputs, rows[0], direction_at)


def _blocks(
    frozen: Frozen, v: Latent, rows: Tensor, space: Space, weights: tuple[list[Tensor], list[Tensor]]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """J, dT/dtheta_T, the output y, dS/du and dS/dtheta_S at u*."""
    theta_S, theta_T = weights
    with torch.enable_grad():
        u = rows.detach().clone().requires_grad_()
        nest = space.nest(u)
        t = space.rows(rebuild(nest, leaves_like(nest, frozen.T(nest, v), "T")))[0]
        y = frozen.S(nest)
    if not isinstance(y, Tensor):
        raise TypeError(f"S must return one tensor to be linearised, got {type(y).__name__}")
    _check_size(len(t), y.numel(), sum(w.numel() for w in (*theta_S, *theta_T)))
    (J, dT), (dS_du, dS) = _jacobian(t, u, theta_T), _jacobian(y.flatten(), u, theta_S)
    return J, dT, y.detach(), dS_du, dS


def _jacobian(value: Tensor, u: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """dvalue/du and dvalue/dweights, one row at a time: slow, and no operation is unsupported."""

    def row(entry: Tensor) -> Tensor:
        return _flat(torch.autograd.grad(entry, [u, *weights], retain_graph=True, materialize_grads=True))

    both = torch.stack([row(entry) for entry in value])
    return both[:, : u.numel()], both[:, u.numel() :]


def _output_gradient(loss: Callable[[Any], Tensor], y: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = y.requires_grad_()
        return torch.autograd.grad(loss(leaf).sum(), leaf)[0].flatten()


def _weights(net: Any) -> tuple[list[Tensor], list[Tensor]]:
    """theta_S and theta_T: what S is trained by, and what Q and R are; the theory needs them apart."""
    owners = trained_weights(net)
    S = [weight for weight, parts in owners.items() if "S" in parts]
    T = [weight for weight, parts in owners.items() if parts - {"S"}]
    shared = len(S) + len(T) - len(owners)
    if shared:
        raise ValueError(
            f"S must share no weights with Q and R, got {shared} shared: the paper assumes them apart"
        )
    if not T:
        raise ValueError("linearise needs weights in Q or R that require a gradient, got none")
    return S, T


def _one_sample(u: Latent) -> Space:
    space = Space.of(u, coupled=True)
    if space.batch != 1:
        raise ValueError(f"the paper's matrices are those of one sample, got a batch of {space.batch}; give d[:1]")
    return space


def _check_size(n: int, c: int, p: int) -> None:
    entries = (n + c) * (p + n + c)
    if entries > LIMIT:
        raise ValueError(
            f"dense matrices of {entries:,} entries (latent n = {n:,}, output c = {c:,}, weights p = {p:,}), at "
            f"most {LIMIT:,}: take a smaller network, or use measure_contraction and descent_check"
        )


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])
