"""operator_norm: against the singular values of the matrix that the layer is, built from unit vectors."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from banach.nn import operator_norm
from banach.nn.affine import AffineLayer, operator_of
from nn.parts_nn import largest, matrix

CASES: dict[str, tuple[Callable[[], AffineLayer], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(9, 14), (9,)),
    "tall": (lambda: nn.Linear(30, 4), (30,)),
    "no padding": (lambda: nn.Conv2d(3, 5, 3), (3, 6, 7)),
    "zeros": (lambda: nn.Conv2d(3, 5, 3, padding=1), (3, 6, 7)),
    "more zeros than kernel": (lambda: nn.Conv2d(2, 2, 2, padding=3), (2, 4, 4)),
    "same": (lambda: nn.Conv2d(3, 3, (3, 5), padding="same", dilation=(2, 1)), (3, 7, 6)),
    "valid": (lambda: nn.Conv2d(3, 3, 3, padding="valid"), (3, 6, 6)),
    "stride": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (4, 8, 7)),
    "stride leaves pixels": (lambda: nn.Conv2d(2, 3, 2, stride=(3, 4)), (2, 7, 9)),
    "stride over kernel": (lambda: nn.Conv2d(2, 3, 1, stride=3), (2, 7, 7)),
    "dilation": (lambda: nn.Conv2d(3, 3, 3, dilation=2, padding=(2, 1)), (3, 7, 7)),
    "groups": (lambda: nn.Conv2d(4, 8, 3, groups=2, padding=1, stride=(1, 2)), (4, 6, 6)),
    "depthwise": (lambda: nn.Conv2d(5, 5, 3, groups=5, padding=1), (5, 6, 6)),
    "circular": (lambda: nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), (3, 6, 5)),
    "circular wide": (lambda: nn.Conv2d(2, 2, 3, padding=4, dilation=2, padding_mode="circular"), (2, 4, 5)),
    "circular same": (lambda: nn.Conv2d(2, 2, 3, padding="same", padding_mode="circular"), (2, 5, 5)),
    "reflect": (lambda: nn.Conv2d(3, 3, 3, padding=(2, 1), stride=2, padding_mode="reflect"), (3, 6, 5)),
    "replicate": (lambda: nn.Conv2d(3, 3, 5, padding=(2, 3), padding_mode="replicate"), (3, 5, 4)),
    "one axis": (lambda: nn.Conv1d(3, 4, 5, stride=2, padding=2), (3, 11)),
    "three axes": (lambda: nn.Conv3d(2, 3, 3, padding=1, padding_mode="circular"), (2, 3, 4, 4)),
}


@pytest.mark.parametrize("case", CASES)
def test_norm_and_transpose_are_those_of_the_matrix(case: str) -> None:
    torch.manual_seed(3)
    make, shape = CASES[case]
    layer = make().double()
    size = shape[1:] or None
    A = matrix(layer, *shape).detach()
    assert float(operator_norm(layer, size)) == pytest.approx(largest(A), rel=1e-9)
    operator = operator_of(layer, size)
    outputs = layer(torch.zeros(1, *shape, dtype=torch.float64)).shape[1:]
    transposed = matrix(lambda y: operator.transposed(layer.weight.detach(), y), *outputs)
    assert torch.allclose(transposed, A.T, rtol=0, atol=1e-14)
    assert torch.allclose(matrix(lambda x: operator.forward(layer.weight.detach(), x), *shape), A, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_that_crowd_at_the_top(dtype: torch.dtype) -> None:
    """A box blur on 32 x 32 pixels: closed form, and a gap of one in a hundred below the top."""
    layer = nn.Conv2d(1, 1, 3, padding=1).to(dtype)
    nn.init.constant_(layer.weight, 1 / 9)
    exact = ((1 + 2 * math.cos(math.pi / 33)) / 3) ** 2
    assert float(operator_norm(layer, 32)) == pytest.approx(exact, rel=1e-6)


def test_measuring_draws_nothing_and_carries_no_gradient() -> None:
    layer = nn.Linear(5, 5)
    before = torch.get_rng_state()
    norm = operator_norm(layer)
    assert torch.equal(torch.get_rng_state(), before)
    assert not norm.requires_grad
    assert torch.equal(operator_norm(layer), norm)


def test_corners() -> None:
    zero = nn.Linear(4, 3)
    nn.init.zeros_(zero.weight)
    assert float(operator_norm(zero)) == 0.0
    eye = nn.Linear(4, 4)
    nn.init.eye_(eye.weight)
    assert float(operator_norm(eye)) == pytest.approx(1.0)
    for scale in (1e15, 1e-15):  # whose fourth powers are no numbers of float32
        layer = nn.Linear(6, 6)
        exact = largest(layer.weight.double()) * scale
        with torch.no_grad():
            layer.weight.mul_(scale)
        assert float(operator_norm(layer)) == pytest.approx(exact, rel=1e-5)
    short = nn.Linear(6, 6).bfloat16()
    assert float(operator_norm(short)) == pytest.approx(largest(short.weight.double()), rel=1e-5)


def test_bad_input_gets_one_sentence() -> None:
    with pytest.raises(TypeError, match=r"expected nn.Linear or nn.Conv1d, 2d or 3d, got ConvTranspose2d"):
        operator_norm(nn.ConvTranspose2d(1, 1, 3), 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give size with 2 numbers, got None"):
        operator_norm(nn.Conv2d(1, 1, 3))
    with pytest.raises(ValueError, match=r"give size with 2 numbers, got \(4,\)"):
        operator_norm(nn.Conv2d(1, 1, 3), (4,))
    with pytest.raises(ValueError, match="a linear layer has no spatial size, got size=4"):
        operator_norm(nn.Linear(2, 2), 4)
