// Rotary position embedding of queries and keys, each direction in one pass over memory (ops/rotary.py). A row has two
// halves x, x' that turn together, and columns beyond them that stay:
//
//     y = x cos - x' sin,   y' = x' cos' + x sin'          backward: dx = dy cos + dy' sin',   dx' = dy' cos' - dy sin
//
// The backward is the same pass with other signs, so nothing is saved but the tables. cos and sin of a position are read
// once for all heads of queries and keys; x and y have any strides, as the layers before and after lay them out.
//
// Rejected: the rotation while the attention kernel packs its operands, which would save this pass, a hundredth of a step,
// but not for keys that go to a cache; tables of half the width, which transformers does not promise to be all there is.
#include <omp.h>

#include <algorithm>

#include "exports.h"
#include "vectors.h"
#include "views.h"

namespace {

constexpr long ENTRIES = 1 << 14;  // fewer are not worth a thread

// Six words from Python. rotated: even, at most width.
struct Sizes {
    long batch, heads, kv_heads, length, width, rotated;
};

// One row, Vec or float at a time from column c on.
template <bool TRANSPOSED, class T>
inline void turn(T x, T other, T cos, T sin, T other_cos, T other_sin, T& y, T& other_y) {
    if constexpr (TRANSPOSED) {
        y = x * cos + other * other_sin;
        other_y = other * other_cos - x * sin;
    } else {
        y = x * cos - other * sin;
        other_y = other * other_cos + x * other_sin;
    }
}

template <bool TRANSPOSED>
void row(const Sizes& sizes, const float* x, const float* cos, const float* sin, float* y) {
    const long half = sizes.rotated / 2, whole = half / W * W;
    for (long c = 0; c < whole; c += W) {
        Vec first, second;
        turn<TRANSPOSED>(load(x + c), load(x + half + c), load(cos + c), load(sin + c), load(cos + half + c),
                         load(sin + half + c), first, second);
        store(y + c, first), store(y + half + c, second);
    }
    for (long c = whole; c < half; ++c)
        turn<TRANSPOSED>(x[c], x[half + c], cos[c], sin[c], cos[half + c], sin[half + c], y[c], y[half + c]);
    std::copy(x + sizes.rotated, x + sizes.width, y + sizes.rotated);
}

template <bool TRANSPOSED>
void rows(const Sizes& sizes, const View* views, int threads) {
    const long entries = sizes.batch * sizes.length * (sizes.heads + sizes.kv_heads) * sizes.width;
    const View &q = views[0], &k = views[1], &cos = views[2], &sin = views[3], &q_out = views[4], &k_out = views[5];
#pragma omp parallel for schedule(static) num_threads((int)std::min((long)threads, entries / ENTRIES + 1))
    for (long unit = 0; unit < sizes.batch * sizes.length; ++unit) {
        const long b = unit / sizes.length, t = unit % sizes.length;
        const float *const c = cos.from(b, 0, t), *const s = sin.from(b, 0, t);
        for (long h = 0; h < sizes.heads; ++h) row<TRANSPOSED>(sizes, q.from(b, h, t), c, s, q_out.from(b, h, t));
        for (long h = 0; h < sizes.kv_heads; ++h) row<TRANSPOSED>(sizes, k.from(b, h, t), c, s, k_out.from(b, h, t));
    }
}

}  // namespace

extern "C" {

// views: q, k, cos, sin, and the results for q and k.
int rotary(const Sizes* sizes, const View* views, int transposed, Threads threads) {
    if (transposed) rows<true>(*sizes, views, threads);
    else rows<false>(*sizes, views, threads);
    return 0;
}
EXPORT(rotary);
}
