"""Operations of a compiled training step of the six-encoder transformer: dense, compressed, compressed and fused.

Counts what reaches the compiler when a whole step is one function (`TrainStep(mode="compile")`): all nodes of the graph
after gradients are taken and the optimizer is traced, and the matrix products among them, of which each is launched by
itself, where the compiler fuses what lies between. The structure of the model is that of the recipe, its sizes are
small: they do not change the counts. Nothing is compiled or timed.

    python benchmarks/compiled_operations.py      2 minutes
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from common import about, update
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from comera.fusion import fuse_
from comera.optim.param_groups import param_groups
from comera.recipes.bert import ModelConfig
from comera.recipes.classify.task import example_loss
from comera.recipes.examples import ExampleBatch
from comera.recipes.mnli.recipe import CompressConfig, build_model, preset
from comera.trainer.step import TrainStep

SIDES = ("dense", "compressed", "fused")
PRODUCTS = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"}


def count(side: str, *, layers: int, order: int) -> dict[str, int]:
    """Nodes and products of one step of one side."""
    torch.compiler.reset()
    config = preset("dense" if side == "dense" else "comera", "tuned")
    sizes = ModelConfig(hidden=64, layers=layers, heads=2, ffn=128, dropout=0.0)
    model: Any = build_model(
        replace(config, model=sizes, compress=CompressConfig(order=order, rank=4, embedding_rank=4)), 100
    )[0]
    if side == "fused":
        fuse_(model)
    graphs: list[Counter[str]] = []

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return graph.forward

    backend = aot_autograd(fw_compiler=record, inference_compiler=record, decompositions=select_decomp_table())
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-4))
    step = TrainStep(model.train(), example_loss, optimizer, max_grad_norm=1.0, mode="compile", backend=backend)
    ids = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(0))
    batch = ExampleBatch(ids, torch.zeros_like(ids), torch.ones(ids.shape, dtype=torch.bool), ids[:, 0] % 3)
    for _ in range(2):  # the first one is eager
        step([batch])
    assert step.mode == "compile", step.mode
    (nodes,) = graphs
    return {
        "parameters": len(step.parameters),
        "nodes": nodes.total(),
        "products": sum(nodes[name] for name in PRODUCTS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--order", type=int, default=6)
    options = parser.parse_args()
    os.environ["COMERA_KERNELS"] = "none"  # with the kernels, a CPU does not compile
    rows = []
    for side in SIDES:
        row = {"side": side, "layers": options.layers, "order": options.order}
        rows.append({**row, **count(side, layers=options.layers, order=options.order), **about()})
        print(" ".join(f"{value!s:>12}" for value in rows[-1].values()), flush=True)
    update("compiled_operations", rows, key=("side", "layers", "order"))


if __name__ == "__main__":
    main()
