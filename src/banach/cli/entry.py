"""The entry point of `banach`: says what is missing if the library was installed without its command line."""

from __future__ import annotations

import sys


def main() -> int:
    """Run `banach` with the arguments of the process, and return the exit code."""
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
