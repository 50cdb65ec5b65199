// Layers whose weights are tensor trains merged to halves, several that share their input x, and their gradients
// (contract/two_sided.py), each as one call:
//
//     P_k = x A_kᵀ,    y_k = [1 P_k] [bias_k; B_k]
//     U_k = dy_k B_kᵀ,  dx = Σ_k U_k A_k,  ∂A_k = U_kᵀ x,  [∂bias_k; ∂B_k] = [1 P_k]ᵀ dy_k
#include "low_rank.h"

#include <vector>

namespace {

struct Half {
    long rank, rows, features;  // of a; of b, with the bias; of b
    const float *a, *b;         // (rank, features of x), (rows, features)
    float *p, *y;               // [1 P], or P without a bias, in rows as far apart as the caller says; y or dy
    float *da, *db;
    long biased() const { return rows - rank; }
};

thread_local Scratch memory;

// All y from all P.
void make_all_wide(long samples, long count, const Half* halves, long p_row) {
    for (long k = 0; k < count; ++k) {
        const Rows b = {halves[k].rows, halves[k].b};
        make_wide(samples, halves[k].p, p_row, &b, 1, halves[k].features, halves[k].y);
    }
}

}  // namespace

extern "C" {

// x (samples, features); p_row: from a row of P to the next.
void two_sided(long samples, long features, const float* x, long count, const Half* halves, long p_row, int threads) {
    long size = 0;
    for (long k = 0; k < count; ++k) size += turned_size(halves[k].rank, features);
    float* const turned = memory.numbers(size);
    const long block = block_of(samples, threads);
#pragma omp parallel num_threads(threads)
    {
        float* at = turned;
        for (long k = 0; k < count; at += turned_size(halves[k++].rank, features))
            share_turned(halves[k].a, halves[k].rank, features, at);
#pragma omp barrier
        at = turned;
        for (long k = 0; k < count; at += turned_size(halves[k++].rank, features)) {
            const Half& half = halves[k];
            make_narrow(samples, features, x, at, half.rank, half.p + half.biased(), p_row, block);
            if (half.biased()) put_ones(samples, half.p, p_row);
        }
#pragma omp barrier
        make_all_wide(samples, count, halves, p_row);
    }
}

// Where P is there already.
void two_sided_wide(long samples, long count, const Half* halves, long p_row, int threads) {
#pragma omp parallel num_threads(threads)
    make_all_wide(samples, count, halves, p_row);
}

// dx, and da and db of each half, null where they are not wanted.
void two_sided_backward(long samples, long features, const float* x, long count, const Half* halves, long p_row,
                        float* dx, int threads) {
    std::vector<Rows> as;
    std::vector<Gradient> das;
    long ranks = 0, size = 0;
    for (long k = 0; k < count; ++k) ranks += halves[k].rank, size += turned_size(halves[k].rank, halves[k].features);
    // the vectors of a U end in the place of the next one, which is written later
    const long u_row = ranks + 16;
    float *const u = memory.numbers(samples * u_row + size), *const turned = u + samples * u_row;
    for (long k = 0, rank = 0; k < count; rank += halves[k++].rank) {
        as.push_back({halves[k].rank, halves[k].a});
        if (halves[k].da) das.push_back({halves[k].rank, u + rank, u_row, halves[k].da});
    }
    const bool needs_u = dx || !das.empty();
    const long block = block_of(samples, threads);
#pragma omp parallel num_threads(threads)
    {
        float* at = turned;
        for (long k = 0; needs_u && k < count; at += turned_size(halves[k].rank, halves[k].features), ++k)
            share_turned(halves[k].b + halves[k].biased() * halves[k].features, halves[k].rank, halves[k].features, at);
#pragma omp barrier
        at = turned;
        float* to = u;
        for (long k = 0; k < count; at += turned_size(halves[k].rank, halves[k].features), to += halves[k++].rank) {
            const Half& half = halves[k];
            if (needs_u) make_narrow(samples, half.features, half.y, at, half.rank, to, u_row, block);
            const long bias = half.biased();
            const Gradient part = {half.rank, half.p + bias, p_row, half.db + bias * half.features};
            if (half.db) make_gradients(samples, half.features, half.y, &part, 1, bias ? half.db : nullptr);
        }
#pragma omp barrier
        if (dx) make_wide(samples, u, u_row, as.data(), count, features, dx);
        if (!das.empty()) make_gradients(samples, features, x, das.data(), das.size(), nullptr);
    }
}
}
