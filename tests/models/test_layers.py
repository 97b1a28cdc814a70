"""Each part of each network against plain functions of the same weights, in float64; sizes and parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from banach import ImplicitNetwork, Tolerance, models
from models.reference_models import IMPLICIT, LATENT, REFERENCE, SMALL, count, images, network, parts

FEW = Tolerance(max_steps=9, check_every=0)  # with fresh weights, R of svhn in eval mode is not a contraction
PARAMETERS = {
    "mnist": (4_896, 36_992, 12_464, 54_352),
    "svhn": (74_640, 73_856, 14_992, 163_488),
    "cifar10": (713_020, 110_600, 19_810, 843_430),
    "digits": (3_720, 10_416, 3_850, 17_986),
}


def latent(name: str, seed: int, batch: int = 2) -> torch.Tensor:
    return images(name, batch, LATENT[name], seed)


@pytest.mark.parametrize("name", IMPLICIT)
def test_parameters_in_each_part(name: str) -> None:
    net = network(name)
    assert (*map(count, parts(net)), count(net)) == PARAMETERS[name]


@pytest.mark.parametrize("name", IMPLICIT)
def test_Q_R_and_S_by_hand(name: str) -> None:
    net = network(name).eval()
    Q, R, S = REFERENCE[name]
    d, u, w = images(name), latent(name, 2), net.state_dict()
    with torch.no_grad():
        v = net.Q(d)
        assert v.shape[1:] == LATENT[name]
        torch.testing.assert_close(v, Q(w, d), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(net.R(u, v), R(w, u, v), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(net.S(u), S(w, u), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", IMPLICIT)
def test_R_by_hand_in_train_mode_normalises_by_the_batch(name: str) -> None:
    net = network(name).train()
    u, v, w = latent(name, 2, 3), latent(name, 3, 3), net.state_dict()
    expected = REFERENCE[name][1](w, u, v, train=True)
    torch.testing.assert_close(net.R(u, v), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["mnist", "digits"])
def test_the_whole_network_by_hand(name: str) -> None:
    """Iterated by hand to rounding, the network's answer is S at the fixed point."""
    net = network(name).eval()
    net.tolerance = Tolerance(atol=1e-12, max_steps=300)
    Q, R, S = REFERENCE[name]
    d, w = images(name), net.state_dict()
    with torch.no_grad():
        v = Q(w, d)
        u = torch.zeros_like(v)
        for _ in range(300):
            u = R(w, u, v)
        assert (R(w, u, v) - u).abs().max() < 1e-11
        torch.testing.assert_close(net(d), S(w, u), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", IMPLICIT)
def test_without_batch_norm_in_R(name: str) -> None:
    net = network(name, batch_norm=False).eval()
    norms = [sum(isinstance(m, nn.BatchNorm2d) for m in part.modules()) for part in parts(net)]
    assert norms[0] > 0
    assert norms[1:] == [0, 0]
    assert (*map(count, parts(net)), count(net)) == PARAMETERS[name]
    u, v = latent(name, 2), latent(name, 3)
    with torch.no_grad():
        expected = REFERENCE[name][1](net.state_dict(), u, v)
        torch.testing.assert_close(net.R(u, v), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", IMPLICIT)
def test_the_explicit_twin(name: str) -> None:
    """S(R(0, Q(d))): values, and the gradient of plain backpropagation."""
    net = network(name, image=SMALL[name], explicit=True).eval()
    d = images(name, 2, SMALL[name])
    v = net.Q(d)
    expected = net.S(net.R(torch.zeros_like(v), v))
    plain = torch.autograd.grad(expected.square().sum(), list(net.parameters()))
    output, found = net(d, solution=True)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert found.steps.tolist() == [0, 0]
    mine = torch.autograd.grad(output.square().sum(), list(net.parameters()))
    torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-12)
    # An implicit network of the same weights answers otherwise, so this compares something.
    other = network(name, image=SMALL[name], tolerance=FEW).eval()
    assert (other(d) - expected).abs().max() > 1e-3


def test_weights_start_as_pytorch_starts_them() -> None:
    """Default initialisation: uniform within 1 / sqrt(fan in), for weights and biases."""
    torch.manual_seed(0)
    for module in models.build("mnist").modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            bound = module.weight[0].numel() ** -0.5
            assert bound * 0.9 < module.weight.abs().max() <= bound


def test_dropout_stands_where_the_paper_has_it_and_never_in_R() -> None:
    found = {}
    for name in IMPLICIT:
        net = network(name)
        for part, module in zip("QRS", parts(net), strict=True):
            drops = [m for m in module.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
            found[name, part] = {(type(m), m.p) for m in drops}
    assert found["mnist", "Q"] == set()
    assert found["mnist", "S"] == found["svhn", "S"] == {(nn.Dropout2d, 0.2)}
    assert found["svhn", "Q"] == {(nn.Dropout2d, 0.1)}
    assert found["cifar10", "Q"] == {(nn.Dropout2d, 0.15)}
    assert found["cifar10", "S"] == {(nn.Dropout, 0.1)}
    assert all(found[name, "R"] == set() for name in IMPLICIT)


@pytest.mark.parametrize("name", IMPLICIT)
@pytest.mark.parametrize("size", [(2, 14, 19), (3, 33, 12)])
def test_other_images_and_classes(name: str, size: tuple[int, int, int]) -> None:
    net = models.build(name, image=size, classes=7, tolerance=FEW).eval()
    with torch.no_grad():
        assert net(torch.zeros(2, *size)).shape == (2, 7)


@pytest.mark.parametrize(("name", "size"), [("mnist", (1, 8, 28)), ("svhn", (3, 32, 8)), ("digits", (1, 8, 1))])
def test_images_too_small_are_refused(name: str, size: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="use larger"):
        models.build(name, image=size)


@pytest.mark.parametrize("name", IMPLICIT)
def test_a_fresh_network_without_batch_norm_contracts(name: str) -> None:
    """With PyTorch's own weights SVHN's would not (gamma is .9): there alone the residual map starts smaller."""
    net = network(name, image=SMALL[name], batch_norm=False).eval()
    with torch.no_grad():
        _, found = net(images(name, 3, SMALL[name]), solution=True)
    assert found.converged.all()
    weight = net.state_dict()["R.blocks.0.conv2.weight"]
    bound = weight[0].numel() ** -0.5 * (0.1 if name == "svhn" else 1)
    assert bound * 0.9 < weight.abs().max() <= bound


@pytest.mark.parametrize("name", ["mnist", "svhn", "cifar10", "digits"])
def test_the_form_that_a_latent_map_declares_is_what_it_computes(name: str) -> None:
    """The kernel that iterates R goes by this form: its plain twin must agree with R itself."""
    from banach.kernels import describe, latent_solve

    torch.manual_seed(0)
    net = models.build(name)
    assert isinstance(net, ImplicitNetwork)
    R = net.R.double().eval()
    assert describe(R) is not None
    channels, size = R.blocks[0].conv1.in_channels, 4
    v = torch.randn(2, channels, size, size, dtype=torch.float64)
    found = latent_solve(R, v, tolerance=Tolerance(atol=0.0, max_steps=3))
    u = torch.zeros_like(v)
    for _ in range(3):
        u = R(u, v)
    torch.testing.assert_close(found.value, u)
