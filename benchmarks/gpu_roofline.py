"""A training step on an H100, by counting: its operations, bytes and launches. No GPU is used, and nothing is timed.

Steps of 4,096 tokens, of BERT-base and the presets of `comera train lm`, dense and compressed, fused, as the trainer
takes them: parameters and AdamW (fused) in float32, autocast in bfloat16, clipping, no adaptation of ranks. They run on
fake tensors (gpu_fake.py), to which this adds autocast and the attention kernel that torch has on an H100. roofline.py
counts each operation: its FLOPs, and the bytes of its operands and results, each once.

    python benchmarks/gpu_roofline.py [--cases BERT-base ...] [--dry]      1 minute; gpu_page.py makes a table of it
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import gpu_fake
import torch
import torch.nn.functional as F
from common import about, update
from roofline import Ceilings, Cost, Counter
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_map_only
from transformers import BertConfig, BertForSequenceClassification, masking_utils

import comera
from comera.optim import AdamW, param_groups
from comera.recipes.lm import recipe as lm
from comera.trainer.state import adapt_
from comera.trainer.step import TrainStep

# An H100 SXM as published: float32 and dense bfloat16, HBM3, second-level cache. Seconds of a launch are assumed.
H100 = Ceilings(67e12, 3.35e12, defaultdict(float), cache=50 * 10**6, half_flops_a_second=989e12)
LAUNCH = 5e-6
CASES = {"BERT-base": "32 x 128", "llama-1b": "8 x 512", "llama-7b": "8 x 512"}
# what autocast computes in bfloat16 and in float32 on CUDA, as far as these models use it
HALF = ("mm", "bmm", "addmm", "baddbmm", "linear", "matmul")
SINGLE = ("layer_norm", "rms_norm", "log_softmax.int", "nll_loss", "cross_entropy_loss", "rsqrt", "pow.Tensor_Scalar")
OWN = ("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward")  # one kernel on CUDA, and parts elsewhere
_KEY = "AutocastPrivateUse1"
_LIBRARIES = [torch.library.Library(name, "IMPL") for name in ("_", "aten")]
RAGGED = ("constant_pad_nd", "index", "index_put", "new_zeros")  # what blocks of different ranks take


def cast(operation: Any, dtype: torch.dtype) -> Callable[..., Any]:
    """An operation as autocast runs it."""
    without = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(without):
            args, kwargs = tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))
            return operation(*args, **kwargs)

    return run


def like_cuda() -> None:
    """For the whole process: the device "gpu" gets the autocast of CUDA, and kernels that need not run."""
    for name in OWN:
        _LIBRARIES[1].impl(name, lambda *_, **__: None, "PrivateUse1")
    _LIBRARIES[0].fallback(torch.library.fallthrough_kernel, _KEY)
    for names, dtype in ((HALF, torch.bfloat16), (SINGLE, torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
            _LIBRARIES[1].impl(name, cast(operation, dtype), _KEY)


def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: None = None, dropout_p: float = 0.0, **options: Any) -> Any:
    """Attention by torch's flash kernel, in bfloat16 as under autocast; elsewhere torch takes plain products."""
    assert attn_mask is None, "the flash kernel has no mask"
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
    causal, scale = options.get("is_causal", False), options.get("scale")
    return flash(q.bfloat16(), k.bfloat16(), v.bfloat16(), dropout_p, causal, False, scale=scale)[0]


def on_meta(case: str, compressed: bool, blocks: int) -> tuple[nn.Module, Any, Callable[..., Tensor]]:
    """A model, fused, with its first blocks, a batch of 4,096 tokens and the loss."""
    with torch.device("meta"):
        if case == "BERT-base":
            # the model would set this kind itself, and a compiled one be compiled anew for that
            config = BertConfig(problem_type="single_label_classification")
            model: Any = BertForSequenceClassification(config).train()
            if compressed:
                comera.tensorize_(model, ratio=10)
            del model.bert.encoder.layer[blocks:]
            ids = torch.zeros(32, 128, dtype=torch.int64)
            comera.fuse_(model)
            return model, {"input_ids": ids, "labels": ids[:, 0]}, lambda model, batch: model(**batch).loss
        preset = lm.preset("comera" if compressed else "dense", case)  # type: ignore[arg-type]
        model, _, loss = lm.meta_step(replace(preset, train=replace(preset.train, batch_size=8)), 32_000)
        del model.model.layers[blocks:]
        adapt_(model.train(), preset.train, keep_logits=False)
        return model, loss.args[1], lm.next_token_loss  # type: ignore[attr-defined]


def count(case: str, compressed: bool, blocks: int = sys.maxsize) -> dict[str, Any]:
    """What a step asks of an H100. blocks: the most that the model keeps."""
    with gpu_fake.on_gpu(on_meta(case, compressed, blocks)) as (model, batch, loss):
        optimizer = AdamW(param_groups(model, lr=1e-3), fused=True)
        step = TrainStep(model, loss, optimizer, max_grad_norm=1.0, precision="bf16")
        step([batch])  # makes the optimizer's state, and tables
        with Counter(H100) as counter:
            step([batch])
    total = sum(counter.costs.values(), Cost())
    seconds = {"compute": total.products, "memory": total.beyond / H100.bytes_a_second, "launch": total.calls * LAUNCH}
    calls = {name.removeprefix("aten."): cost.calls for name, cost in counter.costs.items()}
    return {
        "case": case,
        "side": "compressed" if compressed else "dense",
        "batch": CASES[case],
        "parameters": sum(p.numel() for p in model.parameters()),
        "operations": total.calls,
        "casts": calls["_to_copy"],
        "ragged": sum(calls.get(name, 0) for name in RAGGED),
        "gb": f"{total.nbytes / 1e9:.2f}",
        "gb_beyond_cache": f"{total.beyond / 1e9:.2f}",
        "tflop": f"{total.flops / 1e12:.3f}",
        **{f"{name}_ms": f"{each * 1e3:.2f}" for name, each in (seconds | {"least": total.least}).items()},
    }


@contextmanager
def stood_in() -> Iterator[None]:
    """Functions that a step on fake tensors cannot call as they are."""
    with (
        patch.object(_foreach_utils, "_foreach_supported_types", [Tensor, FakeTensor]),
        patch.object(F, "scaled_dot_product_attention", attend),
        # which read values on the host: rates, as on the meta device none, and whether texts are packed
        patch.dict(param_groups.__globals__, core_rates=lambda *_, **__: None),
        patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--dry", action="store_true", help="models of one block; writes nothing")
    options = parser.parse_args()
    like_cuda()
    with stood_in():
        for case in options.cases:
            for compressed in (False, True):
                row = count(case, compressed, 1 if options.dry else sys.maxsize)
                print(*row.values(), flush=True)
                if not options.dry:
                    update("gpu_roofline", [row | about()], key=("case", "side"))


if __name__ == "__main__":
    main()
