"""The paper's networks and ResNet-56: each part by hand, training steps, memory formats, names in a checkpoint."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from banach import GMRES, JFB, Implicit, Mode, Neumann, NormalCG, Tolerance, Unroll, data, models
from banach.fast.network import with_kernels
from banach.models import ResNet
from banach.train import Settings, evaluate, fit
from models.reference_models import (
    IMPLICIT,
    LATENT,
    REFERENCE,
    SMALL,
    State,
    conv,
    count,
    images,
    network,
    norm,
    parts,
    shortcut,
)

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
def test_Q_R_and_S_by_hand(name: str) -> None:
    net = network(name).eval()
    assert (*map(count, parts(net)), count(net)) == PARAMETERS[name]
    Q, R, S = REFERENCE[name]
    d, u, w = images(name), latent(name, 2), {key: value.clone() for key, value in net.state_dict().items()}
    with torch.no_grad():
        v = net.Q(d)
        assert v.shape[1:] == LATENT[name]
        torch.testing.assert_close(v, Q(w, d), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(net.R(u, v), R(w, u, v), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(net.S(u), S(w, u), rtol=1e-10, atol=1e-10)
        net.R.train()  # which normalises by the batch
        torch.testing.assert_close(net.R(u, v), R(w, u, v, train=True), rtol=1e-10, atol=1e-10)


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


DROPOUT = {  # of Q and S, where the paper has it: never in R
    "mnist": {(nn.Dropout2d, 0.2)},
    "svhn": {(nn.Dropout2d, 0.1), (nn.Dropout2d, 0.2)},
    "cifar10": {(nn.Dropout2d, 0.15), (nn.Dropout, 0.1)},
}


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout(name: str) -> None:
    net, drops = network(name), nn.modules.dropout._DropoutNd
    assert {(type(m), m.p) for m in net.modules() if isinstance(m, drops)} == DROPOUT[name]
    assert not any(isinstance(m, drops) for m in net.R.modules())


@pytest.mark.parametrize("name", IMPLICIT)
def test_other_images_and_classes(name: str) -> None:
    size = (2, 14, 19)
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


def resnet(w: State, d: Tensor, n: int) -> Tensor:
    x = F.relu(norm(w, "norm", conv(w, "conv", d)))
    for i in range(3 * n):
        name, channels = f"blocks.{i}.", 16 * 2 ** (i // n)
        stride = 2 if i in (n, 2 * n) else 1
        y = F.relu(norm(w, name + "norm1", conv(w, name + "conv1", x, stride=stride)))
        x = F.relu(norm(w, name + "norm2", conv(w, name + "conv2", y)) + shortcut(x, channels))
    pooled = x.sum((2, 3)) / (x.shape[2] * x.shape[3])
    return pooled @ w["linear.weight"].T + w["linear.bias"]


def test_resnet_by_hand() -> None:
    torch.manual_seed(0)
    net = ResNet(2, (3, 16, 16)).double().train()
    d = images("resnet56", 4, (3, 16, 16))
    net(d).sum().backward()  # statistics that are not 0 and 1
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(d), resnet(net.state_dict(), d, 2), rtol=1e-10, atol=1e-10)


# Training.

LOOSE = Tolerance(atol=0, rtol=1e-2, max_steps=200)
MODES: list[Mode] = [JFB(), Neumann(2), Unroll(2), Implicit(NormalCG(), LOOSE), Implicit(GMRES(), LOOSE)]


@pytest.mark.parametrize("mode", MODES, ids=repr)
@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize("name", IMPLICIT)
def test_one_step(name: str, batch_norm: bool, mode: Mode) -> None:
    torch.manual_seed(0)
    net = models.build(name, image=SMALL[name], batch_norm=batch_norm, backward=mode)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    d, labels = images(name, 8, SMALL[name]).float(), torch.arange(8)
    before = [p.detach().clone() for p in net.parameters()]
    loss = F.cross_entropy(net(d), labels)
    loss.backward()
    optimizer.step()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    # A bias before a batch norm has no gradient but rounding, yet Adam moves it too.
    assert all(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    counts = [int(m.num_batches_tracked) for m in net.modules() if isinstance(m, nn.BatchNorm2d)]  # type: ignore[arg-type]
    assert counts == [1] * len(counts)
    assert counts


@pytest.mark.parametrize("name", [*IMPLICIT, "resnet56"])
def test_channels_last_is_kept(name: str) -> None:
    lost: list[str] = []

    def watch(label: str, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        for tensor in (*inputs, output):
            if tensor.dim() == 4 and not tensor.is_contiguous(memory_format=torch.channels_last):
                lost.append(label)

    image = SMALL.get(name, (3, 16, 16))
    torch.manual_seed(0)
    net: Any = models.build(name, image=image).double().eval()
    net.tolerance = FEW
    d = images(name, 3, image)
    with torch.no_grad():
        expected = net(d)
        net.to(memory_format=torch.channels_last)
        for label, module in net.named_modules():
            module.register_forward_hook(partial(watch, label))
        torch.testing.assert_close(net(d.contiguous(memory_format=torch.channels_last)), expected)
    assert lost == []


def test_what_is_around_fused_blocks_is_compiled() -> None:
    """A graph break in a loop over layers, as in a Sequential of all of Q, leaves everything to run eagerly."""
    Q: Any = network("cifar10").float().eval().Q
    Q.stage1, Q.stage2 = Q.stage1[:1], Q.stage2[:1]
    graphs = CompileCounter()
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(with_kernels(Q, stacks=True), backend=graphs)(torch.zeros(1, 3, 8, 8))
    assert graphs.frame_count == 3


STATE = {
    "mnist": (14 + 14 + 3, ["Q.conv1.weight", "Q.norm2.running_var", "R.blocks.1.conv2.bias", "S.linear.weight"]),
    "svhn": (5 * 7 + 7 + 7 + 3, ["Q.conv.weight", "Q.blocks.2.norm2.bias", "R.blocks.0.norm.running_mean"]),
    "cifar10": (2 + 37 * 7 + 3, ["Q.conv.bias", "Q.stage2.15.conv2.weight", "R.blocks.4.norm.running_var"]),
    "digits": (14 + 7 + 2, ["Q.conv2.weight", "R.blocks.0.conv1.weight", "S.linear.bias"]),
    "resnet56": (55 * 6 + 2, ["conv.weight", "blocks.26.norm2.weight", "linear.bias"]),
}


@pytest.mark.parametrize("name", STATE)
def test_names_in_a_checkpoint_are_stable(name: str) -> None:
    keys = list(models.build(name).state_dict())
    length, some = STATE[name]
    assert len(keys) == length
    assert set(some) <= set(keys)


@pytest.mark.parametrize("name", IMPLICIT)
def test_twins_exchange_weights(name: str) -> None:
    net = network(name)
    network(name, explicit=True).load_state_dict(net.state_dict())
    missing, extra = network(name, batch_norm=False).load_state_dict(net.state_dict(), strict=False)
    assert missing == []
    assert all(".norm." in key and key.startswith("R.") for key in extra)
    assert extra


@pytest.mark.parametrize(
    ("epochs", "accuracy", "steps"), [(1, 0.9, 25), pytest.param(20, 0.98, 30, marks=pytest.mark.slow)]
)
def test_the_digits_network_learns_and_stays_within_reach_of_picard(
    epochs: int, accuracy: float, steps: int
) -> None:
    torch.manual_seed(0)
    net, test = models.build("digits"), data.load("digits", "test")
    given = {"data": "digits", "epochs": epochs, "monitor": False, "device": "cpu"}
    fit(net, data.load("digits", "train"), None, Settings.of_recipe(models.recipe("digits"), **given))
    reached = evaluate(net, test).accuracy
    assert reached is not None
    assert reached > accuracy
    with torch.no_grad():
        _, found = net.eval()(test.normalise(test.pixels), solution=True)
    assert found.converged.all()
    assert found.steps.max() <= steps
