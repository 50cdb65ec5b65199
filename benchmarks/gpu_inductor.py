"""The kernels of a compiled training step on an H100, by counting: what Inductor makes of gpu_roofline.py's steps.

`TrainStep(mode="compile")` compiles forward and loss, with their backward. Inductor lowers both graphs for "cuda", to
the Triton code of its kernels and their calls; nothing runs. Its scheduler says which bytes each reads and writes. What
stays eager, clipping and AdamW, counts by operations.

No GPU is needed: torch's interface for "cuda" and Triton's driver say that there is an H100. The passes over graphs see
the device "gpu" of gpu_fake.py, as fake tensors of CUDA need a driver, and move to "cuda" before they are lowered. Two
things differ: uniform constants are not folded, and products are not padded, which Inductor decides by measuring.
Models of 1, 2 and 3 blocks are lowered: what the third adds, all further ones add. `linear`: it added as many launches
as the second did.

    python benchmarks/gpu_inductor.py [--cases BERT-base ...] [--dry]      15 minutes; gpu_page.py makes a table of it
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import gpu_fake
import torch
from common import about, update
from gpu_roofline import CASES, H100, LAUNCH, like_cuda, on_meta, stood_in
from roofline import Cost, Counter
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface, get_interface_for_device, register_interface_for_device
from torch._inductor import compile_fx, config
from torch._inductor.codegen.wrapper import KernelCallLine
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import GPU_TYPES
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from transformers import BertConfig
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from comera.optim import AdamW, param_groups
from comera.recipes.lm import recipe as lm
from comera.trainer.step import TrainStep

PROPERTIES = SimpleNamespace(major=9, minor=0, multi_processor_count=132, warp_size=32, max_threads_per_block=1024)
PROPERTIES.regs_per_multiprocessor, PROPERTIES.max_threads_per_multi_processor = 65_536, 2_048
DEPTHS = (1, 2, 3)


class _Interface(CudaInterface):
    class Worker(CudaInterface.Worker):
        get_device_properties = staticmethod(lambda _=None: PROPERTIES)  # type: ignore[assignment]

    current_device = staticmethod(lambda: 0)  # type: ignore[assignment]
    is_available = staticmethod(lambda: True)  # type: ignore[assignment]
    get_device_properties = staticmethod(lambda _=None: PROPERTIES)  # type: ignore[assignment]


def state_h100() -> None:
    """For the whole process: Inductor finds an H100, and takes the device "gpu" for one."""
    torch.cuda.get_device_properties = lambda _=None: PROPERTIES  # type: ignore[assignment, return-value, misc]
    get_interface_for_device("cuda")  # registers torch's own, once
    register_interface_for_device("cuda", _Interface)
    driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))  # type: ignore[arg-type]
    GPU_TYPES.append("gpu")
    config.joint_graph_constant_folding = False  # it computes on the device


class Lowered:
    """What Inductor made of the graphs that `backend`, of torch.compile, got.

    kernels: launched Triton kernels, by name. extern: calls of torch's, as products and attention. launches: of both, a
    graph. costs: of each.
    """

    def __init__(self) -> None:
        self.extern = 0
        self.launches: list[int] = []
        self.costs: list[Cost] = []
        self.kernels: list[str] = []

    def backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=self._lower)

    def _lower(self, graph: torch.fx.GraphModule, inputs: Any, is_backward: bool = False, **_: Any) -> Any:
        """In place of Inductor's compile_fx_inner: as that, without compilation."""
        with _disable_current_modes(), torch.no_grad():
            view_to_reshape(graph)
            mode: Any = compile_fx.fake_tensor_prop(graph, inputs)
            compile_fx._recursive_record_original_output_strides(graph)
            outputs = [node and node.meta["val"] for node in graph.graph.output_node().args[0]]  # type: ignore[union-attr]
            with V.set_fake_mode(mode):
                compile_fx._recursive_post_grad_passes(graph, is_inference=False)
                inputs = _to_cuda(graph, inputs, mode)
                lowering: Any = GraphLowering(graph, example_inputs=inputs, is_backward=is_backward)
                with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]), DebugContext():
                    lowering.run(*inputs)
                    lowering.codegen()
                    self._count(lowering.wrapper_code.lines, lowering.scheduler.nodes)

        def run(given: list[Any]) -> Any:
            given.clear()
            return tree_map_only(Tensor, lambda t: _empty(t, "gpu"), outputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _count(self, lines: list[Any], nodes: list[Any]) -> None:
        kernels = [line.kernel_name for line in lines if isinstance(line, KernelCallLine)]
        names = [type(line).__name__ for line in lines]
        extern = sum(name.startswith("ExternKernel") or name.endswith("FallbackLine") for name in names)
        self.kernels, self.extern = self.kernels + kernels, self.extern + extern
        self.launches.append(len(kernels) + extern)
        for node in nodes:
            nbytes, (flops, half) = node.get_read_write_buffers_sizes(), _flops(node.node)
            products = flops / ((half and H100.half_flops_a_second) or H100.flops_a_second)
            beyond = nbytes if nbytes > H100.cache else 0
            least = max(products, beyond / H100.bytes_a_second)
            self.costs.append(Cost(0, flops, nbytes, least=least, products=products, beyond=beyond))


def _flops(call: Any) -> tuple[int, bool]:
    """Those of a call of torch's, and whether they are of half precision; Inductor itself leaves out attention's."""
    source: Any = call and (
        call.get_origin_node()
        or next((each for each in call.get_origins() if each.target is getattr(call, "op_overload", None)), None)
    )
    count = source and flop_registry.get(getattr(source.target, "overloadpacket", None))
    if not count:
        return 0, False
    args, kwargs = tree_map_only(torch.fx.Node, lambda node: node.meta["val"], (source.args, source.kwargs))
    value = source.meta["val"]
    return count(*args, **kwargs, out_val=value), tree_leaves(value)[0].dtype.itemsize == 2


def _to_cuda(graph: torch.fx.GraphModule, inputs: Any, mode: Any) -> Any:
    """A graph's constants and the tensors that it knows of, on "cuda"; returns its inputs there."""
    with mode:
        for node in graph.graph.nodes:
            device = torch.device("cuda", 0)
            node.args, node.kwargs = tree_map_only(torch.device, lambda _: device, (node.args, node.kwargs))  # noqa: B023
            if "val" in node.meta:
                node.meta["val"] = tree_map_only(Tensor, lambda t: _empty(t, "cuda"), node.meta["val"])
        graph.recompile()
        return tree_map_only(Tensor, lambda t: _empty(t, "cuda"), inputs)


def _empty(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.device(device, 0))


class _Rest(Counter):
    """What runs outside of the compiled graphs."""

    @classmethod
    def is_infra_mode(cls) -> bool:  # else Dynamo compiles nothing inside
        return True


def lower(made: tuple[Any, Any, Callable[..., Tensor]], precision: str = "bf16") -> tuple[Lowered, Cost]:
    """What Inductor makes of a step of model, batch and loss, and the cost of the rest."""
    lowered = Lowered()
    with gpu_fake.on_gpu(made) as (model, batch, loss):
        optimizer = AdamW(param_groups(model, lr=1e-3), fused=True)
        options: Any = {"max_grad_norm": 1.0, "precision": precision, "mode": "compile", "backend": lowered.backend}
        step = TrainStep(model, loss, optimizer, **options)
        step([batch])  # makes the optimizer's state, and compiles
        with _Rest(H100) as counter:
            step([batch])
    assert step.mode == "compile", step.mode
    assert step.built == 1, f"expected one compilation, got {step.built}"
    torch.compiler.reset()
    return lowered, sum(counter.costs.values(), Cost())


def measure(case: str, compressed: bool, blocks: int) -> dict[str, float]:
    """The counts of a step of a model of some blocks."""
    lowered, rest = lower(on_meta(case, compressed, blocks))
    total, (forward, backward) = sum(lowered.costs, rest), lowered.launches
    casts = sum(re.fullmatch(r"triton_poi_fused__to_copy_\d+", name) is not None for name in lowered.kernels)
    padding = sum(any(word in name for word in ("constant_pad", "index_put")) for name in lowered.kernels)
    return {
        **{"triton": len(lowered.kernels), "extern": lowered.extern, "forward": forward, "backward": backward},
        **{"rest": rest.calls, "launches": forward + backward + rest.calls, "casts": casts, "padding": padding},
        **{"gb": total.nbytes / 1e9, "gb_beyond_cache": total.beyond / 1e9, "tflop": total.flops / 1e12},
        **{"compute_ms": total.products * 1e3, "memory_ms": total.beyond / H100.bytes_a_second * 1e3},
        "least_ms": total.least * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--dry", action="store_true", help="models of one block; writes nothing")
    options = parser.parse_args()
    like_cuda()
    state_h100()
    with stood_in():
        for case, compressed in product(options.cases, (False, True)):
            found = [measure(case, compressed, depth) for depth in (DEPTHS[:1] if options.dry else DEPTHS)]
            print(case, compressed, *found, sep="\n", flush=True)
            if not options.dry:
                first, second, third = found
                more = _blocks(case) - DEPTHS[-1]
                row = {name: f"{third[name] + more * (third[name] - second[name]):.6g}" for name in third}
                row["launch_ms"] = f"{int(row['launches']) * LAUNCH * 1e3:.2f}"
                row["linear"] = str(third["launches"] - second["launches"] == second["launches"] - first["launches"])
                about_case = {"case": case, "side": "compressed" if compressed else "dense", "batch": CASES[case]}
                update("gpu_inductor", [about_case | row | about()], key=("case", "side"))


def _blocks(case: str) -> int:
    """Of the whole model."""
    if case == "BERT-base":
        return int(BertConfig().num_hidden_layers)
    return lm.preset("dense", case).model.layers  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
