// Dropout, and the norm of a residual sum after dropout, each direction in one pass over memory (ops/residual_norm.py):
//
//     s = x + f z,   f = 0 where dropped, else `scale`;   without z: s = x;   with rows: xₙ is row rows[n] of a table
//     n = (s - mean) rstd,   y = n weight + bias          LayerNorm: mean, rstd = 1/√(variance + eps) per row
//     n = s rstd,            y = n (offset + weight)      RMSNorm: rstd = 1/√(mean of s² + eps)
//     g = dy (offset + weight),   dx = rstd (g - mean(g) - n mean(g n)) + ds,   dz = f dx        RMSNorm: without mean(g)
//     dweight = Σ dy n,   dbias = Σ dy                    summed by each thread, then over threads in order
//
// f is drawn again wherever it is needed, from a seed and the position of an entry in the whole tensor (random.h): entry e
// belongs to block e / 64, whatever the shape. A row stays in the L1 cache through its passes: one computes s and its sum,
// one the squares about the mean, so that no digits cancel, one y. An RMSNorm sums the squares in the first.
//
// Rejected: masks in memory, a byte to write, keep and read for 0.3 ns of arithmetic; drawing the factors of a whole row
// before its first pass, during which memory idles (a third slower).
#include <algorithm>
#include <cmath>

#include "elementwise.h"
#include "exports.h"
#include "products.h"
#include "random.h"
#include "scratch.h"

namespace {

constexpr long BLOCK = 64;
static_assert(CHUNK % BLOCK == 0);

struct Drop {
    const int64_t* seed;
    uint32_t dropped;  // of 2^16; 0 for no dropout, without a seed
    float scale;
};

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

thread_local Workspace sums_workspace;

struct Gain {  // offset + weight; weight null for a norm without
    const float* weight;
    float offset;
    INLINE Vec times(Vec x, long c, long n) const { return weight ? x * (load(weight + c, n) + offset) : x; }
};

template <bool LAYER>
void forward(long rows, long cols, const float* z, const float* x, const int64_t* row_of, Gain gain, const float* bias,
             Drop drop, float eps, float* y, float* s, float* mean, float* rstd, int threads) {
#pragma omp parallel for schedule(static) num_threads(useful(threads, rows * cols))
    for (long r = 0; r < rows; ++r) {
        const float *const zr = z ? z + r * cols : nullptr, *const xr = x + (row_of ? row_of[r] : r) * cols;
        float *const yr = y + r * cols, *const made = z ? s + r * cols : nullptr;
        const float* const sr = z ? made : xr;
        Sums first;  // of s, or of its squares
        const auto add = [&first](Vec v, int k) INLINE { first.of[k] += LAYER ? v : v * v; };
        if (z)
            over_dropped(drop, r * cols, cols, [=](long c, long n, int k, Vec f) INLINE {
                const Vec v = load(zr + c, n) * f + load(xr + c, n);
                store(made + c, v, n);
                add(v, k);
            });
        else
            over(cols, [=](long c, long n, int k) INLINE { add(load(xr + c, n), k); });
        float center = 0.0f, variance = first.total() / cols;
        if constexpr (LAYER) {
            const float about = variance;
            Sums rest, squares;
            over(cols, [=, &rest, &squares](long c, long n, int k) INLINE {
                const Vec off = load(sr + c, n) - about, v = load((const float*)&off, n);
                rest.of[k] += v;
                squares.of[k] += v * v;
            });
            const float shift = rest.total() / cols;  // what rounding took from the mean
            center = mean[r] = about + shift, variance = squares.total() / cols - shift * shift;
        }
        const float inverse = rstd[r] = 1.0f / std::sqrt(variance + eps);
        over(cols, [=](long c, long n, int) INLINE {
            Vec v = gain.times((load(sr + c, n) - center) * inverse, c, n);
            if (LAYER && bias) v += load(bias + c, n);
            store(yr + c, v, n);
        });
    }
}

template <bool LAYER>
void backward(long rows, long cols, const float* dy, const float* ds, const float* s, const float* mean,
              const float* rstd, Gain gain, Drop drop, float* dx, float* dz, float* dweight, float* dbias,
              int threads) {
    const long width = padded(cols, W);
    const int team = useful(threads, rows * cols);
    Workspace& workspace = sums_workspace;
    workspace.reserve(team, (1 + LAYER) * width);
#pragma omp parallel num_threads(team)
    {
        float *const dw = workspace.own(), *const db = dw + width;
        std::fill_n(dw, (1 + LAYER) * width, 0.0f);
#pragma omp for schedule(static)
        for (long r = 0; r < rows; ++r) {
            const float *const dyr = dy + r * cols, *const sr = s + r * cols, *const dsr = ds ? ds + r * cols : nullptr;
            float *const dxr = dx + r * cols, *const dzr = dz ? dz + r * cols : nullptr;
            const float center = LAYER ? mean[r] : 0.0f, inverse = rstd[r];
            Sums sum, along;
            over(cols, [=, &sum, &along](long c, long n, int k) INLINE {
                const Vec out = load(dyr + c, n), v = (load(sr + c, n) - center) * inverse;
                const Vec g = gain.times(out, c, n);
                ::store(dw + c, ::load(dw + c) + out * v);
                if (LAYER) ::store(db + c, ::load(db + c) + out);
                if (LAYER) sum.of[k] += g;
                along.of[k] += g * v;
            });
            const float base = LAYER ? sum.total() / cols : 0.0f, slope = along.total() / cols;
            over_dropped(drop, r * cols, cols, [=](long c, long n, int, Vec f) INLINE {
                const Vec v = (load(sr + c, n) - center) * inverse, g = gain.times(load(dyr + c, n), c, n);
                Vec dv = (g - base - v * slope) * inverse;
                if (dsr) dv += load(dsr + c, n);
                store(dxr + c, dv, n);
                if (dzr) store(dzr + c, dv * f, n);
            });
        }
        const int count = omp_get_num_threads();
#pragma omp for schedule(static)
        for (long c = 0; c < cols; ++c) {
            float of_weight = 0.0f, of_bias = 0.0f;
            for (int t = 0; t < count; ++t) {
                of_weight += workspace.of(t)[c];
                if (LAYER) of_bias += workspace.of(t)[width + c];
            }
            dweight[c] = of_weight;
            if (LAYER) dbias[c] = of_bias;
        }
    }
}

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

// layer: 1 for a LayerNorm, 0 for an RMSNorm, which has no bias and no mean. z, x, y, s (rows, cols), z null for s = x,
// which is not written; weight, bias (cols) or null; mean, rstd (rows). row_of (rows): those of a table x (given, cols)
// that are added, refused unless all are there; null for x itself.
int residual_norm(int layer, long rows, long cols, const float* z, const float* x, const int64_t* row_of, long given,
                  const float* weight, float offset, const float* bias, const int64_t* seed, int dropped, float scale,
                  float eps, float* y, float* s, float* mean, float* rstd, Threads threads) {
    return status([=] {
        if (row_of && std::any_of(row_of, row_of + rows, [=](int64_t row) { return row < 0 || row >= given; }))
            throw std::invalid_argument("rows");
        const Drop drop = {seed, (uint32_t)dropped, scale};
        (layer ? forward<true> : forward<false>)(rows, cols, z, x, row_of, {weight, offset}, bias, drop, eps, y, s,
                                                 mean, rstd, threads);
    });
}
EXPORT(residual_norm);

// dy, ds, s, dx, dz (rows, cols), ds null where nobody used s, dz null without dropout; dweight, dbias (cols), dbias null
// for an RMSNorm.
int residual_norm_backward(int layer, long rows, long cols, const float* dy, const float* ds, const float* s,
                           const float* mean, const float* rstd, const float* weight, float offset,
                           const int64_t* seed, int dropped, float scale, float* dx, float* dz, float* dweight,
                           float* dbias, Threads threads) {
    return status([=] {
        const Drop drop = {seed, (uint32_t)dropped, scale};
        (layer ? backward<true> : backward<false>)(rows, cols, dy, ds, s, mean, rstd, {weight, offset}, drop, dx, dz,
                                                   dweight, dbias, threads);
    });
}
EXPORT(residual_norm_backward);
}
