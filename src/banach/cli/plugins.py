"""Models and data sets of other packages: entry points of the group "banach", and --import."""

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Annotated

import typer

from banach import data, models
from banach.data.own import own
from banach.train import Settings

GROUP = "banach"


def import_modules(modules: Sequence[str] | None) -> list[str]:
    """Import modules, which register their models and data sets. Older versions of typer need a list back.

    They may be in the working directory. It is on the path only with --import, since a file there could pass for
    an optional package that is missing; and last, so that it hides no installed one.
    """
    if modules and not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())
    for module in modules or ():
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a module raises
            said = f"{type(error).__name__}: {error}"
            advice = "install it, or run the command in its folder"
            raise ValueError(f"--import: the module {module!r} cannot be imported ({said}); {advice}") from error
    return list(modules or ())


_HELP = "Import a module that registers models or data sets; may be repeated."
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", help=_HELP, metavar="MODULE", callback=import_modules, show_default=False),
]


@functools.cache
def load_entry_points() -> dict[str, dict[str, object]]:
    """Import what packages have registered, once; return what needs no --import."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:  # another package's bug must not stop every command
            warnings.warn(f"the entry point {point.value} of {GROUP} cannot be loaded: {error}", stacklevel=2)
    return _registered()


def _registered() -> dict[str, dict[str, object]]:
    known = {"data": (data.get, data.names()), "model": (models.get, models.names())}
    return {kind: {name: get(name) for name in names} for kind, (get, names) in known.items()}


def recorded(settings: Settings, modules: Sequence[str] | None) -> Settings:
    """Return the settings as a run stores them: enough to find its data again, and to say which modules it needs.

    Names that --import registered or replaced become MODULE:NAME, and paths of your data absolute.
    """
    mine = own(str(settings.data))
    given = {"data": mine.name if mine else str(settings.data), "model": str(settings.model)}
    before, now = load_entry_points(), _registered()
    for key, name in given.items():
        if modules and name in now[key] and now[key][name] is not before[key].get(name):
            given[key] = f"{','.join(modules)}:{name}"
    return settings.changed(given)
