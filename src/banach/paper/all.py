"""Every study by its name, in the order of the paper."""

from __future__ import annotations

from banach.paper import accelerate, figures, memory, neumann, table1, table2, theory, toy
from banach.paper.study import Study

STUDIES: dict[str, Study] = {
    module.STUDY.name: module.STUDY
    for module in (table1, table2, figures, neumann, accelerate, memory, toy, theory)
}
