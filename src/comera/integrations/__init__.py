"""Other people's trainers and folders, a module each; none is imported before its library is there.

    comera.integrations.lightning     RankCallback for Lightning's Trainer
    comera.integrations.transformers  RankCallback for transformers' Trainer
    comera.integrations.decompose     trained weights of transformers that are too large to hold
    comera.integrations.fsdp          models whose dense rest is sharded by `fully_shard`
    comera.integrations.peft          LoRA on compressed layers

Accelerate needs none: `accelerator.register_for_checkpointing(controller)`. `save_pretrained` and `from_pretrained` of
transformers need none either: `transformers_formats` registers itself.
"""

__all__: list[str] = []
