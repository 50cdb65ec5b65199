// Passes over tensors of any length, entry by entry.
#pragma once

#include <algorithm>

#include "vectors.h"

constexpr long ENTRIES = 1 << 14;  // fewer are not worth a thread
constexpr long CHUNK = 1024;       // of a pass that has no rows

static inline int useful(int threads, long entries) { return (int)std::min((long)threads, entries / ENTRIES + 1); }

// The first `count` of a vector, 0 beyond.
static inline Vec load(const float* from, long count) {
    if (count >= W) return load(from);
    Vec x{};
    std::memcpy(&x, from, count * sizeof(float));
    return x;
}
static inline void store(float* to, Vec x, long count) {
    if (count >= W) return store(to, x);
    std::memcpy(to, &x, count * sizeof(float));
}

// body(c, count, k) for each vector of a row: `count` entries from c on, W of them but at the end; k < 4 alternates, for
// sums that do not wait for each other.
template <class Body>
INLINE static inline void over(long cols, Body body) {
    long c = 0;
    for (; c + 4 * W <= cols; c += 4 * W)
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) body(c + k * W, (long)W, k);
    for (; c < cols; c += W) body(c, std::min((long)W, cols - c), 0);
}
