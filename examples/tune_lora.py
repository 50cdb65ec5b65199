"""PEFT: LoRA adapters on a compressed model, trained, saved, loaded again, and merged once the model is dense.

python examples/tune_lora.py --out runs/lora
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

import comera
from comera.integrations.peft import with_compressed


def build() -> nn.Module:
    """Two numbers in, the larger one out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Flatten(), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 256))
    comera.tensorize_(model, comera.TensorizeConfig(comera.TT(rank=16), comera.TTM(rank=16)))
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    out = parser.parse_args().out

    config = with_compressed(LoraConfig(r=8, lora_alpha=16, target_modules=["0", "2", "4"]))
    model = get_peft_model(build(), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(30):
        generator = torch.Generator().manual_seed(step)
        pairs = torch.randint(256, (64, 2), generator=generator)
        loss = nn.functional.cross_entropy(model(pairs), pairs.amax(1))
        print(f"step {step}: loss {loss:.6f}", flush=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(out)  # the adapter; the model beneath it has not changed

    config = with_compressed(LoraConfig.from_pretrained(out))
    loaded = PeftModel.from_pretrained(build(), out, config=config)
    pairs = torch.randint(256, (64, 2))
    print("loaded: differs by", float((loaded(pairs) - model(pairs)).abs().max()))

    comera.materialize_(model)  # a tensor train cannot take up an adapter, a dense layer can
    expected = model(pairs)
    merged = model.merge_and_unload()
    print("merged: differs by", float((merged(pairs) - expected).abs().max()))


if __name__ == "__main__":
    main()
