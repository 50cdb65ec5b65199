// Linear layers with block tensor trains as weights, and their gradients, each as one call (ops/block_product.py). For every
// weight of an input x, R already multiplied by its gates g, R_A = R̂_A diag(g_A):
//
//     h_A = x_A R_A,                y_C = [1 h_AC] [bias_C; L_C]
//     [dh_AC] = dy_C L_Cᵀ,          dx_A = dh_A R_Aᵀ,   ∂R_A = x_Aᵀ dh_A,   [∂bias_C; ∂L_C] = [1 h_AC]ᵀ dy_C
//     ∂R̂ = ∂R diag(g),              ∂g = the column sums of R̂ ∂R;   dx is the sum over the weights
//
// Input block A and output block C have the components of all their pairs (A, C), so h has about as many elements as x or
// y: it exists only as tiles of some samples in the caches of a core, and the backward makes it again. A tile of h is
// transposed: the samples of a component are contiguous, those of an input block in consecutive rows. So an output block
// reads rows in some order, and the permutation between both products moves nothing: it is a table of where rows begin.
// Tiles of x, and of dy in the backward, are transposed for that, R and L packed once a call, L in the order of output
// blocks. Every input block has an odd number of rows, of a few cache lines: those of an output block are otherwise powers
// of two apart, and compete for a few lines of the first cache.
//
// Threads divide the samples. In the backward each sums its own gradients of R and L, and adds up a part of all at the end:
// they meet twice a call, however many tiles there are, and the bits of ∂R and ∂L depend on the number of threads alone.
//
// Rejected: batched products with h and its permutation in memory (torch), which take three times as long or more; threads
// that divide the blocks in the backward, half as long again on two cores, and many times as long where other programs want
// them too, since h and dh pass from one to the other twice a tile or a group of tiles; keeping h from the forward, 5 to 11 %
// faster where it stays in the caches until the backward and 7 to 18 % slower where it does not, as in a step of any model
// of some layers; tiles of 96 samples, rows first when a tile is transposed, requesting blocks of x and dy ahead all at once
// (a line at a time, as streams.h has it, gains 2 to 7 %), copying those whose rows are a multiple of 2 kB apart: no gain.
#include <algorithm>
#include <stdexcept>
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
    const float *r, *l, *bias, *gates;  // (N, K), (K, M), (out_features), (K); the last two may be null
    float* y;  // (samples, out_features); in the backward dy, which is only read
    float *dr, *dl, *dbias, *dgates;  // null where not wanted; dgates only with dr
};

struct Layout : Blocks {
    long n, m;  // in_size and out_size padded to whole vectors
    long packed;  // where its Rᵀ begins in packed memory
    long entries, tile_rows;  // rows of packed L; rows of a tile of h
    std::vector<long> first;  // of each input block: its first component
    std::vector<long> row;    // of each input block: its first row in a tile of h
    std::vector<long> entry;  // of each output block: its first row in packed L
    std::vector<long> begin;  // of each row in packed L: the element of a tile of h at which its component begins
    std::vector<long> component;  // of each row in packed L: its component; -1 for a bias

    // Throws std::invalid_argument unless the ranks are those of all components.
    Layout(const Blocks& blocks, long packed)
        : Blocks(blocks), n(padded(in_size, W)), m(padded(out_size, W)), packed(packed) {
        entries = components + has_bias() * out_blocks;
        tile_rows = 1;  // the ones that meet a bias
        entry.assign(out_blocks + 1, 0);
        long k = 0;
        for (long a = 0; a < in_blocks; ++a) {
            first.push_back(k), row.push_back(tile_rows);
            for (long c = 0; c < out_blocks; ++c) {
                const long rank = ranks[a * out_blocks + c];
                if (rank < 0 || rank > components - k) throw std::invalid_argument("ranks");
                k += rank, entry[c + 1] += rank;
            }
            tile_rows += (k - first[a]) | 1;
        }
        if (k != components) throw std::invalid_argument("ranks");
        first.push_back(components);
        for (long c = 0; c < out_blocks; ++c) entry[c + 1] += entry[c] + has_bias();
        begin.assign(entries, 0), component.assign(entries, -1);
        std::vector<long> next(entry.begin(), entry.end() - 1);
        for (long& each : next) each += has_bias();
        k = 0;
        for (long a = 0; a < in_blocks; ++a)
            for (long c = 0; c < out_blocks; ++c)
                for (long q = 0; q < ranks[a * out_blocks + c]; ++q, ++k, ++next[c])
                    begin[next[c]] = (row[a] + k - first[a]) * ROWS, component[next[c]] = k;
    }
    long has_bias() const { return bias != nullptr; }
    long in_width(long a) const { return std::clamp(features - a * in_size, 0l, in_size); }
    long out_width(long c) const { return std::clamp(out_features - c * out_size, 0l, out_size); }
    long rank_of(long a) const { return first[a + 1] - first[a]; }
    long packed_l() const { return packed + components * n; }
    long packed_end() const { return packed_l() + entries * m; }
};

// The weights that share x, and the memory of a thread that suits all of them.
struct Layouts : std::vector<Layout> {
    long packed = 0, tile = 0, block = 0;  // floats: all weights packed; a tile of h; a padded block of x or y in a tile

    Layouts(long count, const Blocks* blocks) {
        reserve(count);
        for (long k = 0; k < count; ++k) {
            const Layout& w = emplace_back(blocks[k], packed);
            packed = w.packed_end();
            tile = std::max(tile, w.tile_rows * ROWS), block = std::max({block, w.n * ROWS, w.m * ROWS});
        }
    }
};

// Rᵀ (K, n) and then [bias_C; L_C] of all C (entries, m), padded with zeros.
void pack(const Layout& w, float* to) {
    float *const r = to + w.packed, *const l = to + w.packed_l();
#pragma omp for schedule(static) nowait
    for (long k = 0; k < w.components; k += 2 * W) {
        const long some = std::min<long>(2 * W, w.components - k);
        transpose(w.in_size, some, w.r + k, w.components, r + k * w.n, w.n);
        for (long j = k; j < k + some; ++j) {
            std::fill(r + j * w.n + w.in_size, r + (j + 1) * w.n, 0.0f);
            for (long i = 0; w.gates && i < w.n; i += W)
                store(r + j * w.n + i, load(r + j * w.n + i) * splat(w.gates[j]));
        }
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

// (samples, columns) with row stride `row`, transposed to (columns, ROWS), padded with zeros to whole vectors.
void transpose_tile(const float* from, long row, long samples, long columns, float* to) {
    for (long j = 0; j < columns && samples % W; ++j)
        std::fill(to + j * ROWS + samples, to + j * ROWS + padded(samples, W), 0.0f);
    transpose(samples, columns, from, row, to, ROWS);
}

// A block of x or dy whose rows are whole vectors: the block itself, or a copy padded with zeros where they are not.
struct Padded {
    const float* at;
    long row;

    Padded(const float* from, long row, long samples, long width, long to_row, float* copy) : at(from), row(row) {
        if (width == to_row) return;
        for (long s = 0; s < samples; ++s)
            std::fill(std::copy_n(from + s * row, width, copy + s * to_row), copy + (s + 1) * to_row, 0.0f);
        at = copy, this->row = to_row;
    }
};

// sum (columns) = or += the sum of the rows of a block; four rows at once, as each addition waits for the one before.
void add_rows(Padded from, long rows, long columns, float* sum, bool add) {
    for (long j = 0; j < columns; j += W) {
        const float* at = from.at + j;
        Vec total = {};
        long k = rows;
        for (; k >= 4; k -= 4, at += 4 * from.row)
            total += (load(at) + load(at + from.row)) + (load(at + 2 * from.row) + load(at + 3 * from.row));
        for (; k > 0; --k, at += from.row) total += load(at);
        store(sum + j, add ? load(sum + j) + total : total);
    }
}

// c (m, width) with row stride c_row = or += a b; b has rows of n >= width elements. past_caches: c `streams`, in whole
// lines, and is not added to.
template <class A>
void cut_product(long m, long width, long n, long depth, A a, const float* b, float* c, long c_row, float* edge, bool add,
                 Prefetch& next, bool past_caches) {
    if (width == n && past_caches) return product(m, n, depth, a, b, n, Streamed{c, c_row}, false, next);
    if (width == n) return product(m, n, depth, a, b, n, Strided{c, c_row}, add, next);
    if (width == 0) return;
    product(m, n, depth, a, b, n, Strided{edge, n}, false, next);
    for (; m > 0; --m, edge += n, c += c_row)
        if (add)
            for (long j = 0; j < width; ++j) c[j] += edge[j];
        else
            std::copy_n(edge, width, c);
}

// Whether w is the last of the weights to read its rows of x.
bool is_last(const Layout& w, const Layouts& weights) { return &w == &weights.back(); }

// Samples that a thread takes at a time: a tile, or the part of one that keeps all threads busy. No result depends on it.
long part_of(long samples, long threads) {
    long part = ROWS;
    for (long smaller : {ROWS / 2, ROWS / 3, ROWS / 6})
        if (smaller % W == 0 && (samples + part - 1) / part < threads) part = smaller;
    return part;
}

// A tile of h from `samples` rows of x. block: memory of in_size x ROWS. next: of the rows that follow (streams.h).
void project(const Layout& w, const float* packed, const float* x, long samples, float* block, float* h, Prefetch& next) {
    const float* const r = packed + w.packed;
    for (long a = 0; a < w.in_blocks; ++a) {
        transpose_tile(x + a * w.in_size, w.features, samples, w.in_width(a), block);
        product(w.rank_of(a), padded(samples, W), w.in_width(a), {r + w.first[a] * w.n, w.n, 1}, block, ROWS,
                h + w.row[a] * ROWS, ROWS, false, next);
    }
}

// dh from `samples` rows of dy, if it is wanted, and the sums of ∂L and ∂bias.
void from_outputs(const Layout& w, const float* packed, const float* dy, long samples, float* h, float* dh,
                  float* sums, bool add, float* block, Prefetch& next) {
    for (long c = 0; c < w.out_blocks; ++c) {
        const long e = w.entry[c] + w.has_bias(), count = w.entry[c + 1] - e, width = w.out_width(c);
        const long* const begin = w.begin.data() + e;
        const float* const dy_c = dy + c * w.out_size;
        float* const sum = sums + w.packed_l() + e * w.m;  // after that of the bias
        if (dh) {
            transpose_tile(dy_c, w.out_features, samples, width, block);
            product(count, padded(samples, W), width, Matrix{packed + w.packed_l() + e * w.m, w.m, 1}, block, ROWS,
                    Rows{dh, begin}, false, next);
        }
        const Padded rows(dy_c, w.out_features, samples, width, w.m, block);
        if (w.dbias) add_rows(rows, samples, w.m, sum - w.m, add);
        if (w.dl) product(count, w.m, samples, Rows{h, begin}, rows.at, rows.row, Strided{sum, w.m}, add, next);
    }
}

// dx, if it is wanted, or more of it, and the sums of ∂R, from `samples` rows of x and their dh.
void from_components(const Layout& w, const float* packed, const float* x, long samples, const float* dh, float* dx,
                     bool add_dx, bool past_caches, float* sums, bool add, float* block, Prefetch& next) {
    for (long a = 0; a < w.in_blocks; ++a) {
        const long k = w.packed + w.first[a] * w.n, count = w.rank_of(a), width = w.in_width(a), at = a * w.in_size;
        const float* const dh_a = dh + w.row[a] * ROWS;
        if (w.dr) {
            const Padded rows(x + at, w.features, samples, width, w.n, block);
            product(count, w.n, samples, {dh_a, ROWS, 1}, rows.at, rows.row, sums + k, w.n, add, next);
        }
        if (dx)
            cut_product(samples, width, w.n, count, Matrix{dh_a, 1, ROWS}, packed + k, dx + at, w.features, block, add_dx,
                        next, past_caches);
    }
}

// sum (size) = the sum of the sums of all threads, which lie behind each other.
void add_up(float* sums, long size, long threads) {
#pragma omp for schedule(static)
    for (long j = 0; j < size; j += W) {
        Vec total = load(sums + j);
        for (long t = 1; t < threads; ++t) total += load(sums + t * size + j);
        store(sums + j, total);
    }
}

// ∂R̂ and ∂g of the components from `first` to `end`; dr holds their ∂R.
void through_gates(const Layout& w, long first, long end) {
    const long row = w.components;
    for (; first + W <= end; first += W) {
        Vec sum = {};
        for (long i = first; i < first + w.in_size * row; i += row) {
            const Vec dr = load(w.dr + i);
            sum = multiply_add(load(w.r + i), dr, sum);
            store(w.dr + i, dr * load(w.gates + first));
        }
        if (w.dgates) store(w.dgates + first, sum);
    }
    for (; first < end; ++first) {
        float sum = 0.0f;
        for (long i = first; i < first + w.in_size * row; i += row) sum += w.r[i] * w.dr[i], w.dr[i] *= w.gates[first];
        if (w.dgates) w.dgates[first] = sum;
    }
}

// The gradients from their sums.
void unpack(const Layout& w, const float* sums) {
    const float *const r_sum = sums + w.packed, *const l_sum = sums + w.packed_l();
#pragma omp for schedule(static) nowait
    for (long c = 0; c < w.out_blocks; ++c)
        for (long e = w.entry[c]; e < w.entry[c + 1]; ++e) {
            const long k = w.component[e];
            if (k < 0 && w.dbias) std::copy_n(l_sum + e * w.m, w.out_width(c), w.dbias + c * w.out_size);
            if (k >= 0 && w.dl) std::copy_n(l_sum + e * w.m, w.out_size, w.dl + k * w.out_size);
        }
#pragma omp for schedule(static) nowait
    for (long a = 0; a < w.in_blocks; ++a)
        if (w.dr) {
            transpose(w.rank_of(a), w.in_size, r_sum + w.first[a] * w.n, w.n, w.dr + w.first[a], w.components);
            if (w.gates) through_gates(w, w.first[a], w.first[a + 1]);
        }
}

thread_local Scratch shared_scratch;
thread_local Workspace threads_workspace;

}  // namespace

extern "C" {

// y of all weights from x (samples, features), which they share as well as its blocks.
int block_product(long samples, long count, const Blocks* blocks, const float* x, Threads threads) {
    return status([=, &workspace = threads_workspace] {
        const Layouts weights(count, blocks);
        float* const packed = shared_scratch.floats(weights.packed);
        workspace.reserve(threads, weights.tile + weights.block);
        const long part = part_of(samples, threads);
#pragma omp parallel num_threads(threads)
        {
            for (const Layout& w : weights) pack(w, packed);
#pragma omp barrier
            float *const h = workspace.own(), *const block = h + weights.tile;
            std::fill_n(h, ROWS, 1.0f);
#pragma omp for schedule(static)
            for (long s = 0; s < samples; s += part)
                for (const Layout& w : weights) {
                    const long some = std::min(part, samples - s), left = std::min(part, samples - s - some);
                    const bool past_caches = streams(w.y, samples, w.out_features) && w.out_size % LINE == 0;
                    Prefetch next(x + (s + some) * w.features, w.features, w.features, is_last(w, weights) ? left : 0);
                    project(w, packed, x + s * w.features, some, block, h, next);
                    for (long c = 0; c < w.out_blocks; ++c) {
                        const long e = w.entry[c];
                        cut_product(some, w.out_width(c), w.m, w.entry[c + 1] - e, Columns{h, w.begin.data() + e},
                                    packed + w.packed_l() + e * w.m, w.y + s * w.out_features + c * w.out_size,
                                    w.out_features, block, false, next, past_caches);
                    }
                }
            streamed();
        }
    });
}
EXPORT(block_product);

// dx, if not null, and the gradients of all weights from their dy.
int block_product_backward(long samples, long count, const Blocks* blocks, const float* x, float* dx, Threads threads) {
    return status([=, &workspace = threads_workspace] {
        const Layouts weights(count, blocks);
        const long share = std::max(1l, padded((samples + threads - 1) / threads, W));
        const long used = std::max(1l, (samples + share - 1) / share);  // threads that get any
        float* const packed = shared_scratch.floats((1 + used) * weights.packed);
        float* const sums = packed + weights.packed;
        workspace.reserve(threads, 2 * weights.tile + weights.block);
#pragma omp parallel num_threads(threads)
        {
            for (const Layout& w : weights) pack(w, packed);
#pragma omp barrier
            float *const h = workspace.own(), *const dh = h + weights.tile, *const block = dh + weights.tile;
#pragma omp for schedule(static, 1)
            for (long u = 0; u < used; ++u) {
                float* const own = sums + u * weights.packed;
                const long end = std::min((u + 1) * share, samples);
                if (samples == 0) std::fill_n(own, weights.packed, 0.0f);
                for (long s = u * share; s < end; s += ROWS)
                    for (const Layout& w : weights) {
                        const long some = std::min(ROWS, end - s), at = s * w.features;
                        const float* const dy = w.y + s * w.out_features;
                        const bool add = s > u * share, add_dx = &w != weights.data();
                        const bool past_caches = count == 1 && streams(dx, samples, w.features) && w.in_size % LINE == 0;
                        const long left = std::min(ROWS, end - s - some);
                        Prefetch next_dy(dy + some * w.out_features, w.out_features, w.out_features, left);
                        Prefetch next_x(x + at + some * w.features, w.features, w.features, is_last(w, weights) ? left : 0);
                        if (w.dl) project(w, packed, x + at, some, block, h, next_x);
                        from_outputs(w, packed, dy, some, h, dx || w.dr ? dh : nullptr, own, add, block, next_dy);
                        from_components(w, packed, x + at, some, dh, dx ? dx + at : nullptr, add_dx, past_caches, own, add,
                                        block, next_x);
                    }
            }
            streamed();
            if (used > 1) add_up(sums, weights.packed, used);
            for (const Layout& w : weights) unpack(w, sums);
        }
    });
}
EXPORT(block_product_backward);
}
