"""For all tests: signals work, and tests marked gpu are skipped where there is none."""

import signal

import pytest

# Started in the background of a shell or by nohup, tests may find signals ignored, and runs then rightly ignore
# them, too. Some tests are about these signals, in this process and in those that it starts.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs CUDA")
