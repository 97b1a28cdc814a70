"""export(): a network as one file for onnxruntime or PyTorch, which runs without banach, and its model card."""

import hashlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from banach import checks
from banach.network import ImplicitNetwork, as_inputs
from banach.provenance import provenance, whole_file, write_json

# The line that loads each format: {file} is its name, {d} the inputs, NumPy arrays for onnx and tensors for torch.
LOAD = {
    "onnx": 'outputs = onnxruntime.InferenceSession("{file}").run(None, {{{d}}})',
    "torch": 'outputs = torch.export.load("{file}").module()({d})',
}
ENDING = {"onnx": ".onnx", "torch": ".pt2"}
OUTPUTS = {
    "output": "S(u*)",
    "steps": "evaluations of R until the sample converged or the steps were used up",
    "residual": "norm of the last step of the sample",
    "converged": "whether the residual met the tolerance",
}


def export(
    net: nn.Module,
    example: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    format: str = "onnx",
    card: Mapping[str, Any] | None = None,
) -> Any:
    """Export a network whose depth follows the data, for any batch size.

    The loop is an ONNX Loop or a `torch.export` while_loop. A sample that has converged keeps its value, as in
    `net(d)`. Samples that stall use up `max_steps`, since only host checks judge that.

    Args:
        net: an `ImplicitNetwork` in eval mode, or another module, which has one output.
        example: inputs of the network, a tensor or a tuple of tensors. Their first axis is the batch, of any size.
        path: file to write, with the model card in `path`.json; None writes nothing.
        format: "onnx" or "torch".
        card: more entries for the model card.
    Returns:
        `torch.onnx.ONNXProgram` or `torch.export.ExportedProgram`, with the outputs of `OUTPUTS`.
    Raises:
        ValueError: if the format is unknown, the network is in train mode, a package that ONNX needs is missing,
            or this version of PyTorch cannot export the network.
    """
    checks.nearest("format", format, LOAD)
    if net.training:
        raise ValueError("export needs a network in eval mode, got train mode; call net.eval()")
    given = as_inputs(example)
    if not all(isinstance(one, Tensor) and one.dim() for one in given):
        got = ", ".join(type(one).__name__ for one in given)
        raise TypeError(f"example must be a tensor or a tuple of tensors with a batch axis, got {got}")
    inputs = {"d": given[0]} if len(given) == 1 else {f"d_{k}": one for k, one in enumerate(given)}
    program: Any = _to_onnx(net, inputs) if format == "onnx" else _traced(net, inputs)
    if path is not None:
        _write(Path(path), program, {**_describe(net, inputs, format, Path(path).name), **(card or {})})
    return program


class _WithSolution(nn.Module):
    """A network that returns the tensors of its solution too."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *d: Tensor) -> tuple[Tensor, ...]:
        if not isinstance(self.net, ImplicitNetwork):
            return (self.net(*d),)
        output, found = self.net(*d, solution=True)
        return output, found.steps, found.residual, found.converged


def _traced(net: nn.Module, inputs: Mapping[str, Tensor]) -> torch.export.ExportedProgram:
    """Return the network as torch.export traces it."""
    shapes = (({0: torch.export.Dim("batch")},) * len(inputs),)
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # about the tracer itself
        # torch.export takes a batch of one for a constant, and a tensor that is given twice for one input.
        several = tuple(torch.cat((one, one)) if one.shape[0] == 1 else one.clone() for one in inputs.values())
        _WithSolution(net)(*several)  # what the network itself refuses is not for the tracer to explain
        try:
            return torch.export.export(_WithSolution(net), several, dynamic_shapes=shapes, strict=False)
        except Exception as error:  # the tracer may raise anything
            torch._dynamo.reset()  # otherwise later exports in this process meet the same batch size
            said = " ".join(str(error).partition("Hint:")[0].rpartition("break/error:")[2].split())[:300]
            advice = "replace that operation (len(x) by x.shape[0]), or update PyTorch: 2.11 and newer were tested"
            raise ValueError(f"torch {torch.__version__} cannot export it ({said}); {advice}") from error


def _to_onnx(net: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    """Return the traced network as an ONNX program, without the stack traces that most of its file would be."""
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            advice = "run: pip install 'banach[export]', or choose the format torch"
            raise ValueError(f"export to ONNX needs {package}, which is missing; {advice}")
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, RemoveUnusedNodesPass  # of onnxscript

    traced = _traced(net, inputs)
    logging.getLogger("torch.onnx._internal.exporter").setLevel(logging.ERROR)  # it misses torchvision
    options: dict[str, Any] = {
        "input_names": list(inputs),
        "output_names": list(OUTPUTS)[: len(traced.graph_signature.user_outputs)],
        "custom_translation_table": {torch.ops.aten._linalg_solve_ex.default: _eliminate},
    }
    try:
        with warnings.catch_warnings(action="ignore"):
            program: Any = torch.onnx.export(traced, dynamo=True, verbose=False, **options)
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        advice = "replace that operation, or choose the format torch"
        raise ValueError(f"torch {torch.__version__} cannot write it as ONNX ({reason}); {advice}") from error
    for tidy in (ClearMetadataAndDocStringPass(), RemoveUnusedNodesPass()):
        tidy(program.model)
    for value in (*program.model.graph.inputs, *program.model.graph.outputs):
        value.shape[0] = "batch"
    return program


def _eliminate(A: Any, B: Any, **options: Any) -> tuple[Any, ...]:
    """Solve A X = B by Gauss-Jordan elimination in ONNX operations. Anderson's A is a Gram matrix: no pivoting."""
    from onnxscript import opset18

    op: Any = opset18

    def split(M: Any, axis: int) -> Any:
        """Return the first row (axis 1) or column (axis 2) of the matrices, and the others."""
        return op.Slice(M, [0], [1], [axis]), op.Slice(M, [1], [2**31], [axis])

    rest = op.Concat(A, B, axis=2)
    for _ in range(A.shape[1]):
        row, others = split(rest, 1)
        pivot, row = split(row, 2)
        column, others = split(others, 2)
        row = op.Div(row, pivot)
        # The row goes to the end and its column is gone: after as many steps as columns, X is left.
        rest = op.Concat(op.Sub(others, op.Mul(column, row)), row, axis=1)
    return (rest,)  # the factors and the error code, which come after it, are not used


def _describe(net: nn.Module, inputs: Mapping[str, Tensor], format: str, file: str) -> dict[str, Any]:
    """Return the model card: what the file is, how to load it, what goes in and comes out."""
    shapes = {name: {"shape": ["batch", *one.shape[1:]], "dtype": str(one.dtype)} for name, one in inputs.items()}
    d = ", ".join(f'"{name}": {name}' if format == "onnx" else name for name in inputs)
    implicit = isinstance(net, ImplicitNetwork)
    return {
        "file": file,
        "format": format,
        "load": LOAD[format].format(file=file, d=d),
        "inputs": shapes,
        "outputs": OUTPUTS if implicit else {"output": "the value of the network"},
        **({"solver": net.solver, "tolerance": net.tolerance} if implicit else {}),
        "exported": provenance(),
    }


def _write(path: Path, program: Any, card: dict[str, Any]) -> None:
    """Write the file, then the card with its checksum; each is complete or absent."""
    with whole_file(path, binary=True) as file, warnings.catch_warnings(action="ignore"):
        if isinstance(program, torch.export.ExportedProgram):
            torch.export.save(program, file)
        else:
            file.write(program.model_proto.SerializeToString())
    write_json(f"{path}.json", {**card, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
