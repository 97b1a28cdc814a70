"""torch.compile in one graph: these layers in whole passes, and in a compiled R."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import JFB, Mode, Tolerance, Unroll
from banach.nn import Dropout, Lipschitz
from nn.parts_nn import Everything, close, gradients, network, normal, state

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo's own, in some versions

FIXED = Tolerance(max_steps=2, check_every=0)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def everything() -> Everything:
    torch.manual_seed(1)
    return Everything(Lipschitz(nn.Linear(6, 6).double(), 0.5), nn.BatchNorm1d(6).double(), Dropout(0.4))


def compare(compiled: Any, held: Any, eager: Any, passes: int = 2) -> None:
    """Two passes by both: same values, gradients and buffers, and masks that differ from pass to pass."""
    values = []
    for seed in range(passes):
        torch.manual_seed(seed)
        y = compiled(normal(5, 4))
        got = gradients(held, y.square().sum())
        torch.manual_seed(seed)
        expected = eager(normal(5, 4))
        assert torch.allclose(y, expected, rtol=0, atol=1e-12)
        assert close(got, gradients(eager, expected.square().sum()), atol=1e-12)
        assert close(state(held), state(eager), atol=1e-12)
        values.append(y)
    assert not torch.allclose(values[0], values[-1])


@pytest.mark.parametrize("mode", [JFB(), Unroll(2), Unroll(2, checkpoint=True)])
def test_a_pass_is_one_graph(mode: Mode) -> None:
    net = network(everything(), tolerance=FIXED, backward=mode)
    if mode == Unroll(2, checkpoint=True):  # buffers that change inside a checkpoint are PyTorch's own refusal
        net.R.affine, net.R.norm = nn.Linear(6, 6).double(), nn.Identity()
    compare(torch.compile(net, fullgraph=True, backend="aot_eager"), net, copy.deepcopy(net))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_a_compiled_r_in_an_eager_loop_settles_on_its_graphs() -> None:
    net = network(everything(), tolerance=FIXED)
    eager = copy.deepcopy(net)
    outer = copy.copy(net)
    outer._modules = dict(net._modules)
    outer.R = torch.compile(net.R, fullgraph=True, backend="aot_eager")
    kept = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        outer.R(normal(5, 6), normal(5, 6))  # compiled outside a pass first, where there is no mask to find
    net.load_state_dict(kept)
    compare(outer, net, eager)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compare(outer, net, eager, passes=4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


class Longer(nn.Module):
    """R on sequences, with a layer that is called at two places: the second drops whole features."""

    def __init__(self, p: float) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear, self.drop = nn.Linear(6, 6).double(), Dropout(p)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.3 * torch.tanh(self.drop(self.linear(u))) + v * self.drop(torch.ones_like(u[:, :1]))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.parametrize(("mode", "p"), [(JFB(), 0.4), (Unroll(2, checkpoint=True), 0.0)])
def test_a_compiled_r_that_drops_takes_sequences_of_every_length(mode: Mode, p: float) -> None:
    """Code was made for every length, and from the eighth piece on R ran eagerly: in a checkpoint an error."""
    net = network(Longer(p), tolerance=FIXED, backward=mode)
    eager, graphs = copy.deepcopy(net), []
    net.R.compile(fullgraph=True, backend="aot_eager")
    for length in (9, 8, 7, 6, 5, 10):
        d = normal(3, length, 4, seed=length)
        found = []
        for one in (net, eager):
            torch.manual_seed(length)
            y = one(d)
            found.append({"y": y, **gradients(one, y.square().sum())})
        assert close(found[0], found[1], atol=1e-12)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[3:] == [graphs[3]] * 3
