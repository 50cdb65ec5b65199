// Rows of a table that is the product of two parts L and R, and the gradients of these (ops/lookup_pairs.py). Of the pair
// (i, k):
//
//     row = L[i] R[k]ᵀ   (X × r)(r × Y)        backward   ∂L[i] += ∂row R[k],   ∂R[k] += ∂rowᵀ L[i]
//
// A row takes some hundred multiplications. What batched matrix products need around them took several times as long:
// the different pairs to be found, operands gathered, results scattered. Here one pass over the pairs does all. Of narrow
// rows, W elements at a time: their sums over the ranks stay vectors to the end, where they are added together, log2 W
// steps for all of them; one by one this took longer than the multiplications. For wide rows R[k] is transposed first, so
// that the elements of a row are contiguous in the products (products.h): 3 times as fast for rows of 16 x 48 from rank 30.
//
// In the backward every thread goes over all pairs and adds to its own rows of ∂L and ∂R alone, in the order of the pairs:
// sums do not depend on the number of threads. Rejected: one ∂L and ∂R a thread, summed in the end, which takes as long as
// the rest where a table is large and a batch small.
//
// R comes from a core (r, K) whose ranks are first, and takes the gates between L and R:
//
//     R[k, q] = core[q, k] g[q]                backward   ∂core[q, k] = ∂R[k, q] g[q],   ∂g[q] = Σ_k ∂R[k, q] core[q, k]
#include <algorithm>
#include <cstdint>
#include <vector>

#include "exports.h"
#include "products.h"
#include "scratch.h"
#include "vectors.h"

namespace {

constexpr long WORK = 1 << 15;  // multiplications; fewer are not worth a thread
constexpr long SHARE = 16;      // consecutive rows that one thread owns: two threads seldom write to one cache line
constexpr long COLUMNS = 256;   // of a core that are transposed at a time

// Six words from Python. left_rows, right_rows: of L (left_rows, x, rank) and R (right_rows, y, rank).
struct Sizes {
    long pairs, left_rows, right_rows, x, y, rank;

    long row() const { return x * y; }
    bool wide() const { return x >= 4 && y % W == 0 && rank >= W; }
    int useful(Threads threads) const { return (int)std::min((long)threads, pairs * row() * rank / WORK + 1); }
};

void check(const Sizes& sizes, const int64_t* i, const int64_t* k) {
    for (long u = 0; u < sizes.pairs; ++u)
        if ((uint64_t)i[u] >= (uint64_t)sizes.left_rows || (uint64_t)k[u] >= (uint64_t)sizes.right_rows)
            throw std::invalid_argument("no such row");
}

// Products whose sum is that of a and b.
INLINE inline Vec products(long count, const float* a, const float* b) {
    Vec sums{};
    long c = 0;
    for (; c + W <= count; c += W) sums = multiply_add(load(a + c), load(b + c), sums);
    if (c < count) sums = multiply_add(load_part(a + c, count - c), load_part(b + c, count - c), sums);
    return sums;
}

// The sum of each of W vectors, in the lane of its number.
template <int apart>
INLINE inline Vec totals(Vec* x) {
#pragma GCC unroll 16
    for (int j = 0; j < apart; ++j) {
        exchange<apart>(x[j], x[j + apart]);
        x[j] += x[j + apart];
    }
    if constexpr (apart > 1) return totals<apart / 2>(x);
    return x[0];
}

void write_row(const Sizes& sizes, const float* left, const float* right, float* row) {
    long x = 0, y = 0;
    for (long first = 0; first < sizes.row(); first += W) {
        const long count = std::min((long)W, sizes.row() - first);
        Vec sums[W] = {};
        for (long j = 0; j < count; ++j) {
            sums[j] = products(sizes.rank, left + x * sizes.rank, right + y * sizes.rank);
            if (++y == sizes.y) ++x, y = 0;
        }
        const Vec elements = totals<W / 2>(sums);
        if (count == W) store(row + first, elements);
        else store_part(row + first, elements, count);
    }
}

// transposed: room for R[k]ᵀ (rank, y).
void write_wide_row(const Sizes& sizes, const float* left, const float* right, float* transposed, float* row) {
    transpose(sizes.y, sizes.rank, right, sizes.rank, transposed, sizes.y);
    product(sizes.x, sizes.y, sizes.rank, {left, sizes.rank, 1}, transposed, sizes.y, row, sizes.y, false);
}

thread_local Workspace threads_workspace;

// One vector, or the first `count` of one, of M rows of ∂ (m, ·) += d (m, n) b (n, ·): rows of ∂ and b are `rank` apart.
template <int M, bool PART>
INLINE inline void add_rows(long n, long rank, long count, const float* d, long row, long column, const float* b,
                            float* gradient) {
    Vec sums[M];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) sums[i] = PART ? load_part(gradient + i * rank, count) : load(gradient + i * rank);
    for (long j = 0; j < n; ++j) {
        const Vec right = PART ? load_part(b + j * rank, count) : load(b + j * rank);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) sums[i] = multiply_add(splat(d[i * row + j * column]), right, sums[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
        if (PART) store_part(gradient + i * rank, sums[i], count);
        else store(gradient + i * rank, sums[i]);
    }
}

// The same of all m rows, eight sums at a time: each must wait for the last product that it took, so fewer leave the
// processor idle.
template <bool PART>
inline void add_column(long m, long n, long rank, long count, const float* d, long row, long column, const float* b,
                       float* gradient) {
    long i = 0;
    for (; i + 8 <= m; i += 8) add_rows<8, PART>(n, rank, count, d + i * row, row, column, b, gradient + i * rank);
    for (; i + 4 <= m; i += 4) add_rows<4, PART>(n, rank, count, d + i * row, row, column, b, gradient + i * rank);
    for (; i < m; ++i) add_rows<1, PART>(n, rank, count, d + i * row, row, column, b, gradient + i * rank);
}

void add_product(long m, long n, long rank, const float* d, long row, long column, const float* b, float* gradient) {
    long c = 0;
    for (; c + W <= rank; c += W) add_column<false>(m, n, rank, W, d, row, column, b + c, gradient + c);
    if (c < rank) add_column<true>(m, n, rank, rank - c, d, row, column, b + c, gradient + c);
}

// Zeros in the rows, `size` long, that a share of the threads owns.
void clear(long rows, long size, int share, int shares, float* to) {
    for (long first = share * SHARE; first < rows; first += shares * SHARE)
        std::fill_n(to + first * size, std::min(SHARE, rows - first) * size, 0.0f);
}

// x[c] *= by(c, n) for n elements from c on, vector by vector.
template <class By>
INLINE inline void scale(long count, float* x, By by) {
    long c = 0;
    for (; c + W <= count; c += W) store(x + c, load(x + c) * by(c, W));
    if (c < count) store_part(x + c, load_part(x + c, count - c) * by(c, count - c), count - c);
}

}  // namespace

extern "C" {

// left, right: L and R. i, k: the row of each pair there. rows (pairs, x, y).
int pair_rows(const Sizes* given, const float* left, const float* right, const int64_t* i, const int64_t* k, float* rows,
              Threads threads) {
    return status([=] {
        const Sizes sizes = *given;
        check(sizes, i, k);
        const int useful = sizes.useful(threads);
        Workspace& workspace = threads_workspace;
        if (sizes.wide()) workspace.reserve(useful, sizes.rank * sizes.y);
#pragma omp parallel for schedule(static) num_threads(useful)
        for (long u = 0; u < sizes.pairs; ++u) {
            const float *const l = left + i[u] * sizes.x * sizes.rank, *const r = right + k[u] * sizes.y * sizes.rank;
            float* const row = rows + u * sizes.row();
            if (sizes.wide()) write_wide_row(sizes, l, r, workspace.own(), row);
            else write_row(sizes, l, r, row);
        }
    });
}
EXPORT(pair_rows);

// drows (pairs, x, y) of rows; dleft, dright: of L and R, all of which is written.
int pair_rows_backward(const Sizes* given, const float* drows, const float* left, const float* right, const int64_t* i,
                       const int64_t* k, float* dleft, float* dright, Threads threads) {
    return status([=] {
        const Sizes sizes = *given;
        check(sizes, i, k);
        const int shares = sizes.useful(threads);
#pragma omp parallel for schedule(static) num_threads(shares)
        for (int share = 0; share < shares; ++share) {
            clear(sizes.left_rows, sizes.x * sizes.rank, share, shares, dleft);
            clear(sizes.right_rows, sizes.y * sizes.rank, share, shares, dright);
            for (long u = 0; u < sizes.pairs; ++u) {
                const long l = i[u] * sizes.x * sizes.rank, r = k[u] * sizes.y * sizes.rank;
                const float* const d = drows + u * sizes.row();
                if (i[u] / SHARE % shares == share)
                    add_product(sizes.x, sizes.y, sizes.rank, d, sizes.y, 1, right + r, dleft + l);
                if (k[u] / SHARE % shares == share)
                    add_product(sizes.y, sizes.x, sizes.rank, d, 1, sizes.y, left + l, dright + r);
            }
        }
    });
}
EXPORT(pair_rows_backward);

// right (columns, rank) of core (rank, columns) and gates (rank), or null for gates of one.
int rank_last(long rank, long columns, const float* core, const float* gates, float* right, Threads threads) {
    return status([=] {
#pragma omp parallel for schedule(static) num_threads((int)std::min((long)threads, rank * columns / WORK + 1))
        for (long first = 0; first < columns; first += COLUMNS) {
            const long count = std::min(COLUMNS, columns - first);
            float* const rows = right + first * rank;
            transpose(rank, count, core + first, columns, rows, rank);
            for (long k = 0; gates && k < count; ++k)
                scale(rank, rows + k * rank, [=](long q, long n) { return n == W ? load(gates + q) : load_part(gates + q, n); });
        }
    });
}
EXPORT(rank_last);

// Gradients dcore (rank, columns) and dgates (rank) from dright (columns, rank); dgates is null where gates are.
int rank_last_backward(long rank, long columns, const float* dright, const float* core, const float* gates, float* dcore,
                       float* dgates, Threads threads) {
    return status([=] {
        const long tiles = (columns + COLUMNS - 1) / COLUMNS;
        std::vector<float> sums(gates ? tiles * rank : 0);  // of each tile, added in their order
#pragma omp parallel for schedule(static) num_threads((int)std::min((long)threads, rank * columns / WORK + 1))
        for (long tile = 0; tile < tiles; ++tile) {
            const long first = tile * COLUMNS, count = std::min(COLUMNS, columns - first);
            transpose(count, rank, dright + first * rank, rank, dcore + first, columns);
            for (long q = 0; gates && q < rank; ++q) {
                float* const d = dcore + q * columns + first;
                const Vec parts = products(count, d, core + q * columns + first);
                float sum = 0;
                for (int j = 0; j < W; ++j) sum += parts[j];
                sums[tile * rank + q] = sum;
                const Vec gate = splat(gates[q]);
                scale(count, d, [=](long, long) { return gate; });
            }
        }
        for (long q = 0; gates && q < rank; ++q) {
            dgates[q] = 0;
            for (long tile = 0; tile < tiles; ++tile) dgates[q] += sums[tile * rank + q];
        }
    });
}
EXPORT(rank_last_backward);
}
