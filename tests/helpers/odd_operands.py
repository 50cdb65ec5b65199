"""Operands of odd shapes for every C++ kernel; run as a program it calls them all, for the sanitizers to watch."""

import torch

from comera.kernels.cpp import (
    adamw,
    attention,
    block_product,
    cross_entropy,
    gated,
    gradients,
    lookup,
    low_rank,
    low_rank_cross_entropy,
    merge,
    mlp,
    ngrams,
    residual_norm,
    rotary,
)
from comera.kernels.cpp.gated import ACTIVATIONS

LAYOUT = (3, 1, 5, 6, 6, 3, 2, 1, 4, 2, 1)  # order, split, features, modes, ranks


def low_rank_operands(batch=5, features=7, out=9, rank=3, bias=1):
    """x, P, dy, A and b as low_rank_backward takes them."""
    x, a, b = torch.randn(batch, features), [torch.randn(rank, features)], [torch.randn(rank + bias, out)]
    return x, low_rank.low_rank(x, a, b)[0], [torch.randn(batch, out)], a, b


def block_product_operands(batch=5, sizes=(3, 4, 5, 7), ranks=2, cut=(0, 0), bias=True):
    """x and lists of dy, R, L, bias, gates and ranks as block_product_backward takes them, for two weights.

    sizes: A, N, C, M; ranks: the largest of a block; cut: features of padding.
    """
    a, n, c, m = sizes
    features, dys, weights = max(0, a * n - cut[0]), [], []
    for with_gates in (True, False):
        of_blocks = torch.randint(ranks + 1, (a, c))
        count, out = int(of_blocks.sum()), max(0, c * m - cut[1])
        dys.append(torch.randn(batch, out))
        gates = torch.randn(count) if with_gates else None
        weights.append(
            (torch.randn(n, count), torch.randn(count, m), torch.randn(out) if bias else None, gates, of_blocks)
        )
    return torch.randn(batch, features), dys, *map(list, zip(*weights, strict=True))


def mlp_operands(batch=5, features=7, hidden=50, out=9, ranks=(3, 2), rank=4, bias=1):
    """x, P, Q, dz, A and b as mlp_backward takes them."""
    a = [torch.randn(r, features) for r in ranks] + [torch.randn(rank, hidden)]
    b = [torch.randn(r + bias, hidden) for r in ranks] + [torch.randn(rank + bias, out)]
    x = torch.randn(batch, features)
    return x, *mlp.mlp(x, a, b, "gelu")[:2], torch.randn(batch, out), a, b


def merge_operands(layout=LAYOUT, trains=2, biased=True):
    """Parameters, biases and layout of trains of one kind."""
    order, _, _, out, *rest = layout
    modes, ranks = rest[:order], rest[order:]
    shapes = [(ranks[k], modes[k], ranks[k + 1]) for k in range(order)] + [(r,) for r in ranks[1:-1]]
    parameters = [torch.randn(shape) for _ in range(trains) for shape in shapes]
    return parameters, [torch.randn(out) if biased else None for _ in range(trains)], layout * trains


def attention_operands(batch=2, heads=4, groups=2, queries=5, keys=7, width=9, value_width=3):
    """q, k, v, mask and do."""
    q, k = torch.randn(batch, heads, queries, width), torch.randn(batch, groups, keys, width)
    v, do = torch.randn(batch, groups, keys, value_width), torch.randn(batch, heads, queries, value_width)
    return q, k, v, torch.randn(queries, keys), do


def rotary_operands(batch=2, heads=4, groups=2, length=5, width=9, columns=6, samples=1):
    """q, k, cos and sin."""
    q, k = (torch.randn(batch, n, length, width) for n in (heads, groups))
    return q, k, torch.randn(samples, length, columns), torch.randn(samples, length, columns)


LOOKUP_SIZES = ((5, (3, 4), (2, 3), 7), (6, (4, 3), (3, 2), 5), (5, (5, 2), (2, 2), 3))


def lookup_operands(tables=LOOKUP_SIZES, threshold=0.1):
    """Lists of the tables' gradients of rows, ids, L, R, gates, limits, paddings and thresholds as pair_rows_backward
    takes them. tables: ids, rows and columns of L and of R, rank; in turn with a core and gates, a core, and R. Of a
    rank None the table is dense."""
    each = []
    for k, (pairs, (m, n), (x, y), rank) in enumerate(tables):
        if rank is None:
            ids, table = torch.randint(max(1, m), (2 * pairs,))[::2], torch.randn(m, x)
            each.append((torch.randn(pairs, x), ids, table, None, None, m, k - 1, threshold))
            continue
        ids, left, right = (
            torch.randint(max(1, m * n), (2 * pairs,))[::2],
            torch.randn(m, x, rank),
            torch.randn(n, y, rank),
        )
        if k % 3 < 2:
            left, right = left.unsqueeze(0), torch.randn(rank, n, *((y, 1) if k % 3 else (1, y)))
        gates = None if k % 3 else torch.rand(rank)
        each.append((torch.randn(pairs, x * y), ids, left, right, gates, m * n, k - 1, threshold))
    return tuple(map(list, zip(*each, strict=True)))


def lookup_rows_and_gradients(drows, ids, lefts, rights, gates, *numbers):
    """All rows, then all gradients of L, R or core, and gates, table by table."""
    found = lookup.pair_rows(ids, lefts, rights, gates, *numbers)
    rows, left_over = found[: len(ids)], iter(found[len(ids) :])
    made = [next(left_over) if right is not None and right.dim() == 4 else None for right in rights]
    each = zip(rights, gates, strict=True)
    wanted = [want for right, gates_R in each for want in (True, right is not None, gates_R is not None)]
    return [*rows, *lookup.pair_rows_backward(drows, ids, lefts, rights, made, gates, *numbers, wanted)]


def ngrams_operands(batch=2, positions=5, rows=7, widths=(9, 9, 4, 2)):
    """Gradients of features, ids, reach, tables and what orders need, as ngrams and ngrams_backward take them."""
    orders = len(widths) - 1
    ids = torch.randint(max(1, rows), (batch, positions + orders + 1))
    reach = torch.arange(positions).expand(batch, positions).contiguous()
    needed = [(torch.arange(width) % 3 != 2).float() for width in widths[1:]]
    tables = [1 + torch.randn(rows, width) / 2 for width in widths]
    return torch.randn(batch, positions, sum(widths[1:])), ids, reach, tables, needed


def call_all():
    """Every kernel on shapes without, with part of, and with several vectors, tiles and blocks."""
    seed = torch.tensor(3)
    for sizes in ((5, 7, 9, 3), (1, 1, 1, 1), (0, 4, 3, 2), (3, 0, 5, 2), (70, 33, 65, 17), (131, 100, 129, 0)):
        for bias in (0, 1):
            operands = low_rank_operands(*sizes, bias)
            low_rank.low_rank_backward(*operands, True, True, True)
            low_rank.low_rank_output(operands[1], [sizes[3]], operands[4])
    for batch in (0, 1, 40, 201):
        for sizes in (
            (3, 4, 5, 7),
            (1, 1, 1, 1),
            (4, 17, 3, 33),
            (2, 0, 3, 5),
            (3, 4, 2, 0),
            (2, 16, 3, 24),
            (0, 3, 2, 4),
        ):
            for cut in ((0, 0), (2, 3), (11, 9)):
                operands = block_product_operands(batch, sizes, batch % 3, cut, bias=batch != 40)
                block_product.block_product_backward(*operands, True, True, True)
                x, dys, *weights = operands
                block_product.block_product(x, *weights, [dy.shape[1] for dy in dys])
    for sizes in ((5, 7, 50, 9, (3, 2), 4), (1, 1, 1, 1, (1,), 1), (0, 3, 9, 4, (2,), 3), (67, 20, 97, 33, (0, 9), 0)):
        for activation in ACTIVATIONS:
            mlp.mlp_backward(*mlp_operands(*sizes, bias=1), activation, True)
    for layout in (LAYOUT, (2, 1, 3, 4, 4, 5, 1, 3, 1), (4, 2, 29, 41, 5, 6, 7, 6, 1, 9, 0, 17, 1)):
        parameters, biases, layouts = merge_operands(layout)
        factors = merge.merge(parameters, biases, layouts, 0.1)
        for missing in (None, 0, 1):
            given = [None if k == missing else torch.randn_like(factor) for k, factor in enumerate(factors)]
            merge.merge_backward(given, parameters, biases, layouts, 0.1)
    for sizes in (
        (2, 4, 2, 5, 7, 9, 3),
        (1, 1, 1, 65, 97, 1, 17),
        (1, 2, 1, 130, 130, 9, 9),
        (1, 2, 2, 0, 3, 4, 4),
        (1, 2, 1, 3, 0, 4, 4),
    ):
        q, k, v, mask, do = attention_operands(*sizes)
        for settings in ((mask, seed, 0.1, 1.0, False), (None, None, 0.0, 0.3, True)):
            o, norms = attention.attention(q, k, v, *settings)
            attention.attention_backward(do, o, norms, q, k, v, *settings)
    for sizes in (
        (2, 4, 2, 5, 9, 6),
        (3, 1, 1, 7, 34, 34, 3),
        (1, 2, 1, 1, 64, 0),
        (0, 2, 2, 3, 8, 8),
        (2, 3, 1, 0, 4, 2),
    ):
        for transposed in (False, True):
            rotary.rotary(*rotary_operands(*sizes), transposed)
    sizes = (
        (5, (3, 4), (2, 3), 7),
        (1, (1, 1), (1, 1), 1),
        (0, (0, 4), (2, 2), 3),
        (4, (3, 3), (2, 2), 0),
        (9, (2, 2), (0, 3), 5),
        (20, (3, 40), (5, 16), 37),
        (5000, (300, 40), (4, 5), 37),
        (50, (9, 1), (21, 1), None),
        (0, (0, 1), (4, 1), None),
        (7, (2, 1), (0, 1), None),
    )
    for tables in [[each] for each in sizes] + [sizes, sizes[1:], sizes[2:]]:
        lookup_rows_and_gradients(*lookup_operands(tables))
    for sizes in (
        (2, 5, 7, (9, 9, 4, 0)),
        (1, 1, 1, (1, 1)),
        (0, 3, 4, (5, 2)),
        (3, 0, 4, (5, 2)),
        (3, 40, 300, (160, 160, 70, 33, 1)),
        (2, 9, 3, (0, 0, 0)),
    ):
        de, ids, reach, tables, needed = ngrams_operands(*sizes)
        e, rho = ngrams.ngrams(ids, reach, tables, needed, 1e-6)
        ngrams.ngrams_backward(de, e, rho, ids, reach, tables, needed)
    for shape in ((3, 65), (1, 1), (0, 8), (4, 0), (40, 700)):
        z, x, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
        for drawn in (seed, None):
            _, s, mean, rstd = residual_norm.residual_norm(z, x, weight, weight, drawn, 0.2, 1e-5)
            residual_norm.residual_norm_backward(z, s, mean, rstd, weight, drawn, 0.2)
            rows, table = torch.arange(shape[0]) % 2, torch.randn(2, shape[1])
            residual_norm.residual_norm(z, table, weight, None, drawn, 0.2, 1e-5, 0.0, False, rows)
            for given in (z, None):
                _, s, mean, rstd = residual_norm.residual_norm(given, x, weight, None, drawn, 0.2, 1e-5, 1.0, True)
                operands = x if given is None else s, mean, rstd, weight, drawn, 0.2, 1.0, True
                residual_norm.residual_norm_backward(z, *operands, z if drawn is None else None)
        residual_norm.dropout(x, seed, 0.3)
        for activation in ACTIVATIONS:
            gated.gated(z, x, activation)
            gated.gated_backward(z, z, x, activation)
            gated.gated_backward(z, gated.gated(x, None, activation), None, activation)
    for rows, classes in ((3, 65), (1, 1), (0, 8), (2, 0), (9, 20_001)):
        labels = torch.full((rows,), classes - 1)  # without classes: ignored
        cross_entropy.cross_entropy(torch.randn(rows, classes), labels, -1)
    for rows, rank, classes in ((3, 5, 65), (1, 1, 1), (0, 3, 8), (2, 3, 0), (97, 0, 49), (200, 33, 301)):
        labels = torch.full((rows,), classes - 1)
        for bias in (0, 1):
            p, b = torch.randn(rows, rank), torch.randn(rank + bias, classes)
            low_rank_cross_entropy.low_rank_cross_entropy(p, b, labels, -1, bool(bias))
            table, biases = torch.randn(classes, rank), torch.randn(classes) if bias else None
            for wanted in (True, False):
                low_rank_cross_entropy.linear_cross_entropy(p, table, biases, labels, -1, wanted)
    params = [torch.randn(size) for size in (0, 1, 7, 20_001)]
    gradients.clip_(params, 0.1)
    states = [t for p in params for t in (torch.zeros_like(p), torch.zeros_like(p), torch.tensor(1.0))]
    held = adamw.Held(params, states)
    lots = [held.group([p.clone() for p in params], [lr] * len(params), [0.1] * len(params)) for lr in (0.1, 0.2)]
    gates, cores = params[::2], params[1::2]
    means = [(p, torch.zeros_like(p), 0.05) for p in gates]
    terms = adamw.Terms.fitting(0.5, [(p, torch.ones_like(p)) for p in gates], cores, 0.1, means)
    adamw.step(lots, betas=(0.9, 0.99), eps=1e-8)
    adamw.step(lots[:1], betas=(0.9, 0.99), eps=1e-8, terms=terms)


if __name__ == "__main__":
    torch.manual_seed(0)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        call_all()
    print("all kernels ran")
