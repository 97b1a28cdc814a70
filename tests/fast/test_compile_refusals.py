"""banach.compile says what it does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import banach
from banach import ConvergenceWarning, ImplicitNetwork, Tolerance


def halves(u: Any, v: Any) -> Any:
    return 0.5 * u + v


CASES: dict[str, tuple[ImplicitNetwork, Any, str]] = {
    "latent": (
        ImplicitNetwork(lambda d: (d, d), lambda u, v: (halves(u[0], v[0]), halves(u[1], v[1])), lambda u: u[0]),
        torch.ones(2, 3),
        r"whose Q\(d\) is one tensor, got a tuple",
    ),
    "output": (
        ImplicitNetwork(nn.Identity(), halves, lambda u: {"a": u}),
        torch.ones(2, 3),
        r"whose S\(u\) is one tensor, got a dict",
    ),
    "data": (
        ImplicitNetwork(lambda d: d["x"], halves, nn.Identity()),
        {"x": torch.ones(2, 3)},
        r"whose d is one tensor, got a dict",
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_nests_are_refused_in_a_sentence(name: str) -> None:
    net, d, words = CASES[name]
    net.eval()(d)  # the network itself takes them
    with pytest.raises(TypeError, match=words):
        banach.compile(net)(d)


ROWS: dict[str, tuple[Any, Any, str]] = {
    "Q": (lambda d: d.flatten(0, 1), nn.Identity(), r"whose Q\(d\) has a row for each of 2"),
    "mean": (nn.Identity(), lambda u: u.mean(0), r"whose S\(u\) has a row .* shape \(3, 4\)"),
    "number": (nn.Identity(), lambda u: u.mean(), r"whose S\(u\) has a row .* shape \(\)"),
}


@pytest.mark.parametrize("name", list(ROWS))
def test_parts_have_a_row_for_every_sample(name: str) -> None:
    Q, S, words = ROWS[name]
    net, d = ImplicitNetwork(Q, halves, S), torch.ones(2, 3, 4)
    net.eval()(d)  # the network itself takes them
    with pytest.raises(ValueError, match=words):
        banach.compile(net)(d)


def test_what_is_no_network_or_no_latent_is_refused_in_a_sentence() -> None:
    for wrong, name in ((nn.Linear(2, 2), "Linear"), (None, "NoneType"), (ImplicitNetwork, "ImplicitNetwork")):
        with pytest.raises(TypeError, match=f"compile takes an ImplicitNetwork, got {name}"):
            banach.compile(wrong)  # type: ignore[arg-type]
    net = ImplicitNetwork(nn.Identity(), halves, nn.Identity()).eval()
    with pytest.raises(ValueError, match="coupled=True"):
        banach.compile(ImplicitNetwork(nn.Identity(), halves, nn.Identity(), coupled=True))
    with pytest.raises(RuntimeError, match=r"net\.eval\(\)"):
        banach.compile(ImplicitNetwork(nn.Identity(), halves, nn.Identity()))(torch.ones(2, 3))
    for wrong_count in ({"neighbours": 1.5}, {"neighbours": True}, {"neighbours": -1}):
        with pytest.raises(ValueError, match="must be a whole number, at least"):
            banach.compile(net, **wrong_count)
    fast, d = banach.compile(net), torch.ones(2, 3)
    found = fast(d, solution=True)[1]
    with pytest.raises(TypeError, match="z0 must be a tensor, such as the value of a Solution, got a Solution"):
        fast(d, z0=found)
    with pytest.raises(ValueError, match="got a tensor without dimensions"):
        fast(torch.tensor(1.0))


def test_an_empty_batch_has_an_empty_answer() -> None:
    net = ImplicitNetwork(nn.Identity(), halves, nn.Identity()).eval()
    d = torch.ones(0, 3)
    for fast in (banach.compile(net), banach.compile(net, neighbours=4)):
        assert fast(d).shape == (0, 3)
        assert fast(torch.ones(2, 3)).shape == (2, 3)


def test_an_r_that_mixes_samples_is_refused() -> None:
    """Late samples went on as a smaller batch, and others were marked converged at values of the larger one."""

    def R(u: Tensor, v: Tensor) -> Tensor:
        return 0.4 * u + 0.3 * u.mean(0) + v

    net = ImplicitNetwork(nn.Identity(), R, nn.Identity()).eval()
    fast = banach.compile(net)
    assert fast(torch.ones(1, 3)).shape == (1, 3), "one sample has nothing to mix with"
    with pytest.raises(ValueError, match="treats each sample by itself, and this one mixes samples"):
        fast(torch.ones(4, 3))


def test_few_steps_warn_on_a_cpu_too() -> None:
    net = ImplicitNetwork(nn.Identity(), lambda u, v: 1.5 * u + v, nn.Identity(), tolerance=Tolerance(max_steps=6))
    with pytest.warns(ConvergenceWarning, match="stopped at max_steps"):
        banach.compile(net.eval())(torch.ones(2, 3))
    net.tolerance = Tolerance(max_steps=0)
    assert torch.equal(banach.compile(net)(torch.ones(2, 3)), torch.ones(2, 3)), "the explicit twin does not warn"
