"""A small BERT, dense and compressed."""

from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM
from transformers.utils import logging

import comera
from comera.nn.tensor_train import named_trains

logging.disable_progress_bar()

SMALL = comera.TensorizeConfig(comera.TT(order=4, rank=6), comera.TTM(order=3, rank=6))
BLOCKS = comera.TensorizeConfig(comera.BTT(rank=2), comera.TTM(order=3, rank=6))


def bert(**options: Any) -> BertForMaskedLM:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    return BertForMaskedLM(BertConfig(vocab_size=512, max_position_embeddings=32, **sizes, **options)).eval()


def compressed_bert(config: comera.TensorizeConfig = SMALL) -> BertForMaskedLM:
    """Compressed, with gates of some layers pruned and cut, so that its ranks are not those of the conversion."""
    torch.manual_seed(0)
    model = bert()
    comera.tensorize_(model, config)
    with torch.no_grad():
        for _, train in list(named_trains(model))[::2]:
            for gates in train.rank_params:
                gates[1:4] = 0
    assert comera.rank.prune_(model).changed
    return model
