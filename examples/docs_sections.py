"""For the docs site: give sections of docstrings the blank line above them that mkdocstrings needs."""

import re
from typing import Any

import griffe


class Sections(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"(?m)^(?=(Args|Returns|Raises|Warns):$)", "\n", obj.docstring.value)
