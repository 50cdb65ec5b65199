// Cross-entropy of rows of logits z, and its gradient, while a row is in the caches (ops/cross_entropy.py):
//
//     m = max z,   loss = log Σ exp(z - m) + m - z[label],   dz = softmax(z) - onehot(label)
//
// Both are 0 in rows whose label is `ignored`. One pass finds m, one writes the exponentials in place of dz and sums them,
// one scales them: a row of 32,768 logits and its gradient stay in a 512 KB cache meanwhile.
#include <algorithm>
#include <cmath>

#include "exports.h"
#include "vectors.h"

namespace {

constexpr long ENTRIES = 1 << 14;  // fewer are not worth a thread

// body(c, count) for each vector of a row: `count` entries from c on, W of them but at the end.
template <class Body>
__attribute__((always_inline)) inline void over(long cols, Body body) {
    long c = 0;
    for (; c + W <= cols; c += W) body(c, (long)W);
    if (c < cols) body(c, cols - c);
}

// The first `count` of a vector, `rest` beyond.
inline Vec load(const float* from, long count, float rest) {
    if (count == W) return ::load(from);
    Vec x = splat(rest);
    std::memcpy(&x, from, count * sizeof(float));
    return x;
}
inline void store(float* to, Vec x, long count) { std::memcpy(to, &x, count * sizeof(float)); }

float entropy(long cols, const float* z, int64_t label, float* dz) {
    Vec largest = splat(-INFINITY);
    over(cols, [&](long c, long n) __attribute__((always_inline)) { largest = larger(largest, load(z + c, n, -INFINITY)); });
    float most = -INFINITY;
    for (int l = 0; l < W; ++l) most = std::max(most, largest[l]);
    double sum = 0;
    for (long start = 0; start < cols; start += 64 * W) {  // sums of short sums lose fewer digits than long ones
        const long count = std::min(cols - start, (long)(64 * W));
        Vec part{};
        over(count, [&](long c, long n) __attribute__((always_inline)) {
            const Vec e = exponential(load(z + start + c, n, -INFINITY) - most);
            if (n == W) store(dz + start + c, e, W);
            else store(dz + start + c, e, n);
            part += e;
        });
        for (int l = 0; l < W; ++l) sum += part[l];
    }
    const float scale = (float)(1 / sum);
    over(cols, [&](long c, long n) __attribute__((always_inline)) { store(dz + c, load(dz + c, n, 0) * scale, n); });
    dz[label] -= 1;
    return (float)(std::log(sum) + ((double)most - z[label]));
}

}  // namespace

extern "C" {

// logits, gradients (rows, cols); labels (rows), each in [0, cols) or `ignored`; losses (rows).
int cross_entropy(long rows, long cols, const float* logits, const int64_t* labels, long ignored, float* losses,
                  float* gradients, Threads threads) {
#pragma omp parallel for schedule(static) num_threads((int)std::min((long)threads, rows * cols / ENTRIES + 1))
    for (long r = 0; r < rows; ++r) {
        float* const dz = gradients + r * cols;
        if (labels[r] == ignored) {
            std::fill(dz, dz + cols, 0.0f);
            losses[r] = 0;
        } else {
            losses[r] = entropy(cols, logits + r * cols, labels[r], dz);
        }
    }
    return 0;
}
EXPORT(cross_entropy);
}
