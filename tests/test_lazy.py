"""What is imported when: names at first use, no torch for --version and --help, no kernels for a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import banach

SOURCE = Path(banach.__file__).parents[1]
REPRODUCTION = f"""
import sys
sys.path.append({str(Path(__file__).parents[1])!r})
from reproduction.__main__ import main
try:
    main(["train", "--help"])
except SystemExit:
    pass
"""


def run(*arguments: str) -> str:
    """Return what a new Python process prints, which coverage would slow down."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    environment = {**kept, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def loaded_after(code: str) -> set[str]:
    return set(json.loads(run("-c", f"import json, sys\n{code}\nprint(json.dumps(list(sys.modules)))")))


@pytest.mark.parametrize(
    "code",
    [
        "import banach; banach.__version__; dir(banach)",
        "import sys; sys.argv = ['banach', '--version']; from banach.cli.entry import main; main(); print()",
        "import sys; sys.argv = ['banach', '--help']; from banach.cli.entry import main; main(); print()",
        "import sys; sys.argv = ['banach', 'trian']; from banach.cli.entry import main; main(); print()",
        REPRODUCTION,
    ],
)
def test_torch_is_not_imported(code: str) -> None:
    quiet = f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    exec({code!r})"
    assert "torch" not in loaded_after(quiet)


@pytest.mark.parametrize("before", ["import banach.solve", "import banach.network", "from banach import Picard"])
def test_solve_is_the_function_whatever_was_imported_before(before: str) -> None:
    code = f"{before}\nimport banach\nfrom banach import solve\nprint(solve is banach.solve, type(solve).__name__)"
    assert run("-c", code).split() == ["True", "function"]


def test_names_and_their_absence() -> None:
    assert set(banach.__all__) <= set(dir(banach))
    assert banach.nn.Dropout is not None
    with pytest.raises(AttributeError, match="module 'banach' has no attribute 'nonsense'"):
        getattr(banach, "nonsense")  # noqa: B009
    code = "from banach import *\nprint(solve.__name__, compile.__name__)"
    assert run("-c", code).split() == ["solve", "CompiledNetwork"]


def test_help_lists_every_command() -> None:
    shown = run("-m", "banach", "--help")
    for part in sorted((SOURCE / "banach" / "cli").glob("*.py")):
        if "EPILOG" in part.read_text() and part.stem != "app":
            assert f"  {part.stem} " in shown


CODE = """
import json, sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
from banach import ImplicitNetwork
print(json.dumps([sorted(set(sys.modules) - before), time.perf_counter() - start]))
"""


def test_a_network_loads_few_modules_no_kernel_and_no_compiler_beyond_torchs() -> None:
    loaded, seconds = json.loads(run("-c", CODE))
    compilers = ("torch._dynamo", "torch._inductor", "triton", "sympy")
    assert not [name for name in loaded if name.startswith(compilers)]
    own = [name for name in loaded if name.startswith("banach.")]
    assert {name.split(".")[1] for name in own} == {"checks", "latent", "solve", "backward", "nn", "network"}
    assert len(own) < 45
    assert seconds < 3  # 0.1 s on a free core; Dynamo alone takes 1 s there
