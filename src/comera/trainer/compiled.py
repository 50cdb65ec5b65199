"""Forward and loss under torch.compile; the backward is compiled with them.

The first shape of batches is compiled as it is, the next one with sizes that may differ, so buckets of lengths share
what is compiled. Weights keep their sizes as constants: when a cut changes them, what was compiled before is thrown
away and compiled anew. Torch itself goes on eager, and says so in a log alone, once a function has been compiled too
often; here that is counted, and the run says it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from comera.trainer.task import Batch

VERSIONS = 32  # of one function between two cuts: what torch calls its recompile limit


class CompiledLoss:
    """`loss`, compiled; eager when that fails.

    loss: (model, batch) -> scalar. backend: of torch.compile.
    reason: why it runs eager from now on, "" as long as it need not. compilations: graphs compiled so far.
    """

    def __init__(self, loss: Callable[[nn.Module, Batch], Tensor], *, backend: str = "inductor") -> None:
        self.reason = ""
        self.compilations = 0
        self._loss = loss
        self._backend = backend
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
            self.reason = f"compiled {VERSIONS} times for as many shapes of batches: give them fewer lengths"
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)  # of the backend
            self.reason = f"torch.compile failed: {type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
        return self._loss(model, batch)

    def _compile(self) -> Callable[[nn.Module, Batch], Tensor]:
        compiled: Any = torch.compile(self._loss, backend=self._count(torch._dynamo.lookup_backend(self._backend)))
        return compiled  # type: ignore[no-any-return]

    def _count(self, backend: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backend)
        def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            self.compilations += 1
            return backend(graph, inputs)

        return counting
