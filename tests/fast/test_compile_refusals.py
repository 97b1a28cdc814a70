"""banach.compile says what it does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import banach
from banach import ImplicitNetwork


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


def test_one_tensor_is_taken() -> None:
    net = ImplicitNetwork(nn.Identity(), halves, nn.Identity()).eval()
    d: Tensor = torch.ones(2, 3)
    torch.testing.assert_close(banach.compile(net)(d), 2 * d, rtol=1e-3, atol=1e-3)
