"""Each augmentation against a loop over images."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.ndimage import affine_transform
from torch import Tensor

from banach.data import Affine, Augmentation, Chain, Crop, Erase, Flip, counter, paper_cifar10


def batch(n: int = 40, shape: tuple[int, int, int] = (3, 9, 7), seed: int = 0) -> Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draws(augmentation: Augmentation, n: int = 40, key: int = 11) -> Tensor:
    return counter.uniform(key, n, augmentation.draws)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_flip(p: float) -> None:
    x, u = batch(), draws(Flip(p))
    for got, image, draw in zip(Flip(p).apply(x, u), x, u, strict=True):
        assert torch.equal(got, image.flip(2) if draw < p else image)


@pytest.mark.parametrize(("pad", "fill"), [(0, 0.0), (2, 0.449), (4, -3.0)])
def test_crop(pad: int, fill: float) -> None:
    x, u = batch(), draws(Crop(pad, fill))
    for got, image, draw in zip(Crop(pad, fill).apply(x, u), x, u, strict=True):
        top, left = (math.floor(float(v) * (2 * pad + 1)) for v in draw)
        padded = np.pad(image.numpy(), ((0, 0), (pad, pad), (pad, pad)), constant_values=fill)
        assert np.array_equal(got.numpy(), padded[:, top : top + 9, left : left + 7])


def test_the_largest_draw_stays_inside() -> None:
    x, u = batch(1), torch.full((1, 2), 1 - 2.0**-24)
    assert torch.equal(Crop(2).apply(x, u)[0, :, :7, :5], x[0, :, 2:, 2:])
    assert Crop(50).apply(x, u).shape == x.shape


def erased(erase: Erase, u: list[float], height: int, width: int) -> tuple[int, int, int, int] | None:
    """Top, left, height and width of the rectangle, decided one draw after another."""
    if u[0] >= erase.p:
        return None
    n = erase.attempts
    for area_draw, ratio_draw in zip(u[3 : 3 + n], u[3 + n :], strict=True):
        area = height * width * (erase.area[0] + area_draw * (erase.area[1] - erase.area[0]))
        low, high = math.log(erase.ratio[0]), math.log(erase.ratio[1])
        ratio = math.exp(low + ratio_draw * (high - low))
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if h < height and w < width:
            return math.floor(u[1] * (height - h + 1)), math.floor(u[2] * (width - w + 1)), h, w
    return None


@pytest.mark.parametrize(
    "erase",
    [
        Erase(),
        Erase(p=1.0, area=(0.5, 0.9), ratio=(0.1, 10.0), fill=2.5, attempts=2),  # often nothing fits
        Erase(p=1.0, area=(0.25, 0.25), ratio=(1.0, 1.0)),
    ],
)
def test_erase(erase: Erase) -> None:
    x = batch(120, (2, 12, 10))
    u = draws(erase, 120)
    got = erase.apply(x, u)
    rectangles = [erased(erase, u[i].tolist(), 12, 10) for i in range(120)]
    for i, rectangle in enumerate(rectangles):
        expected = x[i].clone()
        if rectangle:
            top, left, h, w = rectangle
            expected[:, top : top + h, left : left + w] = erase.fill
        assert torch.equal(got[i], expected)
    if erase.attempts == 2:
        assert 0 < rectangles.count(None) < 120


@pytest.mark.parametrize(
    "affine",
    [
        Affine(),
        Affine(degrees=180, translate=0.3, scale=(0.5, 2.0), fill=1.5),
        Affine(degrees=0, translate=0, scale=(1, 1)),
    ],
)
def test_affine(affine: Affine) -> None:
    """Against scipy, whose axes are rows and columns."""
    n, height, width = 12, 9, 6
    x, u = batch(n, (2, height, width)), draws(affine, n)
    got = affine.apply(x, u)
    for i in range(n):
        a, s, right, down = (float(v) for v in u[i])
        angle = math.radians(affine.degrees) * (2 * a - 1)
        scale = affine.scale[0] + (affine.scale[1] - affine.scale[0]) * s
        shift = affine.translate * np.array([(2 * down - 1) * height, (2 * right - 1) * width])
        forward = scale * np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
        centre, inverse = np.array([(height - 1) / 2, (width - 1) / 2]), np.linalg.inv(forward)
        options = {"order": 1, "mode": "grid-constant", "cval": affine.fill}
        for plane, expected in zip(got[i].numpy(), x[i].numpy(), strict=True):
            moved = affine_transform(expected, inverse, centre - inverse @ (centre + shift), **options)
            np.testing.assert_allclose(plane, moved, atol=1e-9)


def test_a_chain_gives_each_its_own_draws() -> None:
    parts: tuple[Augmentation, ...] = (Flip(), Crop(2, 0.449), Erase(), Affine())
    chain = Chain(*parts)
    x, u = batch(), draws(chain)
    assert chain.draws == 1 + 2 + 23 + 4
    expected = x
    for part, columns in zip(parts, (slice(0, 1), slice(1, 3), slice(3, 26), slice(26, 30)), strict=True):
        expected = part.apply(expected, u[:, columns])
    assert torch.equal(chain.apply(x, u), expected)
    assert torch.equal(Chain().apply(x, u[:, :0]), x)


def test_the_papers_augmentation() -> None:
    erase = Erase(p=0.95, area=(0.1, 0.25), ratio=(0.2, 5.0), fill=0.0, attempts=10)
    assert paper_cifar10().parts == (Flip(p=0.5), Crop(pad=2, fill=0.449), erase)


@pytest.mark.parametrize("augmentation", [Flip(), Crop(2), Erase(), Affine(), paper_cifar10()])
def test_an_image_does_not_depend_on_its_batch_and_needs_no_host(augmentation: Augmentation) -> None:
    x, u = batch(), draws(augmentation)
    whole = augmentation.apply(x, u)
    for i in (0, 17, 39):
        torch.testing.assert_close(augmentation.apply(x[i : i + 1], u[i : i + 1])[0], whole[i], atol=1e-12, rtol=0)
    # On the meta device there are no values to ask for.
    assert augmentation.apply(x.to("meta"), u.to("meta")).shape == x.shape


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Flip(1.5), "p must be a number, at least 0 and at most 1"),
        (lambda: Crop(-1), "pad must be a whole number"),
        (lambda: Erase(area=(0.5, 0.2)), "area must be"),
        (lambda: Erase(attempts=0), "attempts must be"),
        (lambda: Affine(scale=(0, 1)), "scale must be"),
    ],
)
def test_bad_options_are_refused(make: Callable[[], object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        make()
