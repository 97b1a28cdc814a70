"""The layout of images and weights, against torch's convolution in float64."""

import pytest
import torch
import torch.nn.functional as F

from banach.kernels import Layout, Plain
from banach.kernels.layout import split

OF_35 = Plain(Layout(35), torch.float64)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_sizes_of_35_channels() -> None:
    layout = Layout(35)
    assert (layout.pitch, layout.width, layout.depth) == (40, 64, 128)
    assert layout.pitch * 2 % 16 == 0, "a pixel of bf16 begins on 16 bytes"


@pytest.mark.parametrize("channels", [1, 5, 6, 13, 29, 32, 61])
def test_there_is_room_for_the_ones(channels: int) -> None:
    layout = Layout(channels)
    assert channels + 3 <= layout.pitch <= layout.width <= 64
    assert layout.pitch % 8 == 0
    assert 3 * layout.pitch <= layout.depth
    assert layout.width & (layout.width - 1) == 0


@pytest.mark.parametrize("channels", [0, 62])
def test_other_channels_are_refused(channels: int) -> None:
    with pytest.raises(ValueError, match="1 to 61 channels"):
        Layout(channels)


def test_enter_and_leave() -> None:
    x = normal(2, 35, 4, 3)
    pixels = OF_35.enter(x)
    assert pixels.shape == (2, 4, 3, 40)
    assert torch.equal(pixels[..., :35], x.permute(0, 2, 3, 1))
    assert bool((pixels[..., 35:38] == 1).all())
    assert bool((pixels[..., 38:] == 0).all())
    assert torch.equal(OF_35.leave(pixels, None, torch.float64), x)


def test_three_narrow_numbers_are_one_wide_number() -> None:
    value = torch.randn(1000)
    total = torch.stack([part.double() for part in split(value, torch.bfloat16)]).sum(0)
    assert float((total - value).abs().max()) < 1e-6
    assert float((value.bfloat16() - value).abs().max()) > 1e-3, "one alone is not enough"


@pytest.mark.parametrize("channels", [5, 35])
def test_folded_weights_convolve_what_was_normalised(channels: int) -> None:
    """The border most of all: there the shift of the batch norm must be left out where the image ends."""
    plain = Plain(Layout(channels), torch.float64)
    x, w, b = normal(2, channels, 4, 3), normal(1, channels, channels, 3, 3), normal(1, channels)
    mean, rstd = normal(channels), torch.rand(channels, dtype=torch.float64) + 0.5
    stats = plain.layout.wide(torch.stack([mean, rstd, mean]))
    out = plain.leave(plain.hidden(plain.enter(x), plain.fold(w, b, stats[None])[0], None), None, torch.float64)
    normalised = (x - mean[:, None, None]) * rstd[:, None, None]
    torch.testing.assert_close(out, F.leaky_relu(F.conv2d(normalised, w[0], b[0], padding=1), 0.1))


def test_turned_weights_give_the_gradient_of_the_input() -> None:
    x, w, g, s = (
        normal(2, 35, 4, 3).requires_grad_(),
        normal(1, 35, 35, 3, 3),
        normal(2, 35, 4, 3),
        normal(2, 35, 4, 3),
    )
    (wanted,) = torch.autograd.grad(F.conv2d(x, w[0], padding=1), x, g)
    gradient, _ = OF_35.enter_gradient(g, OF_35.enter(x.detach()))
    residual, _ = OF_35.enter_gradient(s, OF_35.enter(x.detach()))
    total, sums = OF_35.add(gradient, OF_35.turn(w)[0], residual, OF_35.enter(x.detach()))
    torch.testing.assert_close(OF_35.leave(total, None, torch.float64), wanted + s)
    torch.testing.assert_close(sums[0, 0, :35], (wanted + s).sum((0, 2, 3)))
    torch.testing.assert_close(sums[0, 1, :35], ((wanted + s) * x).sum((0, 2, 3)).detach())


def test_gradient_of_weights_whose_input_is_normalised() -> None:
    x, g = normal(2, 35, 4, 3), normal(2, 35, 4, 3)
    mean, rstd = normal(35), torch.rand(35, dtype=torch.float64) + 0.5
    w, b = normal(35, 35, 3, 3).requires_grad_(), normal(35).requires_grad_()
    normalised = (x - mean[:, None, None]) * rstd[:, None, None]
    wanted = torch.autograd.grad(F.conv2d(normalised, w, b, padding=1), (w, b), g)
    gradient, _ = OF_35.enter_gradient(g, OF_35.enter(x))
    stats = OF_35.layout.wide(torch.stack([mean, rstd, mean]))
    torch.testing.assert_close(OF_35.weights(OF_35.enter(x), gradient, stats), wanted)
    unchanged = torch.autograd.grad(F.conv2d(x, w, b, padding=1), (w, b), g)
    torch.testing.assert_close(OF_35.weights(OF_35.enter(x), gradient, None), unchanged)


def test_a_gradient_lies_in_memory_as_asked() -> None:
    x, g = (
        OF_35.enter(normal(2, 35, 4, 3)),
        OF_35.enter_gradient(normal(2, 35, 4, 3), OF_35.enter(normal(2, 35, 4, 3)))[0],
    )
    (dw, _), (other, _) = OF_35.weights(x, g, None), OF_35.weights(x, g, None, channels_last=True)
    assert dw.is_contiguous()
    assert other.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(dw, other)
