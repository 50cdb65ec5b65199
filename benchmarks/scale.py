"""What a step takes on many GPUs, by counting: no GPU is used. For results/scale.csv and docs/scale.md.

Llamas of 7 and 70 billion parameters, dense and compressed, are made on the meta device; `comera.memory.estimate`
counts a step's bytes and FLOPs there, of one GPU's tokens, with recomputation. What sharding, links and a GPU's peak
make of these counts follows from the formulas in docs/scale.md, which `placed` computes.

    python benchmarks/scale.py [--page]      10 minutes; --page: only the tables, from the results
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import about, measured, update
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

import comera
from comera.memory.estimate import _step_aside, estimate
from comera.memory.live import LiveMemory
from comera.nn.tensor_train import CompressedLayer

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
TOKENS, RATIO, PEAK_FLOPS = 4096, 35, 989e12  # a GPU's tokens, as texts of 512; of an H100 (SXM), bfloat16, dense
SHAPES: dict[str, dict[str, Any]] = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8},
}  # fmt: skip
# bytes a second of a GPU, each way, as published: NVLink 4 of an H100, and a network card for each GPU
LINKS = {
    "NVLink, 450 GB/s": ((8,), 450e9),
    "InfiniBand, 400 Gbit/s": ((8, 64, 512), 50e9),
    "Ethernet, 100 Gbit/s": ((8, 64, 512), 12.5e9),
}
SIDES = ("dense, FSDP2", "compressed, DDP", "compressed, FSDP2")


def count(shape: str, compressed: bool) -> dict[str, Any]:
    """Parameters, and bytes and FLOPs of a step of one GPU's tokens."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32_000, **SHAPES[shape], use_cache=False)).train()
        ids = torch.zeros(TOKENS // 512, 512, dtype=torch.int64)
    if compressed:
        comera.tensorize_(model, ratio=RATIO)
        comera.recompute_(model)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    comera.fuse_(model, keep_logits=False)
    with patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None):  # which reads values
        found = estimate(model, lambda: model(input_ids=ids, labels=ids).loss)
        # gradients are in the stored bytes: here each goes once it is there, as a sharded one does
        trained = list(model.parameters())
        for each in trained:
            each.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        with _step_aside(trained, True), LiveMemory([*trained, *model.buffers()]) as live:
            model(input_ids=ids, labels=ids).loss.backward()
    layers = [module for module in model.modules() if isinstance(module, CompressedLayer)]
    kept = {p for layer in layers for p in layer.parameters()}
    blocks = [sum(p.numel() for p in block.parameters() if p not in kept) for block in model.model.layers]
    return {
        "shape": shape,
        "side": "compressed" if compressed else "dense",
        "parameters": sum(p.numel() for p in model.parameters()),
        "kept_whole": sum(p.numel() for p in kept),
        "largest_block": max(blocks),
        "stored_bytes": found.weights + found.gradients + found.optimizer,
        "activation_bytes": live.peak,
        "flops": found.flops,
    }


def placed(row: dict[str, str], side: str, gpus: int, bandwidth: float) -> tuple[float, float, float]:
    """Bytes on a GPU, bytes that it sends in a step, and seconds that these take; formulas: docs/scale.md."""
    parameters, whole, block = (int(row[name]) for name in ("parameters", "kept_whole", "largest_block"))
    whole = parameters if side.endswith("DDP") else whole
    sharded, of_others = parameters - whole, (gpus - 1) / gpus
    each = int(row["stored_bytes"]) / parameters
    gathered = 2 * 2 * block if sharded else 0
    held = each * (whole + sharded / gpus) + gathered + int(row["activation_bytes"])
    sent = of_others * (2 * 4 * whole + (2 * 2 + 4) * sharded)
    return held, sent, sent / bandwidth


def tables(rows: list[dict[str, str]]) -> str:
    """Two tables in Markdown."""
    of = {(row["shape"], row["side"]): row for row in rows}
    lines = ["| shape | | parameters, millions | PFLOPs of 4,096 tokens | s at the peak | activations, GB |"]
    lines += ["|---|---|---|---|---|---|"]
    for (shape, side), row in of.items():
        flops = int(row["flops"])
        cells = [f"{int(row['parameters']) / 1e6:,.0f}", f"{flops / 1e15:.2f}", f"{flops / PEAK_FLOPS:.3f}"]
        lines += [f"| {shape} | {side} | {' | '.join(cells)} | {int(row['activation_bytes']) / 1e9:.1f} |"]
    lines += ["", "| shape | link | GPUs | | GB on a GPU | GB sent | s on the link | of the products' time |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for shape in SHAPES:
        for link, (counts, bandwidth) in LINKS.items():
            for gpus in counts:
                for side in SIDES:
                    row = of[shape, side.partition(",")[0]]
                    held, sent, seconds = placed(row, side, gpus, bandwidth)
                    cells = [f"{held / 1e9:,.1f}", f"{sent / 1e9:,.2f}", f"{seconds:.3g}",
                             f"{seconds / (int(row['flops']) / PEAK_FLOPS):.2f}"]  # fmt: skip
                    lines += [f"| {shape} | {link} | {gpus} | {side} | {' | '.join(cells)} |"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="only write the tables of the results")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    options = parser.parse_args()
    for shape in () if options.page else options.shapes:
        for compressed in (False, True):
            row = count(shape, compressed)
            print(row, flush=True)
            update("scale", [row | about()], key=("shape", "side"))
    page = PAGE.read_text("utf-8")
    marked = re.compile(r"(?<=<!-- tables -->\n).*(?=<!-- end of tables -->)", re.DOTALL)
    PAGE.write_text(marked.sub(lambda _: f"\n{tables(measured('scale'))}\n\n", page), encoding="utf-8")


if __name__ == "__main__":
    main()
