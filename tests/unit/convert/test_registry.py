"""Which layers can be converted: registered types, exactly, that do no more than their type tells."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from comera.convert import LINEAR, TT, TTM, TensorizeConfig, materialize_, register_converter, tensorize_
from comera.convert.registry import converters
from comera.errors import ConversionError
from comera.nn.linear import TTLinear

SMALL = TensorizeConfig(linear=TT(order=4, rank=4), embedding=TTM(order=2, rank=4))


class Custom(nn.Linear):
    pass


def hooked(layer: nn.Linear) -> nn.Linear:
    layer.weight.register_hook(lambda grad: grad)
    return layer


def with_buffer(layer: nn.Linear) -> nn.Linear:
    layer.register_buffer("scale", torch.ones(1))
    return layer


def with_bias_as_buffer(layer: nn.Linear) -> nn.Linear:
    bias = layer.bias.detach().clone()
    del layer.bias
    layer.register_buffer("bias", bias)
    return layer


def with_plain_bias(layer: nn.Linear) -> nn.Linear:
    bias = layer.bias.detach().clone()
    del layer.bias
    layer.bias = bias
    return layer


def with_own_bias(table: nn.Embedding) -> nn.Embedding:
    table.bias = nn.Parameter(torch.ones(64))
    return table


def with_own_forward(layer: nn.Linear) -> nn.Linear:
    layer.forward = lambda x: x
    return layer


def with_state_hook(layer: nn.Linear) -> nn.Linear:
    layer.register_state_dict_post_hook(lambda *args: None)
    return layer


@pytest.mark.parametrize(
    ("layer", "note"),
    [
        (Custom(64, 64), "a subclass of a known layer"),
        (parametrizations.weight_norm(nn.Linear(64, 64)), "a subclass of a known layer"),
        (parametrizations.orthogonal(nn.Linear(64, 64)), "a subclass of a known layer"),
        (prune.random_unstructured(nn.Linear(64, 64), "weight", 0.5), "no parameter of its own"),
        (nn.Embedding(64, 64, max_norm=1.0), "max_norm works on rows"),
        (nn.Embedding(64, 64, sparse=True), "sparse works on rows"),
        (nn.Embedding(64, 64, scale_grad_by_freq=True), "scale_grad_by_freq works on rows"),
        (nn.EmbeddingBag(64, 64, mode="max"), "mode 'max' takes the largest of dense rows"),
        (nn.EmbeddingBag(64, 64, max_norm=1.0), "max_norm works on rows"),
        (nn.EmbeddingBag(64, 64, scale_grad_by_freq=True), "scale_grad_by_freq works on rows"),
        (nn.Linear(64, 64, dtype=torch.complex64), "its weight is of torch.complex64"),
        (hooked(nn.Linear(64, 64)), "gradient hooks"),
        (with_buffer(nn.Linear(64, 64)), "it also holds scale"),
        (with_bias_as_buffer(nn.Linear(64, 64)), "its bias is no parameter of its own"),
        (with_plain_bias(nn.Linear(64, 64)), "its bias is no parameter of its own"),
        (prune.random_unstructured(nn.Linear(64, 64), "bias", 0.5), "its bias is no parameter of its own"),
        (with_own_bias(nn.Embedding(64, 64)), "it also holds bias"),
        (with_own_forward(nn.Linear(64, 64)), "its forward was replaced"),
        (with_state_hook(nn.Linear(64, 64)), "state_dict hooks"),
    ],
)
def test_layers_that_do_more_than_their_type_tells_stay_dense(layer: nn.Module, note: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), layer)
    report = tensorize_(model, SMALL)
    assert model[1] is layer
    assert note in report.rows[1].note


def test_a_registered_type_is_converted_and_comes_back() -> None:
    register_converter(Custom, replace(LINEAR, build=lambda layer: Custom(layer.in_features, layer.out_features)))
    try:
        model = nn.Sequential(Custom(64, 64))
        tensorize_(model, SMALL)
        assert isinstance(model[0], TTLinear)
        assert type(materialize_(model)[0]) is Custom
    finally:
        converters().pop(Custom)
    with pytest.raises(ConversionError, match=r"expected a subclass of nn.Module"):
        register_converter(3, LINEAR)
