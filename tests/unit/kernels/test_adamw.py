"""AdamW in one call for many parameters, against torch's."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn

from comera.errors import ConfigError
from comera.kernels.cpp import adamw as kernel
from comera.kernels.cpp import compiler
from comera.nn.linear import TTLinear
from comera.optim import adamw
from comera.optim.adamw import AdamW
from comera.rank.optimizer_state import reset_state_
from comera.rank.prune import prune_
from comera.trainer.config import TrainConfig
from comera.trainer.optimizer import named_optimizer
from comera.tt.spec import TTSpec

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")

# nothing, less than a vector, vectors with and without a rest, and several tiles
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (5, 13), (8, 16), (3, 11, 2), (41_003,)] + [(4, 7)] * 30


@pytest.fixture
def taken(monkeypatch):
    """How many parameters each step of the kernel took, as a list that grows."""
    calls = []

    def step(groups, _step=adamw.step, **kwargs):
        calls.append(sum(len(group.gradients) for group in groups))
        _step(groups, **kwargs)

    monkeypatch.setattr(adamw, "step", step)
    return calls


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def give_gradients(params, k):
    generator = torch.Generator().manual_seed(k)
    for number, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=generator).mul_(10.0 ** (number % 7 - 3)).to(p.dtype)


def train(kind, params, steps=50, *, betas=(0.8, 0.95), **settings):
    """Steps of two groups whose rates change."""
    groups = [{"params": params[:5], "weight_decay": 0.0}, {"params": params[5:], "betas": betas}]
    optimizer = kind(groups, lr=1e-2, weight_decay=0.1, **settings)
    for k in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 + k % 3)
        give_gradients(params, k)
        optimizer.step()
    return optimizer


def test_as_exact_as_torchs_fused(taken):
    exact, torchs, ours = parameters(torch.float64), parameters(), parameters()
    optimizers = [
        train(torch.optim.AdamW, exact),
        train(torch.optim.AdamW, torchs, fused=True),
        train(AdamW, ours, fused=True),
    ]
    assert taken == [5, 34] * 49, "the first step makes the state"
    for x, y, z in zip(exact, torchs, ours, strict=True):
        states = [optimizer.state[p] for optimizer, p in zip(optimizers, (x, y, z), strict=True)]
        assert {float(state["step"]) for state in states} == {50.0}
        means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        gradient = squares[0].sqrt().norm()  # what a mean is a sum of, which may cancel
        for (one, other, own), size in (((x, y, z), x.norm()), (means, gradient), (squares, squares[0].norm())):
            for expected in (one, other):
                assert (own - expected).norm() <= 1e-6 * size


def test_groups_of_any_rate_and_age_are_one_call(taken):
    """But those with other betas, and those that the kernel does not support."""
    both = []
    for kind in (torch.optim.AdamW, AdamW):
        params = parameters()
        settings = {"lr": 1e-3, "weight_decay": 0.3}, {"lr": 1e-1, "weight_decay": 0.0}, {"betas": (0.5, 0.6)}
        members = params[:4], params[4:8], params[8:10]
        groups = [{"params": p, **each} for p, each in zip(members, settings, strict=True)]
        optimizer = kind([*groups, {"params": params[10:12], "amsgrad": True}], fused=True)
        for k in range(5):
            give_gradients(params, k)
            for p in params[4:8] if k < 2 else ():  # the second group is younger
                p.grad = None
            if k == 4:
                params[5].grad = params[5].grad.t().contiguous().t()
            optimizer.step()
        both.append(params)
    first, later, one_less = [4, 2], [8, 2], [4, 2]
    assert taken == [*first, *first, *later, *one_less], "the first step makes the state"
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("betas", [(0.0, 0.5), (0.9, 0.0), (0.999, 0.9999)])
def test_any_betas(betas):
    exact, ours = parameters(torch.float64), parameters()
    for kind, params in ((torch.optim.AdamW, exact), (AdamW, ours)):
        train(kind, params, 9, betas=betas, eps=1e-3)
    for one, other in zip(ours, exact, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()


def bits(count, steps=3):
    torch.set_num_threads(count)
    params = parameters()
    optimizer = train(AdamW, params, steps)
    return [*params, *(state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))]


def test_the_same_bits_with_any_threads():
    expected = bits(1)
    for count in (1, 2, 2, 3, 5):
        for one, other in zip(bits(count), expected, strict=True):
            assert torch.equal(one, other)


def test_state_goes_to_torchs_and_back():
    (expected, moved), optimizers = (parameters(), parameters()), []
    reference = train(AdamW, expected, 6)
    optimizer = train(AdamW, moved, 2)
    for k, kind in enumerate((torch.optim.AdamW, AdamW), start=1):
        state = copy.deepcopy(optimizer.state_dict())
        groups = [{"params": group["params"]} for group in optimizer.param_groups]
        optimizer = kind(groups, fused=True)
        optimizer.load_state_dict(state)
        optimizers.append(optimizer)
        for step in (2 * k, 2 * k + 1):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (1 + step % 3)
            give_gradients(moved, step)
            optimizer.step()
    assert reference.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    for one, other in zip(moved, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(state["step"], torch.tensor(6.0)) for state in optimizer.state.values())


@pytest.mark.parametrize("make", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
def test_a_copy_steps_on_its_own_parameters(make, taken):
    params = parameters()
    optimizer = train(AdamW, params, 2)
    other = make(optimizer)
    before = [p.detach().clone() for p in params]
    copies = [p for group in other.param_groups for p in group["params"]]
    for each, group in ((other, copies), (optimizer, params)):
        give_gradients(group, 2)
        each.step()
        if each is other:
            assert all(map(torch.equal, params, before))
    assert taken == [5, 34] * 3
    assert all(map(torch.equal, params, copies))


WAYS = [{"amsgrad": True}, {"maximize": True}, {"differentiable": True}, {"capturable": True, "fused": True}]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way)))
def test_other_variants_are_left_to_torch(way, taken):
    expected, ours = ([p.detach() for p in parameters()] for _ in range(2))
    train(torch.optim.AdamW, expected, 3, **way)
    train(AdamW, ours, 3, **way)
    assert taken == []
    assert all(map(torch.equal, ours, expected))


def test_without_the_kernel_it_is_torchs(taken, monkeypatch):
    expected, ours = parameters(), parameters()
    train(torch.optim.AdamW, expected, 3, fused=True)
    for setting in ("none", "gradients"):
        monkeypatch.setenv("COMERA_KERNELS", setting)
        train(AdamW, ours, 3, fused=True)
        assert all(map(torch.equal, ours, expected))
        ours = parameters()
    assert taken == []
    monkeypatch.setenv("COMERA_KERNELS", "adamw")
    train(AdamW, ours, 3, fused=True)
    assert taken == [5, 34] * 2
    monkeypatch.setenv("COMERA_KERNELS", "adam")
    with pytest.raises(ConfigError, match="adamw"):
        train(AdamW, ours, 2)


def half(p):
    p.data = p.data.bfloat16()


def transposed(p):
    p.data = p.data.t().contiguous().t()


@pytest.mark.parametrize("change", [half, transposed])
def test_a_group_with_another_kind_of_parameter_is_left_to_torch(change, taken):
    both = []
    for kind in (torch.optim.AdamW, AdamW):
        params = parameters()
        change(params[5])
        train(kind, params, 4)
        both.append(params)
    assert taken == [5] * 3, "the other group"
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_gradients_of_another_form(taken):
    both = []
    for kind in (torch.optim.AdamW, AdamW):
        p = nn.Parameter(torch.ones(4, 6))
        optimizer = kind([p])
        for grad in (torch.ones(4, 6), torch.arange(6.0).expand(4, 6), torch.arange(24.0).view(6, 4).t()):
            p.grad = grad
            optimizer.step()
        both.append(p)
    assert taken == []
    torch.testing.assert_close(*both)
    p.grad = torch.eye(4, 6).to_sparse()
    with pytest.raises(ConfigError, match="expected dense gradients, got sparse ones"):
        optimizer.step()


def test_parameters_without_a_gradient_wait(taken):
    both = []
    for kind in (torch.optim.AdamW, AdamW):
        params = parameters()[5:8]
        optimizer = kind(params, fused=True)
        for k in range(6):
            give_gradients(params, k)
            for p in params[: (0, 2, 1)[k % 3]]:
                p.grad = None
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        both.append((params, [float(optimizer.state[p]["step"]) for p in params]))
    assert both[0][1] == both[1][1] == [2, 4, 6]
    assert taken == [1, 2, 3, 1, 2], "the first step makes the state"
    for one, other in zip(both[1][0], both[0][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_what_pruning_cuts_between_steps_is_found(taken):
    """Parameters and moments get other memory; the next steps are those of torch on the same."""
    both = []
    for kind in (torch.optim.AdamW, AdamW):
        torch.manual_seed(0)
        layer = TTLinear(TTSpec(12, 10, (3, 4), (2, 5), (1, 3, 5, 4, 1)))
        optimizer = kind(layer.parameters(), lr=1e-2, fused=True)
        for k in range(6):
            give_gradients(list(layer.parameters()), k)
            optimizer.step()
            if k % 2:
                with torch.no_grad():
                    layer.tt.rank_params[1][-1] = 0
                assert prune_(layer, [optimizer]).changed
        both.append(list(layer.parameters()))
    assert taken == [8] * 5
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_moments_that_the_optimizer_gives_up_are_freed(taken):
    """At once, by those who look at groups one by one and at all together: they are as large as the parameters."""
    params = parameters()
    optimizer = AdamW([{"params": params[:5]}, {"params": params[5:]}], lr=1e-2)
    for k in range(3):
        give_gradients(params, k)
        optimizer.step()
    assert len(taken) == 2
    moments = [weakref.ref(optimizer.state[p][name]) for p in params for name in ("exp_avg", "exp_avg_sq")]
    reset_state_(params, [optimizer])
    assert [moment() for moment in moments] == [None] * len(moments)


def test_memory_that_is_swapped_under_a_tensor_is_found():
    params = parameters()
    optimizer = train(AdamW, params, 3)
    tensors = [t for p in params for t in (p, *optimizer.state[p].values())]
    old = [t.data for t in tensors]
    before = [t.clone() for t in old]
    for t in tensors:
        t.data = t.data.clone()
    give_gradients(params, 3)
    optimizer.step()
    assert all(map(torch.equal, old, before))
    assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}


def test_moments_of_another_size_are_refused_as_by_torch():
    p = nn.Parameter(torch.ones(40))
    optimizer = AdamW([p], weight_decay=0.0)
    p.grad = torch.ones(40)
    optimizer.step()
    p.data = torch.ones(20)
    p.grad = torch.ones(20)
    with pytest.raises(RuntimeError, match="size"):
        optimizer.step()
    assert torch.equal(p, torch.ones(20))


def test_hooks_are_called_once_and_a_closure_makes_the_gradients(taken):
    params = parameters()
    optimizer, seen = train(AdamW, params, 2), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.zero_grad()

    def closure():
        assert torch.is_grad_enabled()
        seen.append("closure")
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert seen == ["before", "closure", "after"]
    assert taken == [5, 34] * 2


def test_gradients_under_a_scale_are_left_to_torch(taken):
    """A GradScaler gives fused optimizers its scale, and what it found, for the time of a step."""
    params = parameters()[5:]
    optimizer = AdamW(params, fused=True)
    before = [p.detach().clone() for p in params]
    for found in (1.0, 0.0):
        give_gradients(params, 0)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(found)
        optimizer.step()
        assert all(map(torch.equal, params, before)) == bool(found)
    assert taken == []


def test_a_rate_may_be_a_tensor(taken):
    both = []
    for kind in (torch.optim.AdamW, AdamW):
        params = parameters()
        optimizer = kind(params, lr=torch.tensor(0.25), fused=True)
        for k in range(3):
            give_gradients(params, k)
            optimizer.step()
        both.append(params)
    assert taken == [39] * 2
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_autograd_knows_that_parameters_changed():
    p = nn.Parameter(torch.ones(3))
    optimizer = AdamW([p])
    for _ in range(2):
        loss = p.square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nan_and_inf_spread_as_in_torch():
    for bad in (float("nan"), float("inf")):
        both = []
        for kind in (torch.optim.AdamW, AdamW):
            p = nn.Parameter(torch.ones(19))
            optimizer = kind([p], fused=True)
            for _ in range(2):
                p.grad = torch.ones(19)
                p.grad[17] = bad
                optimizer.step()
            both.append(p)
        torch.testing.assert_close(*both, equal_nan=True)


def test_runs_use_it():
    optimizer = named_optimizer(nn.Linear(3, 2), TrainConfig(steps=1, lr=1e-3, betas=(0.8, 0.9)))
    assert type(optimizer) is AdamW
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}


def test_what_is_added_to_gradients_and_the_means_of_squares():
    """g ← c g + a + 2β x as it is read, and s ← s + w ((x g)² - s) after the step, of any lengths."""
    torch.manual_seed(0)
    params, wide = parameters(), parameters(torch.float64)
    numbers = range(len(params))
    added = {k: torch.randn(params[k].shape) for k in numbers if k % 3 == 0}
    means = {k: (torch.rand(params[k].shape), (1.0, 0.05)[k % 2]) for k in numbers if k % 2 == 0 or k % 5 == 0}
    pulled = [params[k] for k in numbers if k not in added and k not in means]
    assert {len(added) > 5, 8 in added or 8 in means, len(pulled) > 5} == {True}
    optimizer = torch.optim.AdamW(wide, lr=0.1, weight_decay=0.2, betas=(0.8, 0.9))
    states = [t for p in params for t in (torch.zeros_like(p), torch.zeros_like(p), torch.tensor(0.0))]
    expected = {k: mean.double() for k, (mean, _) in means.items()}
    for step in range(3):
        torch.set_num_threads(1 + step)
        give_gradients(params, step)
        for k, (p, w) in enumerate(zip(params, wide, strict=True)):
            w.grad = 0.7 * p.grad.double() + added.get(k, torch.zeros(())).double()
            w.grad += 2 * 0.3 * w.detach() if any(p is each for each in pulled) else 0
        optimizer.step()
        grads = [p.grad for p in params]
        group = kernel.Held(params, states).group(grads, [0.1] * len(params), [0.2] * len(params))
        triples = [(params[k], mean, weight) for k, (mean, weight) in means.items()]
        pairs = [(params[k], each) for k, each in added.items()]
        terms = kernel.Terms.fitting(0.7, [*pairs, (torch.ones(2), torch.ones(2))], pulled, 0.6, triples)
        with torch.no_grad():
            kernel.step([group], betas=(0.8, 0.9), eps=1e-8, terms=terms)
        for k, (_, weight) in means.items():
            expected[k] = expected[k].lerp((wide[k].detach() * wide[k].grad).square(), weight)
    for one, other in zip(params, wide, strict=True):
        assert (one - other).norm() <= 2e-6 * other.norm()
    for k, (mean, _) in means.items():
        assert (mean - expected[k]).norm() <= 1e-5 * expected[k].norm()
