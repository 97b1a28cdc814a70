"""`from banach import ImplicitNetwork` loads few modules, and no compiler beyond what `import torch` loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import banach

CODE = """
import json, sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
from banach import ImplicitNetwork
seconds = time.perf_counter() - start
print(json.dumps([sorted(set(sys.modules) - before), seconds]))
"""


def test_a_network_loads_few_modules_and_no_compiler() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(banach.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    loaded, seconds = json.loads(done.stdout)
    assert not [
        name for name in loaded if name.startswith(("torch._dynamo", "torch._inductor", "triton", "sympy"))
    ]
    assert len([name for name in loaded if name.split(".")[0] == "banach"]) <= 45
    assert seconds < 3  # 0.1 s on a free core; Dynamo alone takes 1 s there
