"""Every mode on every map: the contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from backward.contracts_backward import CHECKPOINTED, CHECKS, MODES, check_func_grad, name
from backward.maps_backward import Case, all_cases
from banach import Mode


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("mode", MODES, ids=name)
def test_contract(mode: Mode, case: Case, check: Callable[[Mode, Case], None]) -> None:
    check(mode, case)


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in CHECKPOINTED], ids=name)
def test_torch_func_grad(mode: Mode, case: Case) -> None:
    check_func_grad(mode, case)
