// Products of a batch with the halves of weights, of ranks far smaller than their features (contract/two_sided.py):
//
//     narrow    P = x Aᵀ      (samples, rank)      likewise U = dy Bᵀ
//     wide      y = P B       (samples, features)  likewise dx = U A
//     gradient  ∂B = Pᵀ dy    (rank, features)     likewise ∂A = Uᵀ x
//
// Pieces of parallel regions, which all threads of one call; each ends without waiting for the others. For narrow the
// batch is read where it stands, and A is turned into panels of two vectors of the rank, which all threads read. For
// the other two, groups of features are laid out by the thread that needs them, as rows a multiple of 1 or 3 kB apart
// would fall on the same few lines of the first cache. Threads share samples for narrow, features for the others: so
// little has to go from cache to cache, and no sum depends on how many threads there are.
//
// Rejected: the general products of a library, which spend on their own packing what so short a side never gives back,
// and as many calls, joins of threads and copies as there are products.
#pragma once

#include <algorithm>

#include "products.h"

namespace {

// Numbers at a time so that what meets stays in the first cache: of the rank, samples, of a long sum over features and
// over samples, and features.
constexpr long PANEL = 2 * W, BLOCK = 66, DEPTH = 96, LENGTH = 128, GROUP = 64;

thread_local Scratch group;

// Numbers of memory for share_turned.
inline long turned_size(long rank, long features) { return padded(features, W) * padded(rank, PANEL); }

// (rank, features) turned: panels (features, PANEL) of the rank, filled up with zeros to whole vectors either way.
void share_turned(const float* from, long rank, long features, float* to) {
#pragma omp for schedule(static) nowait
    for (long i = 0; i < features; i += W)
        for (long r = 0; r < rank; r += W) {
            const float* const at = from + r * features + i;
            float* const square = to + r / PANEL * PANEL * padded(features, W) + i * PANEL + r % PANEL;
            if (i + W <= features && r + W <= rank) {
                turn_square(at, features, square, PANEL);
            } else {
                float edge[W * W] = {};
                for (long k = 0; k < std::min<long>(W, rank - r); ++k)
                    std::copy_n(at + k * features, std::min<long>(W, features - i), edge + k * W);
                turn_square(edge, W, square, PANEL);
            }
        }
}

// `width` columns of (rows, columns) as (rows, GROUP), filled up with zeros to whole vectors.
inline void pack_group(const float* from, long rows, long columns, long width, float* to) {
    for (long r = 0; r < rows; ++r, from += columns, to += GROUP)
        if (width == GROUP)
            for (long j = 0; j < GROUP; j += W) store(to + j, load(from + j));
        else
            std::fill_n(std::copy_n(from, width, to), padded(width, W) - width, 0.0f);
}

// product() with a group, of whose columns `width` are c's.
void group_product(long m, long width, long depth, Matrix a, const float* b, float* c, long c_row, bool add) {
    const long whole = width / W * W;
    product(m, whole, depth, a, b, GROUP, c, c_row, add);
    for (long i = 0; i < m && whole < width; i += 6) {
        float edge[6 * W];
        product(std::min(6l, m - i), W, depth, {a.at + i * a.row, a.row, a.column}, b + whole, GROUP, edge, W, false);
        for (long j = i; j < std::min(i + 6, m); ++j)
            for (long k = whole; k < width; ++k)
                c[j * c_row + k] = edge[(j - i) * W + k - whole] + (add ? c[j * c_row + k] : 0.0f);
    }
}

// Samples that a thread takes at a time, so that all have as many.
inline long block_of(long samples, long threads) {
    const long shares = threads * ((samples + threads * BLOCK - 1) / (threads * BLOCK));
    return padded((samples + shares - 1) / std::max(1l, shares), 6) + (samples == 0);
}

// to (samples, rank filled up to whole vectors) = x Aᵀ, A turned; `row` from a row of `to` to the next.
void make_narrow(long samples, long features, const float* x, const float* turned, long rank, float* to, long row,
                 long block) {
#pragma omp for schedule(static) nowait
    for (long s = 0; s < samples; s += block) {
        const long n = std::min(block, samples - s);
        for (long j = s; j < s + n && features == 0; ++j) std::fill_n(to + j * row, padded(rank, W), 0.0f);
        for (long i = 0; i < features; i += DEPTH)
            for (long r = 0; r < rank; r += PANEL) {
                const float* const panel = turned + r * padded(features, W) + i * PANEL;
                product(n, std::min(PANEL, padded(rank - r, W)), std::min(DEPTH, features - i),
                        {x + s * features + i, features, 1}, panel, PANEL, to + s * row + r, row, i > 0);
            }
    }
}

// The ones that a bias meets.
void put_ones(long samples, float* to, long row) {
#pragma omp for schedule(static) nowait
    for (long s = 0; s < samples; ++s) to[s * row] = 1.0f;
}

// (rows, features) of a half.
struct Rows {
    long rows;
    const float* at;
};

// y (samples, features) = narrow (samples, all rows) times the rows of all parts, one below the other.
void make_wide(long samples, const float* narrow, long row, const Rows* parts, long count, long features, float* y) {
    long depth = 0, packed = -1;
    for (long k = 0; k < count; ++k) depth += parts[k].rows;
    float* const panel = group.numbers(depth * GROUP);
    const long blocks = (samples + BLOCK - 1) / BLOCK, groups = (features + GROUP - 1) / GROUP;
#pragma omp for schedule(static) nowait
    for (long task = 0; task < groups * blocks; ++task) {
        const long o = task / blocks * GROUP, s = task % blocks * BLOCK, width = std::min(GROUP, features - o);
        if (packed != o) {
            float* to = panel;
            for (long k = 0; k < count; to += parts[k++].rows * GROUP)
                pack_group(parts[k].at + o, parts[k].rows, features, width, to);
            packed = o;
        }
        group_product(std::min(BLOCK, samples - s), width, depth, {narrow + s * row, row, 1}, panel,
                      y + s * features + o, features, false);
    }
}

// The sum of the rows of a group; of four rows at once, as one addition waits for the other.
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

// to (rank, features) = narrowᵀ wide for a narrow (samples, rank), its rows `row` apart.
struct Gradient {
    long rank;
    const float* narrow;
    long row;
    float* to;
};

// Gradients from the same wide (samples, features); `sum`, where there is one, is that over its samples.
void make_gradients(long samples, long features, const float* wide, const Gradient* parts, long count, float* sum) {
    float* const panel = group.numbers(LENGTH * GROUP);
#pragma omp for schedule(static) nowait
    for (long o = 0; o < features; o += GROUP) {
        const long width = std::min(GROUP, features - o);
        Vec sums[GROUP / W] = {};
        for (long s = 0; s < std::max(samples, 1l); s += LENGTH) {
            const long depth = std::min(LENGTH, samples - s);
            pack_group(wide + s * features + o, depth, features, width, panel);
            for (long k = 0; k < count; ++k)
                group_product(parts[k].rank, width, depth, {parts[k].narrow + s * parts[k].row, 1, parts[k].row}, panel,
                              parts[k].to + o, features, s > 0);
            if (sum) add_rows(panel, depth, sums);
        }
        if (sum) std::memcpy(sum + o, sums, width * sizeof(float));
    }
}

}  // namespace
