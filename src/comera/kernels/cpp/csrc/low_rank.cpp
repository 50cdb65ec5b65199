// Linear layers with low-rank weights, W = A B from the merged cores of a tensor train, and their gradients. Several
// layers may share their input x; each direction is one call (ops/low_rank.py):
//
//     P_k = x A_kᵀ,    y_k = [1 P_k] [bias_k; B_k]
//     U_k = dy_k B_kᵀ,  dx = Σ_k U_k A_k,  ∂A_k = U_kᵀ x,  [∂bias_k; ∂B_k] = [1 P_k]ᵀ dy_k
//
// A bias is the first row of its b; the column of ones in front of P adds it to every sample and sums its gradient.
// low_rank.h has the products.
#include "low_rank.h"

#include <vector>

#include "exports.h"

namespace {

thread_local Scratch shared_scratch;
thread_local Workspace groups_workspace;

void expand_all(long samples, long count, const Weight* weights, long p_row, float* group) {
    for (long k = 0; k < count; ++k) {
        const Factor b = {weights[k].rows, weights[k].b};
        expand(samples, weights[k].p, p_row, &b, 1, weights[k].features, weights[k].y, group);
    }
}

long most_rows(long count, const Weight* weights) {
    long rows = 0;
    for (long k = 0; k < count; ++k) rows = std::max(rows, weights[k].rows);
    return rows;
}

}  // namespace

extern "C" {

// x (samples, features) -> all p and y. p_row: row stride of every p.
int low_rank(long samples, long features, const float* x, long count, const Weight* weights, long p_row, Threads threads) {
    return status([=, &groups = groups_workspace] {
        float* const panels = shared_scratch.floats(all_panels_size(features, count, weights));
        groups.reserve(threads, group_size(most_rows(count, weights)));
        const long block = block_of(samples, threads);
#pragma omp parallel num_threads(threads)
        {
            project_all(samples, features, x, count, weights, p_row, panels, block);
#pragma omp barrier
            expand_all(samples, count, weights, p_row, groups.own());
        }
    });
}
EXPORT(low_rank);

// All y from all p.
int low_rank_output(long samples, long count, const Weight* weights, long p_row, Threads threads) {
    return status([=, &groups = groups_workspace] {
        groups.reserve(threads, group_size(most_rows(count, weights)));
#pragma omp parallel num_threads(threads)
        expand_all(samples, count, weights, p_row, groups.own());
    });
}
EXPORT(low_rank_output);

// dx, if not null, and da and db of each weight from its y = dy.
int low_rank_backward(long samples, long features, const float* x, long count, const Weight* weights, long p_row,
                      float* dx, Threads threads) {
    return status([=, &groups = groups_workspace] {
        std::vector<Factor> as;
        std::vector<Gradient> das;
        long ranks = 0, size = 0;
        for (long k = 0; k < count; ++k)
            ranks += weights[k].rank, size += panels_size(weights[k].rank, weights[k].features);
        // the padding of a U reaches into the next one, which is written later
        const long u_row = ranks + 16;
        float *const u = shared_scratch.floats(samples * u_row + size), *const panels = u + samples * u_row;
        for (long k = 0, rank = 0; k < count; rank += weights[k++].rank) {
            as.push_back({weights[k].rank, weights[k].a});
            if (weights[k].da) das.push_back({weights[k].rank, u + rank, u_row, weights[k].da});
        }
        groups.reserve(threads, group_size(ranks));
        const bool needs_u = dx || !das.empty();
        const long block = block_of(samples, threads);
#pragma omp parallel num_threads(threads)
        {
            float* at = panels;
            for (long k = 0; needs_u && k < count; at += panels_size(weights[k].rank, weights[k].features), ++k) {
                const Weight& w = weights[k];
                transpose_panels(w.b + w.has_bias() * w.features, w.rank, w.features, at);
            }
#pragma omp barrier
            at = panels;
            float* to = u;
            for (long k = 0; k < count; at += panels_size(weights[k].rank, weights[k].features), to += weights[k++].rank) {
                const Weight& w = weights[k];
                const long bias = w.has_bias();
                if (needs_u) project(samples, w.features, w.y, at, w.rank, to, u_row, block);
                if (w.db) {
                    const Gradient db = {w.rank, w.p + bias, p_row, w.db + bias * w.features};
                    factor_gradients(samples, w.features, w.y, &db, 1, bias ? w.db : nullptr, groups.own());
                }
            }
#pragma omp barrier
            if (dx) expand(samples, u, u_row, as.data(), count, features, dx, groups.own());
            if (!das.empty()) factor_gradients(samples, features, x, das.data(), das.size(), nullptr, groups.own());
        }
    });
}
EXPORT(low_rank_backward);
}
