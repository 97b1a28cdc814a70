"""contraction_factor against dense singular values, in every corner a latent has."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import AdjointWarning
from banach.diagnose import contraction_factor, mixes_samples
from diagnose.parts_diagnose import jacobian, unchanged
from problems import normal

EXACT: dict[str, Any] = {"rtol": 1e-12, "max_steps": 500}


def matrices(z: Tensor, A: Tensor) -> Tensor:
    return torch.einsum("bij,bj->bi", A, z)


def test_against_dense_matrices() -> None:
    A, W, z = normal(7, 6, 6), normal(5, 5, seed=2), normal(3, 5, seed=3)
    sigma = contraction_factor(matrices, torch.zeros(7, 6, dtype=torch.float64), (A,), **EXACT)
    torch.testing.assert_close(sigma, torch.linalg.matrix_norm(A, 2), rtol=1e-10, atol=0)
    sigma = contraction_factor(lambda z: torch.tanh(z @ W.T), z, **EXACT)  # not linear: at its point
    slopes = 1 - torch.tanh(z @ W.T) ** 2
    torch.testing.assert_close(sigma, torch.linalg.matrix_norm(slopes[:, :, None] * W, 2), rtol=1e-10, atol=0)
    # A pair of values that are nearly equal.
    V = torch.linalg.qr(normal(8, 8, seed=5))[0]
    A = V @ torch.diag(torch.tensor([1.3, 1.3 - 1e-9, 0.9, 0.5, 0.4, 0.3, 0.2, 0.1], dtype=torch.float64)) @ V.T
    sigma = contraction_factor(lambda z: z @ A.T, torch.zeros(2, 8, dtype=torch.float64))
    torch.testing.assert_close(sigma, torch.full_like(sigma, 1.3), rtol=1e-6, atol=0)
    # Many values near the largest: the search starts again from its best vector.
    values = torch.linspace(0.9, 1, 200, dtype=torch.float64)
    sigma = contraction_factor(lambda z: z * values, torch.zeros(2, 200, dtype=torch.float64), **EXACT)
    torch.testing.assert_close(sigma, torch.ones_like(sigma), rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", [59, 88, 148])
def test_an_unlucky_start_does_not_end_at_the_second_value(seed: int) -> None:
    """Here the estimate rests for a step or two, 6 to 13% short of the largest value: a rest is no end."""
    A = normal(1, 12, 12, seed=seed)
    sigma = contraction_factor(matrices, torch.zeros(1, 12, dtype=torch.float64), (A,), rtol=1e-2)
    torch.testing.assert_close(sigma, torch.linalg.matrix_norm(A, 2), rtol=1e-2, atol=0)


def test_coupled_is_one_value_for_the_batch() -> None:
    z = normal(5, 3, seed=7)
    sigma = contraction_factor(nn.BatchNorm1d(3).double(), z, coupled=True, **EXACT)
    dense = jacobian(nn.BatchNorm1d(3).double(), z)
    assert sigma.shape == (5,)
    torch.testing.assert_close(sigma, torch.linalg.matrix_norm(dense, 2).expand(5), rtol=1e-8, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_a_module_and_the_random_state_are_kept(training: bool) -> None:
    T = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).double().train(training)
    with unchanged(T):
        contraction_factor(T, normal(4, 3), coupled=training)
        contraction_factor(lambda z: z * torch.rand(3, dtype=z.dtype), normal(4, 3))
        assert mixes_samples(T, normal(4, 3)) is training
        assert not mixes_samples(T[2], normal(4, 3))


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
def test_lower_precision(dtype: torch.dtype, rtol: float) -> None:
    A = normal(4, 12, 12, seed=9)
    sigma = contraction_factor(matrices, torch.zeros(4, 12, dtype=dtype), (A.to(dtype),))
    assert sigma.dtype == torch.float32
    torch.testing.assert_close(sigma.double(), torch.linalg.matrix_norm(A, 2), rtol=rtol, atol=0)


def test_small_corners() -> None:
    assert contraction_factor(lambda z: 3 * z, torch.ones(0, 2)).shape == (0,)
    assert torch.equal(contraction_factor(lambda z: torch.ones(4, 2), torch.ones(4, 2)), torch.zeros(4))
    one = contraction_factor(torch.cos, torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(one, torch.tensor([math.sin(1.0)], dtype=torch.float64))


def test_a_nonfinite_sample_is_nan_and_alone_in_it() -> None:
    A = normal(3, 5, 5, seed=11)
    A[1] = torch.nan
    sigma = contraction_factor(matrices, torch.zeros(3, 5, dtype=torch.float64), (A,), **EXACT)
    assert sigma[1].isnan()
    torch.testing.assert_close(sigma[[0, 2]], torch.linalg.matrix_norm(A[[0, 2]], 2), rtol=1e-9, atol=0)


def test_the_default_device_of_the_user_does_not_matter() -> None:
    A, z = normal(3, 5, 5), normal(3, 5)
    with torch.device("meta"):  # stands for torch.set_default_device("cuda")
        sigma = contraction_factor(matrices, z, (A,))
    torch.testing.assert_close(sigma, torch.linalg.matrix_norm(A, 2), rtol=1e-4, atol=0)


def detached(z: Tensor) -> Tensor:
    with torch.enable_grad():
        x = z.detach().requires_grad_()
        return torch.autograd.grad(x.square().sum(), x)[0]


def test_a_map_that_detaches_its_latent_was_said_to_contract(recwarn: pytest.WarningsRecorder) -> None:
    """T = 2 z, but sigma is 0: the derivative is cut."""
    z = normal(4, 3)
    for constant in (lambda z: torch.ones_like(z), lambda z: torch.relu(z - 9)):
        assert not contraction_factor(constant, z).any()
    for flat_at_zero in (torch.relu, torch.square):
        assert not contraction_factor(flat_at_zero, 0 * z).any()
    assert not len(recwarn)
    with pytest.warns(AdjointWarning, match="T must not detach z"):
        contraction_factor(detached, z)


def test_refusals() -> None:
    z = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"T must keep the shape of its input: expected \(2, 3\), got \(2, 1\)"):
        contraction_factor(lambda z: z[:, :1], z)
    with pytest.raises(TypeError, match="structure of z0"):
        contraction_factor(lambda z: (z, z), z)
    with pytest.raises(ValueError, match="max_steps must be a whole number, at least 1, got 0"):
        contraction_factor(torch.tanh, z, max_steps=0)
    bn = nn.BatchNorm1d(3)
    with pytest.raises(RuntimeError, match="give the module itself as T"):
        contraction_factor(lambda z: bn(z), z, coupled=True)
    with pytest.raises(ValueError, match="T must keep the shape"):
        contraction_factor(lambda z: z.sum(0, keepdim=True), z)
