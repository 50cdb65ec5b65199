"""How long does a model take that dense training cannot hold? From the meta device to its first step, and a step.

    python benchmarks/large.py [--cases llama-1b llama-7b] [--steps 5]      3 minutes, 4 GB

The presets of `comera train lm` as they are, on random ids, each in a process of its own. "built": from a model without
memory to one that can train; "first": built, and the first step, which makes the optimizer's state; "step": the median
of the steps after it; "peak": resident memory above that before the model was built; "late": the same once a late stage
has begun and taken as many steps.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

from common import about, update
from estimate import LARGE, batch_of, config_of, vocabulary_of

from comera.memory.estimate import MemoryMeter, current_memory
from comera.nn.tensor_train import TensorTrain
from comera.rank import canonicalize_
from comera.recipes.lm import recipe as lm
from comera.trainer.optimizer import named_optimizer
from comera.trainer.state import adapt_
from comera.trainer.step import TrainStep


def measure(preset: str, steps: int) -> dict[str, float]:
    """Seconds and peak bytes of a preset, in this process."""
    config = config_of(f"lm {preset}")
    vocabulary = vocabulary_of("lm", config)
    before, began = current_memory(), time.perf_counter()
    model, _ = lm.build_model(config, vocabulary)
    adapt_(model.train(), config.train, keep_logits=False)
    built = time.perf_counter() - began
    loss, batch = batch_of("lm", config, vocabulary)
    optimizer = named_optimizer(model, config.train)
    step = TrainStep(model, loss, optimizer, max_grad_norm=config.train.max_grad_norm)
    meter = MemoryMeter.start()
    seconds = []
    for _ in range(1 + steps):
        start = time.perf_counter()
        step([batch])
        seconds.append(time.perf_counter() - start)
    first, *rest = seconds
    early_peak = meter.peak
    canonicalize_([module for module in model.modules() if isinstance(module, TensorTrain)], [optimizer])
    for _ in range(steps):
        step([batch])
    return {
        "built": built,
        "first": built + first,
        "step": statistics.median(rest),
        "peak": float(early_peak - before),
        "late": float(meter.peak - before),
        "parameters": float(sum(p.numel() for p in model.parameters())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=LARGE, choices=LARGE)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(measure(asked.child, asked.steps)))
        return
    rows = []
    for case in asked.cases:
        command = [sys.executable, __file__, "--child", case, "--steps", str(asked.steps)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(shown.stdout.splitlines()[-1])
        seconds = {f"{name}_s": f"{found[name]:.2f}" for name in ("built", "first", "step")}
        sizes = {"parameters": f"{found['parameters']:.0f}"}
        sizes |= {f"{name}_mb": f"{found[name] / 2**20:.0f}" for name in ("peak", "late")}
        rows.append({"case": case, **sizes, **seconds, **about()})
        print(*list(rows[-1].values())[:7], flush=True)
    update("large", rows, ["case"])


if __name__ == "__main__":
    main()
