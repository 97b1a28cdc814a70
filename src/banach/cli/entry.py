"""The entry point of `banach`: exit codes of signals, and what is missing if only the library was installed."""

import atexit
import os
import signal
import sys
from typing import Any


def main() -> int:
    """Run `banach` with the arguments of the process, and return the exit code.

    SIGINT, SIGTERM and SIGHUP exit with 128 + their number, as in training: also while torch is imported, data is
    read or results are written. Files are then complete or absent.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # Ignored ones stay ignored: nohup ignores SIGHUP, a shell SIGINT in the background.
        if number is not None and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _exit)
    if hasattr(sys.stdout, "reconfigure"):  # names of files and classes that the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from banach.cli.app import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich", "click"):
            raise
        print(f"banach: the command line needs {error.name}; run: pip install 'banach[app]'", file=sys.stderr)
        return 2
    code = 1  # of an uncaught exception
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun started this process
        atexit.register(lambda: _end_rank(code))  # registered before those of torch, so it runs after them
    try:
        code = run()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
        raise
    return code


def _exit(number: int, frame: Any) -> None:
    print("banach: stopped", file=sys.stderr)
    raise SystemExit(128 + number)


def _end_rank(code: int) -> None:
    """End the process without finalising Python, after all other exit hooks.

    Threads of gloo cannot be joined: caches of PyTorch keep the process group after it was destroyed. Until Python
    3.14 a thread that then frees a tensor while Python finalises aborts the process (pytorch/pytorch#190489).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
