"""One training step of families of models that `fuse_` knows, in small: dense, compressed, compressed and fused.

Stock models of transformers from a configuration: 4 blocks, 512 wide, 8 heads, feed-forward layers 2,048 wide, 8,192
tokens, 8 texts of 128 tokens with the mask that a tokenizer gives (T5: two blocks and a text on each side; ViT: 8
images of 64 × 64 in patches of 8 × 8).
ALBERT's blocks are one. Dropout is that of each family's configuration (T5's: none and a gated feed-forward layer, as
version 1.1 was pre-trained). A step is forward, backward, clipping and `comera.optim.adamw.AdamW`; compression is
`tensorize_` at ratio 10 (ViT: 8, since its patches and positions stay as they are). Dense is fused, too; `recorded`
sides run in mode graph. The sides of a family alternate in one process, and `times_dense` is the ratio of their medians
to that of the faster dense side; each family has its own process, because memory left behind by others slows short
steps down.

    python benchmarks/families.py [--families NAME ...] [--repeats 5]      8 minutes
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
import transformers
from common import about, in_turns, record, update
from torch import Tensor, nn
from transformers import AutoConfig

from comera import param_groups, tensorize_
from comera.fusion import fuse_
from comera.optim.adamw import AdamW
from comera.trainer import TrainStep

WORDS, LENGTH, BATCH, IMAGE = 8192, 128, 8, 64
ENCODER: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
}
TEXT = {**ENCODER, "vocab_size": WORDS, "max_position_embeddings": LENGTH}
DECODER = {**TEXT, "num_key_value_heads": 8, "head_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 512, "n_layer": 4, "n_head": 8, "vocab_size": WORDS, "n_positions": LENGTH}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
DISTILBERT = {"dim": 512, "n_layers": 4, "n_heads": 8, "hidden_dim": 2048}
T5 = {
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_heads": 8,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "vocab_size": WORDS,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.0,
    "tie_word_embeddings": False,
    "decoder_start_token_id": 0,
}
# name: type of configuration, head, sizes
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("llama", "CausalLM", DECODER),
    "Mistral": ("mistral", "CausalLM", DECODER),
    "Qwen": ("qwen3", "CausalLM", DECODER),
    "Gemma": ("gemma", "CausalLM", DECODER),
    "Phi": ("phi", "CausalLM", {**TEXT, **ENDS}),
    "GPT-2": ("gpt2", "CausalLM", {**GPT2, **ENDS}),
    "OPT": ("opt", "CausalLM", {**TEXT, "ffn_dim": 2048, "word_embed_proj_dim": 512}),
    "T5": ("t5", "Seq2SeqLM", T5),
    "BERT": ("bert", "MaskedLM", TEXT),
    "ELECTRA": ("electra", "MaskedLM", TEXT),
    "DistilBERT": ("distilbert", "MaskedLM", {**DISTILBERT, "vocab_size": WORDS, "max_position_embeddings": LENGTH}),
    "ALBERT": ("albert", "MaskedLM", TEXT),
    "ModernBERT": ("modernbert", "MaskedLM", {**TEXT, **ENDS, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}),
    "ViT": ("vit", "ImageClassification", {**ENCODER, "image_size": IMAGE, "patch_size": 8, "num_labels": 10}),
}
RATIOS = {"ViT": 8}  # 9.95 is the most
# side: compressed, fused, mode
SIDES: dict[str, tuple[bool, bool, Literal["eager", "graph"]]] = {
    "dense": (False, True, "eager"),
    "dense, recorded": (False, True, "graph"),
    "compressed": (True, False, "eager"),
    "fused": (True, True, "eager"),
    "fused, recorded": (True, True, "graph"),
}

Batch = dict[str, Tensor]


def make_batch(head: str) -> Batch:
    """Random images or tokens, and what is to be learned of them."""
    generator = torch.Generator().manual_seed(0)
    if head == "ImageClassification":
        images = torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator)
        return {"pixel_values": images, "labels": torch.arange(BATCH)}
    ids = torch.randint(3, WORDS, (BATCH, LENGTH), generator=generator)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    if head == "MaskedLM":
        masked = torch.rand(ids.shape, generator=generator) < 0.15
        text |= {"input_ids": ids.masked_fill(masked, 3), "labels": ids.masked_fill(~masked, -100)}
    return text


def make_step(family: str, side: str) -> tuple[Callable[[], object], nn.Module, str]:
    """A step of one side, its model, and what is fused in it."""
    kind, head, sizes = FAMILIES[family]
    compressed, fused, mode = SIDES[side]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes)
    model: nn.Module = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    if compressed:
        tensorize_(model, ratio=RATIOS.get(family, 10))
    parts: Counter[str] = Counter()
    if fused:
        parts.update(row.kind for row in fuse_(model, keep_logits=False).rows if not row.reason)
    optimizer = AdamW(param_groups(model, lr=1e-4), fused=True)
    step = TrainStep(model.train(), _loss, optimizer, max_grad_norm=1.0, mode=mode)
    batch = make_batch(head)

    def take() -> object:
        return step([batch])

    if mode == "graph":
        record(take, step)
    return take, model, ", ".join(f"{count} {part}" for part, count in parts.items())


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def measure(family: str, repeats: int) -> list[dict[str, str]]:
    """Rows of one family."""
    made = {side: make_step(family, side) for side in SIDES}
    seconds = in_turns({side: step for side, (step, _, _) in made.items()}, repeats, warm_ups=1)
    dense = min(statistics.median(times) for side, times in seconds.items() if side.startswith("dense"))
    rows = []
    for side, times in seconds.items():
        _, model, parts = made[side]
        p20, _, _, p80 = statistics.quantiles(times, n=5) if len(times) > 1 else times * 4
        row = {
            "family": family,
            "side": side,
            "parameters": str(sum(p.numel() for p in model.parameters())),
            "p20_ms": f"{p20 * 1e3:.1f}",
            "p50_ms": f"{statistics.median(times) * 1e3:.1f}",
            "p80_ms": f"{p80 * 1e3:.1f}",
            "times_dense": f"{dense / statistics.median(times):.2f}",
            "fused": parts,
        }
        rows.append(row)
        print(" ".join(f"{value:>10}" for value in row.values()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if len(options.families) > 1:
        for family in options.families:
            command = [sys.executable, __file__, "--families", family, "--repeats", str(options.repeats)]
            subprocess.run(command, check=True)
        return
    rows = measure(options.families[0], options.repeats)
    update("families", [row | about() for row in rows], key=("family", "side"))


if __name__ == "__main__":
    main()
