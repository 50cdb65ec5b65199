"""A small classifier of synthetic reviews, and its task."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

from comera.rank.objective import EarlyStage
from comera.recipes.classify import recipe as classify
from comera.recipes.classify.data import ClassifyDataConfig
from comera.recipes.classify.model import CompressConfig, EncoderConfig
from comera.recipes.classify.recipe import ClassifyConfig, ClassifyTask
from comera.trainer.config import TrainConfig

from .review_rows import reviews, write_csv

TINY = EncoderConfig(hidden=32, layers=1, heads=2, ffn=64, dropout=0.1, max_positions=32)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def tiny_config(cache: Path, out: Path) -> ClassifyConfig:
    """Six epochs on 300 reviews. cache: folder of the reviews and of what is prepared from them. out: of the run."""
    file = write_csv(cache / "reviews.csv", reviews(300))
    data = ClassifyDataConfig(path=str(file), vocab_size=320, max_length=24, cache=str(cache), held_out=0.2)
    train = TrainConfig(
        epochs=6, batch_size=16, lr=3e-3, early=EarlyStage(0), prune_every=10, progress=False, device="cpu", threads=1
    )
    return ClassifyConfig(out=str(out), data=data, model=TINY, compress=CompressConfig(ratio=1.5), train=train)


def steps(config: ClassifyConfig, count: int, **fields: Any) -> ClassifyConfig:
    return replace(config, train=replace(config.train, steps=count, **fields))


def task_of(config: ClassifyConfig) -> ClassifyTask:
    return ClassifyTask(config, classify.prepare(config.data, config.model.source, quiet=True))


def checkpoint(folder: Path, vocab_size: int = 400, labels: int = 2, kind: Any = BertForSequenceClassification) -> Path:
    """Write a dense encoder of transformers to start from; returns the folder."""
    torch.manual_seed(5)
    kind(BertConfig(vocab_size=vocab_size, num_labels=labels, **SIZES)).save_pretrained(folder)
    return folder
