// The halves of many tensor trains, and the gradients of their cores (contract/together.py, contract/halves.py):
//
//     G'_k = G_k D_k for k < order, d at or below the threshold counted as 0
//     L_1 = G'_1, L_k = L_{k-1} G'_k, A = L_splitᵀ;       R_order = G_order, R_k = G'_k R_{k+1}, B = R_{split+1}
//     ∂G'_k = L_{k-1}ᵀ ∂L_k, ∂L_{k-1} = ∂L_k G'_kᵀ;       ∂G'_k = ∂R_k R_{k+1}ᵀ, ∂R_{k+1} = G'_kᵀ ∂R_k
//     ∂G_k = ∂G'_k D_k,  ∂d_k = Σ ∂G'_k G_k where d_k is active
//
// A half is a task of a few products in the caches of one core, threads share the tasks. The partial products are made
// again in the backward, a third of its work, so that nothing is kept but the parameters.
//
// Rejected: the chains of one kind stacked and merged by batched products, as contract/together.py does on other devices.
// Stacking, masks and the cutting of gradients took several times as long as the products.
#include <algorithm>
#include <memory>
#include <vector>

#include "products.h"

namespace {

// Of one half: cores (rank[k], mode[k], rank[k + 1]) and the d that are absorbed in them.
struct Half {
    long order;  // its number of cores
    bool first;  // the left one
    const long *modes, *ranks;
    const float* const* cores;
    const float* const* d;
    float* const* dcores;
    float* const* dd;
    float threshold;
    bool ends;  // with the last core of the chain, which absorbs nothing

    bool absorbs(long k) const { return !(ends && k == order - 1); }
    long size(long k) const { return ranks[k] * modes[k] * ranks[k + 1]; }
    float factor(long k, long s) const { return !absorbs(k) ? 1.0f : d[k][s] > threshold ? d[k][s] : 0.0f; }
};

// So many numbers, not set to anything.
struct Numbers {
    struct Free {
        void operator()(float* memory) const { std::free(memory); }
    };
    std::unique_ptr<float[], Free> memory;
    explicit Numbers(long count)
        : memory(static_cast<float*>(std::aligned_alloc(64, padded(count, 16) * sizeof(float)))) {}
    float* data() const { return memory.get(); }
    float& operator[](long k) const { return memory[k]; }
};

// c (m, n) = a (m, depth) b (depth, n), n of any size, rows of b and c side by side.
void multiply(long m, long n, long depth, Matrix a, const float* b, float* c) {
    if (n % W == 0) return product(m, n, depth, a, b, n, c, n, false);
    const long width = padded(n, W);
    const Numbers wide_b(depth * width), wide_c(m * width);
    for (long k = 0; k < depth; ++k) std::fill_n(std::copy_n(b + k * n, n, &wide_b[k * width]), width - n, 0.0f);
    product(m, width, depth, a, wide_b.data(), width, wide_c.data(), width, false);
    for (long i = 0; i < m; ++i) std::copy_n(&wide_c[i * width], n, c + i * n);
}

Numbers turned(const float* x, long rows, long columns) {
    Numbers y(rows * columns);
    turn(rows, columns, x, columns, y.data(), rows);
    return y;
}

Numbers absorbed(const Half& half, long k) {
    Numbers g(half.size(k));
    const long right = half.ranks[k + 1];
    std::vector<float> factors(right);
    for (long s = 0; s < right; ++s) factors[s] = half.factor(k, s);
    for (long i = 0; i < half.ranks[k] * half.modes[k]; ++i)
        for (long s = 0; s < right; ++s) g[i * right + s] = half.cores[k][i * right + s] * factors[s];
    return g;
}

// The gradients of G_k and d_k from that of G'_k.
void release(const Half& half, long k, const float* grad) {
    const long right = half.ranks[k + 1], rows = half.ranks[k] * half.modes[k];
    std::vector<float> factors(right), sums(right, 0.0f);
    for (long s = 0; s < right; ++s) factors[s] = half.factor(k, s);
    for (long i = 0; i < rows; ++i)
        for (long s = 0; s < right; ++s) {
            sums[s] += grad[i * right + s] * half.cores[k][i * right + s];
            half.dcores[k][i * right + s] = grad[i * right + s] * factors[s];
        }
    if (half.absorbs(k))
        for (long s = 0; s < right; ++s) half.dd[k][s] = half.d[k][s] > half.threshold ? sums[s] : 0.0f;
}

// The first `count` of L_1, L_2, ... (N_1 ... N_k, S_k), or of R_order, R_{order-1}, ... (R_k, N_k ... N_order).
std::vector<Numbers> partial_products(const Half& half, const std::vector<Numbers>& g, long count) {
    const long order = half.order;
    std::vector<Numbers> made;
    long done = 1;
    for (long step = 0; step < count; ++step) {
        const long k = half.first ? step : order - 1 - step;
        const long left = half.ranks[k], mode = half.modes[k], right = half.ranks[k + 1];
        if (step == 0) {
            made.emplace_back(half.size(k));
            std::copy_n(g[k].data(), half.size(k), made[0].data());
        } else if (half.first) {
            made.emplace_back(done * mode * right);
            multiply(done, mode * right, left, {made[step - 1].data(), left, 1}, g[k].data(), made[step].data());
        } else {
            made.emplace_back(left * mode * done);
            multiply(left * mode, done, right, {g[k].data(), right, 1}, made[step - 1].data(), made[step].data());
        }
        done *= mode;
    }
    return made;
}

std::vector<Numbers> all_absorbed(const Half& half) {
    std::vector<Numbers> g;
    for (long k = 0; k < half.order; ++k) g.push_back(absorbed(half, k));
    return g;
}

// The gradients of the cores from that of the whole half.
void gradients(const Half& half, Numbers grad) {
    const long order = half.order;
    const std::vector<Numbers> g = all_absorbed(half), made = partial_products(half, g, order - 1);
    long done = 1;
    for (long k = 0; k < order; ++k) done *= half.modes[k];
    for (long step = order - 1; step >= 0; --step) {
        const long k = half.first ? step : order - 1 - step;
        const long left = half.ranks[k], mode = half.modes[k], right = half.ranks[k + 1];
        done /= mode;
        if (step == 0) {
            release(half, k, grad.data());
            continue;
        }
        const float* before = made[step - 1].data();
        Numbers dg(half.size(k)), next((half.first ? left : right) * done);
        if (half.first) {  // grad (done, mode * right)
            multiply(left, mode * right, done, {before, 1, left}, grad.data(), dg.data());
            multiply(done, left, mode * right, {grad.data(), mode * right, 1},
                     turned(g[k].data(), left, mode * right).data(), next.data());
        } else {  // grad (left * mode, done)
            multiply(left * mode, right, done, {grad.data(), done, 1}, turned(before, right, done).data(), dg.data());
            multiply(right, done, left * mode, {g[k].data(), 1, right}, grad.data(), next.data());
        }
        release(half, k, dg.data());
        grad = std::move(next);
    }
}

long features(const Half& half) {
    long all = 1;
    for (long k = 0; k < half.order; ++k) all *= half.modes[k];
    return all;
}

// A chain as Python names it, and its halves or their gradients; null where there is none.
struct Chain {
    long order, split, in_features, out_features;
    const long *modes, *ranks;  // order, order + 1
    const float *const *cores, *const *d, *bias;
    float *a, *b, *const *dcores, *const *dd, *dbias;

    Half half(bool first, float threshold) const {
        const long skip = first ? 0 : split;
        return {first ? split : order - split, first, modes + skip, ranks + skip, cores + skip, d + skip,
                dcores + skip, dd + skip, threshold, skip + (first ? split : order - split) == order};
    }
};

// layout: of each chain order, split, in_features, out_features, modes, ranks. pointers: cores, d, bias, a, b, and in the
// backward the gradients of cores, d and bias.
std::vector<Chain> chains_of(long count, const long* layout, float* const* pointers, bool backward) {
    std::vector<Chain> chains;
    for (long k = 0; k < count; ++k) {
        const long order = layout[0];
        Chain chain{order, layout[1], layout[2], layout[3], layout + 4, layout + 4 + order, pointers, pointers + order,
                    pointers[2 * order - 1], pointers[2 * order], pointers[2 * order + 1], nullptr, nullptr, nullptr};
        layout += 5 + 2 * order;
        pointers += 2 * order + 2;
        if (backward) {
            chain.dcores = pointers, chain.dd = pointers + order, chain.dbias = pointers[2 * order - 1];
            pointers += 2 * order;
        }
        chains.push_back(chain);
    }
    return chains;
}

}  // namespace

extern "C" {

void merge(long count, const long* layout, float* const* pointers, float threshold, int threads) {
    const std::vector<Chain> chains = chains_of(count, layout, pointers, false);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (long task = 0; task < 2 * count; ++task) {
        const Chain& chain = chains[task / 2];
        const Half half = chain.half(task % 2 == 0, threshold);
        const Numbers made = std::move(partial_products(half, all_absorbed(half), half.order).back());
        const long rank = chain.ranks[chain.split];
        if (half.first) {
            turn(chain.in_features, rank, made.data(), rank, chain.a, chain.in_features);
        } else {
            const long all = features(half), out = chain.out_features;
            float* to = chain.b;
            if (chain.bias) to = std::copy_n(chain.bias, out, to);
            for (long r = 0; r < rank; ++r) to = std::copy_n(&made[r * all], out, to);
        }
    }
}

void merge_backward(long count, const long* layout, float* const* pointers, float threshold, int threads) {
    const std::vector<Chain> chains = chains_of(count, layout, pointers, true);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (long task = 0; task < 2 * count; ++task) {
        const Chain& chain = chains[task / 2];
        const Half half = chain.half(task % 2 == 0, threshold);
        const long all = features(half), rank = chain.ranks[chain.split], out = chain.out_features;
        Numbers grad(all * rank);
        std::fill_n(grad.data(), all * rank, 0.0f);
        if (half.first) {
            if (chain.a) turn(rank, chain.in_features, chain.a, chain.in_features, grad.data(), rank);
        } else {
            const float* from = chain.b;
            if (from && chain.bias) {
                std::copy_n(from, out, chain.dbias);
                from += out;
            }
            for (long r = 0; from && r < rank; ++r) std::copy_n(from + r * out, out, &grad[r * all]);
        }
        gradients(half, std::move(grad));
    }
}
}
