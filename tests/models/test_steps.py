"""Training steps in every backward mode, statistics, memory formats, names in a checkpoint; digits are learnt."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import GMRES, JFB, Implicit, ImplicitNetwork, Mode, Neumann, NormalCG, Tolerance, Unroll, data, models
from banach.train import Settings, evaluate, fit
from models.reference_models import IMPLICIT, SMALL, images, network

FEW = Tolerance(max_steps=3, check_every=0)
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
    net = models.build(name, image=image).double().eval()
    if isinstance(net, ImplicitNetwork):
        net.tolerance = FEW
    d = images(name, 3, image)
    with torch.no_grad():
        expected = net(d)
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for label, module in net.named_modules():
            module.register_forward_hook(partial(watch, label))
        torch.testing.assert_close(net(d.contiguous(memory_format=torch.channels_last)), expected)
    assert lost == []


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
