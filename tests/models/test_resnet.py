"""ResNet-56 against a plain function of its weights, and its parameters against the paper that has it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import ImplicitNetwork, models
from banach.models import ResNet, Shortcut
from models.reference_models import State, conv, count, images, norm, shortcut


def forward(w: State, d: Tensor, n: int) -> Tensor:
    x = F.relu(norm(w, "norm", conv(w, "conv", d)))
    for i in range(3 * n):
        name, channels = f"blocks.{i}.", 16 * 2 ** (i // n)
        stride = 2 if i in (n, 2 * n) else 1
        y = F.relu(norm(w, name + "norm1", conv(w, name + "conv1", x, stride=stride)))
        x = F.relu(norm(w, name + "norm2", conv(w, name + "conv2", y)) + shortcut(x, channels))
    pooled = x.sum((2, 3)) / (x.shape[2] * x.shape[3])
    return pooled @ w["linear.weight"].T + w["linear.bias"]


def test_forward_by_hand() -> None:
    torch.manual_seed(0)
    net = ResNet(2, (3, 16, 16)).double().train()
    d = images("resnet56", 4, (3, 16, 16))
    net(d)  # statistics that are not 0 and 1
    net.eval()
    with torch.no_grad():
        expected = forward(net.state_dict(), d, 2)
        torch.testing.assert_close(net(d), expected, rtol=1e-10, atol=1e-10)


def test_56_layers_and_853_018_parameters() -> None:
    net = models.build("resnet56")
    layers = [m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(layers) == 6 * 9 + 2 == 56
    convolutions = 9 * (3 * 16 + 18 * 16**2 + 16 * 32 + 17 * 32**2 + 32 * 64 + 17 * 64**2)
    norms = 2 * (19 * 16 + 18 * 32 + 18 * 64)
    assert count(net) == convolutions + norms + 65 * 10 == 853_018
    assert not isinstance(net, ImplicitNetwork)


def test_it_trains_and_answers_at_full_size() -> None:
    torch.manual_seed(0)
    net = models.build("resnet56")
    d, labels = images("resnet56", 2).float(), torch.tensor([3, 7])
    F.cross_entropy(net(d), labels).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_convolutions_start_as_he_proposed() -> None:
    torch.manual_seed(0)
    last = models.build("resnet56").blocks[-1].conv2.weight  # type: ignore[index,union-attr]
    assert abs(float(last.detach().std()) / (2 / (9 * 64)) ** 0.5 - 1) < 0.02


def test_the_shortcut_skips_pixels_and_adds_zeros() -> None:
    x = torch.arange(2 * 3 * 5 * 4, dtype=torch.float64).reshape(2, 3, 5, 4)
    y = Shortcut(3, 6, 2)(x)
    assert y.shape == (2, 6, 3, 2)
    assert torch.equal(y[:, 1:4], x[:, :, ::2, ::2])
    assert not y[:, [0, 4, 5]].any()
    assert Shortcut(3, 3, 1)(x) is x
