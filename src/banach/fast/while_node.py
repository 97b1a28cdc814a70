"""While nodes: a CUDA graph that repeats another one until a test on the device fails.

The test is a small kernel that sets the condition of the node. PyTorch has no API for that, so the graph is built
by `cuda.bindings`, and the kernel is compiled by NVRTC. Both come with the CUDA wheels of PyTorch:
`plan` looks for them before this file is imported.
"""

import ctypes
import functools
import sys
from dataclasses import dataclass
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from torch import Tensor

from banach.fast.plan import device_runtime

_THREADS = 128
_SOURCE = rb"""
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);

extern "C" __global__ void decide(unsigned long long handle, const unsigned char* active, int samples, int stop_at,
                                  int* steps, int cycle, int max_steps) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    int mine = 0;
    for (int i = threadIdx.x; i < samples; i += blockDim.x) mine += active[i] != 0;
    if (mine) atomicAdd(&count, mine);
    __syncthreads();
    if (threadIdx.x == 0) {
        int now = *steps + cycle;
        *steps = now;
        cudaGraphSetConditional(handle, count > stop_at && now < max_steps ? 1u : 0u);
    }
}
"""


@dataclass(eq=False)
class WhileNode:
    """Run `parts` one after the other while more than `stop_at` samples are active and steps are left."""

    parts: "list[torch.cuda.CUDAGraph | WhileNode]"  # captured with keep_graph=True
    active: Tensor  # (samples,) of bool, contiguous; the parts write to it
    steps: Tensor  # int32 without axes: how many steps were taken; each run of the parts adds `cycle`
    cycle: int
    max_steps: int
    stop_at: int = 0

    def instantiate(self) -> None:
        """Make the loop a graph of its own, which `replay` launches."""
        self.graph = _done(driver.cuGraphCreate(0))
        self._add_to(self.graph, [])
        self.executable = _done(driver.cuGraphInstantiate(self.graph, 0))

    def replay(self) -> None:
        """Launch it on the current stream of its device, as PyTorch launches the graphs around it."""
        with torch.cuda.device(self.active.device):
            _done(driver.cuGraphLaunch(self.executable, torch.cuda.current_stream().cuda_stream))

    def _add_to(self, graph: Any, after: list[Any]) -> Any:
        """Add the loop to a graph, after other nodes, and return its node."""
        context = _done(driver.cuCtxGetCurrent())
        handle = _done(driver.cuGraphConditionalHandleCreate(graph, context, 0, 0))
        first = self._add_test(graph, after, handle, 0)
        parameters = driver.CUgraphNodeParams()
        parameters.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        parameters.conditional.handle = handle
        parameters.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        parameters.conditional.size = 1
        parameters.conditional.ctx = context
        try:  # since CUDA 13 the call also takes the data of the edge
            node = _done(driver.cuGraphAddNode(graph, [first], None, 1, parameters))
        except TypeError:
            node = _done(driver.cuGraphAddNode(graph, [first], 1, parameters))
        body = parameters.conditional.phGraph_out[0]
        last: list[Any] = []
        for part in self.parts:
            if isinstance(part, WhileNode):
                last = [part._add_to(body, last)]
            else:
                child = driver.CUgraph(int(part.raw_cuda_graph()))
                last = [_done(driver.cuGraphAddChildGraphNode(body, last, len(last), child))]
        self._add_test(body, last, handle, self.cycle)
        return node

    def _add_test(self, graph: Any, after: list[Any], handle: Any, cycle: int) -> Any:
        """Add the kernel that counts steps and sets the condition: before the loop (cycle 0), and in its body."""
        launch = driver.CUDA_KERNEL_NODE_PARAMS()
        launch.func = _kernel(torch.cuda.current_device())
        launch.gridDimX = launch.gridDimY = launch.gridDimZ = launch.blockDimY = launch.blockDimZ = 1
        launch.blockDimX = _THREADS
        numbers = self.active.numel(), self.stop_at, self.steps.data_ptr(), cycle, self.max_steps
        values = int(handle), self.active.data_ptr(), *numbers
        number, address = ctypes.c_int, ctypes.c_void_p
        launch.kernelParams = (values, (ctypes.c_ulonglong, address, number, number, address, number, number))
        return _done(driver.cuGraphAddKernelNode(graph, after, len(after), launch))

    def __del__(self) -> None:
        if sys.is_finalizing() or not hasattr(self, "executable"):
            return
        driver.cuGraphExecDestroy(self.executable)
        driver.cuGraphDestroy(self.graph)


@functools.cache
def _kernel(device: int) -> Any:
    """Compile and link the kernel for a device."""
    major, minor = torch.cuda.get_device_capability(device)
    source = _done(nvrtc.nvrtcCreateProgram(_SOURCE, b"decide.cu", 0, [], []))
    options = [f"--gpu-architecture=compute_{major}{minor}".encode(), b"--relocatable-device-code=true"]
    _done(nvrtc.nvrtcCompileProgram(source, len(options), options))
    program = b" " * _done(nvrtc.nvrtcGetPTXSize(source))
    _done(nvrtc.nvrtcGetPTX(source, program))
    link = _done(driver.cuLinkCreate(0, [], []))
    kinds = driver.CUjitInputType
    _done(driver.cuLinkAddData(link, kinds.CU_JIT_INPUT_PTX, program, len(program), b"decide", 0, [], []))
    library = str(device_runtime()).encode()
    _done(driver.cuLinkAddFile(link, kinds.CU_JIT_INPUT_LIBRARY, library, 0, [], []))
    binary, _ = _done(driver.cuLinkComplete(link))
    module = _done(driver.cuModuleLoadData(binary))
    return _done(driver.cuModuleGetFunction(module, b"decide"))


def _done(result: tuple[Any, ...]) -> Any:
    """Return what a call of the driver gave, or raise its error."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"a call of the CUDA driver failed: {error}")
    return values[0] if len(values) == 1 else tuple(values)
