"""Monotone operator networks by name: their counts, their answers, and that they learn."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from banach import JFB, ImplicitNetwork, Neumann, Tolerance, descent_check, models
from banach.export import export
from banach.nn import ForwardBackward, PeacemanRachford
from models.reference_models import count

COUNTS = {
    ("mon-fc", (1, 28, 28)): 84_313,
    ("mon", (1, 28, 28)): 84_460,
    ("mon", (3, 32, 32)): 172_218,
    ("mon-tiers", (1, 28, 28)): 81_394,
    ("mon-tiers", (3, 32, 32)): 170_194,
    ("mon-large", (3, 32, 32)): 1_014_546,
}
GREY = (1, 8, 8)  # small images, for speed


def test_counts() -> None:
    for (name, image), parameters in COUNTS.items():
        assert count(models.build(name, image=image)) == parameters
    assert sum(map(count, models.mon((1, 28, 28), channels=54))) == 79_500  # the width that the paper prints
    widths: Any = [4, 8]
    assert list(map(count, models.mon_tiers(GREY, channels=widths))) == list(
        map(count, models.mon_tiers(GREY, channels=(4, 8)))
    )


@pytest.mark.parametrize(("name", "channels"), [("mon", 8), ("mon-tiers", (4, 8, 8))])
def test_both_splittings_give_one_answer(name: str, channels: Any) -> None:
    torch.manual_seed(0)
    builder, tight = models.get(name).builder, Tolerance(atol=1e-11, max_steps=2000)
    nets = []
    for kind, alpha in ((PeacemanRachford, 1.0), (ForwardBackward, 0.25)):
        parts = builder(GREY, 10, channels=channels, splitting=kind, alpha=alpha)
        nets.append(ImplicitNetwork(*parts, tolerance=tight).double())
    weights = {key: value for key, value in nets[0].state_dict().items() if key != "R.alpha"}
    nets[1].load_state_dict(weights)
    d = torch.randn(3, *GREY, dtype=torch.float64)
    torch.testing.assert_close(nets[0](d), nets[1](d), rtol=0, atol=1e-9)


def test_by_one_step_only_peaceman_rachford_reaches_every_tier() -> None:
    cosines = {}
    for kind, alpha, mode in (
        (ForwardBackward, 0.25, JFB()),
        (PeacemanRachford, 1.0, JFB()),
        (PeacemanRachford, 1.0, Neumann(2)),
    ):
        torch.manual_seed(0)
        parts = models.mon_tiers(GREY, 10, channels=(4, 4, 8), splitting=kind, alpha=alpha)
        net = ImplicitNetwork(*parts, tolerance=Tolerance(atol=1e-8, max_steps=600), backward=mode).double()
        d, labels = torch.randn(4, *GREY, dtype=torch.float64), torch.arange(4)
        found = descent_check(net, d, partial(F.cross_entropy, target=labels))
        cosines[kind, mode] = found.parts["Q"].cosine if found.parts["Q"].ratio else 0.0
    assert cosines[ForwardBackward, JFB()] == 0
    assert 0.2 < cosines[PeacemanRachford, JFB()] < cosines[PeacemanRachford, Neumann(2)]
    assert cosines[PeacemanRachford, Neumann(2)] > 0.8


def test_images_that_do_not_halve_are_refused() -> None:
    with pytest.raises(ValueError, match="need an even size"):
        models.build("mon-tiers", image=(1, 27, 27))


@pytest.mark.parametrize("builder", [models.mon, models.mon_tiers, models.mon_large])
def test_a_misspelt_option_is_refused_by_a_public_name(builder: Any) -> None:
    """The TypeError named a private function."""
    with pytest.raises(TypeError, match=r"^mon(_tiers)?\(\) got an unexpected keyword argument 'alphaa'"):
        builder(GREY, alphaa=1)


@pytest.mark.parametrize(
    ("name", "width", "kind"),
    [
        ("mon", {"channels": 4}, ForwardBackward),
        ("mon-tiers", {"channels": (2, 4)}, PeacemanRachford),
        ("mon-fc", {"width": 8}, PeacemanRachford),
    ],
)
def test_they_are_exported(name: str, width: dict[str, Any], kind: Any) -> None:
    """What R stored on itself, a batch size that Q fixed, and .mT of a weight were refused with wrong advice."""
    torch.manual_seed(0)
    parts = models.get(name).builder(GREY, 10, splitting=kind, alpha=0.25, **width)
    net = ImplicitNetwork(*parts, tolerance=Tolerance(atol=0, rtol=1e-3, max_steps=300)).eval()
    program = export(net, torch.zeros(2, *GREY), format="torch")
    d = torch.randn(5, *GREY)
    with torch.no_grad():
        y, found = net(d, solution=True)
    outputs = program.module()(d)
    torch.testing.assert_close(outputs[0], y)
    assert outputs[1].tolist() == found.steps.tolist()


def test_a_batch_stops_as_one_as_the_authors_do_it() -> None:
    torch.manual_seed(0)
    net = ImplicitNetwork(*models.mon(GREY, channels=4), coupled=True, tolerance=Tolerance(atol=0, rtol=1e-2))
    with torch.no_grad():
        d = torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1, 1) * torch.randn(3, *GREY)
        v, steps = net.Q(d), 1
        u, new = torch.zeros_like(v), net.R(torch.zeros_like(v), v)
        while float((new - u).norm()) > 1e-2 * float(new.norm()):
            u, new, steps = new, net.R(new, v), steps + 1
        assert net.latent(d)[1].steps.tolist() == [steps] * 3
