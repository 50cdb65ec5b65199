// Linear layers with block tensor trains as weights, and their gradients, each as one call (ops/block_product.py):
//
//     h_A = x_A R_A,                y_C = [1 h_AC] [bias_C; L_C]
//     [dh_AC] = dy_C L_Cᵀ,          dx_A = dh_A R_Aᵀ,   ∂R_A = x_Aᵀ dh_A,   [∂bias_C; ∂L_C] = [1 h_AC]ᵀ dy_C
//
// Input block A and output block C have the components of all their pairs (A, C), so h has about as many elements as x or
// y: it exists only as tiles of ROWS samples in the caches of a core, and the backward makes it again. A tile of h is
// transposed: the samples of a component are contiguous, those of an input block in consecutive rows. So an output block
// reads rows in some order, and the permutation between both products moves nothing: it is a table of where rows begin.
// Tiles of x, and of dy in the backward, are transposed for that, R and L packed once a call, L in the order of output
// blocks. Every input block has an odd number of rows, of three cache lines: those of an output block are otherwise
// powers of two apart, and compete for a few lines of the first cache.
//
// Threads divide the samples, as many tiles at a time as there are threads, and then, for ∂R and ∂L from these tiles, the
// blocks. So no sum depends on how many threads there are, and none is made in parts.
//
// Rejected: batched products with h and its permutation in memory (torch), which take two to five times as long; sums of
// gradients for each thread, since their addition takes as long as the products of 50 samples.
#include <algorithm>
#include <vector>

#include "exports.h"
#include "products.h"
#include "scratch.h"

namespace {

constexpr long ROWS = 48;  // samples of a tile: whole pairs of vectors, and whole groups of six and twelve rows

// A weight from Python, all rows contiguous. Blocks may reach beyond the features; what is there is padding.
struct Blocks {
    long in_blocks, out_blocks, in_size, out_size;  // A, C, N, M
    long features, out_features, components;
    const int64_t* ranks;  // (A, C)
    const float *r, *l, *bias;  // (N, K), (K, M), (out_features); bias may be null
};

struct Layout : Blocks {
    long n, m;  // in_size and out_size padded to whole vectors
    long entries, tile_rows;  // rows of packed L; rows of a tile of h
    std::vector<long> first;  // of each input block: its first component
    std::vector<long> row;    // of each input block: its first row in a tile of h
    std::vector<long> entry;  // of each output block: its first row in packed L
    std::vector<long> begin;  // of each row in packed L: the element of a tile of h at which its component begins
    std::vector<long> component;  // of each row in packed L: its component; -1 for a bias

    explicit Layout(const Blocks& blocks) : Blocks(blocks), n(padded(in_size, W)), m(padded(out_size, W)) {
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
                    begin[next[c]] = (row[a] + k - first[a]) * ROWS, component[next[c]] = k;
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

// (samples, columns) with row stride `row`, transposed to (columns, ROWS), padded with zeros.
void transpose_tile(const float* from, long row, long samples, long columns, float* to) {
    if (samples < ROWS) std::fill_n(to, columns * ROWS, 0.0f);
    transpose(samples, columns, from, row, to, ROWS);
}

// `width` columns of (samples, columns) as (samples, to_row), padded with zeros.
void copy_tile(const float* from, long row, long samples, long width, float* to, long to_row) {
    for (long s = 0; s < samples; ++s, from += row, to += to_row) {
        long j = 0;
        for (; j + W <= width; j += W) store(to + j, load(from + j));
        std::fill(std::copy(from + j, from + width, to + j), to + to_row, 0.0f);
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
    long part = ROWS;
    for (long smaller : {ROWS / 2, ROWS / 3, ROWS / 6})
        if (smaller % W == 0 && (samples + part - 1) / part < threads) part = smaller;
    return part;
}

// The tile of h of `samples` rows of x. x_tile: memory of in_size x ROWS.
void project(const Layout& w, const float* r, const float* x, long samples, float* x_tile, float* h) {
    for (long a = 0; a < w.in_blocks; ++a) {
        transpose_tile(x + a * w.in_size, w.features, samples, w.in_width(a), x_tile);
        product(w.rank_of(a), padded(samples, W), w.in_width(a), {r + w.first[a] * w.n, w.n, 1}, x_tile, ROWS,
                h + w.row[a] * ROWS, ROWS, false);
    }
}

// The tile of dh of `samples` rows of dy. dy_tile: memory of out_size x ROWS.
void project_back(const Layout& w, const float* l, const float* dy, long samples, float* dy_tile, float* dh) {
    for (long c = 0; c < w.out_blocks; ++c) {
        const long e = w.entry[c] + w.has_bias();
        transpose_tile(dy + c * w.out_size, w.out_features, samples, w.out_width(c), dy_tile);
        product(w.entry[c + 1] - e, padded(samples, W), w.out_width(c), Matrix{l + e * w.m, w.m, 1}, dy_tile, ROWS,
                Rows{dh, w.begin.data() + e}, false);
    }
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
        const Layout w(*blocks);
        float *const r = shared_scratch.floats(w.packed_size()), *const l = r + w.components * w.n;
        workspace.reserve(threads, (w.tile_rows + w.in_size + w.m) * ROWS);
        const long part = part_of(samples, threads);
#pragma omp parallel num_threads(threads)
        {
            pack(w, r, l);
#pragma omp barrier
            Room room = {workspace.own()};
            float* const h = room.take(w.tile_rows * ROWS);
            float *const x_tile = room.take(w.in_size * ROWS), *const edge = room.take(w.m * ROWS);
            std::fill_n(h, ROWS, 1.0f);
#pragma omp for schedule(static)
            for (long s = 0; s < samples; s += part) {
                const long some = std::min(part, samples - s);
                project(w, r, x + s * w.features, some, x_tile, h);
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
        const Layout w(*blocks);
        const long packed = w.packed_size(), tile = w.tile_rows * ROWS, bias = w.has_bias();
        const long part = part_of(samples, threads), group = std::min<long>(threads, (samples + ROWS - 1) / ROWS) * ROWS;
        float* const r = shared_scratch.floats(2 * packed + 2 * group * w.tile_rows);
        float *const l = r + w.components * w.n, *const r_sum = r + packed, *const l_sum = l + packed;
        float *const h = r_sum + packed, *const dh = h + group * w.tile_rows;  // tiles of a group
        const long n = std::max(w.n, w.m);
        workspace.reserve(threads, n * ROWS);
#pragma omp parallel num_threads(threads)
        {
            pack(w, r, l);
            float* const own = workspace.own();
            if (samples == 0) clear(w, dr, dl, dbias);
#pragma omp for schedule(static)
            for (long t = 0; t < group; t += ROWS) std::fill_n(h + t * w.tile_rows, ROWS, 1.0f);
            for (long first = 0; first < samples; first += group) {
                const long end = std::min(first + group, samples);
#pragma omp for schedule(static)
                for (long s = first; s < end; s += part) {
                    const long some = std::min(part, end - s), at = (s - first) / ROWS * tile + s % ROWS;
                    if (dl || dbias) project(w, r, x + s * w.features, some, own, h + at);
                    if (dx || dr) project_back(w, l, dy + s * w.out_features, some, own, dh + at);
                    for (long a = 0; a < w.in_blocks && dx; ++a)
                        cut_product(some, w.in_width(a), w.n, w.rank_of(a), Matrix{dh + at + w.row[a] * ROWS, 1, ROWS},
                                    r + w.first[a] * w.n, dx + s * w.features + a * w.in_size, w.features, own);
                }
#pragma omp for schedule(static) nowait
                for (long a = 0; a < w.in_blocks; ++a) {
                    float* const sum = r_sum + w.first[a] * w.n;
                    for (long s = first; s < end && dr; s += ROWS) {
                        const long some = std::min(ROWS, end - s);
                        copy_tile(x + s * w.features + a * w.in_size, w.features, some, w.in_width(a), own, w.n);
                        product(w.rank_of(a), w.n, some, {dh + (s - first) / ROWS * tile + w.row[a] * ROWS, ROWS, 1}, own, w.n,
                                sum, w.n, s > 0);
                    }
                    if (end == samples && dr) transpose(w.rank_of(a), w.in_size, sum, w.n, dr + w.first[a], w.components);
                }
#pragma omp for schedule(static)
                for (long c = 0; c < w.out_blocks; ++c) {
                    float* const sum = l_sum + w.entry[c] * w.m;
                    for (long s = first; s < end && (dl || dbias); s += ROWS) {
                        const long some = std::min(ROWS, end - s);
                        copy_tile(dy + s * w.out_features + c * w.out_size, w.out_features, some, w.out_width(c), own, w.m);
                        product(w.entry[c + 1] - w.entry[c], w.m, some,
                                Rows{h + (s - first) / ROWS * tile, w.begin.data() + w.entry[c]}, own, w.m, Strided{sum, w.m}, s > 0);
                    }
                    if (end < samples) continue;
                    if (dbias) std::copy_n(sum, w.out_width(c), dbias + c * w.out_size);
                    for (long e = w.entry[c] + bias; dl && e < w.entry[c + 1]; ++e)
                        std::copy_n(l_sum + e * w.m, w.out_size, dl + w.component[e] * w.out_size);
                }
            }
        }
    });
}
EXPORT(block_product_backward);
}
