"""Experts as one tensor train with the expert as a mode, or as a train each: held-out loss at equal parameters.

A small Mixtral (3 blocks, 128 wide, 8 experts of which 2 are used for a token) on plain bytes, 4 × 256 tokens a step.
Only the experts are compressed, so that the whole model gets `--ratio` times smaller; `narrow` has narrower dense
experts of the same size instead. Cosine schedule, the same rates for each; held-out loss in nats per byte.

    python benchmarks/experts.py [--cases tt-3 btt ...] [--ratio 3] [--steps 300] [--rates 4e-3 8e-3] [--seeds 1]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from common import about, update
from short_runs import BETAS, BLOCK, VOCABULARY, held_out, standard_library, train
from transformers import MixtralConfig, MixtralForCausalLM

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--ratio", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rates", nargs="+", type=float, default=[4e-3, 8e-3])
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    for row in runs(options):
        print(" ".join(f"{value!s:>12}" for value in row.values()), flush=True)
        update("experts", [row | about()], ("case", "ratio", "steps", "lr", "seed"))


def runs(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    data = standard_library()
    for seed in range(options.seeds):
        for name in options.cases:
            for lr in options.rates:
                row = {"case": name, "ratio": options.ratio, "steps": options.steps, "lr": f"{lr:g}", "seed": seed}
                model = built(name, options.ratio, seed)
                train(model, AdamW(param_groups(model, lr=lr), betas=BETAS), data, options.steps, seed)
                size = comera.model_size(model).total
                yield row | {"parameters": size, "nats_per_byte": f"{held_out(model, data):.4f}"}


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
