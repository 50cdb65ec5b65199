// Dropout, and the layer norm of a residual sum after dropout, each direction in one pass over memory (ops/dropout.py):
//
//     s = x + f z,   y = (s - mean) rstd · weight + bias,   f = 0 where dropped, else `scale`;   mean, rstd per row
//     n = (s - mean) rstd,   g = dy weight,   dx = rstd (g - mean(g) - n mean(g n)),   dz = f dx
//     dweight = Σ dy n,   dbias = Σ dy       summed by each thread, then over threads in order
//
// f is drawn again wherever it is needed, from a seed and the position of an entry in the whole tensor (random.h): entry e
// belongs to block e / 64, whatever the shape. A row stays in the L1 cache through its passes: one computes s and its sum,
// one the squares about the mean, so that no digits cancel, one y.
//
// Rejected: masks in memory, a byte to write, keep and read for 0.3 ns of arithmetic; drawing the factors of a whole row
// before its first pass, during which memory idles (a third slower).
#include <algorithm>
#include <cmath>

#include "exports.h"
#include "products.h"
#include "random.h"
#include "scratch.h"

namespace {

constexpr long BLOCK = 64, CHUNK = 16 * BLOCK;
constexpr long ENTRIES = 1 << 14;  // fewer are not worth a thread

struct Drop {
    const int64_t* seed;
    uint32_t dropped;  // of 2^16; 0 for no dropout, without a seed
    float scale;
};

// The first `count` of a vector, 0 beyond.
inline Vec load(const float* from, long count) {
    if (count >= W) return ::load(from);
    Vec x{};
    std::memcpy(&x, from, count * sizeof(float));
    return x;
}
inline void store(float* to, Vec x, long count) {
    if (count >= W) return ::store(to, x);
    std::memcpy(to, &x, count * sizeof(float));
}

// body(c, count, k) for each vector of a row: `count` entries from c on, W of them but at the end; k < 4 alternates, for
// sums that do not wait for each other.
template <class Body>
INLINE inline void over(long cols, Body body) {
    long c = 0;
    for (; c + 4 * W <= cols; c += 4 * W)
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) body(c + k * W, (long)W, k);
    for (; c < cols; c += W) body(c, std::min((long)W, cols - c), 0);
}

// The same with dropout's factors, body(c, count, k, f), for the entries from `at` on.
template <class Body>
INLINE inline void over_dropped(Drop drop, long at, long cols, Body body) {
    if (!drop.dropped) return over(cols, [=](long c, long n, int k) INLINE { body(c, n, k, splat(1.0f)); });
    const uint64_t seed = *drop.seed;
    for (long c = 0, end; c < cols; c = end) {
        const long block = (at + c) / BLOCK, before = at + c - block * BLOCK;
        end = std::min(cols, c + BLOCK - before);
        Vec factors[BLOCK / W];
        keep_factors(seed, block, drop.dropped, drop.scale, factors);
        const float* const f = (const float*)factors + before;
        over(end - c, [=](long i, long n, int k) INLINE { body(c + i, n, k, load(f + i, n)); });
    }
}

struct Sums {
    Vec of[4] = {};
    float total() const {
        const Vec all = (of[0] + of[1]) + (of[2] + of[3]);
        float part[W];
        ::store(part, all);
        for (int width = W / 2; width; width /= 2)
            for (int l = 0; l < width; ++l) part[l] += part[l + width];
        return part[0];
    }
};

int useful(int threads, long entries) { return (int)std::min((long)threads, entries / ENTRIES + 1); }

thread_local Workspace sums_workspace;

}  // namespace

extern "C" {

// words (4, 8): those of random.h, for its test.
int random_words(long seed, long block, uint32_t* words) {
    Lanes word[4];
    threefry(seed, block, word);
    std::memcpy(words, word, sizeof word);
    return 0;
}
EXPORT(random_words);

// y = f x, both (count).
int dropout(long count, const float* x, const int64_t* seed, int dropped, float scale, float* y, Threads threads) {
    const Drop drop = {seed, (uint32_t)dropped, scale};
#pragma omp parallel for schedule(static) num_threads(useful(threads, count))
    for (long at = 0; at < count; at += CHUNK) {
        const float* const from = x + at;
        float* const to = y + at;
        over_dropped(drop, at, std::min(CHUNK, count - at), [=](long c, long n, int, Vec f) INLINE {
            store(to + c, load(from + c, n) * f, n);
        });
    }
    return 0;
}
EXPORT(dropout);

// z, x, y, s (rows, cols); weight, bias (cols) or null; mean, rstd (rows).
int residual_norm(long rows, long cols, const float* z, const float* x, const float* weight, const float* bias,
                  const int64_t* seed, int dropped, float scale, float eps, float* y, float* s, float* mean,
                  float* rstd, Threads threads) {
    const Drop drop = {seed, (uint32_t)dropped, scale};
#pragma omp parallel for schedule(static) num_threads(useful(threads, rows * cols))
    for (long r = 0; r < rows; ++r) {
        const float *const zr = z + r * cols, *const xr = x + r * cols;
        float *const sr = s + r * cols, *const yr = y + r * cols;
        Sums sum, rest, squares;
        over_dropped(drop, r * cols, cols, [=, &sum](long c, long n, int k, Vec f) INLINE {
            const Vec v = load(zr + c, n) * f + load(xr + c, n);
            store(sr + c, v, n);
            sum.of[k] += v;
        });
        const float about = sum.total() / cols;
        over(cols, [=, &rest, &squares](long c, long n, int k) INLINE {
            const Vec off = load(sr + c, n) - about, v = load((const float*)&off, n);
            rest.of[k] += v;
            squares.of[k] += v * v;
        });
        const float shift = rest.total() / cols;  // what rounding took from the mean
        const float center = about + shift, variance = squares.total() / cols - shift * shift;
        const float inverse = 1.0f / std::sqrt(variance + eps);
        over(cols, [=](long c, long n, int) INLINE {
            Vec v = (load(sr + c, n) - center) * inverse;
            if (weight) v *= load(weight + c, n);
            if (bias) v += load(bias + c, n);
            store(yr + c, v, n);
        });
        mean[r] = center, rstd[r] = inverse;
    }
    return 0;
}
EXPORT(residual_norm);

// dy, s, dx, dz (rows, cols), dz null without dropout; dweight, dbias (cols).
int residual_norm_backward(long rows, long cols, const float* dy, const float* s, const float* mean, const float* rstd,
                           const float* weight, const int64_t* seed, int dropped, float scale, float* dx, float* dz,
                           float* dweight, float* dbias, Threads threads) {
    return status([=, &workspace = sums_workspace] {
        const Drop drop = {seed, (uint32_t)dropped, scale};
        const long width = padded(cols, W);
        const int team = useful(threads, rows * cols);
        workspace.reserve(team, 2 * width);
#pragma omp parallel num_threads(team)
        {
            float *const dw = workspace.own(), *const db = dw + width;
            std::fill(dw, db + width, 0.0f);
#pragma omp for schedule(static)
            for (long r = 0; r < rows; ++r) {
                const float *const dyr = dy + r * cols, *const sr = s + r * cols;
                float *const dxr = dx + r * cols, *const dzr = dz ? dz + r * cols : nullptr;
                const float center = mean[r], inverse = rstd[r];
                Sums sum, along;
                over(cols, [=, &sum, &along](long c, long n, int k) INLINE {
                    const Vec out = load(dyr + c, n), v = (load(sr + c, n) - center) * inverse;
                    const Vec g = weight ? out * load(weight + c, n) : out;
                    ::store(dw + c, ::load(dw + c) + out * v);
                    ::store(db + c, ::load(db + c) + out);
                    sum.of[k] += g;
                    along.of[k] += g * v;
                });
                const float base = sum.total() / cols, slope = along.total() / cols;
                over_dropped(drop, r * cols, cols, [=](long c, long n, int, Vec f) INLINE {
                    const Vec v = (load(sr + c, n) - center) * inverse;
                    const Vec g = weight ? load(dyr + c, n) * load(weight + c, n) : load(dyr + c, n);
                    const Vec dv = (g - base - v * slope) * inverse;
                    store(dxr + c, dv, n);
                    if (dzr) store(dzr + c, dv * f, n);
                });
            }
            const int count = omp_get_num_threads();
#pragma omp for schedule(static)
            for (long c = 0; c < cols; ++c) {
                float of_weight = 0.0f, of_bias = 0.0f;
                for (int t = 0; t < count; ++t) of_weight += workspace.of(t)[c], of_bias += workspace.of(t)[width + c];
                dweight[c] = of_weight, dbias[c] = of_bias;
            }
        }
    });
}
EXPORT(residual_norm_backward);
}
