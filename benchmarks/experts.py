"""Experts as one tensor train with the expert as a mode, or as a train each: held-out loss at equal parameters; and
block tensor trains as experts of a wider model, beside plain experts and dense layers, at equal FLOPs and steps.

A small Mixtral (3 blocks, 128 wide, 8 experts of which 2 are used for a token) on plain bytes, 4 × 256 tokens a step.
Only the experts are compressed, so that the whole model gets `--ratio` times smaller; `narrow` has narrower dense
experts of the same size instead. Cosine schedule, the same rates for each; held-out loss in nats per byte.

The models of WIDER have all layers but the head compressed, or none, and as many FLOPs in a step. All are fused. AdamW,
since Muon would leave plain experts, a parameter of three dimensions each, to it.

    python benchmarks/experts.py [--cases tt-3 btt ...] [--ratio 3] [--steps 300] [--rates 4e-3 8e-3] [--seeds 1]
    python benchmarks/experts.py --wider --steps 1200 --rates 1e-3 2e-3 4e-3
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from common import about, update
from short_runs import BETAS, BLOCK, VOCABULARY, held_out, standard_library, train
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

import comera
from comera.optim import AdamW, param_groups

EXPERTS, WIDTH, INNER = 8, 128, 128
CASES: dict[str, comera.TT | comera.BTT | int | None] = {
    "dense": None,
    "narrow": 24,  # features inside each expert
    "tt-3": comera.TT(order=3),  # in, expert, out: two factors that all share, and a matrix for each expert
    "tt-4": comera.TT(order=4),
    "tt-6": comera.TT(order=6),
    "low-rank": comera.BTT(blocks=(1, 1)),  # two cores for each expert
    "btt-4": comera.BTT(blocks=(4, 4)),
    "btt": comera.BTT(),
}


class Wider(NamedTuple):
    """A model: its width, features inside an expert, or inside the only MLP, and the rank of block tensor trains of
    4 x 4 blocks, 0 for dense layers. 2 of 8 experts are as many FLOPs as an MLP of twice the features."""

    width: int
    inner: int
    experts: int
    rank: int = 0


WIDER = {
    "dense-128": Wider(128, 256, 0),
    "experts-128": Wider(128, 128, EXPERTS),
    "dense-btt8-256": Wider(256, 512, 0, 8),
    "experts-btt8-256": Wider(256, 256, EXPERTS, 8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*CASES, *WIDER])
    parser.add_argument("--wider", action="store_true", help="models of WIDER")
    parser.add_argument("--ratio", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rates", nargs="+", type=float, default=[4e-3, 8e-3])
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    known: dict[str, Any] = WIDER if options.wider else CASES
    options.cases = options.cases or list(known)
    if unknown := {*options.cases} - {*known}:
        parser.error(f"expected cases out of {', '.join(known)}, got {', '.join(unknown)}")
    for row in runs(options):
        print(" ".join(f"{value!s:>12}" for value in row.values()), flush=True)
        update("experts", [row | about()], ("case", "ratio", "steps", "lr", "seed"))


def runs(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    data = standard_library()
    for seed in range(options.seeds):
        for name in options.cases:
            for lr in options.rates:
                ratio = "" if options.wider else options.ratio
                row = {"case": name, "ratio": ratio, "steps": options.steps, "lr": f"{lr:g}", "seed": seed}
                model = wider(WIDER[name], seed) if options.wider else built(name, options.ratio, seed)
                begin = time.process_time()
                train(model, AdamW(param_groups(model, lr=lr), betas=BETAS), data, options.steps, seed)
                row["step_ms"] = f"{1e3 * (time.process_time() - begin) / options.steps:.1f}"  # of one processor
                size = comera.model_size(model).total
                yield row | {"parameters": size, "nats_per_byte": f"{held_out(model, data):.4f}"}


def wider(case: Wider, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    heads = case.width // 32
    sizes: Any = {"vocab_size": VOCABULARY, "hidden_size": case.width, "intermediate_size": case.inner}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": heads, "num_key_value_heads": heads}
    sizes |= {"max_position_embeddings": BLOCK}
    model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**sizes))
    if case.experts:
        model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=case.experts, num_experts_per_tok=2))
    if case.rank:
        blocks = comera.BTT(rank=case.rank, blocks=(4, 4))
        kept: dict[str, Any] = {"lm_head": None}
        comera.tensorize_(model, comera.TensorizeConfig(blocks, None, overrides=kept, experts=blocks))
    comera.fuse_(model)
    return model


def built(name: str, ratio: float, seed: int) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    how = CASES[name]
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=how if isinstance(how, int) else INNER,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=BLOCK,
    )
    model = MixtralForCausalLM(config)
    if isinstance(how, comera.TT | comera.BTT):
        comera.tensorize_(model, comera.TensorizeConfig(None, None, experts=how), ratio=ratio)
    return model


if __name__ == "__main__":
    main()
