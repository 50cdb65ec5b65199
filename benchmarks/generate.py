"""What a table of n-grams adds to a generated token: a Llama-style model of four blocks with it and without.

`generate` of transformers, greedy, with a KV cache: 64 tokens after a prompt of 64, in batches of 1 and 16 rows. Bytes:
256 ids, strings of six, tables of their own; tokens: 32,768 ids, strings of four, tables shared. Rank 160. The sides
take turns in one process; `plain_ms` and `ngrams_ms` are medians for a token of all rows, `part` is the median over
turns of what the second takes longer, in parts of the first.

    python benchmarks/generate.py [--threads 1] [--repeats 20] [--dry]      4 minutes
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from common import about, in_turns, update
from transformers import LlamaConfig, LlamaForCausalLM

import comera

NEW = 64  # tokens, after as many
KINDS = {"bytes": (256, 6), "tokens": (32_768, 4)}  # vocabulary, longest n-gram
WIDTHS, BATCHES, RANK = (128, 512), (1, 16), 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20, help="turns of each case")
    parser.add_argument("--dry", action="store_true", help="one turn of the smallest case; writes nothing")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases = [(kind, width, batch) for kind in KINDS for width in WIDTHS for batch in BATCHES]
    for kind, width, batch in cases[:1] if options.dry else cases:
        row = measure(kind, width, batch, 1 if options.dry else options.repeats)
        print(" ".join(f"{value!s:>8}" for value in row.values()), flush=True)
        if not options.dry:
            update("generate", [row | about()], key=("ids", "width", "batch", "threads"))


def measure(kind: str, width: int, batch: int, repeats: int) -> dict[str, Any]:
    """A row of one case."""
    vocabulary, order = KINDS[kind]
    torch.manual_seed(0)
    prompt = torch.randint(vocabulary, (batch, NEW))
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 8 * width // 3, "num_hidden_layers": 4}
    plain, ours = (
        LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_attention_heads=width // 64, **sizes)).eval()
        for _ in range(2)
    )
    comera.ngrams_(ours, order=order, rank=RANK)

    def tokens(model: Any) -> None:
        model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)

    sides = {"plain": lambda: tokens(plain), "ngrams": lambda: tokens(ours)}
    seconds = in_turns(sides, repeats)
    medians = {side: 1e3 * statistics.median(own) / NEW for side, own in seconds.items()}
    part = statistics.median(b / a - 1 for a, b in zip(seconds["plain"], seconds["ngrams"], strict=True))
    shown = {f"{side}_ms": f"{ms:.3g}" for side, ms in medians.items()}
    return {"ids": kind, "width": width, "batch": batch, **shown, "part": f"{part:.3f}"}


if __name__ == "__main__":
    main()
