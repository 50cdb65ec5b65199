// Linear layers with block tensor trains as weights, and their gradients, each as one call (ops/block_product.py):
//
//     h_A = x_A R_A,                y_C = [1 h_AC] [bias_C; L_C]
//     [dh_AC] = dy_C L_Cᵀ,          dx_A = dh_A R_Aᵀ,   ∂R_A = x_Aᵀ dh_A,   [∂bias_C; ∂L_C] = [1 h_AC]ᵀ dy_C
//
// Input block A and output block C have the components of all their pairs (A, C), so h has about as many elements as x or
// y: it exists only as tiles of some samples in the caches of a core, and the backward makes it again. A tile of h is
// transposed: the samples of a component are contiguous, those of an input block in consecutive rows. So an output block
// reads rows in some order, and the permutation between both products moves nothing: it is a table of where rows begin.
// Tiles of x, and of dy in the backward, are transposed for that, R and L packed once a call, L in the order of output
// blocks. Every input block has an odd number of rows, of a few cache lines: those of an output block are otherwise powers
// of two apart, and compete for a few lines of the first cache.
//
// Threads divide the samples in the forward; in the backward they divide the blocks of a group of tiles.
// So no sum depends on how many threads there are, and a thread's part of R, L and their gradients stays in its caches.
//
// Rejected: batched products with h and its permutation in memory (torch), which take three times as long or more; sums of
// gradients for each thread, which have to be added up; requesting the next block of x or y ahead, no gain.
#include <algorithm>
#include <vector>

#include "exports.h"
#include "products.h"
#include "scratch.h"

namespace {

// Samples of a tile: whole pairs of vectors, and whole groups of six and twelve rows. In the backward the sums of gradients
// cross the second cache for every tile.
constexpr long FORWARD_ROWS = 48, BACKWARD_ROWS = 96;

// Elements of h and dh in a group of tiles, which threads pass to each other in the backward: 8 MB. Each group has two
// barriers, and where other programs want the cores too, one can take 4 ms: with a tile for each thread, 4,096 rows took ten
// times as long there. A single thread takes tile by tile, which stay in its second cache (10 to 30 % less time).
constexpr long GROUP = 1 << 21;

// A weight from Python, all rows contiguous. Blocks may reach beyond the features; what is there is padding.
struct Blocks {
    long in_blocks, out_blocks, in_size, out_size;  // A, C, N, M
    long features, out_features, components;
    const int64_t* ranks;  // (A, C)
    const float *r, *l, *bias;  // (N, K), (K, M), (out_features); bias may be null
};

struct Layout : Blocks {
    long rows;  // samples of a tile
    long n, m;  // in_size and out_size padded to whole vectors
    long entries, tile_rows;  // rows of packed L; rows of a tile of h
    std::vector<long> first;  // of each input block: its first component
    std::vector<long> row;    // of each input block: its first row in a tile of h
    std::vector<long> entry;  // of each output block: its first row in packed L
    std::vector<long> begin;  // of each row in packed L: the element of a tile of h at which its component begins
    std::vector<long> component;  // of each row in packed L: its component; -1 for a bias

    Layout(const Blocks& blocks, long rows) : Blocks(blocks), rows(rows), n(padded(in_size, W)), m(padded(out_size, W)) {
        entries = components + has_bias() * out_blocks;
        tile_rows = 1;  // the ones that meet a bias
        entry.assign(out_blocks + 1, 0);
        for (long a = 0, k = 0; a < in_blocks; ++a) {
            first.push_back(k), row.push_back(tile_rows);
            for (long c = 0; c < out_blocks; ++c) k += ranks[a * out_blocks + c], entry[c + 1] += ranks[a * out_blocks + c];
            tile_rows += (k - first[a]) | 1;
        }
        first.push_back(components);
        for (long c = 0; c < out_blocks; ++c) entry[c + 1] += entry[c] + has_bias();
        begin.assign(entries, 0), component.assign(entries, -1);
        std::vector<long> next(entry.begin(), entry.end() - 1);
        for (long& each : next) each += has_bias();
        for (long a = 0, k = 0; a < in_blocks; ++a)
            for (long c = 0; c < out_blocks; ++c)
                for (long q = 0; q < ranks[a * out_blocks + c]; ++q, ++k, ++next[c])
                    begin[next[c]] = (row[a] + k - first[a]) * rows, component[next[c]] = k;
    }
    long has_bias() const { return bias != nullptr; }
    long in_width(long a) const { return std::clamp(features - a * in_size, 0l, in_size); }
    long out_width(long c) const { return std::clamp(out_features - c * out_size, 0l, out_size); }
    long rank_of(long a) const { return first[a + 1] - first[a]; }
    long packed_size() const { return components * n + entries * m; }
};

// Rᵀ (K, n) and then [bias_C; L_C] of all C (entries, m), padded with zeros.
void pack(const Layout& w, float* r, float* l) {
#pragma omp for schedule(static) nowait
    for (long k = 0; k < w.components; k += 2 * W) {
        const long some = std::min<long>(2 * W, w.components - k);
        for (long j = 0; j < some && w.n > w.in_size; ++j)
            std::fill(r + (k + j) * w.n + w.in_size, r + (k + j + 1) * w.n, 0.0f);
        transpose(w.in_size, some, w.r + k, w.components, r + k * w.n, w.n);
    }
#pragma omp for schedule(static) nowait
    for (long c = 0; c < w.out_blocks; ++c)
        for (long e = w.entry[c]; e < w.entry[c + 1]; ++e) {
            const long k = w.component[e], width = k < 0 ? w.out_width(c) : w.out_size;
            const float* const from = k < 0 ? w.bias + c * w.out_size : w.l + k * w.out_size;
            float* const to = l + e * w.m;
            std::fill(width > 0 ? std::copy_n(from, width, to) : to, to + w.m, 0.0f);
        }
}

// (samples, columns) with row stride `row`, transposed to (columns, rows), padded with zeros to whole vectors.
void transpose_tile(const float* from, long row, long samples, long columns, float* to, long rows) {
    for (long j = 0; j < columns && samples % W; ++j)
        std::fill(to + j * rows + samples, to + j * rows + padded(samples, W), 0.0f);
    transpose(samples, columns, from, row, to, rows);
}

// `width` columns of (samples, columns) as (samples, to_row), padded with zeros.
void copy_tile(const float* from, long row, long samples, long width, float* to, long to_row) {
    for (long s = 0; s < samples; ++s, from += row, to += to_row) {
        long j = 0;
        for (; j + W <= width; j += W) store(to + j, load(from + j));
        std::fill(std::copy(from + j, from + width, to + j), to + to_row, 0.0f);
    }
}

// sum (columns) = or += the sum of the rows of (rows, columns); four rows at once, as each addition waits for the one before.
void add_rows(const float* from, long rows, long columns, float* sum, bool add) {
    for (long j = 0; j < columns; j += W) {
        const float* at = from + j;
        Vec total = {};
        long k = rows;
        for (; k >= 4; k -= 4, at += 4 * columns)
            total += (load(at) + load(at + columns)) + (load(at + 2 * columns) + load(at + 3 * columns));
        for (; k > 0; --k, at += columns) total += load(at);
        store(sum + j, add ? load(sum + j) + total : total);
    }
}

// c (m, width) with row stride c_row = a b; b has rows of n >= width elements.
template <class A>
void cut_product(long m, long width, long n, long depth, A a, const float* b, float* c, long c_row, float* edge) {
    if (width == n) return product(m, n, depth, a, b, n, Strided{c, c_row}, false);
    if (width == 0) return;
    product(m, n, depth, a, b, n, Strided{edge, n}, false);
    for (long i = 0; i < m; ++i) std::copy_n(edge + i * n, width, c + i * c_row);
}

// Samples that a thread takes at a time: a tile, or the part of one that keeps all threads busy. No result depends on it.
long part_of(long samples, long threads) {
    long part = FORWARD_ROWS;
    for (long smaller : {FORWARD_ROWS / 2, FORWARD_ROWS / 3, FORWARD_ROWS / 6})
        if (smaller % W == 0 && (samples + part - 1) / part < threads) part = smaller;
    return part;
}

// The rows of input block a in a tile of h, from `samples` rows of x. x_tile: memory of in_size x rows.
void project(const Layout& w, long a, const float* r, const float* x, long samples, float* x_tile, float* h) {
    transpose_tile(x + a * w.in_size, w.features, samples, w.in_width(a), x_tile, w.rows);
    product(w.rank_of(a), padded(samples, W), w.in_width(a), {r + w.first[a] * w.n, w.n, 1}, x_tile, w.rows,
            h + w.row[a] * w.rows, w.rows, false);
}

// The gradients of no samples.
void clear(const Blocks& w, float* dr, float* dl, float* dbias) {
#pragma omp single
    {
        if (dr) std::fill_n(dr, w.in_size * w.components, 0.0f);
        if (dl) std::fill_n(dl, w.out_size * w.components, 0.0f);
        if (dbias) std::fill_n(dbias, w.out_features, 0.0f);
    }
}

thread_local Scratch shared_scratch;
thread_local Workspace threads_workspace;

}  // namespace

extern "C" {

// x (samples, features) -> y (samples, out_features).
int block_product(long samples, const Blocks* blocks, const float* x, float* y, Threads threads) {
    return status([=, &workspace = threads_workspace] {
        const Layout w(*blocks, FORWARD_ROWS);
        float *const r = shared_scratch.floats(w.packed_size()), *const l = r + w.components * w.n;
        workspace.reserve(threads, (w.tile_rows + w.in_size + w.m) * w.rows);
        const long part = part_of(samples, threads);
#pragma omp parallel num_threads(threads)
        {
            pack(w, r, l);
#pragma omp barrier
            Room room = {workspace.own()};
            float* const h = room.take(w.tile_rows * w.rows);
            float *const x_tile = room.take(w.in_size * w.rows), *const edge = room.take(w.m * w.rows);
            std::fill_n(h, w.rows, 1.0f);
#pragma omp for schedule(static)
            for (long s = 0; s < samples; s += part) {
                const long some = std::min(part, samples - s);
                for (long a = 0; a < w.in_blocks; ++a) project(w, a, r, x + s * w.features, some, x_tile, h);
                for (long c = 0; c < w.out_blocks; ++c) {
                    const long e = w.entry[c];
                    cut_product(some, w.out_width(c), w.m, w.entry[c + 1] - e, Columns{h, w.begin.data() + e}, l + e * w.m,
                                y + s * w.out_features + c * w.out_size, w.out_features, edge);
                }
            }
        }
    });
}
EXPORT(block_product);

// dx, dr, dl and dbias from dy; null where not wanted.
int block_product_backward(long samples, const Blocks* blocks, const float* x, const float* dy, float* dx, float* dr,
                           float* dl, float* dbias, Threads threads) {
    return status([=, &workspace = threads_workspace] {
        const Layout w(*blocks, BACKWARD_ROWS);
        const long packed = w.packed_size(), rows = BACKWARD_ROWS;
        const long most = threads == 1 ? 1 : std::max<long>(threads, GROUP / (2 * rows * w.tile_rows));
        const long group = std::min(most, (samples + rows - 1) / rows) * rows;
        float* const r = shared_scratch.floats(2 * packed + 2 * group * w.tile_rows);
        float *const l = r + w.components * w.n, *const r_sum = r + packed, *const l_sum = l + packed;
        float *const h = r_sum + packed, *const dh = h + group * w.tile_rows;  // tiles of a group
        const long bias = w.has_bias();
        workspace.reserve(threads, rows * (std::max(w.in_size, w.out_size) + std::max(w.n, w.m)));
#pragma omp parallel num_threads(threads)
        {
            pack(w, r, l);
            float *const tile = workspace.own(), *const own = tile + rows * std::max(w.in_size, w.out_size);
            if (samples == 0) clear(w, dr, dl, dbias);
#pragma omp barrier
            for (long first = 0; first < samples; first += group) {
                const long end = std::min(first + group, samples);
                const bool last = end == samples;
#pragma omp for schedule(static)
                for (long a = 0; a < w.in_blocks; ++a)
                    for (long s = first; s < end && dl; s += rows)
                        project(w, a, r, x + s * w.features, std::min(rows, end - s), tile, h + (s - first) * w.tile_rows);
#pragma omp for schedule(static)
                for (long c = 0; c < w.out_blocks; ++c) {
                    const long e = w.entry[c] + bias, count = w.entry[c + 1] - e, width = w.out_width(c);
                    const long* const begin = w.begin.data() + e;
                    float* const sum = l_sum + e * w.m;  // after that of the bias
                    for (long s = first; s < end; s += rows) {
                        const long some = std::min(rows, end - s), at = (s - first) * w.tile_rows;
                        copy_tile(dy + s * w.out_features + c * w.out_size, w.out_features, some, width, own, w.m);
                        if (dbias) add_rows(own, some, w.m, sum - w.m, s > 0);
                        if (dl) product(count, w.m, some, Rows{h + at, begin}, own, w.m, Strided{sum, w.m}, s > 0);
                        if (dx || dr) {
                            transpose_tile(own, w.m, some, width, tile, rows);
                            product(count, padded(some, W), width, Matrix{l + e * w.m, w.m, 1}, tile, rows,
                                    Rows{dh + at, begin}, false);
                        }
                    }
                    if (last && dbias) std::copy_n(sum - w.m, width, dbias + c * w.out_size);
                    for (long k = 0; last && dl && k < count; ++k)
                        std::copy_n(sum + k * w.m, w.out_size, dl + w.component[e + k] * w.out_size);
                }
#pragma omp for schedule(static) nowait  // the next group overwrites h, which nobody reads anymore
                for (long a = 0; a < w.in_blocks; ++a) {
                    const long k = w.first[a], count = w.rank_of(a), width = w.in_width(a);
                    float* const sum = r_sum + k * w.n;
                    for (long s = first; s < end; s += rows) {
                        const long some = std::min(rows, end - s), at = s * w.features + a * w.in_size;
                        const float* const dh_a = dh + (s - first) * w.tile_rows + w.row[a] * rows;
                        if (dx)
                            cut_product(some, width, w.n, count, Matrix{dh_a, 1, rows}, r + k * w.n, dx + at, w.features, own);
                        if (dr) {
                            copy_tile(x + at, w.features, some, width, own, w.n);
                            product(count, w.n, some, {dh_a, rows, 1}, own, w.n, sum, w.n, s > 0);
                        }
                    }
                    if (last && dr) transpose(count, w.in_size, sum, w.n, dr + k, w.components);
                }
            }
        }
    });
}
EXPORT(block_product_backward);
}
