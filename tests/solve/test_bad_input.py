"""Bad input: one sentence each, saying what was got, what was expected, what to do."""

import math
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import RMS, Anderson, Broyden, Picard, Tolerance, solve

Z = torch.zeros(2, 3)
NEST = {"a": Z, "b": (Z,)}
IN_PLACE = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))
OF_Z = "T must not change its input in place: begin with an operation that is not in place"
OF_INPUTS = r"T must not change `inputs` \(in a network: R must not change v\) in place"


def half(z: Tensor, *inputs: Tensor) -> Tensor:
    return z / 2


def unknown(z: Tensor) -> Tensor:
    raise NotImplementedError("The operator 'aten::geqrf' is not currently implemented for the MPS device.")


MAPS: list[tuple[Any, Any, type[Exception], str]] = [
    (lambda z: z[:, :1], Z, ValueError, r"T must keep the shape of its input: expected \(2, 3\), got \(2, 1\)"),
    (lambda z: (z, z), Z, TypeError, r"T must keep the structure of z0: expected tensor, got \(tensor, tensor\)"),
    (lambda z: None, Z, TypeError, "T must keep the structure of z0: expected tensor, got NoneType"),
    (lambda z: z.double(), Z, TypeError, "the dtype of its input: expected float32, got float64; give z0 in"),
    (lambda z: z.long(), Z, TypeError, "T must keep the dtype of its input: expected float32, got int64$"),
    (unknown, Z, NotImplementedError, "^The operator"),
    (lambda z: z.to("meta"), Z, ValueError, "T must keep the device .*: expected cpu, got meta; put z0 on meta"),
    (nn.Linear(3, 3).double(), Z, TypeError, "T cannot take z0 of torch.float32 on cpu .* give z0 the dtype"),
    (nn.Linear(3, 3, device="meta"), Z, TypeError, "T cannot take z0 of torch.float32 .* device of T's weights"),
    ("tanh", Z, TypeError, "T must be callable, got str"),
    (lambda z: (z["a"], z["b"]), NEST, TypeError, r"'b': \(tensor\)}, got \(tensor, \(tensor\)\)"),
    (lambda z: None, (Z, Z), TypeError, r"structure of z0: expected \(tensor, tensor\), got NoneType"),
    (lambda z: z[:1], (Z, Z), TypeError, r"structure of z0: expected \(tensor, tensor\), got \(tensor\)"),
    (lambda z: {"a": z["a"]}, NEST, TypeError, "got {'a': tensor}"),
    (lambda z: {"a": Z, "b": z["b"][0]}, NEST, TypeError, "the structure of z0: expected .tensor., got tensor"),
    (half, Z.long(), TypeError, r"z0 must be of a floating-point dtype, got int64; call z0.float\(\)"),
    (half, Z.to(torch.complex64), TypeError, r"got complex64; iterate on torch.view_as_real\(z0\)"),
    (half, None, TypeError, "a latent must be a tensor or a tuple, list or dict of tensors, got NoneType"),
    (half, (), ValueError, "z0 must hold at least one tensor, got an empty nest"),
    (half, (Z, Z.double()), TypeError, "the tensors of z0 must share one dtype, got float32 and float64"),
    (half, (Z, Z[:1]), ValueError, r"must share their first \(batch\) axis, got 2 and 1 rows"),
]
SETTINGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"solver": Picard}, TypeError, r"solver must be a solver object such as Picard\(\) .* got <class"),
    ({"tolerance": 1e-4}, TypeError, r"tolerance must be a Tolerance, got 0.0001; write Tolerance\(atol="),
    ({"inputs": Z}, TypeError, r"inputs must be a tuple of tensors, got Tensor; write inputs=\(x,\)"),
    ({"inputs": (Z, None)}, TypeError, "each of `inputs` must be a tensor .* got NoneType"),
    ({"compact": True}, ValueError, "compact=True needs what belongs to a sample in `inputs`"),
    ({"compact": True, "inputs": (Z,), "coupled": True}, ValueError, "compact=True needs independent samples"),
    ({"compact": True, "inputs": (Z[:1],)}, ValueError, r"expected 2 rows, got shape \(1, 3\)"),
    ({"compact": True, "inputs": (Z.to_sparse(),)}, ValueError, r"got shape \(2, 3\), torch.sparse_coo"),
    ({"max_steps": 5}, TypeError, "unexpected keyword argument 'max_steps'"),
]
OBJECTS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (Tolerance, {"atol": -1e-4}, ValueError, "atol must be a number, at least 0 and finite, got -0.0001"),
    (Tolerance, {"atol": math.nan}, ValueError, "atol must be a number, at least 0 and finite, got nan"),
    (Tolerance, {"atol": "1e-4"}, ValueError, "atol must be a number, .* got '1e-4'"),
    (Tolerance, {"rtol": -1e-4}, ValueError, "rtol must be a number, at least 0 and finite, got -0.0001"),
    (Tolerance, {"max_steps": 50.0}, ValueError, "max_steps must be a whole number, at least 0, got 50.0"),
    (Tolerance, {"check_every": -2}, ValueError, "check_every must be a whole number, at least 0, got -2"),
    (Tolerance, {"norm": RMS}, TypeError, r"norm must be a norm such as RMS\(\), .* got <class"),
    (Tolerance, {"norm": "rms"}, TypeError, r"norm must be a norm such as RMS\(\), .* got 'rms'"),
    (Tolerance, {"maxsteps": 3}, TypeError, "unexpected keyword argument 'maxsteps'"),
    (Picard, {"damping": 1.0}, ValueError, "damping must be a number, at least 0 and below 1, got 1.0"),
    (Anderson, {"memory": 0}, ValueError, "memory must be a whole number, at least 1, got 0"),
    (Anderson, {"patience": 0}, ValueError, "patience must be a whole number, at least 1, got 0"),
    (Anderson, {"bound": 0.5}, ValueError, "bound must be above 1, got 0.5"),
    (Anderson, {"growth": math.nan}, ValueError, "growth must be above 1, got nan"),
    (Broyden, {"memory": 0}, ValueError, "memory must be a whole number, at least 1, got 0"),
    (Broyden, {"growth": 1}, ValueError, "growth must be above 1, got 1"),
    (Broyden, {"patience": 2.5}, ValueError, "patience must be a whole number, at least 1, got 2.5"),
]


@pytest.mark.parametrize(("T", "z0", "kind", "message"), MAPS)
def test_bad_maps_and_starts(T: Any, z0: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        solve(T, z0)


@pytest.mark.parametrize(("settings", "kind", "message"), SETTINGS)
def test_bad_settings_of_solve(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as error:
        solve(half, Z, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("make", "settings", "kind", "message"), OBJECTS)
def test_bad_objects(make: Any, settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as error:
        make(**settings)
    assert "\n" not in str(error.value)


def test_autocast_takes_no_integers() -> None:
    with torch.autocast("cpu"), pytest.raises(TypeError, match="expected float32, got int64"):
        solve(lambda z: z.long(), Z)


def test_an_error_inside_T_is_left_as_it_is() -> None:
    def T(z: Tensor) -> Tensor:
        raise RuntimeError("my own trouble")

    with pytest.raises(RuntimeError, match=r"^my own trouble$"):
        solve(T, Z)


# A T that writes to what it is given makes a residual that is not its own.
modes = pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])


def spoil(z: Tensor, x: Tensor) -> Tensor:
    x += z / 2
    return torch.tanh(x)


@modes
@pytest.mark.parametrize("every", [0, 1, 3])
def test_writes_to_z_and_to_inputs(mode: type[AbstractContextManager[Any]], every: int) -> None:
    tolerance, outside = Tolerance(max_steps=50, check_every=every), torch.ones(2, 3)
    with mode():
        inside, x = torch.ones(2, 3), torch.ones(2, 3)
        nest = {"a": x, "b": torch.ones(2)}
        for z0 in (inside, outside):
            unwritten = solve(lambda z: z.view(2, 3), z0, tolerance=tolerance)
            assert torch.equal(unwritten.value, x)
            for T in (IN_PLACE, lambda z: z.mul_(0.5).add_(1)):
                with pytest.raises(ValueError, match=OF_Z):
                    solve(T, z0, Anderson(), tolerance=tolerance)
        with pytest.raises(ValueError, match=OF_Z):
            solve(lambda z: {"a": z["a"] / 2, "b": z["b"].mul_(0.5)}, nest, tolerance=tolerance)
        with pytest.raises(ValueError, match=OF_Z):  # T gets a copy of such rows, but `attach` gives it the value
            solve(lambda z: z.mul_(0.5), outside.bfloat16(), tolerance=tolerance)
        images = (torch.ones(2, 3, 2, 2), torch.ones(2, 3, 2, 2))
        with pytest.raises(ValueError, match=OF_Z):
            solve(lambda z: (z[0] / 2, z[1].mul_(0.5)), images, tolerance=tolerance)
    nested = ({"a": outside, "b": [outside]},)
    with mode(), pytest.raises(ValueError, match=OF_INPUTS):
        solve(spoil, torch.zeros(2, 3), inputs=(outside,), tolerance=tolerance)
    with mode(), pytest.raises(ValueError, match=OF_INPUTS):
        solve(lambda z, given: spoil(z, given["b"][0]), torch.zeros(2, 3), inputs=nested, tolerance=tolerance)
