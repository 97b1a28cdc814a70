"""For all tests: Ctrl-C works, and tests marked gpu are skipped where there is none."""

import signal

import pytest

# Started in the background of a shell, tests may find Ctrl-C ignored, and runs then rightly ignore it, too. Some
# tests are about Ctrl-C, in this process and in those that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs CUDA")
