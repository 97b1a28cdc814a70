"""Neural ODE (Chen et al. 2018) and augmented Neural ODE (Dupont et al. 2019), without a stem; by torchdiffeq."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach.models.blocks import Image
from banach.models.mon import COMMON
from banach.models.registry import Recipe, register


class ODEFailure(RuntimeError):
    """The ODE solver gave up: too many steps, a step size that underflows, or a state that is not finite."""


# What a training step of an ODENet may raise: in an adjoint pass torchdiffeq's own error leaves `backward()`.
ODE_FAILURES = (ODEFailure, AssertionError)


class Evaluations(NamedTuple):
    """How often f was evaluated in the last pass. `backward` grows while an adjoint pass runs."""

    forward: int
    backward: int


class TimeConv2d(nn.Conv2d):
    """conv2d of h with the time t as one more input channel, in front.

    t is equal in all pixels, so what its channel adds is computed once for all images. Concatenating it would copy
    h, and give tensor cores 65 channels where they are fast with 64.
    """

    def forward(self, t: Tensor, h: Tensor) -> Tensor:  # type: ignore[override]
        of_time, of_h = self.weight.split((1, self.in_channels - 1), 1)
        ones = h.new_ones(1, 1, *h.shape[2:])
        added: Tensor = F.conv2d(ones, t.to(h.dtype) * of_time, self.bias, padding=self.padding)
        return F.conv2d(h, of_h, padding=self.padding).add_(added)


class Dynamics(nn.Module):
    """f(t, h): conv1x1, ReLU, conv3x3, ReLU, conv1x1, each with the time t as one more input channel, in front."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.conv1 = TimeConv2d(channels + 1, filters, 1)
        self.conv2 = TimeConv2d(filters + 1, filters, 3, padding=1)
        self.conv3 = TimeConv2d(filters + 1, channels, 1)
        self.count = 0  # evaluations since it was last set to 0

    def forward(self, t: Tensor, h: Tensor) -> Tensor:
        self.count += 1
        h = F.relu(self.conv1(t, h))
        h = F.relu(self.conv2(t, h))
        return self.conv3(t, h)


class ODENet(nn.Module):
    """logits = linear(h(1)),  dh/dt = f(t, h),  h(0) the image with `extra` channels of zeros appended.

    There is no fixed point, so JFB does not apply. The step size follows the RMS error of the whole batch, so a
    sample's answer depends on the other samples, within the tolerance. States are in at least float32.

    Args:
        image: (channels, height, width).
        classes: number of outputs.
        filters: width of f.
        extra: channels of zeros; 0 is a Neural ODE, more an augmented one.
        adjoint: solve the adjoint ODE backwards instead of recording every step; less memory, and a gradient that
            is exact only up to the tolerance.
        tolerance: rtol and atol of the solver.
        max_steps: attempted steps of the solver (dopri5), at most.
    Raises:
        ODEFailure: if the solver gives up in the forward pass. (In an adjoint pass torchdiffeq's AssertionError
            reaches the caller of `backward()`.) `fit` reports either as a DivergenceError, or rewinds.
    """

    def __init__(
        self,
        image: Image,
        classes: int,
        *,
        filters: int,
        extra: int = 0,
        adjoint: bool = True,
        tolerance: float = 1e-3,
        max_steps: int = 1000,
    ) -> None:
        super().__init__()
        channels, height, width = image
        self.extra, self.adjoint = extra, adjoint
        self.rtol, self.max_steps = tolerance, max_steps
        self.f = Dynamics(channels + extra, filters)
        self.linear = nn.Linear((channels + extra) * height * width, classes)
        self._forward = 0

    @property
    def evaluations(self) -> Evaluations:
        """The evaluations of f in the last pass."""
        return Evaluations(self._forward, self.f.count - self._forward)

    def forward(self, d: Tensor) -> Tensor:
        h = F.pad(d, (0, 0, 0, 0, 0, self.extra)) if self.extra else d
        self.f.count = self._forward = 0
        try:
            import torchdiffeq
        except ImportError:
            raise ImportError("Neural ODEs need torchdiffeq: pip install torchdiffeq") from None
        recorded = self.adjoint and torch.is_grad_enabled()
        odeint: Any = torchdiffeq.odeint_adjoint if recorded else torchdiffeq.odeint
        # Rounding in bf16 exceeds any useful tolerance, so f runs without autocast.
        with torch.autocast(h.device.type, enabled=False):
            h = h.to(self.linear.weight.dtype)
            times = torch.tensor([0.0, 1.0], dtype=h.dtype, device=h.device)
            options = {"max_num_steps": self.max_steps}
            try:
                states = odeint(self.f, h, times, rtol=self.rtol, atol=self.rtol, method="dopri5", options=options)
            except AssertionError as error:
                advice = "lower the learning rate, loosen the tolerance, or clip the gradient"
                said = f"the ODE was not solved after {self.f.count} evaluations of f: {error}"
                raise ODEFailure(f"{said}; {advice}") from error
        self._forward = self.f.count
        return self.linear(states[-1].flatten(1))

    def extra_repr(self) -> str:
        return f"extra={self.extra}, tolerance={self.rtol}, adjoint={self.adjoint}"


def node(image: Image = (1, 28, 28), classes: int = 10, **options: Any) -> ODENet:
    """Return a Neural ODE without a stem: 85,316 parameters on MNIST.

    These are 92 filters; SVHN and CIFAR-10 have 125, 173,611 parameters. The paper's counts, 84K and 172K, are
    those without time channels: 84,395 and 172,358.
    """
    return ODENet(image, classes, **{"filters": 92 if image[0] == 1 else 125, **options})


def anode(image: Image = (1, 28, 28), classes: int = 10, **options: Any) -> ODENet:
    """Return an augmented Neural ODE without a stem: 85,462 parameters on MNIST.

    It has 64 filters and adds 5 channels to grey images, 10 to others: 172,452 parameters on SVHN and CIFAR-10.
    Without time channels they would be 84,816 and 171,799.
    """
    return ODENet(image, classes, **{"filters": 64, "extra": 5 if image[0] == 1 else 10, **options})


OWN = Recipe(lr=1e-3, epochs=20, batch_size=256, max_steps=0, augment="none", normalise=False)
RECIPES = {"own": OWN, "common": replace(COMMON, max_steps=0)}

register("node", node, recipes=RECIPES)
register("anode", anode, recipes=RECIPES)
