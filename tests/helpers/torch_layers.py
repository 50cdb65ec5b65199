"""PyTorch's own transformer layers, compressed or not, for tests of their fusion."""

from typing import Any

import torch
from torch import Tensor, nn

import comera

from . import counted
from .families import FORMATS

LAYERS = 2
KINDS: dict[str, Any] = {
    "encoder": (nn.TransformerEncoderLayer, nn.TransformerEncoder),
    "decoder": (nn.TransformerDecoderLayer, nn.TransformerDecoder),
}


def model(
    kind: str, form: str = "tt", *, drop: float = 0.0, batch_first: bool = True, nested: bool = False, **options: Any
) -> Any:
    torch.manual_seed(0)
    layer_type, stack = KINDS[kind]
    one = layer_type(48, 4, 80, dropout=drop, batch_first=batch_first, **options)
    made = stack(one, LAYERS, enable_nested_tensor=nested) if kind == "encoder" else stack(one, LAYERS)
    if isinstance(options.get("activation"), nn.Module):
        for layer in made.layers:  # torch's copies of a decoder layer hide theirs behind F.relu
            vars(layer).pop("activation", None)
    for parameter in made.parameters():  # norms away from 1, biases away from 0, and no two layers alike
        nn.init.normal_(parameter, std=0.5 if parameter.dim() == 1 else 0.1)
    if (linear := FORMATS[form]) is not None:
        comera.tensorize_(made, comera.TensorizeConfig(linear=linear, embedding=None))
    return made.train()


def inputs(kind: str, *, masked: bool = False, batch_first: bool = True, dtype: Any = torch.float32) -> dict[str, Any]:
    """Keywords of a forward, with masks if wanted: causal ones, and of padding at the end."""
    generator = torch.Generator().manual_seed(1)
    x, memory = (torch.randn(3, length, 48, generator=generator, dtype=dtype) for length in (7, 5))
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:] = True
    if not batch_first:
        x, memory = x.transpose(0, 1).contiguous(), memory.transpose(0, 1).contiguous()
    causal = torch.ones(7, 7, dtype=torch.bool).triu(1)
    if kind == "encoder":
        masks = {"mask": causal, "is_causal": True, "src_key_padding_mask": padding}
        return {"src": x} | (masks if masked else {})
    masks = {"tgt_mask": causal, "tgt_key_padding_mask": padding, "memory_key_padding_mask": padding[:, 2:]}
    return {"tgt": x, "memory": memory} | (masks if masked else {})


def trained(made: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
    """The output, and the gradients of inputs and parameters."""
    torch.manual_seed(1)
    made.zero_grad()
    leaves = {name: t.clone().requires_grad_() for name, t in given.items() if name in ("src", "tgt", "memory")}
    out: Tensor = made(**given | leaves)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    named = [*leaves.items(), *made.named_parameters()]
    grads = {name.removeprefix("_orig_mod."): t.grad.clone() for name, t in named if t.grad is not None}
    assert len(grads) == len(named)
    return {"out": out.detach(), **grads}


# of comera/fusion, and the fast path of torch's encoder layers
OPERATIONS = (*counted.OPERATIONS, (torch, "_transformer_encoder_layer_fwd", "fast path"))
