"""Bad input: one sentence each, saying what was got, what was expected, what to do; and the signatures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import RMS, Anderson, Broyden, Picard, Tolerance, solve

Z = torch.zeros(2, 3)


def half(z: Tensor, *inputs: Tensor) -> Tensor:
    return z / 2


def sentence(error: pytest.ExceptionInfo[Any]) -> str:
    text = str(error.value)
    assert "\n" not in text.strip()
    return text


@pytest.mark.parametrize(
    ("T", "kind", "message"),
    [
        (lambda z: z[:, :1], ValueError, r"T must keep the shape of its input: \(2, 3\) became \(2, 1\)"),
        (lambda z: z.sum(), ValueError, r"T must keep the shape of its input: \(2, 3\) became \(\)"),
        (lambda z: z[None], ValueError, r"T must keep the shape of its input: \(2, 3\) became \(1, 2, 3\)"),
        (lambda z: (z, z), TypeError, r"T must keep the structure of z0: tensor became \(tensor, tensor\)"),
        (lambda z: {"z": z}, TypeError, "T must keep the structure of z0: tensor became {'z': tensor}"),
        (lambda z: None, TypeError, "T must keep the structure of z0: tensor became NoneType"),
        (
            lambda z: z.double(),
            TypeError,
            "T must keep the dtype of its input: float32 became float64; give z0 in",
        ),
        (lambda z: z.bfloat16(), TypeError, "T must keep the dtype of its input: float32 became bfloat16"),
        (
            lambda z: z.to("meta"),
            ValueError,
            "T must keep the device of its input: cpu became meta; put z0 on meta",
        ),
        (lambda z: z.mul_(0.5), ValueError, "T must not change its input in place"),
        (
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)),
            ValueError,
            "T must not change its input in place",
        ),
        (nn.Linear(3, 3).double(), TypeError, "T cannot take z0 of torch.float32 on cpu .* give z0 the dtype"),
        (
            nn.Linear(3, 3, device="meta"),
            TypeError,
            "T cannot take z0 of torch.float32 on cpu .* device of T's weights",
        ),
        ("tanh", TypeError, "T must be callable, got str"),
    ],
)
def test_bad_maps(T: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        solve(T, Z)


def test_an_error_inside_T_is_left_as_it_is() -> None:
    def T(z: Tensor) -> Tensor:
        raise RuntimeError("my own trouble")

    with pytest.raises(RuntimeError, match=r"^my own trouble$"):
        solve(T, Z)


@pytest.mark.parametrize(
    ("T", "message"),
    [
        (lambda z: (z["a"], z["b"]), r"{'a': tensor, 'b': \(tensor\)} became \(tensor, \(tensor\)\)"),
        (lambda z: {"a": z["a"]}, "became {'a': tensor}"),
        (lambda z: {**z, "c": z["a"]}, "became {'a': tensor, 'b': .*, 'c': tensor}"),
        (lambda z: {"a": z["a"], "b": z["b"][0]}, "must keep the structure of z0: .tensor. became tensor"),
        (lambda z: z["a"], "became tensor"),
    ],
)
def test_bad_nests(T: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        solve(T, {"a": Z, "b": (Z,)})


@pytest.mark.parametrize(
    ("z0", "kind", "message"),
    [
        (Z.long(), TypeError, r"z0 must be of a floating-point dtype, got int64; call z0.float\(\)"),
        (Z.bool(), TypeError, "z0 must be of a floating-point dtype, got bool"),
        (Z + 0j, TypeError, "z0 must be of a floating-point dtype, got complex64"),
        (None, TypeError, "a latent must be a tensor or a tuple, list or dict of tensors, got NoneType"),
        (3.0, TypeError, "got float"),
        ([[0.0, 1.0]], TypeError, "got float"),
        ((), ValueError, "z0 must hold at least one tensor, got an empty nest"),
        ((Z, Z.double()), TypeError, "the tensors of z0 must share one dtype, got float32 and float64"),
        ((Z, Z.to("meta")), ValueError, "the tensors of z0 must share one device, got cpu and meta"),
        ((Z, Z[:1]), ValueError, r"must share their first \(batch\) axis, got 2 and 1 rows"),
    ],
)
def test_bad_starts(z0: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as error:
        solve(half, z0)
    sentence(error)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        (
            {"solver": Picard},
            TypeError,
            r"solver must be a solver object such as Picard\(\) or Anderson\(\), got <class",
        ),
        ({"solver": "anderson"}, TypeError, "solver must be a solver object .* got 'anderson'"),
        ({"solver": None}, TypeError, "solver must be a solver object .* got None"),
        ({"tolerance": 1e-4}, TypeError, r"tolerance must be a Tolerance, got 0.0001; write Tolerance\(atol="),
        ({"tolerance": Tolerance}, TypeError, "tolerance must be a Tolerance, got <class"),
        ({"inputs": Z}, TypeError, r"inputs must be a tuple of tensors, got Tensor; write inputs=\(x,\)"),
        ({"inputs": None}, TypeError, "inputs must be a tuple of tensors, got NoneType"),
        ({"inputs": (Z, None)}, TypeError, "each of `inputs` must be a tensor .* got NoneType"),
        ({"compact": True}, ValueError, "compact=True needs what belongs to a sample in `inputs`"),
        ({"compact": True, "inputs": (Z,), "coupled": True}, ValueError, "compact=True needs independent samples"),
        ({"compact": True, "inputs": (Z[:1],)}, ValueError, r"expected 2 rows, got shape \(1, 3\)"),
        ({"compact": True, "inputs": (Z, Z.sum())}, ValueError, r"expected 2 rows, got shape \(\)"),
        ({"max_steps": 5}, TypeError, "unexpected keyword argument 'max_steps'"),
        ({"tol": 1e-3}, TypeError, "unexpected keyword argument 'tol'"),
        ({"solvr": Picard()}, TypeError, "unexpected keyword argument 'solvr'"),
    ],
)
def test_bad_settings_of_solve(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as error:
        solve(half, Z, **settings)
    sentence(error)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"atol": -1e-4}, ValueError, "atol must be finite and at least 0, got -0.0001"),
        ({"rtol": -1}, ValueError, "rtol must be finite and at least 0, got -1"),
        ({"atol": math.nan}, ValueError, "atol must be finite and at least 0, got nan"),
        ({"rtol": math.inf}, ValueError, "rtol must be finite and at least 0, got inf"),
        ({"atol": "1e-4"}, TypeError, "atol must be a number, got '1e-4'"),
        ({"atol": None}, TypeError, "atol must be a number, got None"),
        ({"max_steps": 2.5}, TypeError, "max_steps must be a whole number, got 2.5"),
        ({"max_steps": 50.0}, TypeError, "max_steps must be a whole number, got 50.0"),
        ({"max_steps": True}, TypeError, "max_steps must be a whole number, got True"),
        ({"max_steps": -1}, ValueError, "max_steps must be at least 0, got -1"),
        ({"check_every": -2}, ValueError, "check_every must be at least 0, got -2"),
        (
            {"norm": RMS},
            TypeError,
            r"norm must be a norm such as RMS\(\), Euclidean\(\) or WorstPixel\(\), got <class",
        ),
        ({"norm": "rms"}, TypeError, "norm must be a norm .* got 'rms'"),
        ({"maxsteps": 3}, TypeError, "unexpected keyword argument 'maxsteps'"),
    ],
)
def test_bad_tolerances(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as error:
        Tolerance(**settings)
    sentence(error)


def test_tolerance_takes_no_positions() -> None:
    with pytest.raises(TypeError):
        Tolerance(1e-3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "settings", "kind", "message"),
    [
        (Picard, {"damping": 1.0}, ValueError, "damping must be at least 0 and below 1, got 1.0"),
        (Picard, {"damping": -0.1}, ValueError, "damping must be at least 0 and below 1, got -0.1"),
        (Picard, {"damping": math.nan}, ValueError, "damping must be at least 0 and below 1, got nan"),
        (Picard, {"dampening": 0.1}, TypeError, "unexpected keyword"),
        (Anderson, {"memory": 0}, ValueError, "memory must be a whole number of at least 1, got 0"),
        (Anderson, {"memory": 2.0}, ValueError, "memory must be a whole number of at least 1, got 2.0"),
        (Anderson, {"memory": True}, ValueError, "memory must be a whole number of at least 1, got True"),
        (Anderson, {"damping": 1.5}, ValueError, "damping must be at least 0 and below 1, got 1.5"),
        (Anderson, {"ridge": -1.0}, ValueError, "ridge must be at least 0, got -1.0"),
        (Anderson, {"bound": 0.5}, ValueError, "bound must be above 1, got 0.5"),
        (Anderson, {"growth": math.nan}, ValueError, "growth must be above 1, got nan"),
        (Anderson, {"patience": 0}, ValueError, "patience must be a whole number of at least 1, got 0"),
        (Anderson, {"m": 5}, TypeError, "unexpected keyword"),
        (Broyden, {"memory": -1}, ValueError, "memory must be a whole number of at least 1, got -1"),
        (Broyden, {"growth": 1}, ValueError, "growth must be above 1, got 1"),
        (Broyden, {"patience": 2.5}, ValueError, "patience must be a whole number of at least 1, got 2.5"),
        (Broyden, {"ls": True}, TypeError, "unexpected keyword"),
    ],
)
def test_bad_solvers(make: Any, settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as error:
        make(**settings)
    sentence(error)
