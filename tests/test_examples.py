"""The examples run, learn and print what they promise."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import docs_figures, infinity_norm, transformer_deq

from banach import GMRES, Implicit, Picard, Tolerance
from networks import by_hand, gradients

ROOT = Path(__file__).parent.parent


def run(*command: str, **environment: str) -> str:
    found = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", *command],  # every fixed point is found
        cwd=ROOT,
        env={"PYTHONPATH": "src", "PATH": "", **environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_special_cases() -> None:
    said = run("examples/special_cases.py")
    assert "equals S(R(0, Q(d))): True" in said
    assert "S(Q(d)): True" in said


def test_digits_ends_with_a_table_and_a_plot(tmp_path: Path) -> None:
    said = run("examples/digits.py", "--epochs", "2", "--out", str(tmp_path))
    accuracy = re.search(r"accuracy % +([\d.]+)", said)
    assert accuracy is not None
    assert float(accuracy[1]) > 70
    assert (tmp_path / "training.png").stat().st_size > 5000
    assert f"plot: {tmp_path}" in said


def test_the_figures_of_the_docs_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["docs_figures.py", "--out", str(tmp_path)])
    docs_figures.main()
    for name in re.findall(r"images/(\w+\.svg)", (ROOT / "docs" / "idea.md").read_text()):
        assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.parametrize(
    ("package", "example"), [("lightning", "lightning_module"), ("accelerate", "accelerate_loop")]
)
def test_an_implicit_network_trains_in(package: str, example: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; run: pip install {package}")
    paths = os.pathsep.join(["src", *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    loss = re.search(r"loss: ([\d.]+)", run(f"examples/{example}.py", **environment).splitlines()[-1])
    assert loss is not None
    assert float(loss[1]) < 0.03  # a straight line has 0.17


# The paper's general cases: a DEQ with S the identity, and a model kept well-posed by projection.


@pytest.mark.parametrize(("example", "steps", "least"), [(transformer_deq, 120, 0.9), (infinity_norm, 150, 0.75)])
def test_they_learn_and_print_what_they_promise(
    example: Any, steps: int, least: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, accuracy = example.train(steps)
    assert accuracy > least
    if example is transformer_deq:
        tokens = torch.randint(transformer_deq.SYMBOLS, (16, transformer_deq.LENGTH))
        with torch.no_grad():
            u, found = net(tokens, solution=True)
            torch.testing.assert_close(u, net.R(u, net.Q(tokens)), rtol=0, atol=5e-3)  # S is the identity
        assert found.converged.all()
    else:
        assert float(net.R.A.detach().abs().sum(1).max()) <= infinity_norm.BOUND * (1 + 1e-5)
        with torch.no_grad():
            starts = [net.latent(infinity_norm.rings(50)[0], z0=torch.randn(50, 40))[1] for _ in range(2)]
        assert all(found.converged.all() for found in starts)
    monkeypatch.setattr(example, "train", lambda: (net, accuracy))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    example.main()
    assert "evaluations:" in capsys.readouterr().out


@pytest.mark.parametrize("example", [transformer_deq, infinity_norm])
def test_their_exact_gradients_are_those_of_unrolled_autograd(example: Any) -> None:
    torch.manual_seed(0)
    if example is transformer_deq:
        net, d = example.transformer_deq().double().eval(), torch.randint(example.SYMBOLS, (2, example.LENGTH))
    else:
        net, d = example.implicit_model(2, 12, 3).double(), example.rings(4)[0].double()
    net.tolerance, net.solver = Tolerance(atol=1e-13, max_steps=500), Picard()
    net.backward = Implicit(GMRES(), Tolerance(atol=0, rtol=1e-11, max_steps=200))
    # Not squares: their sum over a layer norm is constant.
    wanted = gradients(net, by_hand(net, d, steps=500).pow(3).sum())
    for a, b in zip(gradients(net, net(d).pow(3).sum()), wanted, strict=True):
        assert float((a - b).norm()) <= 1e-6 * max(float(b.norm()), 1e-6)


def test_the_transformer_is_causal() -> None:
    """A later symbol changes nothing before it."""
    torch.manual_seed(0)
    net = transformer_deq.transformer_deq().double().eval()
    net.tolerance = Tolerance(atol=1e-13, max_steps=500)
    tokens = transformer_deq.sequences(3)[0]
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % transformer_deq.SYMBOLS
    with torch.no_grad():
        u, changed = net(tokens), net(other)
        torch.testing.assert_close(u[:, :-1], changed[:, :-1], rtol=0, atol=1e-11)
        assert float((u[:, -1] - changed[:, -1]).abs().max()) > 1e-3


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # these four are of the compiler itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32:UserWarning")
@pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning")
def test_the_transformer_trains_captured_and_compiled() -> None:
    assert transformer_deq.train(300, device="cuda")[1] > 0.9


@pytest.mark.parametrize("bound", [0.3, 0.95, 50.0])
def test_the_projection_is_the_nearest_row(bound: float) -> None:
    """By bisection over the threshold, which is another way to find it."""
    torch.manual_seed(0)
    weight = torch.randn(5, 9, dtype=torch.float64)
    projected = infinity_norm.project_rows_(weight.clone(), bound)
    low, high = torch.zeros(5, 1, dtype=torch.float64), weight.abs().amax(1, keepdim=True)
    for _ in range(100):
        middle = (low + high) / 2
        above = (weight.abs() - middle).clamp(min=0).sum(1, keepdim=True) > bound
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    inside = weight.abs().sum(1, keepdim=True) <= bound
    expected = torch.where(inside, weight, weight.sign() * (weight.abs() - low).clamp(min=0))
    torch.testing.assert_close(projected, expected, rtol=0, atol=1e-12)
