// Products of small matrices in the caches: c (m, n) = or += a (m, k) b (k, n).
//
// Rows of b and c are contiguous, n elements long, n a multiple of W; a has any strides. Rows of c, and rows or columns of
// a, may also begin anywhere. Some rows of c by some vectors stay in registers, for example six by two: 12 sums, two of which
// the processor can advance per cycle. Each k loads two vectors of b and six single elements of a for them, so the loads
// keep up. With the 32 registers of AVX-512 there are 24 sums, eight rows by three vectors, which load less for each: 5 to
// 30 % faster than six by two at depths of 32 to 96. An element of c is the same to the bit whatever the other rows and
// columns of its product.
#pragma once

#include "streams.h"

struct Matrix {
    const float* at;
    long row, column;  // strides
    float operator()(long i, long k) const { return at[i * row + k * column]; }
    Matrix below(long i) const { return {at + i * row, row, column}; }
};

// Columns, or rows, that begin at the elements `starts` of `at`, in any order; along the other axis they are contiguous.
struct Columns {
    const float* at;
    const long* starts;
    float operator()(long i, long k) const { return at[starts[k] + i]; }
    Columns below(long i) const { return {at + i, starts}; }
};
struct Rows {
    float* at;
    const long* starts;
    float operator()(long i, long k) const { return at[starts[i] + k]; }
    float* row(long i) const { return at + starts[i]; }
    Rows below(long i) const { return {at, starts + i}; }
    static void put(float* to, Vec x) { store(to, x); }
};

template <bool STREAM>
struct RowsApart {
    float* at;
    long stride;
    float* row(long i) const { return at + i * stride; }
    RowsApart below(long i) const { return {at + i * stride, stride}; }
    static void put(float* to, Vec x) { STREAM ? stream(to, x) : store(to, x); }
};
using Strided = RowsApart<false>;
using Streamed = RowsApart<true>;  // of a result that `streams` (streams.h) and is not added to

#if defined(__AVX512F__)
constexpr int SUMS = 24, WIDEST = 3;  // vectors of c in registers, and of them in a row
#else
constexpr int SUMS = 12, WIDEST = 2;
#endif

template <int M, int N, class A, class C, class Next>
__attribute__((always_inline)) static inline void tile(long depth, A a, const float* b, long b_row, C c, long column,
                                                       bool add, Next& next) {
    Vec sum[M][N] = {};
    for (long k = 0; k < depth; ++k) {
        next.line();
        Vec right[N];
#pragma GCC unroll 3
        for (int j = 0; j < N; ++j) right[j] = load(b + k * b_row + j * W);
#pragma GCC unroll 24
        for (int i = 0; i < M; ++i) {
            const Vec left = splat(a(i, k));
#pragma GCC unroll 3
            for (int j = 0; j < N; ++j) sum[i][j] = multiply_add(left, right[j], sum[i][j]);
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 3
        for (int j = 0; j < N; ++j) {
            float* const to = c.row(i) + column + j * W;
            C::put(to, add ? load(to) + sum[i][j] : sum[i][j]);  // added last: sums of short sums lose fewer digits than long ones
        }
}

// All rows of N vectors of c, M at a time.
template <int M, int N, class A, class C, class Next>
__attribute__((noinline)) static void panel(long m, long depth, A a, const float* b, long b_row, C c, long column,
                                            bool add, Next& next) {
    for (; m >= M; m -= M, a = a.below(M), c = c.below(M)) tile<M, N>(depth, a, b + column, b_row, c, column, add, next);
    if constexpr (M > 6) {
        panel<M / 2, N>(m, depth, a, b, b_row, c, column, add, next);
    } else {
        if (m == 1) tile<1, N>(depth, a, b + column, b_row, c, column, add, next);
        if (m == 2) tile<2, N>(depth, a, b + column, b_row, c, column, add, next);
        if (m == 3) tile<3, N>(depth, a, b + column, b_row, c, column, add, next);
        if constexpr (M > 4) {
            if (m == 4) tile<4, N>(depth, a, b + column, b_row, c, column, add, next);
            if (m == 5) tile<5, N>(depth, a, b + column, b_row, c, column, add, next);
        }
    }
}

// next: what is fetched from memory meanwhile (Prefetch).
template <class A, class C, class Next = const NoPrefetch>
static inline void product(long m, long n, long depth, A a, const float* b, long b_row, C c, bool add,
                           Next& next = NO_PREFETCH) {
    for (long j = 0; j < n;) {
        const long left = (n - j) / W;
        if (WIDEST == 3 && left >= 3 && left != 4) {  // four are two and two
            panel<SUMS / 3, 3>(m, depth, a, b, b_row, c, j, add, next), j += 3 * W;
        } else if (left >= 2) {
            panel<SUMS / 2, 2>(m, depth, a, b, b_row, c, j, add, next), j += 2 * W;
        } else {
            panel<SUMS, 1>(m, depth, a, b, b_row, c, j, add, next), j += W;
        }
    }
}

template <class Next = const NoPrefetch>
static inline void product(long m, long n, long depth, Matrix a, const float* b, long b_row, float* c, long c_row,
                           bool add, Next& next = NO_PREFETCH) {
    product(m, n, depth, a, b, b_row, Strided{c, c_row}, add, next);
}

static inline long padded(long n, long to) { return (n + to - 1) / to * to; }

// One step of the transposition of a W x W square: of two rows `apart` rows from each other, the blocks of `apart`
// elements across the diagonal change places.
template <int apart>
static inline void exchange(Vec& a, Vec& b) {
    Vec first, second;
    Int low, high;
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) low[i] = i & apart ? i - apart + W : i, high[i] = i & apart ? i + W : i + apart;
    first = __builtin_shuffle(a, b, low), second = __builtin_shuffle(a, b, high);
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
