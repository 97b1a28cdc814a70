"""Use an installed banach as a new user would: run by `make package` in a fresh environment, outside the tree."""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import banach
from banach import Anderson, ImplicitNetwork, fixed_point

PACKAGE = Path(banach.__file__).parent


def check_package() -> None:
    """Check that this is the installed package, with its type marker."""
    assert Path(sys.prefix) in PACKAGE.parents, f"expected banach in {sys.prefix}, got {PACKAGE}"
    assert (PACKAGE / "py.typed").exists()


def check_library() -> None:
    """Take a training step, and find the root of x = cos x."""
    Q, linear, S = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
    net = ImplicitNetwork(Q, lambda u, v: 0.3 * torch.tanh(linear(u) + v), S, solver=Anderson())
    y, found = net(torch.randn(5, 4), solution=True)
    y.sum().backward()
    assert found.converged.all()
    root = fixed_point(torch.cos, torch.ones(1, 1))
    assert abs(float(root) - 0.7390851) < 1e-3


def check_commands(folder: str) -> None:
    """Train for an epoch on a few images, evaluate the run and write its page."""
    banach_command = str(Path(sys.executable).with_name("banach"))
    train = "train --subset 64 --epochs 1 --device cpu --threads 1 --out run"
    report = "report run --device cpu --samples 4"
    for command in ("--version", "models", train, "evaluate run --device cpu", report):
        print("banach", command, flush=True)
        subprocess.run([banach_command, *command.split()], cwd=folder, check=True)
    assert "</html>" in Path(folder, "run", "report.html").read_text()


if __name__ == "__main__":
    check_package()
    check_library()
    with tempfile.TemporaryDirectory() as folder:
        check_commands(folder)
    print(f"banach {banach.__version__} works in {sys.prefix}")
