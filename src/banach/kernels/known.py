"""Is a module still what its class says? Only then may something else compute in its place."""

from __future__ import annotations

from typing import Any


def says(part: Any, name: str) -> bool:
    """Is the class that defines `forward` the one that defines this? Or has the module itself been given it?"""
    if "forward" in vars(part):
        return False
    owners = [next((c for c in type(part).__mro__ if word in vars(c)), None) for word in ("forward", name)]
    return name in vars(part) or (owners[1] is not None and owners[0] is owners[1])
