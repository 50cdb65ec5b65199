// Products of a batch with the factors of low-rank weights, whose rank is far smaller than their features:
//
//     project           P = x Aᵀ      (samples, rank)      also U = dy Bᵀ
//     expand            y = P B       (samples, features)  also dx = U A
//     factor_gradients  ∂B = Pᵀ dy    (rank, features)     also ∂A = Uᵀ x
//
// All are called by every thread of a parallel region and share their work among them; none ends with a barrier, which
// separates what all threads write from what any of them reads.
// `project` reads the batch in place and A as panels of two vectors of the rank, which all threads share. The other two
// pack groups of features into the calling thread's own memory (`group`), since rows a multiple of 1 or 3 kB apart would
// compete for a few lines of the first cache. Threads divide the samples for `project` and the features for the others:
// little moves between their caches, and no sum depends on how many threads there are.
//
// Rejected: a library's general matrix products, whose packing never pays off for so short a side, and which take as
// many calls, joins of threads and copies as there are products.
#pragma once

#include <algorithm>

#include "products.h"
#include "scratch.h"

namespace {

// A weight y = [1 P] [bias; B], P = x Aᵀ, as nine words from Python. All rows are contiguous but those of p, whose stride
// the caller gives.
struct Weight {
    long rank, rows, features;  // rank of A; rows of b, one more with a bias; features of b
    const float *a, *b;         // A (rank, features of x); B or [bias; B] (rows, features)
    float *p, *y;               // P or [1 P] (samples, rows padded to whole vectors); y, or dy in the backward
    float *da, *db;             // null where not wanted
    long has_bias() const { return rows - rank; }
};

// Blocks that keep operands in the first cache: rank, samples, features and samples of a long sum, features.
constexpr long PANEL = 2 * W, BLOCK = 66, DEPTH = 96, LENGTH = 128, GROUP = 64;

// Floats that transpose_panels writes.
inline long panels_size(long rank, long features) { return padded(features, W) * padded(rank, PANEL); }

// (rank, features) transposed to panels (features, PANEL), padded with zeros to whole vectors both ways.
void transpose_panels(const float* from, long rank, long features, float* to) {
#pragma omp for schedule(static) nowait
    for (long i = 0; i < features; i += W)
        for (long r = 0; r < rank; r += W) {
            const float* const at = from + r * features + i;
            float* const square = to + r / PANEL * PANEL * padded(features, W) + i * PANEL + r % PANEL;
            if (i + W <= features && r + W <= rank) {
                transpose_square(at, features, square, PANEL);
            } else {
                float edge[W * W] = {};
                for (long k = 0; k < std::min<long>(W, rank - r); ++k)
                    std::copy_n(at + k * features, std::min<long>(W, features - i), edge + k * W);
                transpose_square(edge, W, square, PANEL);
            }
        }
}

// `width` columns of (rows, columns) as (rows, SIZE), padded with zeros to whole vectors.
template <long SIZE = GROUP>
inline void pack_group(const float* from, long rows, long columns, long width, float* to) {
    for (long r = 0; r < rows; ++r, from += columns, to += SIZE)
        if (width == SIZE)
            for (long j = 0; j < SIZE; j += W) store(to + j, load(from + j));
        else
            std::fill_n(std::copy_n(from, width, to), padded(width, W) - width, 0.0f);
}

// product() with a packed group b; c has only `width` columns.
template <class Next = const NoPrefetch>
void group_product(long m, long width, long depth, Matrix a, const float* b, float* c, long c_row, bool add,
                   Next& next = NO_PREFETCH) {
    const long whole = width / W * W;
    product(m, whole, depth, a, b, GROUP, Strided{c, c_row}, add, next);
    for (long i = 0; i < m && whole < width; i += 6) {
        float edge[6 * W];
        product(std::min(6l, m - i), W, depth, {a.at + i * a.row, a.row, a.column}, b + whole, GROUP, edge, W, false);
        for (long j = i; j < std::min(i + 6, m); ++j)
            for (long k = whole; k < width; ++k)
                c[j * c_row + k] = edge[(j - i) * W + k - whole] + (add ? c[j * c_row + k] : 0.0f);
    }
}

// Samples that a thread takes at a time, so that all threads get the same number.
inline long block_of(long samples, long threads) {
    const long shares = threads * ((samples + threads * BLOCK - 1) / (threads * BLOCK));
    return padded((samples + shares - 1) / std::max(1l, shares), 6) + (samples == 0);
}

// to (samples, rank padded to whole vectors) = x Aᵀ, A as panels; `row`: row stride of `to`.
void project(long samples, long features, const float* x, const float* panels, long rank, float* to, long row,
             long block) {
#pragma omp for schedule(static) nowait
    for (long s = 0; s < samples; s += block) {
        const long n = std::min(block, samples - s);
        for (long j = s; j < s + n && features == 0; ++j) std::fill_n(to + j * row, padded(rank, W), 0.0f);
        for (long i = 0; i < features; i += DEPTH) {
            const bool last = i + DEPTH >= features;  // of these samples
            const float* const after = last ? x + (s + n) * features : x + s * features + i + DEPTH;
            Prefetch next(after, features, DEPTH, last ? std::min(block, samples - s - n) : n);
            for (long r = 0; r < rank; r += PANEL) {
                const float* const panel = panels + r * padded(features, W) + i * PANEL;
                product(n, std::min(PANEL, padded(rank - r, W)), std::min(DEPTH, features - i),
                        {x + s * features + i, features, 1}, panel, PANEL, to + s * row + r, row, i > 0, next);
            }
        }
    }
}

// The column of ones that multiplies a bias.
void put_ones(long samples, float* to, long row) {
#pragma omp for schedule(static) nowait
    for (long s = 0; s < samples; ++s) to[s * row] = 1.0f;
}

// Floats that project_all writes as panels.
inline long all_panels_size(long features, long count, const Weight* weights) {
    long size = 0;
    for (long k = 0; k < count; ++k) size += panels_size(weights[k].rank, features);
    return size;
}

// Every [1 P_k] of weights that share x (samples, features); p_row: row stride of every p.
void project_all(long samples, long features, const float* x, long count, const Weight* weights, long p_row,
                 float* panels, long block) {
    float* at = panels;
    for (long k = 0; k < count; at += panels_size(weights[k++].rank, features))
        transpose_panels(weights[k].a, weights[k].rank, features, at);
#pragma omp barrier
    at = panels;
    for (long k = 0; k < count; at += panels_size(weights[k++].rank, features)) {
        const Weight& w = weights[k];
        project(samples, features, x, at, w.rank, w.p + w.has_bias(), p_row, block);
        if (w.has_bias()) put_ones(samples, w.p, p_row);
    }
}

// A or B (rows, features).
struct Factor {
    long rows;
    const float* at;
};

// Floats that expand and factor_gradients pack into `group`; depth: all rows of the factors.
inline long group_size(long depth) { return std::max(depth, LENGTH) * GROUP; }

// y (samples, features) = p (samples, all rows) times the factors stacked on each other; `row`: row stride of p.
void expand(long samples, const float* p, long row, const Factor* factors, long count, long features, float* y,
            float* group) {
    long depth = 0, packed = -1;
    for (long k = 0; k < count; ++k) depth += factors[k].rows;
    const long blocks = (samples + BLOCK - 1) / BLOCK, groups = (features + GROUP - 1) / GROUP;
    const bool past_caches = streams(y, samples, features);
#pragma omp for schedule(static) nowait
    for (long task = 0; task < groups * blocks; ++task) {
        const long o = task / blocks * GROUP, s = task % blocks * BLOCK, width = std::min(GROUP, features - o);
        if (packed != o) {
            float* to = group;
            for (long k = 0; k < count; to += factors[k++].rows * GROUP)
                pack_group(factors[k].at + o, factors[k].rows, features, width, to);
            packed = o;
        }
        const long n = std::min(BLOCK, samples - s);
        const Matrix a = {p + s * row, row, 1};
        float* const to = y + s * features + o;
        if (past_caches)
            product(n, width, depth, a, group, GROUP, Streamed{to, features}, false);
        else
            group_product(n, width, depth, a, group, to, features, false);
    }
    if (past_caches) streamed();
}

// The sum of the rows of a packed group; four rows at once, as each addition waits for the one before.
inline void add_rows(const float* from, long rows, Vec* sums) {
    for (long j = 0; j < GROUP / W; ++j) {
        const float* at = from + j * W;
        Vec sum = {};
        long r = rows;
        for (; r >= 4; r -= 4, at += 4 * GROUP)
            sum += (load(at) + load(at + GROUP)) + (load(at + 2 * GROUP) + load(at + 3 * GROUP));
        for (; r > 0; --r, at += GROUP) sum += load(at);
        sums[j] += sum;
    }
}

// to (rank, features) = pᵀ dy for p (samples, rank) with row stride `row`.
struct Gradient {
    long rank;
    const float* p;
    long row;
    float* to;
};

// Gradients from one dy (samples, features); `sum`, if given: that of dy over its samples.
void factor_gradients(long samples, long features, const float* dy, const Gradient* gradients, long count, float* sum,
                      float* group) {
#pragma omp for schedule(static) nowait
    for (long o = 0; o < features; o += GROUP) {
        const long width = std::min(GROUP, features - o);
        Vec sums[GROUP / W] = {};
        for (long s = 0; s < std::max(samples, 1l); s += LENGTH) {
            const long depth = std::min(LENGTH, samples - s);
            pack_group(dy + s * features + o, depth, features, width, group);
            Prefetch next(dy + (s + depth) * features + o, features, width, std::min(LENGTH, samples - s - depth));
            for (long k = 0; k < count; ++k) {
                const Gradient& g = gradients[k];
                group_product(g.rank, width, depth, {g.p + s * g.row, 1, g.row}, group, g.to + o, features, s > 0, next);
            }
            if (sum) add_rows(group, depth, sums);
        }
        if (sum) std::memcpy(sum + o, sums, width * sizeof(float));
    }
}

}  // namespace
