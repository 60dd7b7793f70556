"""The whole step, traced for a GPU on a machine that has none; prints what was found as one JSON line. See
test_compile.py.

Fake tensors say they are on cuda:0 and have no storage. Two things stand in for a CUDA build of torch: a
device guard that does nothing (indexing a tensor asks for one; five lines of C++, compiled here), and a
Triton driver that knows its target, sm_90, and nothing else (the compiler reads a kernel's Triton IR to
learn what it writes to).

How far the compiler goes without a device: TorchDynamo, AOT autograd with Inductor's decompositions, and
Inductor's passes over the graph, which decide what is written in place. Generating code asks the device for
its properties, and ends here.
"""
import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.utils._triton
from torch.utils.cpp_extension import include_paths

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""


class Driver:
    """A Triton driver without a device."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0


def pretend(folder: Path, compiler: str) -> None:
    """Let torch and Triton trace for cuda. Only for a process of its own."""
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    headers = [f"-I{path}" for path in include_paths()]
    torch_lib = f"-L{Path(torch.__file__).parent / 'lib'}"
    subprocess.run([compiler, "-std=c++20", "-shared", "-fPIC", abi, *headers, str(source), "-o",
                    str(library), torch_lib, "-lc10"], check=True)
    torch.ops.load_library(str(library))
    torch.utils._triton.has_triton = lambda *_, **__: True
    from triton.runtime import driver
    driver.set_active(Driver())


def graphs_of(run):
    """What `run()` compiles: its graphs after Inductor's passes."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V
    found = []

    def inner(graph, inputs):
        view_to_reshape(graph)
        values = (n.meta.get("val") for n in graph.graph.nodes)
        mode = next(value.fake_mode for value in values if hasattr(value, "fake_mode"))
        with V.set_fake_mode(mode):
            post_grad_passes(graph, is_inference=True)
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    run(aot_autograd(fw_compiler=inner, inference_compiler=inner, decompositions=select_decomp_table(),
                     keep_inference_input_mutations=True))
    return found


def look(graph, kv_shape: tuple) -> dict:
    """What matters of a graph: `copies` are tensors as large as the cache that are not the cache, `host`
    reads and moves to the CPU, `written` the writes into the cache."""
    nodes = list(graph.graph.nodes)
    cache = next(n for n in nodes if n.op == "placeholder" and shape(n) == kv_shape)
    copies = [str(n.target) for n in nodes if n is not cache and shape(n) == kv_shape
              and not (n.target is torch.ops.aten.copy_.default and n.args[0] is n.args[1] is cache)]
    host = [str(n.target) for n in nodes if n.target is torch.ops.aten._local_scalar_dense.default
            or shape(n) is not None and n.meta["val"].device.type == "cpu"]
    kernels = sum("triton_kernel_wrapper" in str(n.target) for n in nodes)
    stores = sum("nano_bicache.store" in str(n.target) for n in nodes)
    outputs = [shape(n) for n in nodes[-1].args[0]]
    return dict(copies=copies, host=host, kernels=kernels, stores=stores, outputs=outputs)


def shape(node) -> tuple | None:
    value = getattr(node, "meta", {}).get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def main(folder: Path, compiler: str) -> None:
    pretend(folder, compiler)
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode

    import step
    from conftest import tiny
    from decoding import Rules
    mode, B, W, M, L, P = FakeTensorMode(), 2, 16, 8, 2, 64
    found = []
    for shift in (False, True):
        model = tiny(shift, layers=L, hidden=64)                # a head dim, 16, that the Triton kernel takes
        shapes = {name: p.shape for name, p in model.named_parameters()}
        with mode, torch.device("cuda"):
            model.load_state_dict({name: torch.empty(size) for name, size in shapes.items()}, assign=True)
            model.requires_grad_(False)
            kv = torch.zeros(20, 2, model.config.kv_heads, 64, model.config.head_dim)
            table, prefix = torch.zeros(8, L, 10, dtype=torch.int32), torch.zeros(B, P, model.config.hidden)
            each = lambda value: torch.full((B,), value)
            rows = lambda dtype: torch.ones(M, dtype=dtype)
            batch = step.Pass(torch.zeros(B, W, dtype=torch.long), each(0), each(W), each(0), each(P),
                              each(W), torch.zeros(M, dtype=torch.long))
            sample = rows(torch.float32), rows(torch.long), rows(torch.long), rows(torch.long)
            guided = batch._replace(active=torch.zeros(2 * M, dtype=torch.long))
            every = Rules(sample, rows(torch.bool), (rows(torch.float32), rows(torch.long)), rows(torch.bool),
                          (rows(torch.long), rows(torch.float32)), True)
        cases = [("none", None, "triton"), ("every", None, "triton"), ("none", 1, "triton"),
                 ("every", 1, "triton"), ("none", 1, "torch")]
        for name, depth, impl in cases:
            active, rules = (batch, Rules()) if name == "none" else (guided, every)

            def run(backend):
                compiled = torch.compile(step.forward, fullgraph=True, dynamic=False, backend=backend)
                with mode, tracing(TracingContext(mode)), torch.inference_mode():
                    compiled(model, kv, table, active, rules, 3, depth, None if depth is None else prefix,
                             (), (0, 0), impl=impl)

            for graph in (graphs := graphs_of(run)):
                found.append(dict(look(graph, tuple(kv.shape)), graphs=len(graphs), shift=shift, rules=name,
                                  depth=depth, impl=impl, rows=M, layers=L))
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
