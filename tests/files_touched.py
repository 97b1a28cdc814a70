"""Print the files of banach that one call passes through, its set-up included.

    python tests/files_touched.py [net] [step] [fit] [gpu]      by default all but gpu

`net`: the first net(d) of a network on a CPU. `step`: the first training step by TrainStep. `fit`: one epoch.
`gpu`: the first captured step of the digits network on a GPU, with the kernel that knows its R.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import banach
from banach import ImplicitNetwork

SOURCE = Path(banach.__file__).parent


def files_touched(call: Callable[[], object]) -> list[str]:
    """Return the files of src/banach whose functions run during the call, relative to that folder.

    Code that runs because a module is imported for the first time does not count: that is what the file holds.
    """
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    # A module's own code, and the bodies of its classes, run at import.
    paths = {Path(code.co_filename) for code in codes if code.co_flags & 0x2 and not code.co_name.startswith("<")}
    return sorted(str(path.relative_to(SOURCE)) for path in paths if path.is_relative_to(SOURCE))


class R(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 0.5 * torch.tanh(self.linear(u) + v)


def network() -> ImplicitNetwork:
    torch.manual_seed(0)
    return ImplicitNetwork(nn.Linear(10, 64), R(), nn.Linear(64, 3))


def net_call() -> Callable[[], object]:
    net, d = network(), torch.randn(32, 10)
    return lambda: net(d)


def step_call() -> Callable[[], object]:
    from banach.fast import TrainStep

    net, d, y = network(), torch.randn(32, 10), torch.randint(3, (32,))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    return lambda: TrainStep(net, optimizer, nn.functional.cross_entropy)(d, y)


def fit_call() -> Callable[[], object]:
    from banach import data, models
    from banach.train import Settings, fit

    net, images = models.build("digits"), data.load("digits", "train").subset(64)
    return lambda: fit(net, images, None, Settings(epochs=1, monitor=False))


def gpu_call() -> Callable[[], object]:
    from banach import models
    from banach.fast import TrainStep

    net, d, y = models.build("digits").cuda(), torch.randn(32, 1, 8, 8).cuda(), torch.randint(10, (32,)).cuda()
    optimizer = torch.optim.Adam(net.parameters(), fused=True, capturable=True)
    return lambda: TrainStep(net, optimizer, nn.functional.cross_entropy)(d, y)


CALLS = {"net": net_call, "step": step_call, "fit": fit_call, "gpu": gpu_call}


if __name__ == "__main__":
    for name in sys.argv[1:] or ["net", "step", "fit"]:
        found = files_touched(CALLS[name]())
        print(f"{name}: {len(found)} files", *found, sep="\n  ")
