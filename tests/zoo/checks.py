"""What every family of the zoo must do. A check returns a remark for its cell of docs/zoo.md, or raises.

The oracle is a dense model of the same configuration whose weights are materialized here, from the tensor trains alone.
"""

import copy
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from comera.convert import BTT, TT, TTM, TensorizeConfig, tensorize_
from comera.convert.registry import converters
from comera.fusion import fuse_
from comera.integrations.transformers import RankCallback
from comera.memory import recompute_
from comera.nn import CompressedLayer
from comera.nn.packed import HELD, Holder
from comera.nn.size import model_size
from comera.optim import param_groups
from comera.pretrained import load_pretrained, save_pretrained
from comera.rank import LateStage, RankController, round_
from comera.tt.spec import TTMSpec

from .families import Family

CONV = TT(order=4, rank=4)
EXPERTS = TT(order=4, rank=4)
CONFIG = TensorizeConfig(TT(order=4, rank=4), TTM(order=2, rank=4), conv=CONV, experts=EXPERTS)
BLOCKS = TensorizeConfig(BTT(rank=1), TTM(order=2, rank=4), conv=CONV, experts=BTT(rank=1))
LEAST_SHARE = 0.8
Results = tuple[list[Tensor], dict[str, Tensor]]


# --- what the checks share -------------------------------------------------------------------------------------------


def built(family: Family, *, compressed: bool = True, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = family.build().eval()
    if dtype == torch.float64:
        double_(model)
    if compressed:
        tensorize_(model, BLOCKS if family.blocks else CONFIG)
    return model


def exactness(family: Family) -> tuple[torch.dtype, float]:
    """In which dtype a family is compared with its dense model, and how closely."""
    return (torch.float64, 1e-9) if family.double else (torch.float32, 1e-4)


def double_(model: nn.Module) -> nn.Module:
    """In float64, with experts one by one: torch multiplies groups of matrices in float32 at most."""
    if getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("eager")
    return model.double()


def dense_model(family: Family, model: nn.Module) -> nn.Module:
    """The family's dense model with the weights of a compressed one."""
    dense = built(family, compressed=False, dtype=next(model.parameters()).dtype)
    modules, state = dict(model.named_modules(remove_duplicate=False)), dict(model.state_dict(keep_vars=True))
    with torch.no_grad():
        for name, value in dense.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):  # neuraloperator's says how the model was made
                continue
            path, _, leaf = name.rpartition(".")
            layer = modules[path]
            if isinstance(layer, Holder) and leaf in layer.leaves:
                held = layer.get_submodule(HELD).get_submodule(leaf)
                value.copy_(held.layout.parameter(held.tt.dense()))
                continue
            if isinstance(layer, CompressedLayer) and leaf == "weight":
                weight = layer.tt.dense()
                if not isinstance(layer.tt.spec, TTMSpec) and not converters()[layer.dense_type].in_first:
                    weight = weight.t()
                value.copy_(weight.reshape(value.shape))
                padding = getattr(layer, "padding_idx", None)
                if padding is not None and not layer.tt.padding_row:
                    value[padding] = 0
                elif padding is not None:
                    dense.get_submodule(path).padding_idx = None  # type: ignore[assignment]
            else:
                value.copy_(state[name])
    return dense


def floats(output: Any) -> Iterator[Tensor]:
    """The tensors of numbers in an output, without caches."""
    if isinstance(output, Tensor):
        yield from [output] if output.is_floating_point() else []
    elif isinstance(output, dict | list | tuple):
        for value in output.values() if isinstance(output, dict) else output:
            yield from floats(value)


def fed(family: Family, model: nn.Module) -> dict[str, Tensor]:
    dtype = next(model.parameters()).dtype
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in family.inputs().items()}


def loss_of(outputs: list[Tensor]) -> Tensor:
    """A number that depends on all outputs."""
    terms = [(out * torch.arange(out.numel()).cos().to(out).view_as(out)).mean() for out in outputs]
    return torch.stack([term.to(torch.float64) for term in terms]).sum()


def run(family: Family, model: nn.Module, call: Callable[..., Any] | None = None) -> Results:
    """Outputs and the gradients of all parameters."""
    model.zero_grad()
    torch.manual_seed(1)  # some draw in training, whatever their configuration says
    outputs = list(floats((model if call is None else call)(**fed(family, model))))
    loss_of(outputs).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    gradients = {name: grad for name, grad in gradients.items() if not re.search(family.rounded, name)}
    return [out.detach() for out in outputs], gradients


def assert_same(found: Results, expected: Results, tolerance: float) -> None:
    """Every output, and every gradient that both have, relative to the largest entry of it."""
    assert len(found[0]) == len(expected[0])
    both = found[1].keys() & expected[1].keys()
    assert both
    pairs = [(f"output {k}", a, b) for k, (a, b) in enumerate(zip(found[0], expected[0], strict=True))]
    pairs += [(name, found[1][name], expected[1][name]) for name in sorted(both)]
    for name, a, b in pairs:
        scale = max(float(b.abs().max()), 1e-3 if b is expected[1].get(name) else 0.0)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}")


def noise(found: list[Tensor], exact: list[Tensor]) -> float:
    """Relative error of all outputs together."""
    errors = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, exact, strict=True))
    return (errors / sum(float(b.double().square().sum()) for b in exact)) ** 0.5


# --- the checks ------------------------------------------------------------------------------------------------------


def conversion(family: Family) -> str:
    """The share of the parameters that are in compressed layers; every other one is in a row with its reason."""
    model = built(family, compressed=False)
    report = tensorize_(model, BLOCKS if family.blocks else CONFIG)
    counted = sum(row.dense + row.bias for row in report.rows), sum(row.stored + row.bias for row in report.rows)
    assert counted == (report.dense_total, report.total)
    assert all(row.note for row in report.rows if not row.compressed)
    share = report.size.dense_tensorized / report.dense_total
    dense = sorted((row for row in report.rows if not row.compressed), key=lambda row: -row.dense)[:4]
    left = "; ".join(f"{row.name} {row.dense:,}: {row.note}" for row in dense)
    assert share >= LEAST_SHARE, f"expected {LEAST_SHARE:.0%} in compressed layers, got {share:.0%}; dense: {left}"
    return f"{share:.0%}"


def agreement(family: Family) -> None:
    """Outputs and gradients of the dense model with the same weights, in float64."""
    dtype, tolerance = exactness(family)
    model = built(family, dtype=dtype)
    assert_same(run(family, model), run(family, dense_model(family, model)), tolerance)


def training(family: Family) -> None:
    """Three steps: one early, one late, one after the cut; then it computes what the dense model does."""
    model = built(family).train()
    optimizer = AdamW(param_groups(model, lr=1e-3))
    ranks = RankController(model, late=LateStage(target_size=0.7, start_step=1)).attach(optimizer)
    for step in range(3):
        loss = loss_of(list(floats(model(**fed(family, model)))))
        loss.backward()
        ranks.observe(loss)
        optimizer.step()
        optimizer.zero_grad()
        assert loss.isfinite()
        assert ranks.stage == "late"
        if step == 1:
            before = model_size(model).tensorized
            ranks.meet_target_()
            assert ranks.target_size is not None
            assert model_size(model).tensorized <= ranks.target_size < before
    dtype, tolerance = exactness(family)
    model.eval()
    if dtype == torch.float64:
        double_(model)
    assert_same(run(family, model), run(family, dense_model(family, model)), tolerance)


def saving(family: Family) -> None:
    """A model whose ranks were cut comes back to the bit: into a fresh dense one, and by transformers' own methods."""
    model: Any = built(family)
    round_(model, 0.7)
    expected = [*floats(model(**fed(family, model)))]
    loaded = [built(family, compressed=False)]
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder)
        load_pretrained(loaded[0], folder)
    if isinstance(model, PreTrainedModel):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            other, info = type(model).from_pretrained(folder, output_loading_info=True)
            loaded += [other, load_pretrained(built(family, compressed=False), folder)]
        assert not any(info.values()), info
    for each in loaded:
        found = [*floats(each(**fed(family, each)))]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert sum(p.numel() for p in each.parameters()) == sum(p.numel() for p in model.parameters())


def from_pretrained(family: Family) -> None:
    """The library's own `save_pretrained` and `from_pretrained` give a model whose ranks were cut back, to the bit."""
    model: Any = built(family)
    if not hasattr(type(model), "from_pretrained"):
        pytest.skip("Nothing to check: its library has no `from_pretrained`.")
    round_(model, 0.7)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        other = type(model).from_pretrained(folder).eval()
    found, expected = ([*floats(each(**fed(family, each)))] for each in (other, model))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert sum(p.numel() for p in other.parameters()) == sum(p.numel() for p in model.parameters())


def resume(family: Family) -> None:
    """transformers' `Trainer` goes on from its checkpoint with the weights, to the bit, and the ranks that it saved."""
    model = built(family)
    if not isinstance(model, PreTrainedModel):
        pytest.skip("Nothing to check: its library has no `Trainer`.")
    with tempfile.TemporaryDirectory() as folder:
        expected = _trained(family, model, folder, 1).state_dict()
        seen = _Seen()
        _trained(family, built(family), folder, 2, seen, resume=True)
    assert seen.state.keys() == expected.keys()
    assert all(torch.equal(seen.state[name], value) for name, value in expected.items())


class _Seen(TrainerCallback):
    """The state of a model as its training begins."""

    def on_train_begin(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        self.state = {name: value.clone() for name, value in model.state_dict().items()}


class _Trainer(Trainer):
    """One whose loss is that of this page: many families return none."""

    ranks: RankCallback

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        loss = loss_of(list(floats(model(**inputs))))
        self.ranks.record(loss)
        return loss


def _trained(
    family: Family, model: nn.Module, folder: str, steps: int, *more: TrainerCallback, resume: bool = False
) -> nn.Module:
    """The model after these steps, of which the last cuts its ranks; each writes a checkpoint."""
    arguments = TrainingArguments(
        folder, max_steps=steps, save_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
        remove_unused_columns=False, logging_strategy="no",
    )  # fmt: skip
    ranks = RankCallback(late=LateStage(target_size=0.7))
    trainer = _Trainer(
        model, arguments, data_collator=lambda _: fed(family, model), train_dataset=range(2),
        optimizers=(AdamW(param_groups(model, lr=1e-3)), None), callbacks=[ranks, *more],
    )  # fmt: skip
    trainer.ranks = ranks
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the late stage never began")  # the cut of so short a run is at once
        trainer.train(resume_from_checkpoint=resume)
    return model


def ties(family: Family) -> None:
    """Table and head share one tensor train, after `tie_weights` and a copy too."""
    if not family.tied:
        pytest.skip("Nothing to check: table and head are not tied.")
    model: Any = built(family)
    for each in (model, copy.deepcopy(model)):
        before = list(floats(each(**fed(family, each))))
        if hasattr(each, "tie_weights"):
            each.tie_weights()
        assert each.get_input_embeddings().tt is each.get_output_embeddings().tt
        assert all(torch.equal(a, b) for a, b in zip(floats(each(**fed(family, each))), before, strict=True))


def generate(family: Family) -> None:
    """Greedy decoding gives the tokens of the dense model, with a cache and without."""
    if not family.generates:
        pytest.skip("Nothing to check: it does not generate.")
    model: Any = built(family)
    dense: Any = dense_model(family, model)
    inputs = {name: value for name, value in fed(family, model).items() if name != "decoder_input_ids"}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    for cached in (True, False):  # RWKV without a cache reads the last token only, dense too
        expected = dense.generate(**inputs, **options, use_cache=cached)
        assert torch.equal(model.generate(**inputs, **options, use_cache=cached), expected)


def checkpointing(family: Family) -> None:
    """Hugging Face's gradient checkpointing gives the gradients without it: fused too, and where a part is called."""
    for fused in (False, True):
        model: Any = built(family).train()
        if not getattr(model, "supports_gradient_checkpointing", False):
            pytest.skip("The dense model has no gradient checkpointing.")
        if fused:
            fuse_(model)
        expected = [run(family, model, call) for call in (model, model.base_model)]
        model.gradient_checkpointing_enable()
        for call, wanted in zip((model, model.base_model), expected, strict=True):
            # layers that checkpoint themselves are not fused, and of some gradients (biases of keys) all is rounding
            assert_same(run(family, model, call), wanted, 1e-4 if fused else 1e-5)


def autocast(family: Family) -> None:
    """Under bfloat16 autocast the error is that of the dense model, within 12 dB, and gradients arrive."""
    model = built(family)
    dense, bfloat16 = dense_model(family, model), torch.autocast("cpu", torch.bfloat16)
    try:
        with bfloat16:
            dense(**fed(family, dense))
    except RuntimeError:
        pytest.skip("The dense model fails too, where the processor has no bfloat16 for it.")
    errors, trained = [], []
    for each in (dense, model):
        exact, _ = run(family, each)
        with bfloat16:
            outputs, gradients = run(family, each)
        errors.append(noise(outputs, exact))
        trained.append(gradients)
        assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert trained[0].keys() & dict(model.named_parameters()).keys() <= trained[1].keys()
    assert errors[1] <= max(4 * errors[0], 0.02), f"relative error {errors[1]:.2g}, of the dense model {errors[0]:.2g}"


def fuse(family: Family) -> None:
    """The fused model computes the same, and so do its gradients."""
    model = built(family).train()
    expected = run(family, model)
    fuse_(model)
    assert_same(run(family, model), expected, 1e-4)
    fuse_(model, enabled=False)
    assert_same(run(family, model), expected, 1e-5)


def recompute(family: Family) -> None:
    """Recomputing blocks gives the same gradients, fused too."""
    for fused in (False, True):
        model = built(family).train()
        if fused:
            fuse_(model)
        expected = run(family, model)
        recompute_(model)
        assert_same(run(family, model), expected, 1e-5)


def compiled(family: Family) -> None:
    """torch.compile gives the same results with no graph break that the dense model does not have, fused too."""
    model = built(family).train()
    expected = run(family, model)
    for fused in (False, True):
        if fused:
            fuse_(model)
        found, breaks = _run_compiled(family, model)
        assert_same(found, expected, 1e-4)
        of_dense = _run_compiled(family, dense_model(family, model).train())[1] if breaks else 0
        assert breaks <= of_dense, f"graph breaks: {breaks}, of the dense model {of_dense}, fused: {fused}"


def _run_compiled(family: Family, model: nn.Module) -> tuple[Results, int]:
    """Results, and how often the graph broke."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        found = run(family, model, torch.compile(model, backend="eager"))
        return found, sum(torch._dynamo.utils.counters["graph_break"].values())
    finally:
        torch._dynamo.reset()


CHECKS: dict[str, Callable[[Family], str | None]] = {
    "conversion": conversion,
    "float64": agreement,
    "training": training,
    "saving": saving,
    "from_pretrained": from_pretrained,
    "resume": resume,
    "ties": ties,
    "generate": generate,
    "checkpointing": checkpointing,
    "autocast": autocast,
    "fuse_": fuse,
    "recompute_": recompute,
    "compile": compiled,
}
