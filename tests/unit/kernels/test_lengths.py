"""No kernel touches memory that its operands do not have: wrong lengths raise, and so does a lack of scratch memory."""

import ctypes
import subprocess
import sys

import pytest
import torch

from comera.kernels import select
from comera.kernels.cpp import (
    adamw,
    attention,
    block_product,
    compiler,
    cross_entropy,
    gated,
    gradients,
    lookup,
    low_rank,
    low_rank_cross_entropy,
    merge,
    mlp,
    residual_norm,
    rotary,
)
from comera.kernels.cpp.library import call

from ...helpers.odd_operands import (
    LOOKUP_SIZES,
    attention_operands,
    block_product_operands,
    lookup_operands,
    lookup_rows_and_gradients,
    low_rank_operands,
    merge_operands,
    mlp_operands,
    rotary_operands,
)
from ...helpers.refused import CHANGE_IDS, CHANGES, assert_all_refused, longer, shorter

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")
SEED = torch.tensor(5)
WANTED = (True, True, True)


def test_a_size_that_is_a_tensor_is_a_number_and_never_an_address():
    x, y = torch.ones(5), torch.zeros(5)
    call("dropout", torch.tensor(5), x, None, 0, 3.0, y)
    assert torch.equal(y, x)
    with pytest.raises((TypeError, ctypes.ArgumentError)):
        call("dropout", torch.ones(2), x, None, 0, 3.0, y)


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_of_low_rank_are_refused(change):
    operands = low_rank_operands()
    assert_all_refused(lambda *given: low_rank.low_rank_backward(*given, True, True, True), operands, change)
    _, p, _, a, b = operands
    if change is not longer:  # P alone says how many samples there are
        assert_all_refused(lambda p: low_rank.low_rank_output(p, [len(a[0])], b), [p], change)
    for given in ([p, [len(a[0]) + 1], b], [p, [len(a[0]) - 1], b]):
        with pytest.raises(RuntimeError, match="expected"):
            low_rank.low_rank_output(*given)


@pytest.mark.parametrize("change", [longer, shorter, torch.Tensor.double], ids=CHANGE_IDS[:3])
def test_wrong_factors_of_the_forward_are_refused(change):
    x, _, _, [a], [b] = low_rank_operands()
    for given in ([x, [change(longer(a))], [b]], [x, [shorter(a)], [b]], [change(x.t()).t(), [a], [b.double()]]):
        with pytest.raises(RuntimeError, match="expected"):
            low_rank.low_rank(*given)


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_of_block_product_are_refused(change):
    torch.manual_seed(0)
    x, dys, rs, *rest = block_product_operands()
    outs = [dy.shape[1] for dy in dys]
    assert_all_refused(
        lambda dys, *rest: block_product.block_product_backward(x, dys, rs, *rest, *WANTED), [dys, *rest], change
    )
    assert_all_refused(lambda *rest: block_product.block_product(x, rs, *rest, outs), rest, change)
    if change is not shorter:  # features of x that are missing are padding
        assert_all_refused(lambda x: block_product.block_product_backward(x, dys, rs, *rest, *WANTED), [x], change)
    if change is not longer:  # and so are features that an input block has beyond those of x
        assert_all_refused(lambda rs: block_product.block_product(x, rs, *rest, outs), [rs], change)
    for wrong in ([outs[0] + 1, outs[1]], [outs[0], outs[1] - 1], outs[:1], [*outs, 1]):
        with pytest.raises((RuntimeError, ValueError), match=r"expected|argument"):
            block_product.block_product(x, rs, *rest, wrong)
    with pytest.raises(RuntimeError, match="at least one R"):
        block_product.block_product(x, *([] for _ in range(6)))


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
@pytest.mark.parametrize("ranks", [(3,), (3, 2)], ids=["plain", "gated"])
def test_wrong_operands_of_mlp_are_refused(change, ranks):
    operands = mlp_operands(ranks=ranks)
    assert_all_refused(lambda *given: mlp.mlp_backward(*given, "gelu", True), operands, change)


def test_a_wrong_number_of_weights_is_refused():
    x, p, q, dz, a, b = mlp_operands()
    for given in ([x, p, q, dz, a[:1], b[:1]], [x, p, q, dz, [*a, a[-1]], [*b, b[-1]]], [x, p, q, dz, a, b[:2]]):
        with pytest.raises(RuntimeError, match="expected"):
            mlp.mlp_backward(*given, "gelu", True)


@pytest.mark.parametrize("change", [longer, shorter, torch.Tensor.double, CHANGES[-1]], ids=[*CHANGE_IDS[:3], "meta"])
def test_wrong_operands_of_merge_are_refused(change):
    parameters, biases, layout = merge_operands()
    assert_all_refused(lambda *given: merge.merge(*given, layout, 0.0), [parameters, biases], change)
    factors = merge.merge(parameters, biases, layout, 0.0)
    operands = [factors, parameters, biases]
    assert_all_refused(lambda *given: merge.merge_backward(*given, layout, 0.0), operands, change)
    for few in (
        [factors[1:], parameters, biases],
        [factors, parameters[1:], biases],
        [factors, parameters, biases[1:]],
    ):
        with pytest.raises(RuntimeError, match="expected"):
            merge.merge_backward(*few, layout, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {0: 2},  # order
        {1: 0},  # split
        {1: 3},
        {2: 7},  # more features than the modes have
        {3: 7},
        {4: 0},  # modes
        {7: 2},  # ranks
        {8: -4},
    ],
    ids=str,
)
def test_layouts_that_are_no_trains_are_refused(wrong):
    parameters, biases, layout = merge_operands(trains=1)
    layout = tuple(wrong.get(k, number) for k, number in enumerate(layout))
    with pytest.raises((RuntimeError, ValueError), match=r"expected|not enough"):
        merge.merge(parameters, biases, layout, 0.0)


def test_cores_cut_between_forward_and_backward_are_refused():
    """As rounding or pruning between the two would leave them."""
    parameters, biases, layout = merge_operands()
    factors = merge.merge(parameters, biases, layout, 0.0)
    cut = [p[..., :1].contiguous() for p in parameters]
    with pytest.raises(RuntimeError, match="as the layout says"):
        merge.merge_backward(factors, cut, biases, layout, 0.0)


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_of_attention_are_refused(change):
    q, k, v, mask, do = attention_operands()
    settings = SEED, 0.1, 1.0, False
    o, norms = attention.attention(q, k, v, mask, *settings)

    def run(do, o, norms, q, k, v):
        return attention.attention_backward(do, o, norms, q, k, v, mask, *settings)

    assert_all_refused(run, [do, o, norms, q, k, v], change)
    if change is not CHANGES[3]:  # a mask may have more dimensions, of one entry
        assert_all_refused(lambda mask: attention.attention(q, k, v, mask, *settings), [mask], change)


def test_wrong_seeds_probabilities_and_heads_are_refused():
    q, k, v, _, _ = attention_operands()
    for seed, p in ((SEED.int(), 0.1), (torch.tensor([1, 2]), 0.1), (SEED, 1.0), (SEED, -0.1)):
        with pytest.raises(RuntimeError, match="expected"):
            attention.attention(q, k, v, None, seed, p, 1.0, False)
        with pytest.raises(RuntimeError, match="expected"):
            residual_norm.dropout(q, seed, p)
    for groups in (0, 3):
        with pytest.raises(RuntimeError, match="divide"):
            attention.attention(q, *(torch.zeros(2, groups, 7, size) for size in (9, 3)), None, None, 0.0, 1.0, False)


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_of_rotary_are_refused(change):
    for samples in (1, 2):
        operands = rotary_operands(samples=samples)
        assert_all_refused(lambda *given: rotary.rotary(*given, False), operands, change)


@pytest.mark.parametrize("columns", [3, 10], ids=["odd", "wider than a row"])
def test_columns_that_cannot_turn_are_refused(columns):
    with pytest.raises(RuntimeError, match="even number of columns up to 9"):
        rotary.rotary(*rotary_operands(columns=columns), False)


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_of_residual_norm_are_refused(change):
    z, x, weight, bias = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6), torch.randn(6)
    if change not in (CHANGES[0], CHANGES[1], CHANGES[3]):  # a z of another shape only fits another x
        assert_all_refused(lambda z: residual_norm.residual_norm(z, x, weight, bias, SEED, 0.1, 1e-5), [z], change)
    operands = [x, weight, bias]
    assert_all_refused(lambda *given: residual_norm.residual_norm(z, *given, SEED, 0.1, 1e-5), operands, change)
    _, s, mean, rstd = residual_norm.residual_norm(z, x, weight, bias, SEED, 0.1, 1e-5)
    operands = [z, s, mean, rstd, weight]
    assert_all_refused(lambda *given: residual_norm.residual_norm_backward(*given, SEED, 0.1), operands, change)


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_of_an_rms_norm_are_refused(change):
    z, x, dy, ds = (torch.randn(4, 6) for _ in range(4))
    weight, settings = torch.randn(6), (None, 0.0, 1e-5, 1.0, True)
    run = residual_norm.residual_norm
    assert_all_refused(lambda z, weight: run(z, x, weight, None, *settings), [z, weight], change)
    if change in (CHANGES[2], CHANGES[4]):  # an x of another shape only fits another z
        assert_all_refused(lambda x: run(None, x, weight, None, *settings), [x], change)
    with pytest.raises(RuntimeError, match="expected no bias"):
        run(z, x, weight, weight, *settings)
    _, s, mean, rstd = run(z, x, weight, None, *settings)

    def backward(dy, s, rstd, weight, ds):
        return residual_norm.residual_norm_backward(dy, s, mean, rstd, weight, None, 0.0, 1.0, True, ds)

    assert_all_refused(backward, [dy, s, rstd, weight, ds], change)
    with pytest.raises(RuntimeError, match="expected mean"):  # one of a layer norm
        residual_norm.residual_norm_backward(dy, s, rstd, rstd, weight, None, 0.0, 1.0, True)


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_of_gated_are_refused(change):
    dh, g, u = (torch.randn(4, 6) for _ in range(3))
    assert_all_refused(lambda u: gated.gated(g, u, "silu"), [u], change)
    assert_all_refused(lambda *given: gated.gated_backward(*given, "silu"), [dh, g, u], change)
    assert_all_refused(lambda dh: gated.gated_backward(dh, g, None, "silu"), [dh], change)
    for refused in (lambda: gated.gated(g, u, "tanh"), lambda: gated.gated(g, None, "tanh")):
        with pytest.raises(ValueError, match="tuple"):
            refused()
    with pytest.raises(RuntimeError, match="expected g of dtype float32"):
        gated.gated(g.double(), None, "gelu")


def test_wrong_moments_and_gradients_are_refused_by_adamw():
    params = [torch.ones(3), torch.ones(2, 2)]
    states = [t for p in params for t in (torch.zeros_like(p), torch.zeros_like(p), torch.tensor(0.0))]
    for k in range(len(states)):
        held = adamw.Held(params, [longer(t) if k == j else t for j, t in enumerate(states)])
        assert not held.fits
        assert held.group(params, [0.1, 0.2], [0.0, 0.0]) is None
    held = adamw.Held(params, states)
    assert held.group(params, [0.1, 0.2], [0.0, 0.0]) is not None
    for grads in ([torch.ones(2), torch.ones(2, 2)], params[:1], [p.double() for p in params]):
        assert held.group(grads, [0.1, 0.2], [0.0, 0.0]) is None
    assert held.group(params, [0.1], [0.0]) is None
    d = params[0]
    for wrong in (torch.ones(2), torch.ones(3, dtype=torch.float64), torch.ones(6)[::2]):
        assert adamw.Terms.fitting(1.0, [(d, wrong)]) is None
        assert adamw.Terms.fitting(1.0, [], [], 0.0, [(d, wrong, 1.0)]) is None
    assert adamw.Terms.fitting(1.0, [(d, torch.ones(3))], [], 0.0, [(d, torch.ones(3), 1.0)]) is not None


def negative(*shape):
    """A tensor with torch's negative bit, and one with the same values without."""
    tensor = torch.randn(*shape, dtype=torch.complex64).conj().imag
    assert tensor.is_neg()
    return tensor, tensor.resolve_neg().contiguous()


def test_tensors_with_the_negative_bit_are_declined():
    tensor, _ = negative(4, 6)
    assert not any(select.supports(kernel, tensor) for kernel in select.CPP)
    assert not gradients.are_plain([tensor])
    assert gradients.clip_([tensor.clone(), tensor], 1.0) is None


def test_gradients_with_the_negative_bit_have_the_right_sign():
    x, p, _, a, b = low_rank_operands()
    results = [low_rank.low_rank_backward(x, p, [dy], a, b, True, True, True) for dy in negative(5, 9)]
    parameters, biases, layout = merge_operands(trains=1)
    factors = merge.merge(parameters, biases, layout, 0.0)
    da = negative(*factors[0].shape)
    results += [merge.merge_backward([each, None], parameters, biases, layout, 0.0) for each in da]
    q, k, v, _, do = attention_operands()
    o, norms = attention.attention(q, k, v, None, None, 0.0, 1.0, False)
    each_do = negative(*do.shape)
    results += [attention.attention_backward(each, o, norms, q, k, v, None, None, 0.0, 1.0, False) for each in each_do]
    results += [[residual_norm.dropout(each, SEED, 0.1)] for each in negative(4, 6)]
    _, *tables = rotary_operands()
    results += [rotary.rotary(each, *tables, False) for each in negative(2, 4, 5, 9)]
    _, *operands = lookup_operands(LOOKUP_SIZES[:1])
    results += [lookup_rows_and_gradients([each], *operands) for each in negative(5, 6)]
    first, *rest = parameters
    given = [[each, *rest] for each in (torch._neg_view(-first), first)]  # contiguous, in spite of its bit
    results += [merge.merge(each, biases, layout, 0.0) for each in given]
    results += [merge.merge_backward(factors, each, biases, layout, 0.0) for each in given]
    for one, other in zip(results[::2], results[1::2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


SCRATCH = """
import resource, torch
from comera.kernels.cpp import attention, block_product, compiler, low_rank, merge, mlp, residual_norm
torch.set_num_threads(1)
n = 2**22
x, p, one = torch.zeros(n, 1), torch.zeros(n, 16), torch.ones(1, 1)
long_row = torch.zeros(1, 2**24)
row = torch.zeros(1)
keys = torch.zeros(1, 1, 1, 64).expand(1, 1, n, 64)
layout = (2, 1, 2**18, 2, 2**18, 2, 1, 16, 1)
cores = [torch.zeros(1, 2**18, 16), torch.zeros(16, 2, 1), torch.ones(16)]
wide, narrow, ranks = torch.zeros(8, 2**21), torch.zeros(2**21, 8), torch.full((1, 1), 2**21)
calls = {
    "block_product": (180, lambda: block_product.block_product(
        one.repeat(1, 8), [wide], [narrow], [None], [None], [ranks], [8])),
    "low_rank_backward": (120, lambda: low_rank.low_rank_backward(x, p, [x], [one], [one], True, True, True)),
    "mlp_backward": (100, lambda: mlp.mlp_backward(x, p, p, x, [one] * 2, [one] * 2, "gelu", True)),
    "attention": (500, lambda: attention.attention(keys[:, :, :1], keys, keys, None, None, 0.0, 1.0, False)),
    "merge": (200, lambda: merge.merge(cores, [None], layout, 0.0)),
    "residual_norm_backward": (
        256, lambda: residual_norm.residual_norm_backward(long_row, long_row, row, row, None, None, 0.0)),
}
low_rank.low_rank(one, [one], [one])
_, most = resource.getrlimit(resource.RLIMIT_AS)
for name, (megabytes, run) in calls.items():
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + megabytes * 2**20, most))
    try:
        run()
    except MemoryError as error:
        assert name in str(error), error
        print(name)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
assert float(low_rank.low_rank(one, [one], [one])[1]) == 1.0
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space through /proc")
def test_a_lack_of_scratch_memory_is_an_error():
    run = subprocess.run([sys.executable, "-c", SCRATCH], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    expected = ["block_product", "low_rank_backward", "mlp_backward", "attention", "merge", "residual_norm_backward"]
    assert run.stdout.split() == expected


def test_an_unknown_function_is_no_silent_call():
    with pytest.raises(KeyError):
        call("no_such_kernel")


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_of_lookups_are_refused(change):
    drows, ids, lefts, rights, gates, *numbers = lookup_operands()
    made = [*lookup.pair_rows(ids, lefts, rights, gates, *numbers)[3:], None]
    wanted = [True, True, True, True, True, False, True, True, False]

    def backward(drows, ids, made, gates, lefts=lefts, rights=rights):
        return lookup.pair_rows_backward(drows, ids, lefts, rights, made, gates, *numbers, wanted)

    assert_all_refused(backward, [drows, ids, made, gates], change)
    assert_all_refused(lambda gates: lookup.pair_rows(ids, lefts, rights, gates, *numbers), [gates], change)

    def of_parts(first, second, left=lefts[2], right=rights[2]):
        return backward(drows, ids, made, gates, [*first, left], [*second, right])

    assert_all_refused(of_parts, [lefts[:2], rights[:2]], change)  # cores
    if change is not longer:  # L and R may have more rows
        assert_all_refused(lambda right: of_parts(lefts[:2], rights[:2], right=right), [rights[2]], change)
        if change is not CHANGES[3]:  # and L may be a core
            assert_all_refused(lambda left: of_parts(lefts[:2], rights[:2], left), [lefts[2]], change)


def test_wrong_numbers_of_lookups_are_refused():
    drows, *operands = lookup_operands()
    ids, lefts, rights, gates, limits, paddings, thresholds = operands
    for wrong in (
        [ids, lefts, rights, [None, None, gates[0]], limits, paddings, thresholds],  # gates without a core
        [ids, lefts, rights, gates, [13, *limits[1:]], paddings, thresholds],
        [ids, lefts, rights, gates, [-1, *limits[1:]], paddings, thresholds],
        [ids, lefts, rights, gates, limits, paddings, thresholds[1:]],
        [ids, lefts, rights, gates, limits, paddings[1:], thresholds],
        [ids[1:], lefts, rights, gates, limits, paddings, thresholds],
    ):
        with pytest.raises((RuntimeError, ValueError), match=r"expected|argument"):
            lookup.pair_rows(*wrong)
    made = [*lookup.pair_rows(*operands)[3:], None]
    for missing in ([None, *made[1:]], [*made[:2], rights[2]], made[1:]):
        with pytest.raises((RuntimeError, ValueError), match=r"expected|argument"):
            lookup.pair_rows_backward(drows, ids, lefts, rights, missing, *operands[3:], [True, True, False] * 3)
    for wanted in ([True] * 9, [True] * 8):  # there are no gates of the second and third
        with pytest.raises(RuntimeError, match="expected"):
            lookup.pair_rows_backward(drows, ids, lefts, rights, made, *operands[3:], wanted)


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_of_a_dense_table_are_refused(change):
    drows, ids, tables, rights, gates, *numbers = lookup_operands([(5, (7, 1), (3, 1), None)])

    def backward(drows, ids, tables=tables):
        return lookup.pair_rows_backward(drows, ids, tables, rights, [None], gates, *numbers, [True, False, False])

    assert_all_refused(backward, [drows, ids], change)
    if change is not longer:  # a table may have more rows
        assert_all_refused(lambda tables: backward(drows, ids, tables), [tables], change)


def test_wrong_numbers_of_a_dense_table_are_refused():
    drows, ids, tables, rights, gates, limits, paddings, thresholds = lookup_operands([(5, (7, 1), (3, 1), None)])
    for wrong in ([tables, [torch.randn(3)], limits], [[torch.randn(7, 3, 1)], gates, limits], [tables, gates, [8]]):
        given = ids, wrong[0], rights, wrong[1], wrong[2], paddings, thresholds
        with pytest.raises(RuntimeError, match="expected"):
            lookup.pair_rows(*given)
    for made, wanted in (([None], [True, True, False]), ([None], [True, False, True]), (drows, [True, False, False])):
        with pytest.raises(RuntimeError, match="expected"):
            lookup.pair_rows_backward(drows, ids, tables, rights, made, gates, limits, paddings, thresholds, wanted)
    for wrong in (-1, 7, 2**40):
        ids[0][2] = wrong
        with pytest.raises(ValueError, match="expected numbers that fit each other"):
            lookup.pair_rows(ids, tables, rights, gates, limits, paddings, thresholds)


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_of_cross_entropy_are_refused(change):
    logits, labels = torch.randn(4, 9), torch.tensor([0, 8, -100, 3])
    entropy = lambda *given: cross_entropy.cross_entropy(*given, -100)  # noqa: E731
    assert_all_refused(lambda labels: entropy(logits, labels), [labels], change)
    if change is not shorter:  # fewer classes: the labels may do
        assert_all_refused(lambda logits: entropy(logits, labels), [logits], change)
    for wrong in (9, -1, 2**40, -(2**40)):
        with pytest.raises(RuntimeError, match=f"expected labels from 0 to 8 or -100, got {wrong}"):
            entropy(logits, labels.where(labels != 3, wrong))


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_of_low_rank_cross_entropy_are_refused(change):
    p, b, labels = torch.randn(4, 3), torch.randn(4, 9), torch.tensor([0, 8, -100, 3])
    entropy = lambda *given: low_rank_cross_entropy.low_rank_cross_entropy(*given, -100, True)  # noqa: E731
    assert_all_refused(lambda p, labels: entropy(p, b, labels), [p, labels], change)
    for wrong in (torch.randn(5, 9), torch.randn(2, 9), torch.randn(4), b.double()):
        with pytest.raises(RuntimeError, match="expected"):
            entropy(p, wrong, labels)
    for wrong in (9, -1, 2**40, -(2**40)):
        with pytest.raises(RuntimeError, match=f"expected labels from 0 to 8 or -100, got {wrong}"):
            entropy(p, b, labels.where(labels != 3, wrong))


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_of_linear_cross_entropy_are_refused(change):
    operands = torch.randn(4, 3), torch.randn(9, 3), torch.randn(9), torch.tensor([0, 8, -100, 3])
    assert_all_refused(lambda *given: low_rank_cross_entropy.linear_cross_entropy(*given, -100, True), operands, change)
    with pytest.raises(RuntimeError, match="expected labels from 0 to 8 or -100, got 9"):
        low_rank_cross_entropy.linear_cross_entropy(*operands[:3], torch.tensor([0, 9, 1, 2]), -100, True)
