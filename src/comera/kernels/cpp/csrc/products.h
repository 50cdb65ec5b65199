// Products of small matrices in the caches: c (m, n) = or += a (m, k) b (k, n).
//
// Rows of b and c are contiguous, n elements long, n a multiple of W; a has any strides. Six rows of c by two vectors stay
// in registers: 12 sums, two of which the processor can advance per cycle. Each k loads two vectors of b and six single
// elements of a, so the loads keep up.
#pragma once

#include "vectors.h"

struct Matrix {
    const float* at;
    long row, column;  // strides
};

template <int M, int N>
__attribute__((always_inline)) static inline void tile(long depth, Matrix a, const float* b, long b_row, float* c, long c_row, bool add) {
    Vec sum[M][N] = {};
    for (long k = 0; k < depth; ++k) {
        Vec right[N];
#pragma GCC unroll 2
        for (int j = 0; j < N; ++j) right[j] = load(b + k * b_row + j * W);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
            const Vec left = splat(a.at[i * a.row + k * a.column]);
#pragma GCC unroll 2
            for (int j = 0; j < N; ++j) sum[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < N; ++j) {
            float* const to = c + i * c_row + j * W;
            store(to, add ? load(to) + sum[i][j] : sum[i][j]);  // added last: sums of short sums lose fewer digits than long ones
        }
}

template <int M>
__attribute__((noinline)) static void rows(long n, long depth, Matrix a, const float* b, long b_row, float* c, long c_row, bool add) {
    long j = 0;
    for (; j + 2 * W <= n; j += 2 * W) tile<M, 2>(depth, a, b + j, b_row, c + j, c_row, add);
    for (; j < n; j += W) tile<M, 1>(depth, a, b + j, b_row, c + j, c_row, add);
}

static inline void product(long m, long n, long depth, Matrix a, const float* b, long b_row, float* c, long c_row,
                           bool add) {
    for (; m >= 6; m -= 6, a.at += 6 * a.row, c += 6 * c_row) rows<6>(n, depth, a, b, b_row, c, c_row, add);
    switch (m) {
        case 5: rows<5>(n, depth, a, b, b_row, c, c_row, add); break;
        case 4: rows<4>(n, depth, a, b, b_row, c, c_row, add); break;
        case 3: rows<3>(n, depth, a, b, b_row, c, c_row, add); break;
        case 2: rows<2>(n, depth, a, b, b_row, c, c_row, add); break;
        case 1: rows<1>(n, depth, a, b, b_row, c, c_row, add); break;
    }
}

static inline long padded(long n, long to) { return (n + to - 1) / to * to; }

// One step of the transposition of a W x W square: of two rows `apart` rows from each other, the blocks of `apart`
// elements across the diagonal change places.
template <int apart>
static inline void exchange(Vec& a, Vec& b) {
    Vec first, second;
#ifdef __clang__
    for (int i = 0; i < W; ++i) first[i] = i & apart ? b[i - apart] : a[i], second[i] = i & apart ? b[i] : a[i + apart];
#else
    Int low, high;
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) low[i] = i & apart ? i - apart + W : i, high[i] = i & apart ? i + W : i + apart;
    first = __builtin_shuffle(a, b, low), second = __builtin_shuffle(a, b, high);
#endif
    a = first, b = second;
}

template <int apart>
__attribute__((always_inline)) static inline void exchange_all(Vec* x) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
        if (!(i & apart)) exchange<apart>(x[i], x[i + apart]);
    if constexpr (apart > 1) exchange_all<apart / 2>(x);
}

__attribute__((always_inline)) static inline void transpose_square(const float* from, long from_row, float* to,
                                                                   long to_row) {
    Vec x[W];
#pragma GCC unroll 16
    for (int k = 0; k < W; ++k) x[k] = load(from + k * from_row);
    exchange_all<W / 2>(x);
#pragma GCC unroll 16
    for (int k = 0; k < W; ++k) store(to + k * to_row, x[k]);
}

// (rows, columns) with row stride `from_row`, transposed to (columns, rows) with row stride `to_row`: in W x W squares
// along the longer side, the last of which overlap those before them.
static inline void transpose(long rows, long columns, const float* from, long from_row, float* to, long to_row) {
    if (rows < W || columns < W) {
        for (long j = 0; j < columns; ++j)
            for (long i = 0; i < rows; ++i) to[j * to_row + i] = from[i * from_row + j];
        return;
    }
    const bool across = columns > rows;
    const long outer = across ? rows : columns, inner = across ? columns : rows;
    for (long p = 0; p < outer; p += W)
        for (long q = 0; q < inner; q += W) {
            const long u = p + W < outer ? p : outer - W, v = q + W < inner ? q : inner - W;
            const long i = across ? u : v, j = across ? v : u;
            transpose_square(from + i * from_row + j, from_row, to + j * to_row + i, to_row);
        }
}
