"""The working points of the GPU benchmarks: network, batch, tolerance, precision, and images for them.

The paper's networks have the authors' tolerance. Three networks are known to no kernel: a transformer, an MLP and
two coupled resolutions, solved to a relative 1e-2 in the Euclidean norm. Monotone operator networks and multiscale
DEQs have solver, tolerance and gradient of their own recipes.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import Euclidean, ImplicitNetwork, Tolerance, WorstPixel, data, models
from banach.train import Settings

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Point:
    """One network at one batch size, solved to `eps`."""

    model: str  # of banach.models, or a key of OWN
    batch: int
    eps: float
    max_steps: int
    precision: str | None  # of the fast path: the fastest that can meet eps; None: try TF32 and bf16
    relative: bool = False  # eps is relative to the latent
    warm_up: int = 60  # training steps before the measurement
    mean_steps: int | None = None  # end the warm-up when the mean sample takes so many steps
    data: str | None = None  # the data set of a rival of the paper's networks, which has its recipe's tolerance

    def tiny(self) -> "Point":
        """Return the point at a size for `--quick`. The CIFAR-10 network takes seconds per step on a CPU."""
        model = "digits" if self.model == "cifar10" else self.model
        small = replace(self, batch=2 if self.own else 4, max_steps=20, model=model, precision="fp32", warm_up=2)
        return replace(small, data=self.data and "digits")

    @property
    def own(self) -> bool:
        """Whether no kernel knows the network."""
        return self.model in OWN

    @property
    def tolerance(self) -> Tolerance:
        atol, rtol = (0.0, self.eps) if self.relative else (self.eps, 0.0)
        norm = Euclidean() if self.own else WorstPixel()
        return Tolerance(atol=atol, rtol=rtol, max_steps=self.max_steps, norm=norm)

    @property
    def recipe(self) -> models.Recipe:
        """How it is trained, by Adam."""
        return models.Recipe(lr=1e-4, epochs=1, batch_size=1) if self.own else models.recipe(self.model)

    def network(self, device: torch.device, seed: int = 0) -> ImplicitNetwork:
        """Return the network in train mode: the same weights for the same seed."""
        if self.data is not None:
            rival: Any = Settings.choose({"data": self.data, "model": self.model, "seed": seed}).build()
            return rival.to(device).train()
        torch.manual_seed(seed)
        build = partial(ImplicitNetwork, *OWN[self.model]()) if self.own else partial(models.build, self.model)
        net: Any = build(tolerance=self.tolerance)
        return net.to(device).train()

    def inputs(self, batch: int, draw: torch.Generator) -> Tensor:
        """Return random inputs of the right shape."""
        if self.model == "transformer":
            return torch.randint(64, (batch, 128), generator=draw)
        own = {"mlp": (64,), "two-scales": (3, 32, 32)}
        shape = own.get(self.model) or (data.get(self.data).shape if self.data else models.get(self.model).image)
        return torch.randn(batch, *shape, generator=draw)

    def excess(self, after: Any, before: Any) -> Tensor:
        """Return the largest residual over its threshold, a 0-d tensor: at most 1 where eps is met."""
        if not self.own:  # the authors' test: the worst pixel's 2-norm over the channels
            return torch.linalg.vector_norm(after.detach() - before.detach(), dim=1).amax() / self.eps
        after, before = flat(after), flat(before)
        return ((after - before).norm(dim=1) / (self.eps * after.norm(dim=1))).amax()


# TF32 and bf16 cannot meet SVHN's 1e-4: their rounding leaves a residual of about 1e-3.
SVHN = Point("svhn", 100, 1e-4, 200, "fp32")
# Trained on one batch, whose slowest samples then take many steps.
OWN_SETTING: dict[str, Any] = {"eps": 1e-2, "max_steps": 40, "precision": None, "relative": True, "warm_up": 120}
TRANSFORMER = Point("transformer", 64, **OWN_SETTING)
POINTS = {
    "mnist100": Point("mnist", 100, 1e-1, 50, "bf16"),
    "svhn100": SVHN,
    "svhn100-trained": replace(SVHN, warm_up=6000),  # late in training a solve takes about 100 steps
    "cifar100": Point("cifar10", 100, 1e-1, 50, "bf16"),
    "cifar512": Point("cifar10", 512, 1e-1, 50, "bf16"),
    "transformer": TRANSFORMER,
    "transformer-8": replace(TRANSFORMER, mean_steps=8, warm_up=500),
    "mlp": Point("mlp", 256, **OWN_SETTING),
    "two-scales": Point("two-scales", 128, **OWN_SETTING),
    "mon": Point("mon", 128, 1e-2, 300, "tf32", relative=True, data="mnist"),
    "mon-tiers": Point("mon-tiers", 128, 1e-2, 300, "tf32", relative=True, data="svhn"),
    "mdeq-tiny": Point("mdeq-tiny", 128, 1e-3, 22, "tf32", relative=True, data="cifar10"),
}
OWN_POINTS = ("transformer", "mlp", "two-scales")
RIVAL_POINTS = ("mon", "mon-tiers", "mdeq-tiny")
PAPER_POINTS = ("mnist100", "svhn100", "cifar100", "cifar512")


def feed(
    point: Point, device: torch.device, data_dir: str | os.PathLike[str] | None = None, *, many: int = 64
) -> tuple[Iterator[Batch], str]:
    """Return an endless iterator over `many` batches on the device, and a title that says what they are.

    Real images, augmented as in the paper for CIFAR-10; random ones if the data set is not found. The depth on
    random images differs from that on real ones, so the title is part of every result. A network that no kernel
    knows has one random batch.
    """
    try:
        if point.own:
            raise data.DataError("there is no data set for this network")
        images = data.load(point.data or point.model, "train", data_dir, device)
    except data.DataError:
        draw, size, many = torch.Generator().manual_seed(0), (point.batch,), 1 if point.own else min(many, 8)
        made = [(point.inputs(*size, draw), torch.randint(10, size, generator=draw)) for _ in range(many)]
        title = f"random inputs (no data set for {point.model})"
        return cycle([(d.to(device), y.to(device)) for d, y in made]), title
    augment = data.paper_cifar10() if point.model == "cifar10" else None
    batches = data.Batches(images, point.batch, seed=0, augment=augment, drop_last=True)
    title = images.title if augment is None else f"{images.title}, augmented as in the paper"
    return cycle(list(islice(batches.epoch(), many))), title


def flat(z: Any) -> Tensor:
    """Return a latent, a tensor or a tuple of tensors, as one row per sample."""
    return torch.cat([part.detach().flatten(1) for part in (z if isinstance(z, tuple) else (z,))], 1)


class Block(nn.Module):
    """A weight-tied transformer block, post-norm, with the input injected."""

    def __init__(self, d: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.n1, self.n2, self.heads = nn.LayerNorm(d), nn.LayerNorm(d), heads

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        b, n, d = u.shape
        x = u + v
        q, k, w = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = self.n1(x + self.out(F.scaled_dot_product_attention(q, k, w).transpose(1, 2).reshape(b, n, d)))
        return 0.5 * self.n2(x + self.down(F.gelu(self.up(x))))


class Embed(nn.Module):
    """Tokens and positions."""

    def __init__(self, tokens: int = 64, d: int = 256, length: int = 128) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, d), nn.Parameter(torch.randn(length, d) * 0.02)

    def forward(self, t: Tensor) -> Tensor:
        return self.tokens(t) + self.places


class Mean(nn.Module):
    """A linear map of the means over `dims` of all parts of a latent."""

    def __init__(self, width: int, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.head, self.dims = nn.Linear(width, 10), dims

    def forward(self, u: Any) -> Tensor:
        parts = u if isinstance(u, tuple) else (u,)
        return self.head(torch.cat([part.mean(self.dims) for part in parts], 1))


class MLP(nn.Module):
    """0.8 tanh(norm(A u + v))."""

    def __init__(self, d: int = 512) -> None:
        super().__init__()
        self.a, self.n = nn.Linear(d, d), nn.LayerNorm(d)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.8 * torch.tanh(self.n(self.a(u) + v))


class Scales(nn.Module):
    """Two resolutions that feed each other; group norm, no batch norm."""

    def __init__(self, c: int = 32) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)
        self.ab, self.ba = nn.Conv2d(c, c, 3, 2, 1), nn.Conv2d(c, c, 1)
        self.na, self.nb = nn.GroupNorm(8, c), nn.GroupNorm(8, c)

    def forward(self, u: tuple[Tensor, Tensor], v: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        (x, y), (p, q) = u, v
        fine = F.relu(self.na(self.a(x) + p + F.interpolate(self.ba(y), scale_factor=2)))
        coarse = F.relu(self.nb(self.b(y) + q + self.ab(x)))
        return 0.5 * fine, 0.5 * coarse


class ScalesIn(nn.Module):
    """An image at two resolutions."""

    def __init__(self, c: int = 32) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, c, 3, 2, 1)

    def forward(self, d: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.a(d))
        return x, F.relu(self.b(x))


OWN: dict[str, Any] = {
    "transformer": lambda: (Embed(), Block(), Mean(256, (1,))),
    "mlp": lambda: (nn.Linear(64, 512), MLP(), nn.Linear(512, 10)),
    "two-scales": lambda: (ScalesIn(), Scales(), Mean(64, (2, 3))),
}
