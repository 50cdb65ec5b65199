"""Functions of a step under torch.compile: the whole step, or forward and loss with their backward.

The first shape of the batches is compiled as it is, the next one with dynamic sizes, so buckets of lengths share their
compilations. Weights keep their sizes as constants: when pruning changes them, everything is compiled anew. Torch falls
back to eager, with no more than a log message, once it has recompiled a function too often. Here that is detected, and
the run logs it.

The exceptions and the config of torch._dynamo have no public counterpart; only this file uses them.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from comera.trainer.task import Batch

VERSIONS = 32  # torch's recompile limit: compilations of one function between two prunings

T = TypeVar("T")
Backend = str | Callable[..., Any]
"""Of torch.compile: a name, or a function of a graph and example inputs."""


class Compiled(Generic[T]):
    """A function under torch.compile, as long as that succeeds.

    backend: of torch.compile. whole: compile the function as one graph or not at all, with the gradients that it takes.
    reason: why it is not compiled from now on; "" while it is. too_many: whether that is because of too many shapes.
    compilations: graphs compiled so far.
    """

    def __init__(self, function: Callable[..., T], *, backend: Backend, whole: bool = False) -> None:
        self.reason, self.too_many, self.compilations = "", False, 0
        self._function, self._backend, self._whole = function, backend, whole
        self._sizes: list[torch.Size] = []
        self._compiled = self._compile()

    def __call__(self, sizes: list[torch.Size], *args: Any) -> T | None:
        """The function's result, or None, with nothing done, where it cannot be compiled: `reason` says why.

        sizes: of the weights.
        """
        if self.reason:
            return None
        if self._sizes and sizes != self._sizes:
            torch.compiler.reset()
            self._compiled = self._compile()
        self._sizes = sizes
        options: dict[str, Any] = {"recompile_limit": VERSIONS, "fail_on_recompile_limit_hit": True}
        if self._whole:
            options["trace_autograd_ops"] = True
        try:
            with torch._dynamo.config.patch(options):
                return self._compiled(*args)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            self.reason = f"compiled {VERSIONS} times for as many shapes of batches: use fewer lengths"
            self.too_many = True
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)  # the error of the backend
            self.reason = f"torch.compile failed: {type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
        return None

    def _compile(self) -> Callable[..., T]:
        backend = torch._dynamo.lookup_backend(self._backend)

        @wraps(backend)
        def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            self.compilations += 1
            return backend(graph, inputs)

        compiled: Any = torch.compile(self._function, backend=counting, fullgraph=self._whole)
        return compiled  # type: ignore[no-any-return]


class CompiledLoss:
    """`loss`, compiled, or eager if that fails.

    loss: (model, batch) -> scalar. backend: of torch.compile.
    """

    def __init__(self, loss: Callable[[nn.Module, Batch], Tensor], *, backend: Backend = "inductor") -> None:
        self._loss = loss
        self._compiled = Compiled(loss, backend=backend)
        self._parameters: list[nn.Parameter] = []

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch."""
        self._parameters = self._parameters or list(model.parameters())
        loss = self._compiled([parameter.shape for parameter in self._parameters], model, batch)
        return self._loss(model, batch) if loss is None else loss

    @property
    def reason(self) -> str:
        """Why it runs eager from now on; "" while it does not."""
        return self._compiled.reason

    @property
    def compilations(self) -> int:
        """Graphs compiled so far."""
        return self._compiled.compilations


def traces_gradients() -> bool:
    """Whether this torch can compile functions that take gradients."""
    return hasattr(torch._dynamo.config, "trace_autograd_ops")
