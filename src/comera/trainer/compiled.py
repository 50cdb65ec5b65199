"""Forward and loss of a step under torch.compile, as one graph, with their backward.

The first shape of the batches is compiled as it is, the next one with dynamic sizes, so buckets of lengths share their
compilations. Weights keep their sizes as constants: when pruning changes them, everything is compiled anew. What breaks
the graph, or has too many shapes, runs eager, and the run logs why: torch itself would only write a log message.
Rejected: the whole step as one function, optimizer and rank rule included. It gained nothing on a CPU.

The exceptions and the config of torch._dynamo have no public counterpart; only this file uses them.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from comera.trainer.task import Batch

VERSIONS = 32  # torch's recompile limit: compilations of one function between two prunings

Backend = str | Callable[..., Any]
"""Of torch.compile: a name, or a function of a graph and example inputs."""


class CompiledLoss:
    """`loss` under torch.compile, as long as that succeeds; eager from then on.

    loss: (model, batch) -> scalar. backend: of torch.compile.
    reason: why it is not compiled from now on; "" while it is. compilations: graphs compiled so far.
    """

    def __init__(self, loss: Callable[[nn.Module, Batch], Tensor], *, backend: Backend = "inductor") -> None:
        self.reason, self.compilations = "", 0
        self._loss, self._backend = loss, backend
        self._parameters: list[nn.Parameter] = []
        self._sizes: list[torch.Size] = []
        self._compiled = self._compile()

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch."""
        if self.reason:
            return self._loss(model, batch)
        self._parameters = self._parameters or list(model.parameters())
        sizes = [parameter.shape for parameter in self._parameters]
        if self._sizes and sizes != self._sizes:
            torch.compiler.reset()
            self._compiled = self._compile()
        self._sizes = sizes
        try:
            with torch._dynamo.config.patch(recompile_limit=VERSIONS, fail_on_recompile_limit_hit=True):
                return self._compiled(model, batch)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            self.reason = f"compiled {VERSIONS} times for as many shapes of batches: use fewer lengths"
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)  # the error of the backend
            self.reason = f"torch.compile failed: {type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
        return self._loss(model, batch)

    def _compile(self) -> Callable[[nn.Module, Batch], Tensor]:
        backend = torch._dynamo.lookup_backend(self._backend)

        @wraps(backend)
        def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            self.compilations += 1
            return backend(graph, inputs)

        compiled: Any = torch.compile(self._loss, backend=counting, fullgraph=True)
        return compiled  # type: ignore[no-any-return]
