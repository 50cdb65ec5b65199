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

// Weights as the tiles take them: for each FEATURES of them a block (rows, FEATURES), filled up with zeros.
void pack_blocks(const float* from, long rows, long wide, float* to) {
#pragma omp for schedule(static)
    for (long first = 0; first < wide; first += FEATURES) {
        const long count = std::min(FEATURES, wide - first);
        float* block = to + first * rows;
        for (long r = 0; r < rows; ++r, block += FEATURES)
            std::fill_n(std::copy_n(from + r * wide + first, count, block), FEATURES - count, 0.0f);
    }
}

// (rows, all) at `first` as (rows, SAMPLES), filled up with zeros.
void pack_samples(const float* from, long rows, long all, long first, float* to) {
    const long count = std::min(SAMPLES, all - first);
    for (long r = 0; r < rows; ++r, to += SAMPLES)
        std::fill_n(std::copy_n(from + r * all + first, count, to), SAMPLES - count, 0.0f);
}

// The sums of all threads, (wide, width) each, as (rows, wide).
void add_up(float* const* sums, int threads, long offset, long width, long rows, long wide, float* to) {
    constexpr long BLOCK = 16;
    float total[BLOCK * W];
#pragma omp for schedule(static)
    for (long first = 0; first < wide; first += BLOCK)
        for (long r = 0; r < rows; r += W) {
            const long count = std::min(BLOCK, wide - first);
            for (long f = 0; f < count; ++f) {
                Vec sum = load(sums[0] + offset + (first + f) * width + r);
                for (int t = 1; t < threads; ++t) sum += load(sums[t] + offset + (first + f) * width + r);
                store(total + f * W, sum);
            }
            turn(count, std::min<long>(W, rows - r), total, W, to + r * wide + first, wide);
        }
}

thread_local Scratch own, shared;

template <class Act>
void forward(long samples, long wide, long count, const Up* ups, long rank, const float* a, float* q, int threads) {
    const long blocks = padded(wide, FEATURES);
    long rows = rank;
    for (long k = 0; k < count; ++k) rows += ups[k].rows;
    float* weights = shared.numbers(rows * blocks);
#pragma omp parallel num_threads(threads)
    {
        float* const a_blocks = weights;
        float* b_blocks[2] = {};
        pack_blocks(a, rank, wide, a_blocks);
        float* next = weights + rank * blocks;
        for (long k = 0; k < count; ++k, next += ups[k - 1].rows * blocks)
            pack_blocks(ups[k].b, ups[k].rows, wide, b_blocks[k] = next);
        float* y[2];
        y[0] = own.numbers((2 * FEATURES + rows) * SAMPLES);
        y[1] = y[0] + FEATURES * SAMPLES;
        float* const q_tile = y[1] + FEATURES * SAMPLES;
        float* const p_tiles = q_tile + rank * SAMPLES;
#pragma omp for schedule(static)
        for (long first = 0; first < samples; first += SAMPLES) {
            const long n = padded(std::min(SAMPLES, samples - first), W);
            float* p[2] = {p_tiles, p_tiles + ups[0].rows * SAMPLES};
            for (long k = 0; k < count; ++k) pack_samples(ups[k].p, ups[k].rows, samples, first, p[k]);
            for (long f = 0; f < wide; f += FEATURES) {
                const long m = std::min(FEATURES, wide - f);
                for (long k = 0; k < count; ++k)
                    product(m, n, ups[k].rows, {b_blocks[k] + f * ups[k].rows, 1, FEATURES}, p[k], SAMPLES, y[k], SAMPLES, false);
                for (long i = 0; i < m; ++i)
                    for (long j = i * SAMPLES; j < i * SAMPLES + n; j += W) {
                        const Vec h = Act::value(load(y[0] + j));
                        store(y[0] + j, count == 2 ? h * load(y[1] + j) : h);
                    }
                product(rank, n, m, {a_blocks + f * rank, FEATURES, 1}, y[0], SAMPLES, q_tile, SAMPLES, f > 0);
            }
            for (long r = 0; r < rank; ++r)
                for (long j = 0; j < std::min(SAMPLES, samples - first); ++j)
                    q[r * samples + first + j] = wide ? q_tile[r * SAMPLES + j] : 0.0f;
        }
    }
}

template <class Act>
void backward(long samples, long wide, long count, const Up* ups, long rank, const float* a, const float* u, float* da,
              int threads) {
    const long blocks = padded(wide, FEATURES), u_width = padded(rank, W);
    long rows = rank, widths = u_width, p_width[2] = {};
    for (long k = 0; k < count; ++k) {
        rows += ups[k].rows;
        widths += p_width[k] = padded(ups[k].rows, W);
    }
    float* weights = shared.numbers(rows * blocks);
    float* sums[256];
#pragma omp parallel num_threads(threads)
    {
        float* const a_blocks = weights;
        float* b_blocks[2] = {};
        pack_blocks(a, rank, wide, a_blocks);
        float* next = weights + rank * blocks;
        for (long k = 0; k < count; ++k, next += ups[k - 1].rows * blocks)
            pack_blocks(ups[k].b, ups[k].rows, wide, b_blocks[k] = next);
        float* sum = sums[omp_get_thread_num()] =
            own.numbers(widths * blocks + (4 * FEATURES + 2 * rows + widths) * SAMPLES);
        float* const da_sum = sum;
        float* const db_sum[2] = {sum + u_width * blocks, sum + (u_width + p_width[0]) * blocks};
        float* at = sum + widths * blocks;
        auto take = [&at](long count) { float* from = at; at += count * SAMPLES; return from; };
        float* const y[2] = {take(FEATURES), take(FEATURES)};
        float *const h = take(FEATURES), *const dh = take(FEATURES), *const u_tile = take(rank), *const ut = take(u_width);
        float *p[2] = {}, *pt[2] = {}, *v[2] = {};
        for (long k = 0; k < count; ++k) p[k] = take(ups[k].rows), pt[k] = take(p_width[k]), v[k] = take(ups[k].rank);
        std::fill_n(ut, u_width * SAMPLES, 0.0f);
        for (long k = 0; k < count; ++k) std::fill_n(pt[k], p_width[k] * SAMPLES, 0.0f);
        bool begun = false;  // this thread's sums
#pragma omp for schedule(static)
        for (long first = 0; first < samples; first += SAMPLES) {
            const long n = padded(std::min(SAMPLES, samples - first), W);
            pack_samples(u, rank, samples, first, u_tile);
            turn(rank, SAMPLES, u_tile, SAMPLES, ut, u_width);
            for (long k = 0; k < count; ++k) {
                pack_samples(ups[k].p, ups[k].rows, samples, first, p[k]);
                turn(ups[k].rows, SAMPLES, p[k], SAMPLES, pt[k], p_width[k]);
            }
            for (long f = 0; f < wide; f += FEATURES) {
                const long m = std::min(FEATURES, wide - f);
                for (long k = 0; k < count; ++k)
                    product(m, n, ups[k].rows, {b_blocks[k] + f * ups[k].rows, 1, FEATURES}, p[k], SAMPLES, y[k], SAMPLES, false);
                product(m, n, rank, {a_blocks + f * rank, 1, FEATURES}, u_tile, SAMPLES, dh, SAMPLES, false);
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
                product(m, u_width, n, {h, SAMPLES, 1}, ut, u_width, da_sum + f * u_width, u_width, begun);
                for (long k = 0; k < count; ++k) {
                    const long bias = ups[k].rows - ups[k].rank;
                    product(m, p_width[k], n, {y[k], SAMPLES, 1}, pt[k], p_width[k], db_sum[k] + f * p_width[k], p_width[k],
                            begun);
                    product(ups[k].rank, n, m, {b_blocks[k] + f * ups[k].rows + bias * FEATURES, FEATURES, 1}, y[k], SAMPLES,
                            v[k], SAMPLES, f > 0);
                }
            }
            for (long k = 0; k < count; ++k)
                for (long r = 0; r < ups[k].rank; ++r)
                    for (long j = 0; j < std::min(SAMPLES, samples - first); ++j)
                        ups[k].v[r * samples + first + j] = wide ? v[k][r * SAMPLES + j] : 0.0f;
            begun = true;
        }
        if (!begun) std::fill_n(sum, widths * blocks, 0.0f);
#pragma omp barrier
        add_up(sums, omp_get_num_threads(), 0, u_width, rank, wide, da);
        long offset = u_width * blocks;
        for (long k = 0; k < count; ++k, offset += p_width[k - 1] * blocks)
            add_up(sums, omp_get_num_threads(), offset, p_width[k], ups[k].rows, wide, ups[k].db);
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
