"""torch.func, autocast, bfloat16 networks, channels_last, two processes: the rest of PyTorch."""

import tempfile
import time

import pytest
import torch
import torch.multiprocessing as mp

import banach
from banach import JFB, Anderson, Implicit, Neumann, Status, Tolerance, Unroll
from networks import conv_network, gradients, images, linear_network
from two_processes import train_in_a_process

EXACT = Implicit(tolerance=Tolerance(atol=0, rtol=1e-12, max_steps=200))


@pytest.mark.parametrize("backward", [JFB(), Neumann(2), Unroll(3), EXACT])
def test_func_grad_equals_autograd(backward: banach.Mode) -> None:
    net = linear_network()
    net.backward = backward
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parameters = dict(net.named_parameters())

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(net, parameters, (x,)).square().sum()

    functional = torch.func.grad(loss)({name: p.detach() for name, p in parameters.items()})
    for got, expected in zip(functional.values(), gradients(net, net(x).square().sum()), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("solver", [banach.Picard(), Anderson(), banach.Broyden()])
@pytest.mark.parametrize("backward", [JFB(), Neumann(2), Unroll(2, damping=0.2), Implicit()])
@pytest.mark.filterwarnings("ignore:the adjoint equation missed")
def test_autocast(solver: banach.Solver, backward: banach.Mode) -> None:
    net = conv_network(batch_norm=True)
    net.solver, net.backward = solver, backward
    expected = gradients(net, net(images()).square().sum())
    with torch.autocast("cpu", torch.bfloat16):
        u, found = net.latent(images())
        loss = net.S(u).float().square().sum()
    assert found.value.dtype == torch.float32
    got = gradients(net, loss)
    for a, b in zip(got, expected, strict=True):
        if b.norm() > 1e-3:  # bfloat16 has 8 bits: the direction is what survives
            assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.9


def test_a_network_in_bfloat16() -> None:
    net = conv_network().bfloat16()
    u, found = net.latent(images().bfloat16())
    assert u.dtype == found.value.dtype == torch.bfloat16
    assert found.residual.dtype == torch.float32
    assert Status.NONFINITE not in found.status
    reference = conv_network().latent(images())[0]
    assert (u.float() - reference).abs().max() < 0.05 * reference.abs().max()


@pytest.mark.parametrize("solver", [banach.Picard(), Anderson(), banach.Broyden()])
def test_channels_last_is_kept(solver: banach.Solver) -> None:
    net = conv_network(batch_norm=True).eval()
    expected = net(images())
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net.solver = solver
    seen = []
    net.R.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    y, found = net(images().to(memory_format=torch.channels_last), solution=True)
    assert all(u.is_contiguous(memory_format=torch.channels_last) for u in seen[1:])
    assert found.value.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, expected, atol=1e-3, rtol=1e-3)


def test_ddp_over_two_processes() -> None:
    alone = conv_network()
    expected = gradients(alone, alone(images(6)).square().mean())
    with tempfile.TemporaryDirectory() as folder:
        both = mp.start_processes(train_in_a_process, args=(folder,), nprocs=2, start_method="spawn", join=False)
        deadline = time.monotonic() + 120
        while not both.join(timeout=10):  # true once both have ended, false after every wait for one
            if time.monotonic() > deadline:
                for process in both.processes:
                    process.kill()
                pytest.fail("two processes took longer than 120 s over one step")
        got = torch.load(f"{folder}/gradients.pt")
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
