"""What a loss and a model read through objects, classes, methods and globals: a change between two steps is recorded
anew, and steps of mode graph are those of mode eager."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from comera.graphs.picture import Picture
from comera.kernels.cpp import compiler
from comera.trainer.step import TrainStep

from .test_what_changes import CHANGE, STEPS, Both, squares

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")

ALPHA, settings = 1.0, SimpleNamespace(alpha=1.0)


def linear() -> nn.Module:
    return nn.Linear(8, 8)


def by_alpha() -> float:
    return ALPHA


def scaled(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, x) * by_alpha()


def generated(model: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([ALPHA * y.square().mean() for y in [model(x)]]).sum()


def set_global(value: float = 3.0) -> None:
    global ALPHA
    ALPHA = value


class Change(NamedTuple):
    """A model, its loss, and what is done to one of them."""

    build: Callable[[], nn.Module]
    loss: Any
    change: Callable[[Any], object]


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = 1.0

    def forward(self, y: Tensor) -> Tensor:
        return y.square().mean() * self.alpha


class Called:
    """Multiplies with a number that it holds."""

    def __init__(self) -> None:
        self.alpha = 1.0

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x) * self.alpha


class Schedule:
    def __init__(self) -> None:
        self.alpha = 1.0

    def __call__(self) -> float:
        return self.alpha


# --- the loss ---------------------------------------------------------------------------------------------------------


def owner_of(**more: Any) -> Any:
    """A new object of a new class, with a number by each way to hold one."""

    def loss(self: Any, model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x) * self.of_class * self.read() * self.shown

    def read(self: Any) -> float:
        return self.held * by_alpha()

    names = {"of_class": 1.0, "loss": loss, "read": read, "shown": property(lambda self: self.hidden)}
    owner: Any = type("Owner", (), names | more)()
    owner.held = owner.hidden = 1.0
    return owner


def called_object() -> Change:
    loss = Called()
    return Change(linear, loss, lambda _: setattr(loss, "alpha", 3.0))


def called_schedule() -> Change:
    schedule = Schedule()
    return Change(linear, lambda m, x: squares(m, x) * schedule(), lambda _: setattr(schedule, "alpha", 3.0))


def bound_schedule() -> Change:
    schedule = Schedule()
    read = schedule.__call__
    return Change(linear, lambda m, x: squares(m, x) * read(), lambda _: setattr(schedule, "alpha", 3.0))


def helper() -> Change:
    owner = owner_of()
    return Change(linear, owner.loss, lambda _: setattr(owner, "held", 3.0))


def property_of_owner() -> Change:
    owner = owner_of()
    return Change(linear, owner.loss, lambda _: setattr(owner, "hidden", 3.0))


def class_attribute() -> Change:
    owner = owner_of()
    return Change(linear, owner.loss, lambda _: setattr(type(owner), "of_class", 3.0))


def attribute_over_that_of_the_class() -> Change:
    owner = owner_of()
    return Change(linear, owner.loss, lambda _: setattr(owner, "of_class", 3.0))


def method_of_owner() -> Change:
    owner = owner_of()
    return Change(linear, owner.loss, lambda _: setattr(type(owner), "read", lambda self: 3.0))


def class_method() -> Change:
    owner = owner_of(loss=classmethod(lambda cls, model, x: squares(model, x) * cls.of_class))
    return Change(linear, owner.loss, lambda _: setattr(type(owner), "of_class", 3.0))


def static_namespace() -> Change:
    class Config:
        alpha = 1.0

    return Change(linear, lambda m, x: squares(m, x) * Config.alpha, lambda _: setattr(Config, "alpha", 3.0))


def generator_expression() -> Change:
    return Change(linear, generated, lambda _: set_global())


def global_of_a_function() -> Change:
    return Change(linear, scaled, lambda _: set_global())


def decorated() -> Change:
    return Change(linear, torch.enable_grad()(scaled), lambda _: set_global())


def partial_loss() -> Change:
    config = SimpleNamespace(alpha=1.0)
    loss = partial(lambda m, x, config: squares(m, x) * config.alpha, config=config)
    return Change(linear, loss, lambda _: setattr(config, "alpha", 3.0))


def default_of_a_function() -> Change:
    def read(alpha: float = 1.0) -> float:
        return alpha

    return Change(linear, lambda m, x: squares(m, x) * read(), lambda _: setattr(read, "__defaults__", (3.0,)))


def nested_namespace() -> Change:
    config = SimpleNamespace(loss=SimpleNamespace(alpha=1.0))
    return Change(linear, lambda m, x: squares(m, x) * config.loss.alpha, lambda _: setattr(config.loss, "alpha", 3.0))


def in_a_tuple() -> Change:
    held = (SimpleNamespace(alpha=1.0),)
    return Change(linear, lambda m, x: squares(m, x) * held[0].alpha, lambda _: setattr(held[0], "alpha", 3.0))


def criterion_in_a_dict() -> Change:
    criteria = {"first": Criterion()}
    return Change(linear, lambda m, x: criteria["first"](m(x)), lambda _: setattr(criteria["first"], "alpha", 3.0))


def teachers() -> list[Any]:
    return [nn.Sequential(nn.Linear(8, 8), nn.ReLU()).requires_grad_(False)]


def hook_of_a_teacher() -> Change:
    held = teachers()
    hook = partial(held[0].register_forward_hook, lambda *given: given[2] * 2)
    return Change(linear, lambda m, x: (m(x) - held[0](x)).square().mean(), lambda _: hook())


def layer_of_a_teacher() -> Change:
    owner = owner_of(loss=lambda self, m, x: (m(x) - self.teachers[0](x)).square().mean())
    owner.teachers = teachers()
    layer = nn.Linear(8, 8).requires_grad_(False)
    return Change(linear, owner.loss, lambda _: setattr(owner.teachers[0], "0", layer))


def child_of_the_owner() -> Change:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = Criterion()

        def loss(self, model: nn.Module, x: Tensor) -> Tensor:
            found: Tensor = self.criterion(model(x))
            return found

    owner = Owner()
    return Change(linear, owner.loss, lambda _: setattr(owner.criterion, "alpha", 3.0))


def memory_of_a_tensor() -> Change:
    weight = torch.ones(8)
    loss = lambda m, x: (m(x) * weight).square().mean()  # noqa: E731
    return Change(linear, loss, lambda _: setattr(weight, "data", torch.full((8,), 3.0)))


# --- the model --------------------------------------------------------------------------------------------------------


class Slope:
    def __init__(self) -> None:
        self.slope = 0.5

    def __call__(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, self.slope * x)


def net_of(**names: Any) -> Callable[[], nn.Module]:
    """Of a class of its own."""

    class Net(nn.Module):
        of_class = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.act, self.table = nn.Linear(8, 8), Slope(), torch.ones(8)
            self.pair = torch.ones(8), torch.ones(8)

        def help(self, x: Tensor) -> Tensor:
            return self.act(self.layer(x)) * self.table * self.pair[1]

        def forward(self, x: Tensor) -> Tensor:
            return self.help(x) * self.of_class * by_alpha() * settings.alpha

    for name, value in names.items():
        setattr(Net, name, value)
    return Net


MODEL: dict[str, Callable[[Any], object]] = {
    "attribute of a callable object": lambda model: setattr(model.act, "slope", 0.1),
    "class attribute": lambda model: setattr(type(model), "of_class", 3.0),
    "method of the class": lambda model: setattr(type(model), "help", lambda self, x: self.layer(x)),
    "method of the class of an object": lambda model: setattr(Slope, "__call__", lambda self, x: x * 2),
    "global": lambda _: set_global(),
    "object that is a global": lambda _: setattr(settings, "alpha", 3.0),
    "tensors in a tuple": lambda model: setattr(model, "pair", (torch.ones(8), torch.full((8,), 3.0))),
    "memory of a tensor": lambda model: setattr(model.table, "data", torch.full((8,), 3.0)),
}


def of_model(name: str) -> Callable[[], Change]:
    return lambda: Change(net_of(), squares, MODEL[name])


CASES: dict[str, Callable[[], Change]] = {
    each.__name__.replace("_", " "): each
    for each in (
        *(called_object, called_schedule, bound_schedule, helper, property_of_owner, class_attribute),
        *(attribute_over_that_of_the_class, method_of_owner, class_method, static_namespace, generator_expression),
        *(global_of_a_function, decorated, partial_loss, default_of_a_function, nested_namespace, in_a_tuple),
        *(criterion_in_a_dict, hook_of_a_teacher, layer_of_a_teacher, child_of_the_owner, memory_of_a_tensor),
    )
} | {f"model: {name}": of_model(name) for name in MODEL}


@pytest.mark.parametrize("case", CASES)
def test_what_changes_in_what_is_read_is_recorded_anew(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name in ((settings, "alpha"), (Slope, "__call__")):
        monkeypatch.setattr(place, name, getattr(place, name))  # as they were, afterwards
    found = []
    for mode in ("eager", "graph"):
        set_global(1.0)
        settings.alpha, Slope.__call__ = 1.0, slope  # type: ignore[method-assign]
        torch.manual_seed(5)
        build, loss, change = CASES[case]()
        step, losses = Both(build, loss, each=at_once(change)).take(mode)
        found.append(losses)
    assert [k for k in range(STEPS) if found[0][k] != found[1][k]] == []
    assert (step.mode, step.built) == ("graph", 2)


slope = Slope.__call__


def at_once(change: Callable[[Any], object]) -> Callable[[int, TrainStep], object]:
    return lambda k, step: change(step.model) if k == CHANGE else None


# --- what is not of the step ------------------------------------------------------------------------------------------


@dataclass
class Run:
    """Counts its steps and keeps their losses, which its loss does not read."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        self.steps, self.history = 0, [0.0]

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x) * self.alpha

    def report(self) -> None:
        history.append(self.steps)


history = [0]


def test_what_only_others_read_may_change() -> None:
    run = Run()

    def each(k: int, step: TrainStep) -> None:
        run.steps += 1
        run.history.append(0.0)
        run.alpha = float("1.0")  # another object, the same number
        run.report()

    step = Both(linear, run.loss, each=each).same()
    assert (step.mode, step.built) == ("graph", 1)


def test_a_picture_says_where_it_has_changed() -> None:
    owner, model = owner_of(), net_of()()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = SimpleNamespace(loss=SimpleNamespace(alpha=1.0))
    owner.config = config
    type(owner).loss = lambda self, m, x: squares(m, x) * self.config.loss.alpha * self.read()

    def said(change: Callable[[], object]) -> str:
        picture = Picture(model, owner.loss, optimizer)
        assert picture() == ""
        change()
        return picture()

    assert said(lambda: setattr(config.loss, "alpha", 3.0)) == "config.loss.alpha"
    assert said(lambda: setattr(owner, "held", 3.0)) == "held"
    assert said(lambda: setattr(type(owner), "read", lambda self: 3.0)) == "Owner.read"
    assert said(lambda: setattr(type(model), "of_class", 3.0)) == "Net.of_class"
    assert said(lambda: setattr(model, "act", Slope())) == "act"
    assert said(lambda: set_global(5.0)) == "ALPHA"
    set_global(1.0)
