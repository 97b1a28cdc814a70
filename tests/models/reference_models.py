"""The paper's networks once more, as plain functions of a state dict, written from the layer list alone.

Layer by layer in the authors' order: the last activation of a residual map applied twice, the pool after the
activation, the border padded first and repeated by the convolution after.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from banach import ImplicitNetwork, models

State = Mapping[str, Tensor]


def lrelu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.1 * x)


def conv(w: State, name: str, x: Tensor, *, stride: int = 1, padding: int = 1) -> Tensor:
    return F.conv2d(x, w[name + ".weight"], w.get(name + ".bias"), stride, padding)


def norm(w: State, name: str, x: Tensor, *, train: bool = False) -> Tensor:
    """Batch norm by its formula; a state dict without its statistics has none."""
    if name + ".running_mean" not in w:
        return x
    mean, var = w[name + ".running_mean"], w[name + ".running_var"]
    if train:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    y = (x - mean[:, None, None]) / (var[:, None, None] + 1e-5).sqrt()
    if name + ".weight" in w:
        y = y * w[name + ".weight"][:, None, None] + w[name + ".bias"][:, None, None]
    return y


def pair_Q(w: State, d: Tensor, *, pools: tuple[int, int]) -> Tensor:
    x = F.max_pool2d(lrelu(norm(w, "Q.norm1", conv(w, "Q.conv1", d))), pools[0])
    return F.max_pool2d(lrelu(norm(w, "Q.norm2", conv(w, "Q.conv2", x))), pools[1])


def shortcut(x: Tensor, channels: int) -> Tensor:
    """Every second pixel where the channels double; half of the new channels, all zero, before and half after."""
    if channels == x.shape[1]:
        return x
    x = x[:, :, ::2, ::2]
    zeros = x.new_zeros(x.shape[0], (channels - x.shape[1]) // 2, *x.shape[2:])
    return torch.cat([zeros, x, zeros], 1)


def svhn_Q(w: State, d: Tensor) -> Tensor:
    x = lrelu(norm(w, "Q.norm", conv(w, "Q.conv", d)))
    for i, (channels, stride) in enumerate([(16, 1), (32, 2), (64, 2)]):
        name = f"Q.blocks.{i}."
        y = lrelu(norm(w, name + "norm1", conv(w, name + "conv1", x, stride=stride)))
        y = norm(w, name + "norm2", conv(w, name + "conv2", y))
        x = lrelu(y + shortcut(x, channels))
    return x


def scaled_R(w: State, u: Tensor, v: Tensor, *, blocks: int, gamma: float, train: bool = False) -> Tensor:
    x = u + v
    for i in range(blocks):
        name = f"R.blocks.{i}."
        res = lrelu(lrelu(conv(w, name + "conv2", lrelu(conv(w, name + "conv1", x)))))
        x = norm(w, name + "norm", x + res, train=train)
    return gamma * x


def cifar_block(w: State, name: str, x: Tensor, *, train: bool = False) -> Tensor:
    res = conv(w, name + "conv2", lrelu(conv(w, name + "conv1", x)))
    return norm(w, name + "norm", lrelu(x + res), train=train)


def cifar_Q(w: State, d: Tensor) -> Tensor:
    x = F.pad(d, (4, 4, 4, 4), value=0.449)
    x = lrelu(conv(w, "Q.conv", F.pad(x, (3, 3, 3, 3), mode="replicate"), padding=0))
    for stage in ("stage1", "stage2"):
        for i in range(16):
            x = cifar_block(w, f"Q.{stage}.{i}.", x)
        x = F.avg_pool2d(x, 2)
    return x


def cifar_R(w: State, u: Tensor, v: Tensor, *, train: bool = False) -> Tensor:
    x = v + 0.5 * u
    for i in range(5):
        x = cifar_block(w, f"R.blocks.{i}.", x, train=train)
    return x


def conv_S(w: State, u: Tensor, *, stride: int = 1, padding: int = 0) -> Tensor:
    return lrelu(conv(w, "S.conv", u, stride=stride, padding=padding)).reshape(len(u), -1) @ w["S.linear.weight"].T


def digits_S(w: State, u: Tensor) -> Tensor:
    return u.reshape(len(u), -1) @ w["S.linear.weight"].T + w["S.linear.bias"]


REFERENCE: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]] = {
    "mnist": (partial(pair_Q, pools=(3, 1)), partial(scaled_R, blocks=2, gamma=0.5), conv_S),
    "svhn": (svhn_Q, partial(scaled_R, blocks=1, gamma=0.9), conv_S),
    "cifar10": (cifar_Q, cifar_R, partial(conv_S, stride=2, padding=1)),
    "digits": (partial(pair_Q, pools=(1, 2)), partial(scaled_R, blocks=1, gamma=0.4), digits_S),
}
IMPLICIT = tuple(REFERENCE)
LATENT = {"mnist": (32, 9, 9), "svhn": (64, 8, 8), "cifar10": (35, 10, 10), "digits": (24, 4, 4)}
# The smallest images that leave a latent of several pixels: for what does not depend on the size.
SMALL = {"mnist": (1, 12, 12), "svhn": (3, 12, 12), "cifar10": (3, 8, 8), "digits": (1, 8, 8)}


def network(name: str, **options: object) -> ImplicitNetwork:
    """A network with seeded weights, in float64, and uneven statistics, so that leaving them out shows."""
    torch.manual_seed(0)
    net = models.build(name, **options).double()  # type: ignore[arg-type]
    assert isinstance(net, ImplicitNetwork)
    for key, buffer in net.named_buffers():
        if key.endswith("running_mean"):
            buffer.normal_(0, 0.3)
        elif key.endswith("running_var"):
            buffer.uniform_(0.5, 2)
    return net


def images(name: str, batch: int = 2, image: tuple[int, ...] | None = None, seed: int = 1) -> Tensor:
    shape = image or models.get(name).image
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts(net: ImplicitNetwork) -> models.Parts:
    """Q, R and S as the modules they are here."""
    made = models.Parts(net.Q, net.R, net.S)
    assert all(isinstance(part, torch.nn.Module) for part in made)
    return made


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
