"""conv2d as a custom operation is F.conv2d: values, gradients, compilers; on a GPU the kernels compute it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from banach.kernels import conv2d, has_triton
from kernels.window_cases import CASES, Case, made, worst_error


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_those_of_conv2d(case: Case) -> None:
    assert worst_error(case, *made(case, torch.float64)) < 1e-12


def test_weights_and_bias_may_have_any_strides_and_need_no_gradient() -> None:
    x, weight, _ = made(CASES[0], torch.float64)
    bias = torch.randn(64, dtype=torch.float64)[::2].requires_grad_()
    torch.testing.assert_close(conv2d(x, weight, bias, 1, 1), F.conv2d(x, weight, bias, 1, 1))
    conv2d(x, weight, bias, 1, 1).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, x[:, 0].numel()))
    assert weight.grad is None


def test_an_empty_batch_gives_nothing_and_no_gradient() -> None:
    x, weight, bias = made(CASES[0], torch.float64)
    weight.requires_grad_()
    y = conv2d(x[:0], weight, bias, 1, 1)
    assert y.shape == (0, 32, 9, 8)
    y.sum().backward()
    assert weight.grad is not None
    assert not bool(weight.grad.any())


def test_other_channels_are_refused() -> None:
    x, weight, bias = made(CASES[0], torch.float64)
    with pytest.raises(ValueError, match="check the channels"):
        conv2d(x[:, :5], weight, bias, 1, 1)


def test_opcheck() -> None:
    case = CASES[0]
    x, weight, bias = (None if part is None else part.requires_grad_() for part in made(case, torch.float64))
    torch.library.opcheck(torch.ops.banach.conv2d.default, (x, weight, bias, case.stride, case.padding))


@pytest.mark.gpu
@pytest.mark.skipif(not has_triton(), reason="needs Triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu_the_kernels_agree_with_float64(case: Case, dtype: torch.dtype) -> None:
    for images in (2, 37, 140, 600):  # tiles for few pixels and for many
        x, weight, bias = (
            None if part is None else part.cuda().to(dtype) for part in made(case, torch.float32, images)
        )
        assert worst_error(case, x, weight, bias) < (3e-6 if dtype == torch.float32 else 6e-3)  # type: ignore[arg-type]
