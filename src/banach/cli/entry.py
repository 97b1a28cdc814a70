"""The entry point of `banach`: exit codes of signals, and what is missing if only the library was installed."""

import signal
import sys
from typing import Any


def main() -> int:
    """Run `banach` with the arguments of the process, and return the exit code.

    SIGTERM and SIGHUP exit with 128 + their number, as in training: also while torch is imported, data is read or
    results are written. Files are then complete or absent.
    """
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _exit)
    try:
        from banach.cli.app import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich", "click"):
            raise
        print(f"banach: the command line needs {error.name}; run: pip install 'banach[app]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # torch takes seconds to import
        print("banach: stopped", file=sys.stderr)
        return 130
    return run()


def _exit(number: int, frame: Any) -> None:
    print("banach: stopped", file=sys.stderr)
    raise SystemExit(128 + number)
