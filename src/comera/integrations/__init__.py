"""Other people's trainers, a module each; none is imported before its library is there.

comera.integrations.lightning     RankCallback for Lightning's Trainer
comera.integrations.fsdp          models whose dense rest is sharded by `fully_shard`
comera.integrations.peft          LoRA on compressed layers

Accelerate needs none: `accelerator.register_for_checkpointing(controller)`.
"""

__all__: list[str] = []
