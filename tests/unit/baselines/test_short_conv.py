"""Short convolutions: what they compute, and that a cache is refused: they keep nothing in it."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from comera.baselines.tokens import ShortConv, add_short_convs_
from comera.convert.ngrams import CACHES
from comera.errors import ConfigError

SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_it_is_a_causal_convolution_of_each_channel() -> None:
    torch.manual_seed(0)
    layer, x_BTD = ShortConv(5, taps=4).double(), torch.randn(2, 9, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x_BTD), x_BTD)
    nn.init.normal_(layer.taps)
    kernel = layer.taps.T[:, None].flip(-1)
    expected = nn.functional.conv1d(x_BTD.mT, kernel, padding=3, groups=5)[..., :9].mT
    torch.testing.assert_close(layer(x_BTD), expected)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", CACHES[:2])
def test_a_cache_is_refused(name: str) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    ids, cache = torch.arange(8)[None], DynamicCache()
    model(ids, use_cache=True, **{name: cache})
    add_short_convs_(model, 4)
    with pytest.raises(ConfigError, match="got one with 8 positions"):
        model(ids, **{name: cache})
