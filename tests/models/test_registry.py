"""Names, descriptions, settings, and a model of one's own."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import JFB, Anderson, ImplicitNetwork, Neumann, Picard, Tolerance, WorstPixel, models
from banach.models import Constant, Cosine, Steps, registry


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))


class Mix(nn.Module):
    """R(u, v) = (u + v) / 3, whose fixed point is v / 2."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return (u + v) / 3


def own(image: tuple[int, int, int], classes: int) -> tuple[nn.Module, nn.Module, nn.Module]:
    return nn.Flatten(), Mix(), nn.Linear(image[0] * image[1] * image[2], classes, bias=False)


def test_the_builder_says_what_is_not_given() -> None:
    def half(image: tuple[int, int, int] = (1, 2, 4), classes: int = 10) -> nn.Module:
        """Return half of it: 8 pixels.

        More.
        """
        return nn.Flatten()

    model = models.register("half", half)
    assert (model.description, model.image) == ("half of it: 8 pixels", (1, 2, 4))


@pytest.mark.parametrize("name", models.names())
def test_the_description_is_one_line_with_the_true_size(name: str) -> None:
    description, net = models.get(name).description, models.build(name)
    parameters = sum(p.numel() for p in net.parameters())
    assert f"{parameters:,} parameters" in description
    assert "\n" not in description
    assert len(description) < 90
    assert type(net).__name__ in str(net), "`banach models NAME` prints it; monotone networks could not be printed"


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown model: 'CIFAR10'; did you mean 'cifar10'.* choose from"):
        models.build("CIFAR10")
    with pytest.raises(ValueError, match="unknown recipe of mnist: 'papper'; did you mean 'paper'"):
        models.recipe("mnist", "papper")


def test_your_own_model() -> None:
    models.register("own", own, description="a linear one", image=(2, 3, 3), classes=4)
    assert models.names()[-1] == "own"
    net = models.build("own", tolerance=Tolerance(atol=1e-7))
    d = torch.randn(5, 2, 3, 3)
    expected = d.flatten(1) @ net.state_dict()["S.weight"].T / 2
    torch.testing.assert_close(net(d), expected, rtol=1e-5, atol=1e-5)
    assert models.build("own", image=(1, 2, 2), classes=3)(torch.randn(1, 1, 2, 2)).shape == (1, 3)
    assert models.recipe("own").tolerance == Tolerance()


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="model 'mnist' is registered already; choose another name"):
        models.register("mnist", own, description="mine", image=(1, 2, 2))
    models.register("mnist", own, description="mine", image=(1, 2, 2), overwrite=True)
    assert models.get("mnist").description == "mine"


def test_a_builder_may_return_a_whole_network() -> None:
    def whole(image: tuple[int, int, int], classes: int) -> nn.Module:
        return ImplicitNetwork(*own(image, classes), solver=Anderson(2), coupled=True)

    models.register("whole", whole, description="whole", image=(1, 2, 2))
    net: Any = models.build("whole", backward=Neumann(3))
    assert (net.solver, net.backward, net.coupled) == (Anderson(2), Neumann(3), True)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"image must be \(channels, height, width\), .* got None"):
        models.register("bad", own, description="bad")
    models.register("bad", lambda image, classes: "net", description="bad", image=(1, 2, 2))
    with pytest.raises(ValueError, match=r"the builder of bad must return \(Q, R, S\) or a module, got str"):
        models.build("bad")
    with pytest.raises(ValueError, match="resnet56 has no twin without batch norm"):
        models.build("resnet56", batch_norm=False)
    with pytest.raises(ValueError, match="resnet56 has no fixed point to find; leave out solver and backward"):
        models.build("resnet56", solver=Picard(), backward=JFB())


@pytest.mark.parametrize("wrong", [{"image": (28, 28)}, {"image": (1, 28.0, 28)}, {"classes": 0}])
def test_images_and_classes_that_are_none(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"image must be \(channels, height, width\)|classes must be a whole"):
        models.build("mnist", **wrong)


def test_settings_reach_the_network() -> None:
    plain: Any = models.build("mnist")
    assert (plain.solver, plain.tolerance, plain.backward) == (Picard(), models.recipe("mnist").tolerance, JFB())
    tolerance = Tolerance(atol=1e-3, max_steps=7)
    net: Any = models.build("mnist", solver=Anderson(4), tolerance=tolerance, backward=Neumann(1))
    assert (net.solver, net.tolerance, net.backward) == (Anderson(4), tolerance, Neumann(1))
    twin: Any = models.build("mnist", tolerance=tolerance, explicit=True)
    assert twin.tolerance == dataclasses.replace(tolerance, max_steps=0)
    with pytest.raises(TypeError, match="toleranse"):
        models.build("mnist", toleranse=tolerance)  # type: ignore[call-arg]


# eps, max_steps, lr, weight decay, epochs: the paper notes' table.
TABLE = {
    ("mnist", "released"): (1e-1, 50, 2e-4, 1e-6, 100),
    ("mnist", "paper"): (1e-4, 50, 1e-4, 1e-6, 100),
    ("svhn", "released"): (1e-4, 200, 1e-4, 2e-4, 100),
    ("cifar10", "released"): (1e-1, 50, 1e-3, 1e-3, 1000),
    ("cifar10", "jacobian"): (1e-4, 500, 1e-3, 1e-3, 1000),
}


@pytest.mark.parametrize(("name", "which"), TABLE)
def test_recipes_of_the_paper(name: str, which: str) -> None:
    r = models.recipe(name, which)
    assert (r.eps, r.max_steps, r.lr, r.weight_decay, r.epochs) == TABLE[name, which]
    assert r.tolerance == Tolerance(atol=r.eps, max_steps=r.max_steps, norm=WorstPixel())
    assert models.recipe(name) == models.recipe(name, "released")


def test_schedules() -> None:
    assert [Constant().multiplier(e, 100) for e in (0, 50.5, 100)] == [1, 1, 1]
    halved = models.recipe("cifar10").schedule
    assert [halved.multiplier(e, 1000) for e in (0, 199.9, 200, 399, 400, 999)] == [1, 1, 0.5, 0.5, 0.25, 1 / 16]
    assert [Cosine().multiplier(e, 20) for e in (0, 10, 20)] == pytest.approx([1, 0.5, 0])
    tenth = models.recipe("resnet56").schedule
    assert tenth == Steps(at=(91, 136), factor=0.1)
    assert tenth.multiplier(140, 182) == pytest.approx(0.01)
