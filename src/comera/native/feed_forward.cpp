// The feed-forward part of a transformer block between its narrow products, and its gradients (contract/feed_forward.py):
//
//     Y_k = [1; P_k]ᵀ [bias_k; B_k],   h = act(Y_1) or act(Y_1) · Y_2,   Q = A hᵀ
//     dh = Uᵀ A,  dY_1 = act'(Y_1) dh Y_2,  dY_2 = act(Y_1) dh,   ∂A = U h,  [∂bias_k; ∂B_k] = [1; P_k] dY_k,  V_k = B_k dY_kᵀ
//
// The wide Y, h and their gradients exist as tiles of FEATURES x SAMPLES in the caches of a core, with the samples side by
// side as in P, Q, U and V: so no product needs a transposed tile, but for ∂A and ∂B, which take Uᵀ and Pᵀ instead. Threads
// share the samples; gradients of weights are summed for each thread, then over threads in their order.
//
// Rejected: torch's own products over larger pieces, which stay in the caches that the cores share. At these ranks they
// run at half of what the processor can do, and activations, allocation and the joins of threads cost as much again.
#include <omp.h>

#include <algorithm>

#include "products.h"

namespace {

constexpr long FEATURES = 48, SAMPLES = 64;

struct Gelu {
    // y Φ(y) without cancellation on either side of 0
    static Vec value(Vec y) {
        Vec density, beyond;
        normal(y, density, beyond);
        return larger(y, splat(0.0f)) - magnitude(y) * beyond;
    }
    static void slope(Vec y, Vec& h, Vec& dh) {
        Vec density, beyond;
        normal(y, density, beyond);
        const Vec below = y < splat(0.0f) ? beyond : 1.0f - beyond;
        h = y * below;
        dh = below + y * density * 0.39894228f;
    }
};

struct GeluTanh {
    // y/2 (1 + tanh u) = y s with s = 1/(1 + exp(-2u)), u = sqrt(2/pi) (y + 0.044715 y³)
    static Vec gate(Vec y) { return 1.0f / (1.0f + exponential(y * (y * y * 0.044715f + 1.0f) * -1.59576912f)); }
    static Vec value(Vec y) { return y * gate(y); }
    static void slope(Vec y, Vec& h, Vec& dh) {
        const Vec s = gate(y);
        h = y * s;
        dh = s + y * s * (1.0f - s) * (y * y * (3 * 0.044715f) + 1.0f) * 1.59576912f;
    }
};

struct Relu {
    static Vec value(Vec y) { return larger(y, splat(0.0f)); }
    static void slope(Vec y, Vec& h, Vec& dh) {
        h = value(y);
        dh = y > splat(0.0f) ? splat(1.0f) : splat(0.0f);
    }
};

struct Silu {
    static Vec gate(Vec y) { return 1.0f / (1.0f + exponential(-y)); }
    static Vec value(Vec y) { return y * gate(y); }
    static void slope(Vec y, Vec& h, Vec& dh) {
        const Vec s = gate(y);
        h = y * s;
        dh = s + h * (1.0f - s);
    }
};

struct Up {
    long rows, rank;  // of b, and of b without its bias
    const float *p, *b;
    float *v, *db;
};

// Columns [first, first + FEATURES) of (rows, wide) as (rows, FEATURES), filled up with zeros.
void pack_features(const float* from, long rows, long wide, long first, float* to) {
    const long count = std::min(FEATURES, wide - first);
    for (long r = 0; r < rows; ++r, to += FEATURES)
        std::fill_n(std::copy_n(from + r * wide + first, count, to), FEATURES - count, 0.0f);
}

// Likewise (rows, all) as (rows, SAMPLES).
void pack_samples(const float* from, long rows, long all, long first, float* to) {
    const long count = std::min(SAMPLES, all - first);
    for (long r = 0; r < rows; ++r, to += SAMPLES)
        std::fill_n(std::copy_n(from + r * all + first, count, to), SAMPLES - count, 0.0f);
}

// (rows, samples) from tiles (rows, SAMPLES) of each thread, `apart` numbers from one to the next.
void add_up(float* const* sums, int threads, long offset, long apart, long rows, long samples, float* to) {
#pragma omp for schedule(static)
    for (long first = 0; first < samples; first += SAMPLES)
        for (long r = 0; r < rows; ++r)
            for (long j = 0; j < std::min(SAMPLES, samples - first); ++j) {
                const long at = offset + first / SAMPLES * apart + r * SAMPLES + j;
                float sum = sums[0][at];
                for (int t = 1; t < threads; ++t) sum += sums[t][at];
                to[r * samples + first + j] = sum;
            }
}

constexpr int THREADS = 256;
thread_local Scratch own, shared;

template <class Act>
void forward(long samples, long wide, long count, const Up* ups, long rank, const float* a, float* q, int threads) {
    const long tiles = (samples + SAMPLES - 1) / SAMPLES;
    long rows = 0;  // of all P
    for (long k = 0; k < count; ++k) rows += ups[k].rows;
    float* const p_tiles = shared.numbers(tiles * rows * SAMPLES);
    float* sums[THREADS];
#pragma omp parallel num_threads(std::min(threads, THREADS))
    {
        float* const sum = sums[omp_get_thread_num()] =
            own.numbers(tiles * rank * SAMPLES + 2 * FEATURES * SAMPLES + (rank + rows) * FEATURES);
        float* const y[2] = {sum + tiles * rank * SAMPLES, sum + (tiles * rank + FEATURES) * SAMPLES};
        float* const a_block = y[1] + FEATURES * SAMPLES;
        float* const b_block[2] = {a_block + rank * FEATURES, a_block + (rank + ups[0].rows) * FEATURES};
#pragma omp for schedule(static)
        for (long tile = 0; tile < tiles; ++tile) {
            float* to = p_tiles + tile * rows * SAMPLES;
            for (long k = 0; k < count; to += ups[k++].rows * SAMPLES)
                pack_samples(ups[k].p, ups[k].rows, samples, tile * SAMPLES, to);
        }
        bool begun = false;  // this thread's sums
#pragma omp for schedule(static)
        for (long f = 0; f < wide; f += FEATURES) {
            const long m = std::min(FEATURES, wide - f);
            pack_features(a, rank, wide, f, a_block);
            for (long k = 0; k < count; ++k) pack_features(ups[k].b, ups[k].rows, wide, f, b_block[k]);
            for (long tile = 0; tile < tiles; ++tile) {
                const long n = padded(std::min(SAMPLES, samples - tile * SAMPLES), W);
                const float* p = p_tiles + tile * rows * SAMPLES;
                for (long k = 0; k < count; p += ups[k++].rows * SAMPLES)
                    product(m, n, ups[k].rows, {b_block[k], 1, FEATURES}, p, SAMPLES, y[k], SAMPLES, false);
                for (long i = 0; i < m; ++i)
                    for (long j = i * SAMPLES; j < i * SAMPLES + n; j += W) {
                        const Vec h = Act::value(load(y[0] + j));
                        store(y[0] + j, count == 2 ? h * load(y[1] + j) : h);
                    }
                product(rank, n, m, {a_block, FEATURES, 1}, y[0], SAMPLES, sum + tile * rank * SAMPLES, SAMPLES, begun);
            }
            begun = true;
        }
        if (!begun) std::fill_n(sum, tiles * rank * SAMPLES, 0.0f);
#pragma omp barrier
        add_up(sums, omp_get_num_threads(), 0, rank * SAMPLES, rank, samples, q);
    }
}

template <class Act>
void backward(long samples, long wide, long count, const Up* ups, long rank, const float* a, const float* u, float* da,
              int threads) {
    const long tiles = (samples + SAMPLES - 1) / SAMPLES, u_width = padded(rank, W);
    long rows = 0, ranks = 0, widths = 0, p_width[2] = {};  // of all P, of all V, and of all Pᵀ
    for (long k = 0; k < count; ++k) {
        rows += ups[k].rows, ranks += ups[k].rank;
        widths += p_width[k] = padded(ups[k].rows, W);
    }
    // of each tile: U, Uᵀ, then P_k, P_kᵀ
    const long apart = (rank + u_width + rows + widths) * SAMPLES;
    float* const packed = shared.numbers(tiles * apart);
    float* sums[THREADS];
#pragma omp parallel num_threads(std::min(threads, THREADS))
    {
        float* next = own.numbers(tiles * ranks * SAMPLES + 4 * FEATURES * SAMPLES +
                                  (u_width + widths + rank + rows) * FEATURES);
        auto take = [&next](long count) { float* from = next; next += count; return from; };
        float* const sum = sums[omp_get_thread_num()] = take(tiles * ranks * SAMPLES);
        float *const y[2] = {take(FEATURES * SAMPLES), take(FEATURES * SAMPLES)};
        float *const h = take(FEATURES * SAMPLES), *const dh = take(FEATURES * SAMPLES);
        float *const da_block = take(u_width * FEATURES), *db_block[2] = {}, *b_block[2] = {};
        for (long k = 0; k < count; ++k) db_block[k] = take(p_width[k] * FEATURES);
        float* const a_block = take(rank * FEATURES);
        for (long k = 0; k < count; ++k) b_block[k] = take(ups[k].rows * FEATURES);
#pragma omp for schedule(static)
        for (long tile = 0; tile < tiles; ++tile) {
            float* to = packed + tile * apart;
            auto pack = [&](const float* from, long rows, long width) {
                pack_samples(from, rows, samples, tile * SAMPLES, to);
                float* const turned = to + rows * SAMPLES;
                std::fill_n(turned, width * SAMPLES, 0.0f);
                turn(rows, SAMPLES, to, SAMPLES, turned, width);
                to = turned + width * SAMPLES;
            };
            pack(u, rank, u_width);
            for (long k = 0; k < count; ++k) pack(ups[k].p, ups[k].rows, p_width[k]);
        }
        bool begun = false;  // this thread's sums
#pragma omp for schedule(static)
        for (long f = 0; f < wide; f += FEATURES) {
            const long m = std::min(FEATURES, wide - f);
            pack_features(a, rank, wide, f, a_block);
            for (long k = 0; k < count; ++k) pack_features(ups[k].b, ups[k].rows, wide, f, b_block[k]);
            for (long tile = 0; tile < tiles; ++tile) {
                const long n = padded(std::min(SAMPLES, samples - tile * SAMPLES), W);
                const float *const u_tile = packed + tile * apart, *const ut = u_tile + rank * SAMPLES;
                const float *p[2] = {}, *pt[2] = {}, *at = ut + u_width * SAMPLES;
                for (long k = 0; k < count; at = pt[k] + p_width[k] * SAMPLES, ++k) {
                    p[k] = at, pt[k] = at + ups[k].rows * SAMPLES;
                    product(m, n, ups[k].rows, {b_block[k], 1, FEATURES}, p[k], SAMPLES, y[k], SAMPLES, false);
                }
                product(m, n, rank, {a_block, 1, FEATURES}, u_tile, SAMPLES, dh, SAMPLES, false);
                for (long i = 0; i < m; ++i)
                    for (long j = i * SAMPLES; j < i * SAMPLES + n; j += W) {
                        Vec act, slope, grad = load(dh + j);
                        Act::slope(load(y[0] + j), act, slope);
                        if (count == 2) {
                            const Vec gated = load(y[1] + j);
                            store(y[1] + j, grad * act);
                            act *= gated, grad *= gated;
                        }
                        store(h + j, act);
                        store(y[0] + j, grad * slope);
                    }
                // what was filled up is 0 in Uᵀ and Pᵀ
                product(m, u_width, n, {h, SAMPLES, 1}, ut, u_width, da_block, u_width, tile > 0);
                float* v = sum + tile * ranks * SAMPLES;
                for (long k = 0; k < count; v += ups[k++].rank * SAMPLES) {
                    const long bias = ups[k].rows - ups[k].rank;
                    product(m, p_width[k], n, {y[k], SAMPLES, 1}, pt[k], p_width[k], db_block[k], p_width[k], tile > 0);
                    product(ups[k].rank, n, m, {b_block[k] + bias * FEATURES, FEATURES, 1}, y[k], SAMPLES, v, SAMPLES, begun);
                }
            }
            if (tiles == 0) std::fill_n(da_block, (u_width + widths) * FEATURES, 0.0f);
            turn(m, rank, da_block, u_width, da + f, wide);
            for (long k = 0; k < count; ++k) turn(m, ups[k].rows, db_block[k], p_width[k], ups[k].db + f, wide);
            begun = true;
        }
        if (!begun) std::fill_n(sum, tiles * ranks * SAMPLES, 0.0f);
#pragma omp barrier
        long offset = 0;
        for (long k = 0; k < count; offset += ups[k++].rank * SAMPLES)
            add_up(sums, omp_get_num_threads(), offset, ranks * SAMPLES, ups[k].rank, samples, ups[k].v);
    }
}

}  // namespace

extern "C" {

// activation: 0 gelu, 1 gelu_tanh, 2 relu, 3 silu. All tensors float32, rows side by side: p (rows, samples), b (rows, wide),
// a (rank, wide), q (rank, samples).
void feed_forward(int activation, long samples, long wide, long count, const Up* ups, long rank, const float* a, float* q,
                  int threads) {
    const auto run = activation == 0 ? forward<Gelu> : activation == 1 ? forward<GeluTanh> : activation == 2 ? forward<Relu> : forward<Silu>;
    run(samples, wide, count, ups, rank, a, q, threads);
}

// u (rank, samples); da as a, and of each Up: v (its rank, samples), db as b.
void feed_forward_backward(int activation, long samples, long wide, long count, const Up* ups, long rank, const float* a,
                           const float* u, float* da, int threads) {
    const auto run = activation == 0 ? backward<Gelu> : activation == 1 ? backward<GeluTanh> : activation == 2 ? backward<Relu> : backward<Silu>;
    run(samples, wide, count, ups, rank, a, u, da, threads);
}
}
