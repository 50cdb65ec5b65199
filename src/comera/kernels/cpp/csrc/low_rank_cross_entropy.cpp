// Cross-entropy of an output head whose weight is of low rank, and its gradients, as one call (ops/cross_entropy.py):
//
//     z = [1 P] [bias; B],   loss = log Σ exp(z) - z[label],   dz = softmax(z) - onehot(label)
//     U = dz Bᵀ,             [∂bias; ∂B] = [1 P]ᵀ dz
//
// Gradients are those of the sum of the losses; rows whose label is `ignored` add nothing. The logits z exist only as tiles
// of CLASSES x SAMPLES in the caches of a core, and are made twice: first for the largest logit m of a row and
// Σ exp(z - m), then for dz. In a tile the samples of a class are contiguous, so m and the sums of a vector of samples need
// no sum across its lanes, and no product needs a transposed tile. Threads divide the classes: each has its own part of ∂B,
// and its own sums, of exponentials and of U, which are added in the order of the threads.
//
// Rejected: logits of some rows in memory, between the products of low_rank.cpp and the rows of cross_entropy.cpp. At low
// ranks writing and reading them takes longer than making them again: 85 ms instead of 50 at rank 32, 1,024 rows and 32,768
// classes (a core of an AMD EPYC with AVX-512). Threads that divide the rows: each would need a ∂B of its own.
#include <cfloat>
#include <cmath>

#include "exports.h"
#include "low_rank.h"
#include "sample_tiles.h"

namespace {

constexpr long CLASSES = 48, SAMPLES = 96;

thread_local Scratch shared_scratch;
thread_local Workspace threads_workspace;

// Σ exp(z - most) of each sample over all tiles so far, and the largest logit `most`.
struct Running {
    float* most;
    double* sums;

    void clear(long count) {
        std::fill_n(most, count, -INFINITY);
        std::fill_n(sums, count, 0.0);
    }

    // A tile of m classes; n samples from the one at `first` on.
    void add(const float* z, long m, long n, long first) {
        for (long j = 0; j < n; j += W) {
            const Vec before = load(most + first + j);
            Vec top = before, sum = {};
            for (long i = 0; i < m; ++i) top = larger(top, load(z + i * SAMPLES + j));
            const Vec base = larger(top, splat(-FLT_MAX));  // finite while all logits so far are -inf
            for (long i = 0; i < m; ++i) sum += exponential(load(z + i * SAMPLES + j) - base);
            const Vec shrink = exponential(before - base);
            store(most + first + j, top);
            double* const to = sums + first + j;
            for (int l = 0; l < W; ++l) to[l] = (to[l] == 0 ? 0 : to[l] * shrink[l]) + sum[l];
        }
    }
};

}  // namespace

extern "C" {

// p (samples, rank); b: B (rank, classes) or, `by_class`, its transpose (classes, rank); bias (classes) or null; labels
// (samples), each in [0, classes) or `ignored`; losses (samples), u (samples, rank), and db and dbias as b and bias, both
// null where not wanted.
int low_rank_cross_entropy(long samples, long rank, long classes, const float* p, const float* b, int by_class,
                           const float* biases, const int64_t* labels, long ignored, float* losses, float* u, float* db,
                           float* dbias, Threads threads) {
    return status([=, &workspace = threads_workspace] {
        const long bias = biases != nullptr, rows = rank + bias, width = padded(rows, W);
        const long blocks = (samples + SAMPLES - 1) / SAMPLES, all = blocks * SAMPLES;
        Room shared = {shared_scratch.floats(all * (rows + width + 3) + 5 * 16)};
        float *const p_tiles = shared.take(all * rows), *const p_rows = shared.take(all * width);
        float *const most = shared.take(all), *const scale = shared.take(all), *const log_sum = shared.take(all);
        workspace.reserve(threads, all * (rank + 3) + CLASSES * (SAMPLES + rows + width) + 6 * 16);
#pragma omp parallel num_threads(threads)
        {
            Room room = {workspace.own()};
            float* const u_tiles = room.take(all * rank);  // first, as add_up finds it in the memory of every thread
            Running own = {room.take(all), reinterpret_cast<double*>(room.take(2 * all))};
            float *const z = room.take(CLASSES * SAMPLES), *const b_tile = room.take(CLASSES * rows);
            float* const db_tile = room.take(CLASSES * width);
#pragma omp for schedule(static)
            for (long block = 0; block < blocks; ++block) {
                const long s = block * SAMPLES, some = std::min(SAMPLES, samples - s);
                float *const tile = p_tiles + s * rows, *row = p_rows + s * width;
                if (bias) std::fill(std::fill_n(tile, some, 1.0f), tile + SAMPLES, 0.0f);
                transpose_tile<SAMPLES>(p + s * rank, rank, some, rank, tile + bias * SAMPLES);
                for (long j = s; j < s + some; ++j, row += width) {
                    std::fill_n(row, bias, 1.0f);
                    std::fill(std::copy_n(p + j * rank, rank, row + bias), row + width, 0.0f);
                }
            }
            // body(m, n, some, block) with the logits of m classes from c on and a block of n samples, padded, in z
            const auto each_tile = [&](long c, auto body) {
                const long m = std::min(CLASSES, classes - c);
                float* const own_b = b_tile + bias * CLASSES;
                if (bias) std::copy_n(biases + c, m, b_tile);
                if (by_class) transpose(m, rank, b + c * rank, rank, own_b, CLASSES);
                else pack_group<CLASSES>(b + c, rank, classes, m, own_b);
                for (long block = 0; block < blocks; ++block) {
                    const long some = std::min(SAMPLES, samples - block * SAMPLES), n = padded(some, W);
                    product(m, n, rows, {b_tile, 1, CLASSES}, p_tiles + block * SAMPLES * rows, SAMPLES, z, SAMPLES, false);
                    body(m, n, some, block);
                }
            };
            own.clear(all);
#pragma omp for schedule(static)
            for (long c = 0; c < classes; c += CLASSES)
                each_tile(c, [&](long m, long n, long, long block) { own.add(z, m, n, block * SAMPLES); });
#pragma omp for schedule(static)
            for (long j = 0; j < all; ++j) {
                most[j] = scale[j] = 0.0f;
                if (j >= samples) continue;
                losses[j] = 0.0f;
                if (labels[j] == ignored) continue;
                float top = -INFINITY;
                double sum = 0;
                const auto of = [&](int t) {
                    Room its = {workspace.of(t)};
                    its.take(all * rank);
                    return Running{its.take(all), reinterpret_cast<double*>(its.take(2 * all))};
                };
                for (int t = 0; t < omp_get_num_threads(); ++t) top = std::max(top, of(t).most[j]);
                for (int t = 0; t < omp_get_num_threads(); ++t)
                    if (of(t).sums[j] != 0) sum += of(t).sums[j] * std::exp((double)of(t).most[j] - top);
                most[j] = top, scale[j] = (float)(1 / sum), log_sum[j] = (float)std::log(sum);
            }
            bool begun = false;  // this thread's U
#pragma omp for schedule(static)
            for (long c = 0; c < classes; c += CLASSES) {
                each_tile(c, [&](long m, long n, long some, long block) {
                    const long s = block * SAMPLES;
                    long hits = 0;
                    float* hit[SAMPLES];
                    for (long j = 0; j < some; ++j)
                        if (labels[s + j] >= c && labels[s + j] < c + m && labels[s + j] != ignored) {
                            hit[hits] = z + (labels[s + j] - c) * SAMPLES + j;
                            losses[s + j] = log_sum[s + j] + (most[s + j] - *hit[hits++]);
                        }
                    for (long j = 0; j < n; j += W) {
                        const Vec top = load(most + s + j), factor = load(scale + s + j);
                        for (long i = j; i < m * SAMPLES; i += SAMPLES) store(z + i, exponential(load(z + i) - top) * factor);
                    }
                    while (hits > 0) *hit[--hits] -= 1.0f;
                    product(rank, n, m, {b_tile + bias * CLASSES, CLASSES, 1}, z, SAMPLES, u_tiles + s * rank, SAMPLES, begun);
                    if (db || dbias)
                        product(m, width, some, {z, SAMPLES, 1}, p_rows + s * width, width, db_tile, width, block > 0);
                });
                begun = true;
                const long m = std::min(CLASSES, classes - c);
                if (blocks == 0) std::fill_n(db_tile, CLASSES * width, 0.0f);
                for (long i = 0; dbias && i < m; ++i) dbias[c + i] = db_tile[i * width];
                if (db && !by_class) transpose(m, rank, db_tile + bias, width, db + c, classes);
                for (long i = 0; db && by_class && i < m; ++i)
                    std::copy_n(db_tile + i * width + bias, rank, db + (c + i) * rank);
            }
            if (!begun) std::fill_n(u_tiles, all * rank, 0.0f);
#pragma omp barrier
            add_up<SAMPLES>(workspace, omp_get_num_threads(), 0, rank * SAMPLES, rank, samples, u, rank);
        }
    });
}
EXPORT(low_rank_cross_entropy);
}
