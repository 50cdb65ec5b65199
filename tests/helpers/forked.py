"""Processes that are forked from one server, which has imported once what takes seconds."""

import multiprocessing
from multiprocessing.context import ForkServerContext

LIBRARIES = ["torch._dynamo", "torch.distributed.launcher.api", "accelerate", "peft", "pytorch_lightning"]
LIBRARIES += [f"transformers.models.{name}.modeling_{name}" for name in ("bert", "llama")]
LIBRARIES += [f"comera.recipes.{name}.recipe" for name in ("code_lm", "dlrm", "lm")]
LIBRARIES += ["jsonargparse", "transformers.trainer"]


def context() -> ForkServerContext:
    """For `Process`. The server goes on from one test to the next, so all ask for the same."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(LIBRARIES)
    return made
