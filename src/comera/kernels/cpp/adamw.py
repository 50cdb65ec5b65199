"""The step of adamw.cpp, outside of torch's dispatcher, which would convert thousands of small tensors."""

from array import array
from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor
from torch.autograd.graph import increment_version

from comera.kernels.cpp.gradients import are_plain
from comera.kernels.cpp.library import call, words


class Held:
    """Parameters and their state in AdamW, examined once for many steps.

    params: their tensors; states: first moment, second moment and step count of the first parameter, of the second ...
    All may be replaced or get other memory between steps: ask `holds` before each.
    """

    def __init__(self, params: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        self.params = list(params)
        # not kept alive: an optimizer that gives up moments does so to have their memory, or for smaller ones
        self._states = list(map(ref, states))
        self._sizes = list(map(Tensor.numel, params))
        sizes = [size for size in self._sizes for size in (size, size, 1)]
        tensors = [*params, *states]
        self.fits = are_plain(tensors) and list(map(Tensor.numel, states)) == sizes
        """Whether the kernel supports them: `are_plain`, and moments of their parameters' sizes."""
        self._addresses = list(map(Tensor.data_ptr, tensors)) if self.fits else []
        self.memory = words(self._addresses[: len(params)]), words(self._addresses[len(params) :]), words(self._sizes)
        """Addresses of the parameters and of their states, and elements of each parameter, as the kernel reads them."""

    def holds(self, params: Sequence[Tensor], states: Sequence[Tensor]) -> bool:
        """Whether these are the tensors that were examined, in the same memory and of the same sizes."""
        return (
            self.fits
            and len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and all(map(is_, states, [state() for state in self._states]))
            and list(map(Tensor.data_ptr, [*params, *states])) == self._addresses
            and list(map(Tensor.numel, params)) == self._sizes
        )

    def group(self, gradients: Sequence[Tensor], rates: Sequence[float], decays: Sequence[float]) -> "Group | None":
        """What `step` takes, with lr and λ of each parameter; None if the kernel does not support the parameters with
        these gradients."""
        fits = self.fits and are_plain(gradients) and list(map(Tensor.numel, gradients)) == self._sizes
        return Group(self, gradients, rates, decays) if fits and len(rates) == len(decays) == len(self.params) else None


class Group(NamedTuple):
    """Parameters, gradients that fit them, and lr and λ of each: made by `Held.group` alone."""

    held: Held
    gradients: Sequence[Tensor]
    rates: Sequence[float]
    decays: Sequence[float]


class Terms(NamedTuple):
    """What a step adds to gradients as it reads them, and the running means that it updates (adamw.cpp): made by
    `fitting` alone."""

    scale: float = 1.0
    """Of all gradients, before anything is added."""
    added: Sequence[tuple[Tensor, Tensor]] = ()
    """Gates, and what is added to the gradient of each."""
    pulled: Sequence[Tensor] = ()
    """Cores, to whose gradients `pull` times themselves is added."""
    pull: float = 0.0
    means: Sequence[tuple[Tensor, Tensor, float]] = ()
    """Gates, the running mean of the squares of x g of each, and the weight of the next square."""

    @classmethod
    def fitting(cls, *fields: Any) -> "Terms | None":
        """These terms; None if the kernel does not support them: they are plain tensors of their parameters' sizes."""
        made = cls(*fields)
        pairs = [*made.added, *((d, mean) for d, mean, _ in made.means)]
        fits = are_plain([tensor for _, tensor in pairs]) and all(d.numel() == t.numel() for d, t in pairs)
        return made if fits else None


_NONE = Terms()


def step(groups: Sequence[Group], *, betas: tuple[float, float], eps: float, terms: Terms = _NONE) -> None:
    """Take a step of AdamW in place, as one call for all groups. Terms of parameters in no group count nothing."""
    gradients = words(g.data_ptr() for group in groups for g in group.gradients)
    params, states, sizes = (b"".join(parts) for parts in zip(*(group.held.memory for group in groups), strict=True))
    count = sum(len(group.gradients) for group in groups)
    rates = array("d", bytes(32 * count))
    rates[::4] = array("d", chain.from_iterable(group.rates for group in groups))
    rates[1::4] = array("d", chain.from_iterable(group.decays for group in groups))
    rules = None if terms is _NONE else _rules(groups, terms, rates)
    call("adamw", count, gradients, params, states, rules, sizes, rates.tobytes(), *betas, eps, terms.scale)
    for group in groups:
        increment_version(group.held.params)
    increment_version([mean for _, mean, _ in terms.means])


def _rules(groups: Sequence[Group], terms: Terms, rates: "array[float]") -> bytes:
    """Two addresses for each parameter: of what is added to its gradient, and of its running mean. The factors of what
    has one go into its `rates`."""
    places = {id(p): k for k, p in enumerate(p for group in groups for p in group.held.params)}
    rules = array("q", bytes(16 * len(places)))
    for d, added in terms.added:
        if (k := places.get(id(d))) is not None:
            rules[2 * k] = added.data_ptr()
    for d, mean, weight in terms.means:
        if (k := places.get(id(d))) is not None:
            rules[2 * k + 1], rates[4 * k + 3] = mean.data_ptr(), weight
    for core in terms.pulled if terms.pull else ():
        if (k := places.get(id(core))) is not None:
            rates[4 * k + 2] = terms.pull
    return rules.tobytes()
