"""`banach`: the sub-commands, and main(), which turns bad input into one sentence and exit code 2."""

import errno
import os
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from banach import __version__
from banach.cli.console import PLAIN, complain, spoken_warnings

BAD_INPUT, DIVERGED = 2, 3
_SHORT = {
    "train": "Train an implicit network.",
    "evaluate": "Evaluate a run on a split.",
    "diagnose": "Measure contraction, convergence and gradient quality of a run.",
    "predict": "Classify image files.",
    "compare": "Compare runs in a table and a plot.",
    "report": "Write one HTML page about a run, or about several.",
    "export": "Export a run to ONNX or torch.export, with a model card.",
    "models": "List the networks.",
    "data": "List, verify and fetch data sets.",
}


class _Command(TyperCommand):
    """A command whose --help lists options in groups, the `rich_help_panel` of each."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                panel = getattr(parameter, "rich_help_panel", None) or f"{parameter.param_type_name.title()}s"
                groups.setdefault(panel, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


class _Commands(TyperGroup):
    """The sub-commands. Each is imported when it is called: --help and shells see names only, without torch."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is None:  # a shell completes an unknown name
            return name, command, rest
        part = import_module(f"banach.cli.{name}")
        import_module("banach.cli.shared").load_entry_points()
        if name == "data":
            return name, typer.main.get_command(part.data_app), rest
        alone = typer.Typer(**PLAIN)
        alone.command(name, cls=_Command, epilog=part.EPILOG)(getattr(part, name))
        return name, typer.main.get_command(alone), rest


app = typer.Typer(
    name="banach",
    cls=_Commands,
    epilog="Start with: banach train      Then: banach diagnose runs/digits-1",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    **{**PLAIN, "add_completion": True},
)
for _name, _help in _SHORT.items():
    app.command(_name, short_help=_help)(lambda: None)  # `_Commands` replaces it


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"banach {__version__}")
        raise typer.Exit


_VERSION = typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")


@app.callback()
def _options(version: Annotated[bool, _VERSION] = False) -> None:
    """Implicit networks: train, evaluate, diagnose, predict."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return the exit code: 0, 2 for bad input, 3 for a divergence, or 128 + signal.

    What went wrong is one sentence on stderr; with BANACH_DEBUG=1 it is a traceback.
    """
    try:
        with spoken_warnings():
            done = typer.main.get_command(app).main(arguments, prog_name="banach", standalone_mode=False)
        return done if isinstance(done, int) else 0
    except typer.Abort:  # what typer makes of an EOFError
        return _refuse("a file or the input ended too early; check the data and what --import loads", BAD_INPUT)
    except Exception as error:
        # What typer raises for bad usage; its class is in click or in typer, depending on the version.
        if hasattr(error, "format_message"):
            return _usage(error)
        sentence = _sentence(error)
        if sentence is None or os.environ.get("BANACH_DEBUG"):
            raise
        return _refuse(sentence, DIVERGED if type(error).__name__ == "DivergenceError" else BAD_INPUT)


def _usage(error: Any) -> int:
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message)
        return BAD_INPUT
    path = error.ctx.command_path if getattr(error, "ctx", None) else "banach"
    return _refuse(f"{message.rstrip('.')}; see: {path} --help".replace("?;", "?"))


def _sentence(error: Exception) -> str | None:
    """Return the message of an error that the user can do something about, None for others."""
    from banach.train import CheckpointError, DivergenceError, RunError  # a command has imported it already

    random = "there is no fixed point to find" in str(error)  # an R with plain dropout
    if random or isinstance(error, (ValueError, RunError, CheckpointError, DivergenceError)):
        return str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):
        return f"there is not enough memory for this; choose smaller settings ({str(error)[:200]})"
    if not isinstance(error, OSError):
        return None
    said = (f"{error.filename}: " if error.filename else "") + str(error.strerror or error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        said += "; free some space and run it again (train: with --resume, earlier checkpoints are complete)"
    return said


def _refuse(sentence: str, code: int = BAD_INPUT) -> int:
    complain(f"banach: {' '.join(sentence.split())}")
    return code
