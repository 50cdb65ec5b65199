"""btt_linear against the dense weight in float64: values, all gradients, precisions, the kernel, shapes and errors."""

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from comera.errors import SpecError
from comera.kernels.cpp import compiler
from comera.memory.replay import contexts
from comera.ops import block_product as room
from comera.ops.block_product import BlockFactors, block_product, block_products, btt_linear
from comera.tt.blocks import materialize_blocks
from comera.tt.shapes import btt_spec
from comera.tt.spec import BTTSpec

from ...helpers.oracle import signal_to_noise, values_and_gradients
from ...helpers.specs import ragged

needs_compiler = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")

SPECS = [
    btt_spec(12, 20),
    btt_spec(20, 12, rank=3),
    BTTSpec(1, 1, (1, 1), (1, 1), 1),
    BTTSpec(7, 5, (7, 1), (1, 5), 1),
    BTTSpec(8, 9, (5, 7), (3, 4), 2),
    BTTSpec(10, 9, (2, 5), (3, 3), 0),
    ragged(11, 13, (3, 4), (2, 7), 3),
    BTTSpec(9, 9, (3, 3), (3, 3), ((0, 2, 3), (0, 0, 0), (0, 1, 1))),  # an input and an output block without rank
]


THRESHOLD = 0.1037  # no gate is so near that rounding would take it to the other side


def operands(spec, lead, *, bias=True, dtype=torch.float64):
    """x, bias or None, R, L and gates, some of them below the threshold."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(*lead, spec.in_features), (spec.out_features,), *spec.core_shapes]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tensors.append(torch.linspace(-0.2, 1.5, spec.ranks[1], dtype=torch.float64))
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    return [leaves[0], leaves[1] if bias else None, *leaves[2:]]


def product(spec):
    return lambda x, bias, r, left, d: btt_linear(x, spec, [r, left], bias, gates=[d], threshold=THRESHOLD)


def oracle(spec):
    def dense(x, bias, r, left, d):
        y = x @ materialize_blocks(spec, [r * d.masked_fill(d <= THRESHOLD, 0.0), left])
        return y if bias is None else y + bias

    return dense


def doubles(tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("lead", [(), (1,), (7,), (0,), (2, 3), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_agrees_with_the_dense_oracle(spec, lead, bias):
    tensors = operands(spec, lead, bias=bias)
    found, exact = values_and_gradients(product(spec), tensors), values_and_gradients(oracle(spec), tensors)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_first_and_second_derivatives_pass_gradcheck(spec):
    tensors = operands(spec, (2,))
    assert torch.autograd.gradcheck(product(spec), tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(product(spec), tensors, fast_mode=True)


@needs_compiler
@pytest.mark.parametrize("spec", [*SPECS, btt_spec(96, 128, rank=2), ragged(66, 133, (6, 11), (7, 19), 4)], ids=str)
@pytest.mark.parametrize("lead", [(), (0,), (1,), (3, 50)], ids=str)
def test_the_kernel_agrees_with_torch_and_the_oracle(spec, lead, monkeypatch):
    tensors = operands(spec, lead, dtype=torch.float32)
    with monkeypatch.context() as patch:
        patch.setenv("COMERA_KERNELS", "block_product")
        found = values_and_gradients(product(spec), tensors, rounded=torch.float32)
        patch.setenv("COMERA_KERNELS", "none")
        plain = values_and_gradients(product(spec), tensors, rounded=torch.float32)
    exact = values_and_gradients(oracle(spec), doubles(tensors), rounded=torch.float32)
    for one, other, true in zip(found, plain, exact, strict=True):
        largest = float(true.detach().abs().max()) if true.numel() else 0.0
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6 * largest)
        torch.testing.assert_close(one.double(), true, rtol=1e-4, atol=1e-6 * largest)


@needs_compiler
def test_layers_use_the_kernel_and_second_derivatives_do_not(monkeypatch):
    monkeypatch.delenv("COMERA_KERNELS", raising=False)
    spec, calls = SPECS[6], []
    for name in ("block_product", "block_product_backward"):
        kernel = getattr(room.cpp, name)
        monkeypatch.setattr(room.cpp, name, lambda *args, k=kernel, n=name: calls.append(n) or k(*args))
    tensors = operands(spec, (5,), dtype=torch.float32)
    values_and_gradients(product(spec), tensors)
    assert calls == ["block_product", "block_product_backward"]
    calls.clear()
    wanted = tensors[:1] + tensors[2:]

    def twice(function, tensors):
        (dx,) = torch.autograd.grad(function(*tensors).square().sum(), tensors[:1], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [t for t in tensors if t is not tensors[1]])

    found = twice(product(spec), tensors)
    assert calls == ["block_product", "block_product_backward"]  # the latter where dx depends on y
    assert len(found) == len(wanted)
    exact = twice(oracle(spec), doubles(tensors))
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


@needs_compiler
@pytest.mark.parametrize("wanted", range(4))
def test_only_the_wanted_gradients_are_made(wanted, monkeypatch):
    monkeypatch.delenv("COMERA_KERNELS", raising=False)
    spec = SPECS[6]
    x, bias, r, left, _ = operands(spec, (5,), dtype=torch.float32)
    flat = [x, r[0], left[..., 0], bias]
    leaves = [t.detach().requires_grad_(k == wanted) for k, t in enumerate(flat)]
    block_product(*leaves[:3], spec, leaves[3]).sum().backward()
    assert [t.grad is not None for t in leaves] == [k == wanted for k in range(4)]
    exact = [t.detach().double().requires_grad_(k == wanted) for k, t in enumerate(flat)]
    block_product(*exact[:3], spec, exact[3]).sum().backward()
    torch.testing.assert_close(leaves[wanted].grad.double(), exact[wanted].grad, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_strided_input_and_expanded_gradient(monkeypatch):
    monkeypatch.delenv("COMERA_KERNELS", raising=False)
    spec = SPECS[6]
    x, bias, *rest = operands(spec, (6,), dtype=torch.float32)
    for view in (x.detach().t().contiguous().t(), torch.cat([x, x], 1).detach()[:, :11], x.detach()[:1].expand(6, 11)):
        found = torch.autograd.grad(product(spec)(view, bias, *rest).sum(), [bias, *rest])
        exact = torch.autograd.grad(product(spec)(*(t.double() for t in (view, bias, *rest))).sum(), [bias, *rest])
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


def test_autocast_and_half_precision():
    spec = btt_spec(96, 128, rank=2)
    tensors = operands(spec, (50,), dtype=torch.float32)
    exact = oracle(spec)(*(t.double() for t in tensors))
    with torch.autocast("cpu", torch.bfloat16):
        y = product(spec)(*tensors)
    assert y.dtype == torch.bfloat16
    assert signal_to_noise(y, exact) > 40
    half = product(spec)(*(t.bfloat16() for t in tensors))
    assert half.dtype == torch.bfloat16
    assert signal_to_noise(half, exact) > 40


@needs_compiler
def test_a_replay_gives_the_same(monkeypatch):
    monkeypatch.delenv("COMERA_KERNELS", raising=False)
    spec = ragged(66, 133, (6, 11), (7, 19), 4)
    tensors = operands(spec, (70,), dtype=torch.float32)

    def replayed(*given):
        run = torch.utils.checkpoint.checkpoint
        return run(lambda *t: product(spec)(*t) * 1, *given, use_reentrant=False, context_fn=contexts)

    plain, again = (values_and_gradients(each, tensors) for each in (product(spec), replayed))
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


def test_transforms_of_torch_func():
    spec = SPECS[6]
    tensors = operands(spec, (4,), dtype=torch.float32)
    each = torch.func.vmap(lambda x: product(spec)(x, *tensors[1:]))(tensors[0])
    torch.testing.assert_close(each, product(spec)(*tensors), rtol=1e-5, atol=1e-5)


SHARING = [btt_spec(12, 20), ragged(12, 13, (3, 4), (2, 7), 3), BTTSpec(12, 9, (2, 6), (3, 3), 0)]


def sharing(dtype):
    """x, and R, L, bias or None and gates or None of three weights."""
    generator, tensors = torch.Generator().manual_seed(0), [(70, 12)]
    for k, spec in enumerate(SHARING):
        (n, m), count = spec.sizes, spec.ranks[1]
        tensors += [(n, count), (count, m), None if k == 1 else (spec.out_features,), None if k == 0 else (count,)]
    drawn = (s and torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in tensors)
    return [None if each is None else each.requires_grad_() for each in drawn]


def products(reached):
    """The concatenated outputs of the weights `reached`."""

    def run(x, *flat):
        ys = block_products(x, [BlockFactors(spec, *flat[4 * k : 4 * k + 4]) for k, spec in enumerate(SHARING)])
        return torch.cat([ys[k] for k in reached], 1)

    return run


def dense_products(reached):
    def run(x, *flat):
        ys = []
        for k in reached:
            r, left, bias, gates = flat[4 * k : 4 * k + 4]
            y = x @ materialize_blocks(SHARING[k], [(r if gates is None else r * gates)[None], left[..., None]])
            ys.append(y if bias is None else y + bias)
        return torch.cat(ys, 1)

    return run


@pytest.mark.parametrize("reached", [(0, 1, 2), (1,), (0, 2)], ids=str)
@pytest.mark.parametrize("kernels", ["none", pytest.param("block_product", marks=needs_compiler)])
def test_weights_that_share_x_agree_with_the_oracle(reached, kernels, monkeypatch):
    """Also where only some of the outputs reach the loss."""
    monkeypatch.setenv("COMERA_KERNELS", kernels)
    tensors = sharing(torch.float32)
    used = [x for k, x in enumerate(tensors) if x is not None and (k == 0 or (k - 1) // 4 in reached)]
    y = products(reached)(*tensors)
    found = [y, *torch.autograd.grad(y.square().sum(), used, retain_graph=True)]
    unused = [x for x in tensors if x is not None and all(x is not each for each in used)]
    assert not unused or not any(grad is not None for grad in torch.autograd.grad(y.sum(), unused, allow_unused=True))
    exact_tensors = doubles(tensors)
    exact_y = dense_products(reached)(*exact_tensors)
    exact_used = [x for k, x in enumerate(exact_tensors) if x is not None and (k == 0 or (k - 1) // 4 in reached)]
    exact = [exact_y, *torch.autograd.grad(exact_y.square().sum(), exact_used)]
    for one, other in zip(found, exact, strict=True):
        largest = float(other.detach().abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=2e-6 * largest)


def test_weights_that_share_x_pass_gradcheck():
    given = sharing(torch.float64)
    given[0] = given[0][:3].detach().requires_grad_()
    leaves = [each for each in given if each is not None]

    def run(*leaves):
        rest = iter(leaves)
        return products((0, 1, 2))(*(None if each is None else next(rest) for each in given))

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@needs_compiler
def test_second_derivatives_of_weights_that_share_x(monkeypatch):
    monkeypatch.delenv("COMERA_KERNELS", raising=False)

    def penalty(function, tensors):
        leaves = [each for each in tensors if each is not None]
        (dx,) = torch.autograd.grad(function(*tensors).square().sum(), tensors[:1], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), leaves, allow_unused=True, materialize_grads=True)

    tensors = sharing(torch.float32)
    found, exact = penalty(products((0, 1)), tensors), penalty(dense_products((0, 1)), doubles(tensors))
    for one, other in zip(found, exact, strict=True):
        largest = float(other.abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5 * largest)


def test_operands_that_do_not_fit_are_refused():
    spec = SPECS[0]
    x, bias, *cores, _ = operands(spec, (2,))
    with pytest.raises(SpecError, match="last dimension is 12"):
        btt_linear(x[:, :-1], spec, cores, bias)
    with pytest.raises(SpecError, match=r"bias of shape \(20,\)"):
        btt_linear(x, spec, cores, bias[:-1])
    with pytest.raises(SpecError, match="cores of shapes"):
        btt_linear(x, spec, [cores[0], cores[0]], bias)
    with pytest.raises(TypeError, match="dtype of the cores"):
        btt_linear(x.float(), spec, cores, bias)


def test_tables_of_ragged_blocks_are_copied_to_the_device_once():
    spec = ragged(12, 21, (2, 6), (3, 7), 2)
    with FakeTensorMode():
        fake = room.component_places(spec, torch.device("cpu"))
    with torch.inference_mode():
        places = room.component_places(spec, torch.device("cpu"))
    assert all(type(each) is torch.Tensor and not each.is_inference() for each in places)
    assert type(fake[0]) is FakeTensor
    assert all(a is b for a, b in zip(room.component_places(spec, torch.device("cpu")), places, strict=True))


def test_of_blocks_of_different_ranks_only_the_second_weight_is_padded(monkeypatch):
    spec, padded, pad = ragged(12, 21, (2, 6), (3, 7), 2), [], room.F.pad
    x, _, r, left, _ = operands(spec, (50,))
    places = room.component_places(spec, x.device)
    monkeypatch.setattr(room.F, "pad", lambda t, *args, **kwargs: padded.append(t) or pad(t, *args, **kwargs))
    y = room.batched_product(spec, x, r.squeeze(0), left.squeeze(2), None, places)
    torch.testing.assert_close(y, x @ materialize_blocks(spec, [r, left]))
    assert [each.shape for each in padded] == [left.squeeze(2).shape]


def test_a_compiled_product_copies_no_tables_to_the_device():
    spec, graphs = ragged(12, 21, (2, 6), (3, 7), 2), []
    x, bias, *cores, _ = operands(spec, (2,))

    def twice(x):
        return btt_linear(btt_linear(x, spec, cores, bias)[:, :12], spec, cores, bias)

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    y = torch.compile(twice, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(y, twice(x))
    assert len(graphs) == 1
    assert "torch.tensor(" not in graphs[0]
