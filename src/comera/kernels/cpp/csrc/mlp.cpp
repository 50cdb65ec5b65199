// The feed-forward part of a transformer block, and its gradients, each as one call (contract/feed_forward.py):
//
//     P_k = x A_kᵀ,   Y_k = [1 P_k] [bias_k; B_k],   h = act(Y_1) or act(Y_1) · Y_2,   Q = h Aᵀ,   z = [1 Q] [bias; B]
//     U = dz Bᵀ,  dh = U A,  dY_1 = act'(Y_1) dh Y_2,  dY_2 = act(Y_1) dh,  V_k = dY_k B_kᵀ,  dx = Σ_k V_k A_k,
//     ∂A = Uᵀ h,  [∂bias; ∂B] = [1 Q]ᵀ dz,  ∂A_k = V_kᵀ x,  [∂bias_k; ∂B_k] = [1 P_k]ᵀ dY_k
//
// What x, z and their gradients meet are products as of any layer (two_sided.h).
// The wide Y, h and their gradients exist as tiles of FEATURES x SAMPLES in the caches of a core, with the samples side
// by side, as in the tiles that P and U are turned to: so no other product needs a turned tile. Threads share the wide
// features; sums over these, Q and V, are made for each thread, then over threads in their order.
//
// Rejected: torch's own products over larger pieces, which stay in the caches that the cores share. At these ranks they
// run at half of what the processor can do, and activations, allocation and the joins of threads cost as much again.
#include <omp.h>

#include "low_rank.h"

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

// A weight of x.
struct Up {
    long rank, rows;  // of a; of b, with the bias
    const float *a, *b;
    float *p, *da, *db;  // p: [1 P], or P without a bias
    long biased() const { return rows - rank; }
};

// The weight of h.
struct Down {
    long rank, rows, features;
    const float *a, *b;
    float *q, *z, *da, *db;  // q: [1 Q]; z or dz
    long q_row;
    long biased() const { return rows - rank; }
};

// What both directions are given: x (samples, features), count weights of it, p_row from a row of their P to the next.
struct Problem {
    long samples, features, wide, count, p_row;
    const float* x;
    const Up* ups;
    Down down;
};

// Columns [first, first + FEATURES) of (rows, wide) as (rows, FEATURES), filled up with zeros.
void pack_features(const float* from, long rows, long wide, long first, float* to) {
    const long count = std::min(FEATURES, wide - first);
    for (long r = 0; r < rows; ++r, to += FEATURES)
        std::fill_n(std::copy_n(from + r * wide + first, count, to), FEATURES - count, 0.0f);
}

// (samples, columns), its rows `row` apart, turned: (columns, SAMPLES), filled up with zeros.
void turn_tile(const float* from, long row, long samples, long columns, float* to) {
    if (samples < SAMPLES) std::fill_n(to, columns * SAMPLES, 0.0f);
    turn(samples, columns, from, row, to, SAMPLES);
}

// (samples, rows), `row` apart, from tiles (rows, SAMPLES) of each thread, `apart` numbers from one to the next.
void add_up(float* const* sums, int threads, long offset, long apart, long rows, long samples, float* to, long row) {
#pragma omp for schedule(static)
    for (long first = 0; first < samples; first += SAMPLES)
        for (long r = 0; r < rows; ++r)
            for (long j = 0; j < std::min(SAMPLES, samples - first); ++j) {
                const long at = offset + first / SAMPLES * apart + r * SAMPLES + j;
                float sum = sums[0][at];
                for (int t = 1; t < threads; ++t) sum += sums[t][at];
                to[(first + j) * row + r] = sum;
            }
}

constexpr int THREADS = 256;
thread_local Scratch own, shared;

template <class Act>
void forward(const Problem& problem, int threads) {
    const long samples = problem.samples, features = problem.features, wide = problem.wide, count = problem.count;
    const long p_row = problem.p_row;
    const float* const x = problem.x;
    const Up* const ups = problem.ups;
    const Down& down = problem.down;
    const long tiles = (samples + SAMPLES - 1) / SAMPLES, rank = down.rank;
    const long block = block_of(samples, threads);
    long rows = 0, size = 0;  // of all P, of all A turned
    for (long k = 0; k < count; ++k) rows += ups[k].rows, size += turned_size(ups[k].rank, features);
    float* const p_tiles = shared.numbers(tiles * rows * SAMPLES + size);
    float* const turned = p_tiles + tiles * rows * SAMPLES;
    float* sums[THREADS];
#pragma omp parallel num_threads(std::min(threads, THREADS))
    {
        float* at = turned;
        for (long k = 0; k < count; at += turned_size(ups[k++].rank, features))
            share_turned(ups[k].a, ups[k].rank, features, at);
#pragma omp barrier
        at = turned;
        for (long k = 0; k < count; at += turned_size(ups[k++].rank, features)) {
            make_narrow(samples, features, x, at, ups[k].rank, ups[k].p + ups[k].biased(), p_row, block);
            if (ups[k].biased()) put_ones(samples, ups[k].p, p_row);
        }
#pragma omp barrier
        float* const sum = sums[omp_get_thread_num()] =
            own.numbers(tiles * rank * SAMPLES + 2 * FEATURES * SAMPLES + (rank + rows) * FEATURES);
        float* const y[2] = {sum + tiles * rank * SAMPLES, sum + (tiles * rank + FEATURES) * SAMPLES};
        float* const a_block = y[1] + FEATURES * SAMPLES;
        float* const b_block[2] = {a_block + rank * FEATURES, a_block + (rank + ups[0].rows) * FEATURES};
#pragma omp for schedule(static)
        for (long tile = 0; tile < tiles; ++tile) {
            float* to = p_tiles + tile * rows * SAMPLES;
            const long s = tile * SAMPLES;
            for (long k = 0; k < count; to += ups[k++].rows * SAMPLES)
                turn_tile(ups[k].p + s * p_row, p_row, std::min(SAMPLES, samples - s), ups[k].rows, to);
        }
        bool begun = false;  // this thread's sums
#pragma omp for schedule(static)
        for (long f = 0; f < wide; f += FEATURES) {
            const long m = std::min(FEATURES, wide - f);
            pack_features(down.a, rank, wide, f, a_block);
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
        if (down.biased()) put_ones(samples, down.q, down.q_row);
        add_up(sums, omp_get_num_threads(), 0, rank * SAMPLES, rank, samples, down.q + down.biased(), down.q_row);
        const Rows b = {down.rows, down.b};
        make_wide(samples, down.q, down.q_row, &b, 1, down.features, down.z);
    }
}

template <class Act>
void backward(const Problem& problem, float* dx, int threads) {
    const long samples = problem.samples, features = problem.features, wide = problem.wide, count = problem.count;
    const long p_row = problem.p_row;
    const float* const x = problem.x;
    const Up* const ups = problem.ups;
    const Down& down = problem.down;
    const long tiles = (samples + SAMPLES - 1) / SAMPLES, rank = down.rank, u_width = padded(rank, W);
    const long block = block_of(samples, threads);
    long rows = 0, ranks = 0, widths = 0, p_width[2] = {};  // of all P, of all V, and of all P filled up
    for (long k = 0; k < count; ++k) {
        rows += ups[k].rows, ranks += ups[k].rank;
        widths += p_width[k] = padded(ups[k].rows, W);
    }
    const long apart = (rank + rows) * SAMPLES;  // of each tile: U, then P_k
    const long size = tiles * apart + samples * (u_width + ranks) + turned_size(rank, down.features);
    float* const packed = shared.numbers(size);
    float *const u = packed + tiles * apart, *const v = u + samples * u_width, *const turned = v + samples * ranks;
    float* sums[THREADS];
    Rows as[2];
    Gradient das[2];
    for (long k = 0, r = 0; k < count; r += ups[k++].rank)
        as[k] = {ups[k].rank, ups[k].a}, das[k] = {ups[k].rank, v + r, ranks, ups[k].da};
#pragma omp parallel num_threads(std::min(threads, THREADS))
    {
        const long bias = down.biased();
        share_turned(down.b + bias * down.features, rank, down.features, turned);
#pragma omp barrier
        make_narrow(samples, down.features, down.z, turned, rank, u, u_width, block);
        const Gradient db = {rank, down.q + bias, down.q_row, down.db + bias * down.features};
        make_gradients(samples, down.features, down.z, &db, 1, bias ? down.db : nullptr);
#pragma omp barrier
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
            const long s = tile * SAMPLES, n = std::min(SAMPLES, samples - s);
            turn_tile(u + s * u_width, u_width, n, rank, to);
            to += rank * SAMPLES;
            for (long k = 0; k < count; to += ups[k++].rows * SAMPLES)
                turn_tile(ups[k].p + s * p_row, p_row, n, ups[k].rows, to);
        }
        bool begun = false;  // this thread's sums
#pragma omp for schedule(static)
        for (long f = 0; f < wide; f += FEATURES) {
            const long m = std::min(FEATURES, wide - f);
            pack_features(down.a, rank, wide, f, a_block);
            for (long k = 0; k < count; ++k) pack_features(ups[k].b, ups[k].rows, wide, f, b_block[k]);
            for (long tile = 0; tile < tiles; ++tile) {
                const long s = tile * SAMPLES, some = std::min(SAMPLES, samples - s), n = padded(some, W);
                const float *const u_tile = packed + tile * apart, *p = u_tile + rank * SAMPLES;
                for (long k = 0; k < count; p += ups[k++].rows * SAMPLES)
                    product(m, n, ups[k].rows, {b_block[k], 1, FEATURES}, p, SAMPLES, y[k], SAMPLES, false);
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
                product(m, u_width, some, {h, SAMPLES, 1}, u + s * u_width, u_width, da_block, u_width, tile > 0);
                float* v = sum + tile * ranks * SAMPLES;
                for (long k = 0; k < count; v += ups[k++].rank * SAMPLES) {
                    const long bias = ups[k].biased();
                    product(m, p_width[k], some, {y[k], SAMPLES, 1}, ups[k].p + s * p_row, p_row, db_block[k],
                            p_width[k], tile > 0);
                    product(ups[k].rank, n, m, {b_block[k] + bias * FEATURES, FEATURES, 1}, y[k], SAMPLES, v, SAMPLES,
                            begun);
                }
            }
            if (tiles == 0) std::fill_n(da_block, (u_width + widths) * FEATURES, 0.0f);
            turn(m, rank, da_block, u_width, down.da + f, wide);
            for (long k = 0; k < count; ++k) turn(m, ups[k].rows, db_block[k], p_width[k], ups[k].db + f, wide);
            begun = true;
        }
        if (!begun) std::fill_n(sum, tiles * ranks * SAMPLES, 0.0f);
#pragma omp barrier
        long offset = 0;
        for (long k = 0, r = 0; k < count; offset += ups[k].rank * SAMPLES, r += ups[k++].rank)
            add_up(sums, omp_get_num_threads(), offset, ranks * SAMPLES, ups[k].rank, samples, v + r, ranks);
        if (dx) make_wide(samples, v, ranks, as, count, features, dx);
        make_gradients(samples, features, x, das, count, nullptr);
    }
}

}  // namespace

extern "C" {

// activation: 0 gelu, 1 gelu_tanh, 2 relu, 3 silu. All tensors float32, rows side by side but for P and Q.
void feed_forward(int activation, const Problem* problem, int threads) {
    const auto run = activation == 0   ? forward<Gelu>
                     : activation == 1 ? forward<GeluTanh>
                     : activation == 2 ? forward<Relu>
                                       : forward<Silu>;
    run(*problem, threads);
}

// dx null where it is not wanted.
void feed_forward_backward(int activation, const Problem* problem, float* dx, int threads) {
    const auto run = activation == 0   ? backward<Gelu>
                     : activation == 1 ? backward<GeluTanh>
                     : activation == 2 ? backward<Relu>
                                       : backward<Silu>;
    run(*problem, dx, threads);
}
}
