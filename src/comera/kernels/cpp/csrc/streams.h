// Tensors larger than the caches, on their way from memory and back: what is read soon is fetched while a core computes, and
// what is not is written past the caches. 4,096 rows of 768 features through weights of rank 30, two cores of an AMD EPYC with
// AVX-512: 1.5 -> 0.9 ms forward, 3.3 -> 2.2 backward, where products alone need 0.9 and 1.8.
#pragma once

#include "vectors.h"

constexpr long LINE = 16;  // floats of a line of the cache
constexpr long STREAMED = 1 << 19;  // from so many floats on a tensor leaves the caches before somebody reads it

// (rows, columns) with row stride `row`, fetched line by line: one line at each step of a product's sums, which is what
// memory keeps up with. All at once, they would wait for each other and the product for them.
class Prefetch {
    const float* at;
    long row, columns, rows, column = 0;

   public:
    Prefetch(const float* at, long row, long columns, long rows) : at(at), row(row), columns(columns), rows(rows) {}

    void line() {
        if (rows <= 0) return;
        __builtin_prefetch(at + column, 0, 2);
        column += LINE;
        if (column >= columns) column = 0, at += row, --rows;
    }
    bool done() const { return rows <= 0; }
};
struct NoPrefetch {
    void line() const {}
};
constexpr NoPrefetch NO_PREFETCH;

// Whether rows of a result (rows, columns) are to be written by `stream`: they are many and whole lines.
static inline bool streams(const float* to, long rows, long columns) {
    const bool whole_lines = columns % LINE == 0 && (uintptr_t)to % (LINE * sizeof(float)) == 0;
    return to != nullptr && W >= 8 && rows * columns >= STREAMED && whole_lines;
}

// store() past the caches, which then need not read the line from memory first; `to` is aligned to whole vectors.
static inline void stream(float* to, Vec x) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, (__m512)x);
#elif defined(__AVX__) && defined(__FMA__)
    _mm256_stream_ps(to, (__m256)x);
#else
    store(to, x);
#endif
}
// After a thread's last stream(): what it wrote is there for all threads before anything that it writes from now on.
static inline void streamed() {
#if defined(__AVX__) && defined(__FMA__)
    _mm_sfence();
#endif
}
