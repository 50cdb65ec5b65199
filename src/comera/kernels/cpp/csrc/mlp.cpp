// The MLP of a transformer block with low-rank weights, and its gradients, each as one call (ops/mlp.py):
//
//     P_k = x A_kᵀ,   Y_k = [1 P_k] [bias_k; B_k],   h = act(Y_1) or act(Y_1) · Y_2,   Q = h Aᵀ,   z = [1 Q] [bias; B]
//     U = dz Bᵀ,  dh = U A,  dY_1 = act'(Y_1) dh Y_2,  dY_2 = act(Y_1) dh,  V_k = dY_k B_kᵀ,  dx = Σ_k V_k A_k,
//     ∂A = Uᵀ h,  [∂bias; ∂B] = [1 Q]ᵀ dz,  ∂A_k = V_kᵀ x,  [∂bias_k; ∂B_k] = [1 P_k]ᵀ dY_k
//
// The products with x, z and their gradients are those of any layer (low_rank.h). The hidden Y, h and their gradients
// exist only as tiles of FEATURES x SAMPLES in the caches of a core. In a tile the samples of a feature are contiguous,
// as in the tiles that P and U are transposed to, so no other product needs a transposed tile. Threads divide the hidden
// features; each makes its own sums over them, Q and V, which are then added in the order of the threads.
//
// Rejected: torch's own products over larger chunks, which stay in the caches that the cores share. At these ranks they
// run at half of the processor's speed, and activations, allocation and joins of threads cost as much again.
#include "activations.h"
#include "exports.h"
#include "low_rank.h"
#include "sample_tiles.h"

namespace {

constexpr long FEATURES = 48, SAMPLES = 64;

thread_local Scratch shared_scratch;
thread_local Workspace threads_workspace;  // a thread's memory begins with its sums

// ups: `count` weights from x (samples, features) to the hidden features, then that to z, whose p is Q and whose y is z;
// p_row, q_row: row strides of P and Q.
template <class Act>
void forward(long samples, long features, const float* x, long count, const Weight* ups, long p_row, long q_row,
             int threads) {
    const Weight& down = ups[count];
    const long hidden = ups[0].features, tiles = (samples + SAMPLES - 1) / SAMPLES, rank = down.rank;
    const long block = block_of(samples, threads);
    long rows = 0;  // of all P
    for (long k = 0; k < count; ++k) rows += ups[k].rows;
    float* const p_tiles = shared_scratch.floats(tiles * rows * SAMPLES + all_panels_size(features, count, ups));
    float* const panels = p_tiles + tiles * rows * SAMPLES;
    Workspace& workspace = threads_workspace;
    const long own_size = tiles * rank * SAMPLES + 2 * FEATURES * SAMPLES + (rank + rows) * FEATURES;
    workspace.reserve(threads, own_size + group_size(down.rows));
#pragma omp parallel num_threads(threads)
    {
        project_all(samples, features, x, count, ups, p_row, panels, block);
#pragma omp barrier
        Room room = {workspace.own()};
        float* const sum = room.take(tiles * rank * SAMPLES);
        float* const y[2] = {room.take(FEATURES * SAMPLES), room.take(FEATURES * SAMPLES)};
        float* const a_block = room.take(rank * FEATURES);
        float* b_block[2] = {};
        for (long k = 0; k < count; ++k) b_block[k] = room.take(ups[k].rows * FEATURES);
        float* const group = room.next;
#pragma omp for schedule(static)
        for (long tile = 0; tile < tiles; ++tile) {
            float* to = p_tiles + tile * rows * SAMPLES;
            const long s = tile * SAMPLES;
            for (long k = 0; k < count; to += ups[k++].rows * SAMPLES)
                transpose_tile<SAMPLES>(ups[k].p + s * p_row, p_row, std::min(SAMPLES, samples - s), ups[k].rows, to);
        }
        bool begun = false;  // this thread's sums
#pragma omp for schedule(static)
        for (long f = 0; f < hidden; f += FEATURES) {
            const long m = std::min(FEATURES, hidden - f);
            pack_group<FEATURES>(down.a + f, rank, hidden, m, a_block);
            for (long k = 0; k < count; ++k) pack_group<FEATURES>(ups[k].b + f, ups[k].rows, hidden, m, b_block[k]);
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
        const long bias = down.has_bias();
        if (bias) put_ones(samples, down.p, q_row);
        add_up<SAMPLES>(workspace, omp_get_num_threads(), 0, rank * SAMPLES, rank, samples, down.p + bias, q_row);
        const Factor b = {down.rows, down.b};
        expand(samples, down.p, q_row, &b, 1, down.features, down.y, group);
    }
}

// As in forward, but the y of the weight to z is dz.
template <class Act>
void backward(long samples, long features, const float* x, long count, const Weight* ups, long p_row, long q_row,
              float* dx, int threads) {
    const Weight& down = ups[count];
    const long hidden = ups[0].features;
    const long tiles = (samples + SAMPLES - 1) / SAMPLES, rank = down.rank, u_width = padded(rank, W);
    const long block = block_of(samples, threads);
    long rows = 0, ranks = 0, widths = 0, p_width[2] = {};  // of all P; of all V; of all P, padded
    for (long k = 0; k < count; ++k) {
        rows += ups[k].rows, ranks += ups[k].rank;
        widths += p_width[k] = padded(ups[k].rows, W);
    }
    const long stride = (rank + rows) * SAMPLES;  // between tiles, each U and then P_k
    const long size = tiles * stride + samples * (u_width + ranks) + panels_size(rank, down.features);
    float* const packed = shared_scratch.floats(size);
    float *const u = packed + tiles * stride, *const v = u + samples * u_width, *const panels = v + samples * ranks;
    Workspace& workspace = threads_workspace;
    const long own_size = tiles * ranks * SAMPLES + 4 * FEATURES * SAMPLES + (u_width + widths + rank + rows) * FEATURES;
    workspace.reserve(threads, own_size + group_size(ranks));
    Factor as[2];
    Gradient das[2];
    for (long k = 0, r = 0; k < count; r += ups[k++].rank)
        as[k] = {ups[k].rank, ups[k].a}, das[k] = {ups[k].rank, v + r, ranks, ups[k].da};
#pragma omp parallel num_threads(threads)
    {
        Room room = {workspace.own()};
        float* const sum = room.take(tiles * ranks * SAMPLES);
        float *const y[2] = {room.take(FEATURES * SAMPLES), room.take(FEATURES * SAMPLES)};
        float *const h = room.take(FEATURES * SAMPLES), *const dh = room.take(FEATURES * SAMPLES);
        float *const da_block = room.take(u_width * FEATURES), *db_block[2] = {}, *b_block[2] = {};
        for (long k = 0; k < count; ++k) db_block[k] = room.take(p_width[k] * FEATURES);
        float* const a_block = room.take(rank * FEATURES);
        for (long k = 0; k < count; ++k) b_block[k] = room.take(ups[k].rows * FEATURES);
        float* const group = room.next;
        const long bias = down.has_bias();
        transpose_panels(down.b + bias * down.features, rank, down.features, panels);
#pragma omp barrier
        project(samples, down.features, down.y, panels, rank, u, u_width, block);
        const Gradient db = {rank, down.p + bias, q_row, down.db + bias * down.features};
        factor_gradients(samples, down.features, down.y, &db, 1, bias ? down.db : nullptr, group);
#pragma omp barrier
#pragma omp for schedule(static)
        for (long tile = 0; tile < tiles; ++tile) {
            float* to = packed + tile * stride;
            const long s = tile * SAMPLES, n = std::min(SAMPLES, samples - s);
            transpose_tile<SAMPLES>(u + s * u_width, u_width, n, rank, to);
            to += rank * SAMPLES;
            for (long k = 0; k < count; to += ups[k++].rows * SAMPLES)
                transpose_tile<SAMPLES>(ups[k].p + s * p_row, p_row, n, ups[k].rows, to);
        }
        bool begun = false;  // this thread's sums
#pragma omp for schedule(static)
        for (long f = 0; f < hidden; f += FEATURES) {
            const long m = std::min(FEATURES, hidden - f);
            pack_group<FEATURES>(down.a + f, rank, hidden, m, a_block);
            for (long k = 0; k < count; ++k) pack_group<FEATURES>(ups[k].b + f, ups[k].rows, hidden, m, b_block[k]);
            for (long tile = 0; tile < tiles; ++tile) {
                const long s = tile * SAMPLES, some = std::min(SAMPLES, samples - s), n = padded(some, W);
                const float *const u_tile = packed + tile * stride, *p = u_tile + rank * SAMPLES;
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
                float* v_tile = sum + tile * ranks * SAMPLES;
                for (long k = 0; k < count; v_tile += ups[k++].rank * SAMPLES) {
                    product(m, p_width[k], some, {y[k], SAMPLES, 1}, ups[k].p + s * p_row, p_row, db_block[k],
                            p_width[k], tile > 0);
                    product(ups[k].rank, n, m, {b_block[k] + ups[k].has_bias() * FEATURES, FEATURES, 1}, y[k], SAMPLES,
                            v_tile, SAMPLES, begun);
                }
            }
            if (tiles == 0) std::fill_n(da_block, u_width * FEATURES, 0.0f);
            for (long k = 0; tiles == 0 && k < count; ++k) std::fill_n(db_block[k], p_width[k] * FEATURES, 0.0f);
            transpose(m, rank, da_block, u_width, down.da + f, hidden);
            for (long k = 0; k < count; ++k)
                transpose(m, ups[k].rows, db_block[k], p_width[k], ups[k].db + f, hidden);
            begun = true;
        }
        if (!begun) std::fill_n(sum, tiles * ranks * SAMPLES, 0.0f);
#pragma omp barrier
        long offset = 0;
        for (long k = 0, r = 0; k < count; offset += ups[k].rank * SAMPLES, r += ups[k++].rank)
            add_up<SAMPLES>(workspace, omp_get_num_threads(), offset, ranks * SAMPLES, ups[k].rank, samples, v + r, ranks);
        if (dx) expand(samples, v, ranks, as, count, features, dx, group);
        factor_gradients(samples, features, x, das, count, nullptr, group);
    }
}

}  // namespace

extern "C" {

// activation: 0 gelu, 1 gelu_tanh, 2 relu, 3 silu.
int mlp(int activation, long samples, long features, const float* x, long count, const Weight* ups, long p_row,
        long q_row, Threads threads) {
    constexpr decltype(&forward<Gelu>) run[] = {forward<Gelu>, forward<GeluTanh>, forward<Relu>, forward<Silu>};
    return status([=] { run[activation](samples, features, x, count, ups, p_row, q_row, threads); });
}
EXPORT(mlp);

// dx null where not wanted.
int mlp_backward(int activation, long samples, long features, const float* x, long count, const Weight* ups, long p_row,
                 long q_row, float* dx, Threads threads) {
    constexpr decltype(&backward<Gelu>) run[] = {backward<Gelu>, backward<GeluTanh>, backward<Relu>, backward<Silu>};
    return status([=] { run[activation](samples, features, x, count, ups, p_row, q_row, dx, threads); });
}
EXPORT(mlp_backward);
}
