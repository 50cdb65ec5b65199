"""What an optimizer holds: the state of parameters whose ranks change, cut with them, zeroed, or reset; its rates."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Adagrad, Optimizer

from comera.errors import RankError

Cut = Callable[[Tensor], Tensor]


def unwrap(optimizer: Optimizer) -> Optimizer:
    """The optimizer that takes the steps, inside wrappers such as Accelerate's, SAM and Lookahead.

    Raises RankError for one that holds several.
    """
    return _chain(optimizer)[-1]


def _chain(optimizer: Optimizer) -> list[Optimizer]:
    """A wrapper, the optimizer of the same parameters that it holds under whatever name, and so on inward."""
    own = parameters_of(optimizer)
    held = {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, Optimizer) and value is not optimizer and (not own or own & parameters_of(value))
    }
    if len(set(held.values())) > 1:
        raise RankError(
            f"expected an optimizer, or one that holds another, got a {type(optimizer).__name__} with several, "
            f"{' and '.join(held)}: attach, or pass, each of these instead"
        )
    return [optimizer, *(each for inner in list(held.values())[:1] for each in _chain(inner))]


def parameters_of(optimizer: Optimizer) -> set[Tensor]:
    """The parameters of all groups; none of a wrapper without groups."""
    return {p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}


def check_cuttable(optimizers: Iterable[Optimizer]) -> None:
    """Raise RankError for an optimizer whose state is that of all its parameters together, as one vector."""
    for optimizer in _with_state(optimizers):
        if isinstance(optimizer, LBFGS):
            raise RankError(
                f"{type(optimizer).__name__} keeps one history of all its parameters, which can be neither cut nor "
                "brought into another basis with some of them: adapt ranks with another optimizer (AdamW), then prune "
                "without passing this one, and create it for the model that is left (nothing was changed)"
            )


def rates_overwritten(optimizer: Optimizer) -> bool:
    """Whether all groups have one rate before their schedule, where `comera.param_groups` gave them different ones.
    Of rates in tensors it is not known."""
    groups = optimizer.param_groups
    rates = [group.get("initial_lr", group["lr"]) for group in groups]
    times = [group.get("times", 1.0) for group in groups]
    known = not any(isinstance(rate, Tensor) for rate in rates)
    return known and min(rates) == max(rates) > 0 and max(times) > 1.001 * min(times)


def _with_state(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers, and those that they hold, that have state of their own: a wrapper may show the inner one's."""
    found = {id(each.state): each for optimizer in optimizers for each in _chain(optimizer) if hasattr(each, "state")}
    return list(found.values())


def state_tensors(parameter: Tensor, optimizers: Iterable[Optimizer]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """State tensors of `parameter` that are not scalars, as (state, key, tensor), in all optimizers."""
    for optimizer in _with_state(optimizers):
        state = optimizer.state.get(parameter, {})
        yield from ((state, key, value) for key, value in state.items() if isinstance(value, Tensor) and value.ndim)


def cut_state(
    optimizers: Sequence[Optimizer], cuts: Mapping[Tensor, Cut], names: Mapping[Tensor, str]
) -> list[tuple[dict[str, Any], str, Tensor]]:
    """State entries to replace, as (state, key, new tensor), when each parameter in `cuts` is cut; changes nothing.

    Every state tensor of its parameter's shape is cut with it, and so are Adafactor's means over its last dimensions;
    scalars stay. Other factored state is cut by its optimizer's method `edited_state`. Raises RankError for any other
    shape, or for LBFGS.
    """
    check_cuttable(optimizers)
    updates = []
    for optimizer in _with_state(optimizers):
        for parameter, cut in cuts.items():
            factored = _edited_state(optimizer, parameter, cut)
            updates += [(optimizer.state[parameter], key, value) for key, value in factored.items()]
            for state, key, value in state_tensors(parameter, [optimizer]):
                if key in factored:
                    continue
                if value.shape != parameter.shape:
                    if (factor := _cut_factor(value, parameter, key, cut)) is not None:
                        updates.append((state, key, factor))
                        continue
                    raise RankError(
                        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for "
                        f"{names[parameter]!r} of shape {tuple(parameter.shape)}, so it cannot be cut with it: prune "
                        "with an optimizer whose state has the shapes of its parameters (AdamW, SGD, Adagrad), or "
                        "without passing this one and then create it anew (nothing was pruned)"
                    )
                updates.append((state, key, cut(value)))
    return updates


def _cut_factor(value: Tensor, parameter: Tensor, key: str, cut: Cut) -> Tensor | None:
    """A mean over the last dimension of a parameter ("row") or the one before ("col"), as torch's Adafactor and that of
    transformers keep them, when the parameter is cut; None for other state."""
    dim = {"row": -1, "col": -2}.get(key.removesuffix("_var")[-3:])
    if dim is None or parameter.ndim < 2:
        return None
    kept = value if value.ndim == parameter.ndim else value.unsqueeze(dim)
    if kept.ndim != parameter.ndim or kept.movedim(dim, 0).shape != (1, *parameter.movedim(dim, 0).shape[1:]):
        return None
    after = cut(kept.expand_as(parameter))
    after = after.narrow(dim, 0, 1) if after.shape[dim] else after.sum(dim, keepdim=True)
    return (after if kept is value else after.squeeze(dim)).clone()


def zero_state_(d: Tensor, zeroed: Tensor, optimizers: Iterable[Optimizer]) -> None:
    """Set the state of the gates `zeroed`, indices into the vector `d`, to zero."""

    def without(moment: Tensor) -> Tensor:
        return moment.index_fill(0, zeroed, 0)

    for optimizer in _with_state(optimizers):
        factored = _edited_state(optimizer, d, without)
        for state, key, value in state_tensors(d, [optimizer]):
            if key in factored:
                state[key] = factored[key]
            elif value.shape == d.shape:
                value[zeroed] = 0


def _edited_state(optimizer: Optimizer, parameter: Tensor, edit: Cut) -> Mapping[str, Tensor]:
    """What `edit` makes of factored moments, by an optimizer that has them; nothing for any other."""
    edited: Mapping[str, Tensor] = getattr(optimizer, "edited_state", lambda *_: {})(parameter, edit)
    return edited


def reset_state_(parameters: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> None:
    """Empty the state of `parameters`, step counts included, so that their next step is like their first.

    Their entries stay: torch's distributed checkpoints take a step of an optimizer that has none, to save its state.
    """
    chosen = set(parameters)
    for optimizer in _with_state(optimizers):
        for group in optimizer.param_groups:
            for parameter in chosen.intersection(group["params"]):
                state = optimizer.state.get(parameter)
                if state:
                    optimizer.state[parameter] = {}
                # Most optimizers create state at a parameter's next step; Adagrad does so only when constructed.
                if state and isinstance(optimizer, Adagrad):
                    first = torch.full_like(parameter, group["initial_accumulator_value"])
                    optimizer.state[parameter] = {"step": torch.zeros_like(state["step"]), "sum": first}
