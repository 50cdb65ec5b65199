"""Blocks that are known by their code: copies under other names, subclasses, families of transformers."""

import copy
import logging
import types
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.bert.modeling_bert import BertOutput
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import comera
from comera.fusion import MLP, fuse_, register_block
from comera.fusion.registry import patterns_of
from comera.fusion.same_code import code_of

from ...helpers.near import assert_near

CODE = """
import logging
import math
import torch.nn.functional as F
from torch import nn

logger = logging.getLogger(__name__)

def scaled(x):
    return FACTOR * x

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)

    def forward(self, x):
        "DOCUMENTED"
        logger.debug("ran")
        return self.shift(scaled(self.down(self.act(self.up(x)))), *[n * self.size for n in (1, self.width)])

    size = 2

    @property
    def width(self):
        return 2

    def shift(self, x, a, b):
        return x + SHIFT + math.pi + F.relu(x) * 0
"""


def block(factor: str = "2", shift: str = "1", doc: str = "A text.") -> type[nn.Module]:
    """A class from source of its own, as in a file of its own."""
    source = CODE.replace("FACTOR", factor).replace("SHIFT", shift).replace("DOCUMENTED", doc)
    module = types.ModuleType("a_file")
    exec(compile(source, "a_file", "exec"), vars(module))
    return module.Block  # type: ignore[no-any-return]


def same_code(one: type, other: type, method: str, *, whole: bool = True) -> bool:
    return code_of(one, method, whole=whole).content == code_of(other, method, whole=whole).content


def test_a_copy_is_the_same_code() -> None:
    assert same_code(block(), block(doc="Another text."), "forward")
    assert same_code(block(), block(), "shift")


@pytest.mark.parametrize(
    "other",
    [
        block(factor="3"),  # a constant in a function of the file
        block(shift="2"),  # in a method of the class
        block(factor="2 + 0"),  # other instructions
        type("Block", (block(),), {"shift": lambda self, x, a, b: x}),
        type("Block", (block(),), {"size": 3}),
        type("Block", (block(),), {"width": property(lambda self: 3)}),
        type("Block", (block(),), {"forward": lambda self, x: x}),
        type("Block", (nn.Module,), {}),
    ],
)
def test_what_computes_something_else_is_not(other: type) -> None:
    assert not same_code(block(), other, "forward")


def test_constants_are_compared_with_their_types() -> None:
    assert not same_code(block(factor="2"), block(factor="2.0"), "forward")
    assert not same_code(block(factor="1"), block(factor="True"), "forward")


def test_functions_that_a_class_holds_are_compared() -> None:
    def made(function: Any) -> type:
        class Block(nn.Module):
            act = function

            def forward(self, x: Tensor) -> Any:
                return self.act(x)

        return Block

    assert same_code(made(torch.tanh), made(torch.tanh), "forward")
    assert not same_code(made(torch.tanh), made(torch.relu), "forward")


def test_names_from_outside_are_the_same_objects() -> None:
    other = block()
    other.forward.__globals__["F"] = types.SimpleNamespace(relu=F.gelu)
    assert not same_code(block(), other, "forward")
    other = block()
    other.forward.__globals__["logger"] = logging.getLogger("another")  # messages may go anywhere
    assert same_code(block(), other, "forward")


def test_what_a_function_has_around_it_is_compared() -> None:
    def times(factor: float) -> Callable[[Any], Any]:
        def decorated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            @wraps(function)
            def run(self: Any, x: Tensor) -> Tensor:
                return function(self, x) * factor

            return run

        return decorated

    def made(factor: float, act: Callable[[Tensor], Tensor], add: float) -> type:
        def more(x: Tensor) -> Tensor:
            return x + add

        class Block(nn.Module):
            @times(factor)
            def forward(self, x: Tensor) -> Tensor:
                return more(act(x))

        return Block

    assert same_code(made(2.0, F.relu, 1.0), made(2.0, F.relu, 1.0), "forward")
    for other in (made(3.0, F.relu, 1.0), made(2.0, F.gelu, 1.0), made(2.0, F.relu, 2.0)):
        assert not same_code(made(2.0, F.relu, 1.0), other, "forward")
    assert not same_code(made(2.0, F.relu, 1.0), made(3.0, F.relu, 1.0), "forward", whole=False)


def test_a_call_of_the_base_class_is_like_no_other() -> None:
    def made(base: type) -> type:
        class Block(base):  # type: ignore[misc, valid-type]
            def forward(self, x: Tensor) -> Any:
                return super().forward(x)

        return Block

    assert not same_code(made(block()), made(block(factor="3")), "forward")


def test_a_method_by_itself() -> None:
    assert same_code(block(), block(shift="2"), "forward", whole=False)
    assert not same_code(block(), type("Block", (block(),), {"forward": lambda self, x: x}), "forward", whole=False)


def test_code_that_calls_itself_ends() -> None:
    def made() -> type:
        class Block(nn.Module):
            def forward(self, x: Tensor, depth: int = 3) -> Tensor:
                return self.forward(x, depth - 1) if depth else x

        return Block

    assert same_code(made(), made(), "forward")


def test_subclasses_and_copies_of_registered_types_are_known() -> None:
    kind = block()
    assert not patterns_of(kind())
    register_block(kind, MLP("forward", ups=("up",), activation="act", down="down", within=True))
    assert patterns_of(kind())
    model = nn.Sequential(block()(), type("MyBlock", (kind,), {"extra": 3})(), type("Other", (kind,), {})())
    comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=4)))
    report = fuse_(model)
    assert report.fused("mlp") == ("0", "1", "2")  # whatever they are called
    assert not report.unknown
    model.append(block(factor="3")()).append(block(factor="3")())
    comera.tensorize_(model[3:], comera.TensorizeConfig(comera.TT(order=4, rank=4)))
    report = fuse_(model)
    assert dict(report.unknown) == {"Block": 2}
    assert "not known: 2 Block: their layers are called one by one (register_block changes that)" in str(report)


def test_a_subclass_with_a_forward_of_its_own_is_not() -> None:
    class MyOutput(BertOutput):
        def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
            return hidden_states

    class SameOutput(BertOutput):
        pass

    config = AutoConfig.for_model("bert", hidden_size=24, intermediate_size=40)
    assert not patterns_of(MyOutput(config))
    assert patterns_of(SameOutput(config)) == patterns_of(BertOutput(config))


def test_a_subclass_that_a_library_wraps_once_more_is_known() -> None:
    """transformers wraps the forward of each class of layers, FSDP makes a class of its own of each."""
    config = AutoConfig.for_model("llama", **SIZES)
    layer = LlamaDecoderLayer(config, layer_idx=0)
    layer.__class__ = type("FSDPLlamaDecoderLayer", (LlamaDecoderLayer,), {})
    assert patterns_of(layer) == patterns_of(LlamaDecoderLayer(config, layer_idx=0)) != ()


SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
DECODER = {"pre-norm": 2, "qkv": 2, "rotary attention": 2, "norm": 5, "attention": 2}
ENCODER = {"qkv": 2, "mlp": 2, "residual norm": 4, "embedding norm": 1, "attention": 2}
# family -> what is fused in two blocks, by the code of another family
FAMILIES: dict[str, tuple[Any, dict[str, int]]] = {
    "xlm-roberta": (AutoModelForMaskedLM, ENCODER),
    "camembert": (AutoModelForMaskedLM, ENCODER),
    # which turn queries and keys in other ways
    "ernie4_5": (AutoModelForCausalLM, {"pre-norm": 2, "qkv": 2, "norm": 5, "mlp": 2, "attention": 2}),
    "glm": (AutoModelForCausalLM, {"pre-norm": 2, "qkv": 2, "norm": 5, "attention": 2}),
    # whose norms are others
    "olmo2": (AutoModelForCausalLM, {"mlp": 2, "attention": 2}),
    "helium": (AutoModelForCausalLM, {"qkv": 2, "mlp": 2, "attention": 2}),
    # whose MLPs are experts
    "mixtral": (AutoModelForCausalLM, {"qkv": 2, "rotary attention": 2, "norm": 5, "attention": 2}),
    "qwen2_moe": (AutoModelForCausalLM, DECODER | {"mlp": 2}),
}


def trained(made: Any, ids: Tensor) -> dict[str, Tensor]:
    made.zero_grad()
    out = made(input_ids=ids, labels=ids)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **grads}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_that_is_a_copy_of_a_known_one(name: str) -> None:
    head, parts = FAMILIES[name]
    torch.manual_seed(0)
    made = head.from_config(AutoConfig.for_model(name, **SIZES)).eval()
    for parameter in made.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.5)
    comera.tensorize_(made, comera.TensorizeConfig(linear=comera.TT(order=4, rank=6), embedding=None))
    plain = copy.deepcopy(made)
    report = fuse_(made)
    assert Counter(row.kind for row in report.rows if not row.reason) == parts
    ids = torch.randint(3, 50, (3, 14), generator=torch.Generator().manual_seed(1))
    assert_near(trained(made, ids), trained(plain, ids))
