"""The self-test of a library: every room of kernels on odd shapes, forward and backward, beside torch in float64.

It takes some milliseconds in a process that `trial` starts. tests/unit/kernels has the thorough tests; this one finds a
library that this processor cannot run or that its compiler made wrongly.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.kernels.cpp import (
    adamw,
    attention,
    block_product,
    cross_entropy,
    gated,
    gradients,
    library,
    lookup,
    low_rank,
    low_rank_cross_entropy,
    merge,
    mlp,
    ngrams,
    residual_norm,
    rotary,
    trial,
)

_SIZES = ((1, 1, 1, 1), (5, 7, 9, 3), (67, 33, 50, 17))  # batch, in, out, rank: less and more than a vector and a tile
_NEAR = 1e-4  # of the largest element, or of 0.1 where results vanish
_Results = Sequence[Tensor]


def main(path: str) -> None:
    """Try a library and end this process: with status 0 if it passes, else with a line on the standard output."""
    library.on_trial = Path(path)
    try:
        reason = library.unavailable_reason() or difference()
    except OSError as error:
        print(error)
        sys.exit(trial.UNLOADABLE)
    if reason is not None:
        print(reason)
        sys.exit(1)


def difference() -> str | None:
    """The first kernel whose results differ from torch's, in one line; None if there is none."""
    torch.manual_seed(0)
    products = _low_rank, _mlp, _gated, _blocks, _merge, _lookup, _ngrams
    for check in (*products, _norms, _attention, _rotary, _cross_entropy, _optimizer):
        for sizes in _SIZES:
            for name, found, expected in check(*sizes):
                if not _near(found, expected):
                    return f"{name} differs from torch's result on {sizes}"
    return None


def _near(found: _Results, expected: _Results) -> bool:
    def close(one: Tensor, other: Tensor) -> bool:
        largest = float(other.abs().max()) if other.numel() else 0.0
        return one.shape == other.shape and bool(((one.double() - other).abs() <= _NEAR * (largest + 0.1)).all())

    return len(found) == len(expected) and all(map(close, found, expected))


def _reference(compute: Callable[..., _Results], inputs: _Results, seeds: _Results) -> tuple[_Results, _Results]:
    """Results in float64, and the gradients of the inputs from those of the results."""
    leaves = [each.double().requires_grad_() for each in inputs]
    outputs = compute(*leaves)
    return [each.detach() for each in outputs], torch.autograd.grad(outputs, leaves, [seed.double() for seed in seeds])


_Found = Iterator[tuple[str, _Results, _Results]]


def _low_rank(batch: int, inputs: int, outputs: int, rank: int) -> _Found:
    x, a, b = torch.randn(batch, inputs), torch.randn(rank, inputs), torch.randn(1 + rank, outputs)
    dy = torch.randn(batch, outputs)
    values, grads = _reference(lambda x, a, b: [x @ a.T @ b[1:] + b[0]], [x, a, b], [dy])
    p, *ys = low_rank.low_rank(x, [a], [b])
    yield "low_rank", ys, values
    yield "low_rank_backward", low_rank.low_rank_backward(x, p, [dy], [a], [b], True, True, True), grads


def _mlp(batch: int, inputs: int, outputs: int, rank: int) -> _Found:
    hidden = 3 * outputs
    x, a, b = torch.randn(batch, inputs), torch.randn(rank, inputs), torch.randn(1 + rank, hidden)
    c, d, dz = torch.randn(rank, hidden) / hidden, torch.randn(1 + rank, outputs), torch.randn(batch, outputs)

    def product(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> _Results:
        return [F.gelu(x @ a.T @ b[1:] + b[0]) @ c.T @ d[1:] + d[0]]

    values, grads = _reference(product, [x, a, b, c, d], [dz])
    p, q, z = mlp.mlp(x, [a, c], [b, d], "gelu")
    yield "mlp", [z], values
    yield "mlp_backward", mlp.mlp_backward(x, p, q, dz, [a, c], [b, d], "gelu", True), grads


def _gated(batch: int, inputs: int, outputs: int, rank: int) -> _Found:
    g, u, dh = (torch.randn(batch, outputs) for _ in range(3))
    values, grads = _reference(lambda g, u: [F.silu(g) * u], [g, u], [dh])
    yield "gated", [gated.gated(g, u, "silu")], values
    yield "gated_backward", gated.gated_backward(dh, g, u, "silu"), grads
    values, grads = _reference(lambda g: [F.gelu(g)], [g], [dh])
    yield "gated", [gated.activated(g, "gelu")], values
    yield "gated_backward", [gated.activated_backward(dh, g, "gelu")], grads


def _norms(batch: int, inputs: int, outputs: int, rank: int) -> _Found:
    z, x, dy = (torch.randn(batch, outputs) for _ in range(3))
    weight, bias = torch.randn(outputs), torch.randn(outputs)
    eps = 0.1  # of one column the variance is 0
    reference = _reference(lambda z, x, w, b: [F.layer_norm(x + z, x.shape[1:], w, b, eps)], [z, x, weight, bias], [dy])
    values, (_, *grads) = reference
    y, s, mean, rstd = residual_norm.residual_norm(z, x, weight, bias, None, 0.0, eps)
    yield "residual_norm", [y], values
    table, rows = x.flip(0), torch.arange(batch).flip(0)
    yield (
        "residual_norm",
        [residual_norm.residual_norm(z, table, weight, bias, None, 0.0, eps, 0.0, False, rows)[0]],
        values,
    )
    dx, _, dweight, dbias = residual_norm.residual_norm_backward(dy, s, mean, rstd, weight, None, 0.0)
    yield "residual_norm_backward", [dx, dweight, dbias], grads
    seed = torch.tensor(3)
    kept = residual_norm.dropout(torch.ones_like(x), seed, 0.3)
    yield "dropout", [residual_norm.dropout(x, seed, 0.3)], [(x * kept).double()]


def _attention(batch: int, inputs: int, outputs: int, rank: int) -> _Found:
    q, k = torch.randn(2, 4, batch, rank), torch.randn(2, 2, inputs, rank)
    v, do, mask = torch.randn(2, 2, inputs, outputs), torch.randn(2, 4, batch, outputs), torch.randn(batch, inputs)

    def softmax(q: Tensor, k: Tensor, v: Tensor) -> _Results:
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
        return [F.scaled_dot_product_attention(q, k, v, attn_mask=mask.double(), scale=0.3)]

    values, grads = _reference(softmax, [q, k, v], [do])
    given = q, k, v, mask, None, 0.0, 0.3, False
    o, norms = attention.attention(*given)
    yield "attention", [o], values
    yield "attention_backward", attention.attention_backward(do, o, norms, *given), grads


def _rotary(batch: int, inputs: int, outputs: int, rank: int) -> _Found:
    angles = torch.randn(1, inputs, rank).repeat(1, 1, 2)
    q, k = torch.randn(2, 4, inputs, 2 * rank + 1), torch.randn(2, 2, inputs, 2 * rank + 1)

    def turned(x: Tensor) -> Tensor:
        first, second, rest = x.double().split([rank, rank, 1], dim=-1)
        both = torch.cat((first, second), -1) * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
        return torch.cat((both, rest), -1)

    yield "rotary", rotary.rotary(q, k, angles.cos(), angles.sin(), False), [turned(q), turned(k)]


def _cross_entropy(batch: int, inputs: int, outputs: int, rank: int) -> _Found:
    logits, labels = torch.randn(batch, outputs), torch.randint(outputs, (batch,))
    values, grads = _reference(
        lambda logits: [F.cross_entropy(logits, labels, reduction="none")], [logits], [torch.ones(batch)]
    )
    yield "cross_entropy", cross_entropy.cross_entropy(logits, labels, -1), [*values, *grads]
    p, b = torch.randn(batch, rank), torch.randn(1 + rank, outputs)
    values, grads = _reference(
        lambda p, b: [F.cross_entropy(p @ b[1:] + b[0], labels, reduction="none")], [p, b], [torch.ones(batch)]
    )
    found = low_rank_cross_entropy.low_rank_cross_entropy(p, b, labels, -1, True)
    yield "low_rank_cross_entropy", found, [*values, *grads]
    of_table = low_rank_cross_entropy.linear_cross_entropy(p, b[1:].t(), b[0], labels, -1, True)
    yield "low_rank_cross_entropy", of_table, [*values, grads[0], grads[1][1:].t(), grads[1][0]]


def _blocks(batch: int, inputs: int, outputs: int, rank: int) -> _Found:
    ranks = torch.tensor([[rank, 0, 1], [2, rank, 1]])
    blocks = [(a, c) for a in range(2) for c in range(3) for _ in range(int(ranks[a, c]))]  # of each component
    x, r, gates = torch.randn(batch, 2 * inputs), torch.randn(inputs, len(blocks)), torch.randn(len(blocks))
    left, bias, dy = torch.randn(len(blocks), outputs), torch.randn(3 * outputs), torch.randn(batch, 3 * outputs)

    def product(x: Tensor, r: Tensor, left: Tensor, bias: Tensor, gates: Tensor) -> _Results:
        weight = x.new_zeros(2, 3, inputs, outputs)
        for k, (a, c) in enumerate(blocks):
            place = torch.zeros(2, 3, 1, 1, dtype=x.dtype)
            place[a, c] = 1.0
            weight = weight + place * torch.outer(r[:, k] * gates[k], left[k])
        return [x @ weight.permute(0, 2, 1, 3).reshape(2 * inputs, 3 * outputs) + bias]

    values, grads = _reference(product, [x, r, left, bias, gates], [dy])
    weight = [r], [left], [bias], [gates], [ranks]
    yield "block_product", block_product.block_product(x, *weight, [3 * outputs]), values
    found = block_product.block_product_backward(x, [dy], *weight, True, True, True)
    yield "block_product_backward", found, grads


def _merge(batch: int, inputs: int, outputs: int, rank: int) -> _Found:
    modes, ranks = (3, inputs, outputs), (1, 2, rank, 1)
    cores = [torch.randn(left, mode, right) for left, mode, right in zip(ranks, modes, ranks[1:], strict=False)]
    gates, bias = [torch.rand(2) + 0.1, torch.rand(rank) + 0.1], torch.randn(outputs)
    dweight, dbias = torch.randn(3 * inputs, outputs), torch.randn(outputs)

    def dense(u: Tensor, v: Tensor, w: Tensor, g: Tensor, h: Tensor, bias: Tensor) -> _Results:
        return [torch.einsum("amr,r,rns,s,sob->mno", u, g, v, h, w).reshape(3 * inputs, outputs), bias]

    values, grads = _reference(dense, [*cores, *gates, bias], [dweight, dbias])
    given = [*cores, *gates], [bias], (3, 2, 3 * inputs, outputs, *modes, *ranks)
    a, b = merge.merge(*given, 0.0)
    yield "merge", [a.T.double() @ b[1:].double(), b[0]], values
    db = torch.cat((dbias[None], a @ dweight))
    yield "merge_backward", merge.merge_backward([b[1:] @ dweight.T, db], *given, 0.0), grads


def _lookup(batch: int, inputs: int, outputs: int, rank: int) -> _Found:
    lefts, rights, ids, drows = [], [], [], []
    for x, y in ((3, 2), (5, 16)):  # narrow rows and wide ones; R as a core and as it is read
        lefts.append(torch.randn(inputs, x, rank))
        rights.append(torch.randn(rank, outputs, 1, y) if y == 2 else torch.randn(outputs, y, rank))
        ids.append(torch.randint(inputs * outputs, (batch,)))
        drows.append(torch.randn(batch, x * y))
    gates, table = torch.randn(rank), torch.randn(inputs, outputs)
    ids.append(torch.randint(inputs, (batch,)))
    drows.append(torch.randn(batch, outputs))
    values, grads = _reference(partial(_pairs, ids), [*lefts, *rights, gates, table], drows)
    given, numbers = [ids, [*lefts, table], [*rights, None]], [[inputs * outputs] * 2 + [inputs], [-1] * 3, [-9.0] * 3]
    *rows, made = lookup.pair_rows(*given, [gates, None, None], *numbers)
    yield "pair_rows", rows, values
    wanted = [True, True, True, True, True, False, True, False, False]
    found = lookup.pair_rows_backward(drows, *given, [made, None, None], [gates, None, None], *numbers, wanted)
    yield "pair_rows_backward", [found[k] for k in (0, 3, 1, 4, 2, 5)], grads


def _pairs(ids: Sequence[Tensor], *tensors: Tensor) -> list[Tensor]:
    left, other, core, right, gates, table = tensors
    rights = [torch.einsum("rmny,r->myr", core, gates), right]
    parts = zip(ids, (left, other), rights, strict=False)
    return [*((left[n // len(right)] @ right[n % len(right)].mT).flatten(1) for n, left, right in parts), table[ids[2]]]


def _ngrams(batch: int, inputs: int, outputs: int, rank: int) -> _Found:
    eps, widths = 0.1, (outputs, outputs, -(-outputs // 2))
    ids, reach = torch.randint(inputs, (batch, 6)), torch.arange(4).expand(batch, 4).contiguous()
    needed = [(torch.arange(width) % 3 != 1).float() for width in widths[1:]]
    de = torch.randn(batch, 4, sum(widths[1:]))

    def chain(*tables: Tensor) -> _Results:
        e, made = tables[0][ids[:, 2:]], []
        for k, (own, table) in enumerate(zip(needed, tables[1:], strict=True), start=1):
            c = torch.where((reach >= k)[..., None], table[ids[:, 2 - k : 6 - k]], 1.0)
            x = e[..., : len(own)] * c * own
            e = x / (x.square().sum(-1, keepdim=True) / own.sum() + eps).sqrt()
            made.append(e)
        return [torch.cat(made, -1)]

    tables = [1 + torch.randn(inputs, width) / 2 for width in widths]
    values, grads = _reference(chain, tables, [de])
    e, rho = ngrams.ngrams(ids, reach, tables, needed, eps)
    yield "ngrams", [e], values
    yield "ngrams_backward", ngrams.ngrams_backward(de, e, rho, ids, reach, tables, needed), grads


def _optimizer(batch: int, inputs: int, outputs: int, rank: int) -> _Found:
    params = [torch.randn(batch, outputs), torch.randn(rank)]
    came = [torch.randn_like(param) for param in params]
    norm = torch.cat([g.double().flatten() for g in came]).norm()
    clipped = [g.double() * min(1.0, 0.5 / float(norm)) for g in came]
    core, gates = params
    slope, mean = torch.randn(rank), torch.rand(rank)
    read = [0.5 * clipped[0] + 0.3 * core.double(), 0.5 * clipped[1] + slope.double()]
    # the first step of AdamW, by its formula: importing torch's takes a second
    stepped = [p.double() * (1 - 0.1 * 0.2) - 0.1 * g / (g.abs() + 1e-8) for p, g in zip(params, read, strict=True)]
    squares = mean.double().lerp((stepped[1] * read[1]).square(), 0.05)
    found = gradients.clip_(came, 0.5)
    yield "clip", [*([] if found is None else [found]), *came], [norm, *clipped]
    states = [t for p in params for t in (torch.zeros_like(p), torch.zeros_like(p), torch.tensor(0.0))]
    group = adamw.Held(params, states).group(came, [0.1] * len(params), [0.2] * len(params))
    assert group is not None
    terms = adamw.Terms.fitting(0.5, [(gates, slope)], [core], 0.3, [(gates, mean, 0.05)])
    assert terms is not None
    adamw.step([group], betas=(0.9, 0.99), eps=1e-8, terms=terms)
    yield "adamw", [*params, mean], [*stepped, squares]
