"""transformers' Trainer: train a compressed model and cut its ranks on the way. Run it again to go on where it stopped.

python examples/train_transformers.py --out runs/transformers
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import comera
from comera.integrations.transformers import RankCallback

STEPS, SAVE_EVERY, PRUNE_EVERY = 60, 10, 10


class Pairs(Dataset[dict[str, torch.Tensor]]):
    """Two numbers, and the larger one to predict."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pair = torch.randint(256, (2,), generator=torch.Generator().manual_seed(index))
        largest = pair.amax(0, keepdim=True)
        return {"input_ids": torch.cat([pair, largest]), "labels": torch.cat([torch.full((2,), -100), largest])}


def build() -> LlamaForCausalLM:
    """A small language model, compressed."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, attention_dropout=0.1, **sizes))
    comera.tensorize_(model, comera.TensorizeConfig(comera.TT(rank=16), comera.TTM(rank=16)))
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/transformers"))
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in a step")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(comera.param_groups(model, lr=3e-3))
    late = comera.LateStage(target_size=0.4, start_step=20, steps=30)
    arguments = TrainingArguments(
        str(options.out),
        max_steps=STEPS,
        per_device_train_batch_size=64 // options.accumulate,
        gradient_accumulation_steps=options.accumulate,
        activation_checkpointing=options.activation_checkpointing,
        bf16=options.bf16,
        save_steps=SAVE_EVERY,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    ranks = RankCallback(late=late, prune_every=PRUNE_EVERY)
    trainer = Trainer(model, arguments, train_dataset=Pairs(), optimizers=(optimizer, None), callbacks=[ranks])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(options.out)) if options.out.exists() else None)
    print(f"{comera.model_size(trainer.model).tensorized} parameters in tensor trains", flush=True)
    trainer.save_model(str(options.out / "model"))  # and AutoModelForCausalLM.from_pretrained(...) gives it back


if __name__ == "__main__":
    main()
