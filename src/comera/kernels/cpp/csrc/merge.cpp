// The factors A and B of many tensor trains, and the gradients of their cores and gates (ops/merge.py):
//
//     G'_k = G_k D_k for k < order, D_k = diag(d_k), gates d at or below the threshold counted as 0
//     L_1 = G'_1, L_k = L_{k-1} G'_k, A = L_splitᵀ;       R_order = G_order, R_k = G'_k R_{k+1}, B = R_{split+1}
//     ∂G'_k = L_{k-1}ᵀ ∂L_k, ∂L_{k-1} = ∂L_k G'_kᵀ;       ∂G'_k = ∂R_k R_{k+1}ᵀ, ∂R_{k+1} = G'_kᵀ ∂R_k
//     ∂G_k = ∂G'_k D_k,  ∂d_k = Σ ∂G'_k G_k where d_k is not pruned
//
// Each factor is a task, a few products in the caches of one core; threads share the tasks. The backward recomputes the
// partial products, all but the last and largest, so nothing is kept but the parameters. The largest tensors, A and B and
// their gradients, are written and read once: B as its product yields it, A in blocks that are transposed while cached.
//
// Rejected: stacking all trains of a kind and merging them by batched products, as ops/merge.py does on other devices:
// stacking, masks and unstacking the gradients took several times as long as the products. Copying strips of b together
// before the product: 7 % slower. All kinds of trains in one call: no faster than one kind after the other.
// Fetching the operands of the next factor meanwhile (streams.h): no gain in a step, 4 % slower where all is in the caches.
#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "exports.h"
#include "products.h"
#include "scratch.h"

namespace {

// The cores that merge into one factor, (rank[k], mode[k], rank[k + 1]), and the gates that they absorb.
struct Side {
    long order;  // number of its cores
    bool left;   // merges into A
    const long *modes, *ranks;
    const float* const* cores;
    const float* const* gates;
    float* const* dcores;
    float* const* dgates;
    float threshold;

    bool absorbs(long k) const { return left || k < order - 1; }  // but not the train's last core
    long width(long k) const { return modes[k] * ranks[k + 1]; }
    bool pruned(long k, long s) const { return gates[k][s] <= threshold; }  // not a NaN, which has to be seen
    float gate(long k, long s) const { return !absorbs(k) ? 1.0f : pruned(k, s) ? 0.0f : gates[k][s]; }
    // Row stride of G'_k (rank[k], width): whole vectors where it is the b of products, dense where it is the a.
    long stride(long k) const { return left || k == order - 1 ? padded(width(k), W) : width(k); }
    long features() const { return std::accumulate(modes, modes + order, 1l, std::multiplies<long>()); }
    // The core that the products take in at a step: from the outer end of the train to its split.
    long core(long step) const { return left ? step : order - 1 - step; }
    // Multiplications of the partial products.
    long work() const {
        long done = 1, all = 0;
        for (long step = 0; step < order; ++step) {
            const long k = core(step);
            done *= modes[k], all += done * ranks[k] * ranks[k + 1];
        }
        return all;
    }
    // Floats of scratch that the backward takes, which is more than the forward does. Padding of rows to whole vectors is
    // never initialized: what products compute from it is cut off again.
    long scratch() const {
        long done = 1, all = 2 * padded(2 * order, 16);
        for (long step = 0; step < order; ++step) {
            const long k = core(step);
            const long row = padded(std::max(1l, ranks[k]), W), column = padded(ranks[k + 1], W);
            const long partial = left ? done * modes[k] * column : row * modes[k] * padded(done, W);
            all += 7 * row * modes[k] * column + 5 * partial + 16 * 16;
            done *= modes[k];
        }
        return all;
    }
};

const float** pointers(long count, Room& room) { return reinterpret_cast<const float**>(room.take(2 * count)); }

// Between the groups, and between the rows, of (groups, rows, n).
struct Strides {
    long group, row;
};

inline void copy(long n, const float* from, float* to) {
    if (n < W) {
        for (long k = 0; k < n; ++k) to[k] = from[k];
        return;
    }
    for (long k = 0; k + W <= n; k += W) store(to + k, load(from + k));
    store(to + n - W, load(from + n - W));  // the last W, overlapping those before
}

// (groups, rows, n) with other strides; x itself if they are the same.
const float* restrided(long groups, long rows, long n, const float* x, Strides from, Strides to, Room& room) {
    if (from.row == to.row && (groups == 1 || from.group == to.group)) return x;
    float* const y = room.take(groups * to.group);
    for (long group = 0; group < groups; ++group)
        for (long row = 0; row < rows; ++row)
            copy(n, x + group * from.group + row * from.row, y + group * to.group + row * to.row);
    return y;
}

// product() strip by strip of b, for a b that is larger than the nearest cache and an a that is not.
void product_by_strips(long m, long n, long depth, Matrix a, const float* b, float* c, bool add) {
    for (long j = 0; j < n; j += 2 * W) product(m, std::min(2l * W, n - j), depth, a, b + j, n, c + j, n, add);
}

// What D_k multiplies each element of a row of G_k by.
const float* row_gates(const Side& side, long k, Room& room) {
    const long right = side.ranks[k + 1];
    float* const f = room.take(side.width(k));
    for (long s = 0; s < right; ++s) f[s] = side.gate(k, s);
    for (long at = right; at < side.width(k); ++at) f[at] = f[at - right];
    return f;
}

// G'_k of all k.
const float** absorb_all(const Side& side, Room& room) {
    const float** const g = pointers(side.order, room);
    for (long k = 0; k < side.order; ++k) {
        const long left = side.ranks[k], n = side.width(k), stride = side.stride(k);
        const float *from = side.cores[k], *const f = row_gates(side, k, room);
        float* to = room.take(left * stride);
        g[k] = to;
        for (long i = 0; i < left; ++i, from += n, to += stride) {
            long j = 0;
            for (; j + W <= n; j += W) store(to + j, load(from + j) * load(f + j));
            for (; j < n; ++j) to[j] = from[j] * f[j];
        }
    }
    return g;
}

// The gradients of G_k and d_k from that of G'_k, whose row stride is given.
void release(const Side& side, long k, const float* grad, long stride, Room& room) {
    const long right = side.ranks[k + 1], n = side.width(k);
    const float *g = side.cores[k], *const f = row_gates(side, k, room);
    float *to = side.dcores[k], *const sums = room.take(n);
    std::fill_n(sums, n, 0.0f);
    for (long i = 0; i < side.ranks[k]; ++i, g += n, grad += stride, to += n) {
        long j = 0;
        for (; j + W <= n; j += W) {
            store(sums + j, load(sums + j) + load(grad + j) * load(g + j));
            store(to + j, load(grad + j) * load(f + j));
        }
        for (; j < n; ++j) sums[j] += grad[j] * g[j], to[j] = grad[j] * f[j];
    }
    if (!side.absorbs(k)) return;
    for (long s = 0; s < right; ++s) {
        float sum = 0.0f;
        for (long at = s; at < n; at += right) sum += sums[at];
        side.dgates[k][s] = side.pruned(k, s) ? 0.0f : sum;
    }
}

// The first `count` of L_1, L_2, ..., as (N_1 ... N_k, S_k), or of R_order, R_{order-1}, ..., as (R_k, N_k ... N_order)
// with rows padded to whole vectors.
const float** partial_products(const Side& side, const float* const* g, long count, Room& room) {
    const float** const made = pointers(side.order, room);
    long done = 1;
    for (long step = 0; step < count; ++step) {
        const long k = side.core(step);
        const long left = side.ranks[k], mode = side.modes[k], right = side.ranks[k + 1];
        if (step == 0) {
            made[0] = g[k];
        } else if (side.left) {
            const long n = mode * right, row = padded(n, W);
            float* const c = room.take(done * row);
            product(done, row, left, {made[step - 1], left, 1}, g[k], row, c, row, false);
            made[step] = restrided(1, done, n, c, {0, row}, {done * n, n}, room);
        } else {
            const long row = padded(done, W);
            float* const c = room.take(left * mode * row);
            product(left * mode, row, right, {g[k], right, 1}, made[step - 1], row, c, row, false);
            made[step] = restrided(left, mode, done, c, {mode * row, row}, {padded(mode * done, W), done}, room);
        }
        done *= mode;
    }
    return made;
}

// A = L_orderᵀ (rank, features), a block of features of L at a time, while it is cached.
void make_a(const Side& side, long features, float* a, Room room) {
    constexpr long BLOCK = 24;
    const long k = side.order - 1, left = side.ranks[k], mode = side.modes[k], rank = side.ranks[side.order];
    const float* const* const g = absorb_all(side, room), *const *const made = partial_products(side, g, k, room);
    if (k == 0) return transpose(features, rank, g[0], rank, a, features);
    const long n = mode * rank, row = padded(n, W), done = side.features() / mode;
    float* const c = room.take(std::min(BLOCK, done) * row);
    for (long first = 0; first * mode < features; first += BLOCK) {
        const long count = std::min(BLOCK, done - first);
        product(count, row, left, {made[k - 1] + first * left, left, 1}, g[k], row, c, row, false);
        Room spare = room;
        const float* const l = restrided(1, count, n, c, {0, row}, {count * n, n}, spare);
        transpose(std::min(count * mode, features - first * mode), rank, l, rank, a + first * mode, features);
    }
}

// B = R_1 (rank, features)
void make_b(const Side& side, long features, float* b, Room room) {
    const float* const* const g = absorb_all(side, room);
    const long rank = side.ranks[0], mode = side.modes[0], right = side.ranks[1], all = side.features();
    const long done = all / mode;
    if (side.order > 1 && done % W == 0 && all == features) {
        const float* const* const made = partial_products(side, g, side.order - 1, room);
        return product(rank * mode, done, right, {g[0], right, 1}, made[side.order - 2], done, b, done, false);
    }
    const float* const r = partial_products(side, g, side.order, room)[side.order - 1];
    for (long i = 0; i < rank; ++i) copy(features, r + i * padded(all, W), b + i * features);
}

// The gradients of the left cores and gates from that of A.
void through_a(const Side& side, long features, const float* da, Room room) {
    constexpr long BLOCK = 96;  // rows of ∂L at a time, while they are cached
    const long last = side.order - 1;
    const float* const* const g = absorb_all(side, room), *const *const made = partial_products(side, g, last, room);
    const float* grad = nullptr;  // of L_k (done, row); of the last one a block at a time instead
    long done = side.features();
    for (long k = last; k >= 0; --k) {
        const long left = side.ranks[k], mode = side.modes[k], right = side.ranks[k + 1];
        const long n = mode * right, row = padded(n, W), width = padded(left, W);
        done /= mode;
        float* const block = k == last ? room.take(std::min(BLOCK, done) * n) : nullptr;
        auto rows = [&](long first, long count, Room& room) {
            if (k < last) return grad + first * row;
            const long there = std::max(0l, std::min(count * mode, features - first * mode));
            transpose(right, there, da + first * mode, features, block, right);
            std::fill_n(block + there * right, (count * mode - there) * right, 0.0f);
            return restrided(1, count, n, block, {0, n}, {count * row, row}, room);
        };
        if (k == 0) return release(side, 0, rows(0, 1, room), row, room);
        float *const dg = room.take(left * row), *const transposed = room.take(n * width);
        float* const before = room.take(done * width);
        transpose(left, n, g[k], row, transposed, width);
        for (long first = 0; first < done; first += BLOCK) {
            Room spare = room;
            const long count = std::min(BLOCK, done - first);
            const float* const dl = rows(first, count, spare);
            product_by_strips(left, row, count, {made[k - 1] + first * left, 1, left}, dl, dg, first > 0);
            product(count, width, n, {dl, row, 1}, transposed, width, before + first * width, width, false);
        }
        release(side, k, dg, row, room);
        const long mode_before = side.modes[k - 1];
        grad = restrided(done / mode_before, mode_before, left, before, {mode_before * width, width},
                         {padded(mode_before * left, W), left}, room);
    }
}

// The gradients of the right cores and gates from that of B.
void through_b(const Side& side, long features, const float* db, Room room) {
    const long last = side.order - 1;
    const float* const* const g = absorb_all(side, room), *const *const made = partial_products(side, g, last, room);
    long done = side.features();
    const float* grad = nullptr;  // of R_k (left * mode, row), for the last core (left, mode)
    for (long k = 0; k <= last; ++k) {
        const long left = side.ranks[k], mode = side.modes[k], right = side.ranks[k + 1];
        const long modes = k == last ? 1 : mode;
        const long n = done / modes, row = padded(n, W), width = padded(right, W);
        if (k > 0) {
            grad = restrided(left, modes, n, grad, {padded(done, W), n}, {modes * row, row}, room);
        } else if (features == done && row == n) {
            grad = db;
        } else {
            float* const padded_db = room.take(left * modes * row);
            std::fill_n(padded_db, left * modes * row, 0.0f);
            for (long i = 0; i < left * modes; ++i) {
                const long first = i % modes * n;
                copy(std::max(0l, std::min(n, features - first)), db + i / modes * features + first, padded_db + i * row);
            }
            grad = padded_db;
        }
        if (k == last) return release(side, k, grad, row, room);
        float *const transposed = room.take(n * width), *const dg = room.take(left * mode * width);
        transpose(right, n, made[last - 1 - k], row, transposed, width);
        product(left * mode, width, n, {grad, row, 1}, transposed, width, dg, width, false);
        const float* const dense = restrided(1, left * mode, right, dg, {0, width}, {left * mode * right, right}, room);
        release(side, k, dense, mode * right, room);
        float* const next = room.take(right * row);
        product_by_strips(right, row, left * mode, {g[k], 1, right}, grad, next, false);
        grad = next, done = n;
    }
}

// For a factor that has no gradient while the other one has.
void zero_gradients(const Side& side) {
    for (long k = 0; k < side.order; ++k) {
        std::fill_n(side.dcores[k], side.ranks[k] * side.width(k), 0.0f);
        if (side.absorbs(k)) std::fill_n(side.dgates[k], side.ranks[k + 1], 0.0f);
    }
}

// The factor that a side merges into, or its gradient: null where there is none. bias, dbias: those of a B, if it has one.
struct Factor {
    Side side;
    long features, work;
    float *at, *bias, *dbias;
};

// layout: order, split, in_features, out_features, modes and ranks of each train. memory: the cores and gates of one train
// after the other; all biases; all a and b; in the backward the gradients of cores and gates, and of biases.
std::vector<Factor> factors_of(long count, const long* layout, float* const* memory, float threshold, bool backward) {
    long parameters = 0;
    for (long k = 0, at = 0; k < count; ++k, at += 5 + 2 * layout[at]) parameters += 2 * layout[at] - 1;
    float *const *biases = memory + parameters, *const *made = biases + count;
    // the forward has no gradients, but sides take offsets from these
    float *const *grads = backward ? made + 2 * count : memory, *const *dbiases = backward ? grads + parameters : biases;
    std::vector<Factor> factors;
    for (long k = 0; k < count; ++k) {
        const long order = layout[0], split = layout[1], *const modes = layout + 4, *const ranks = modes + order;
        for (const bool left : {true, false}) {
            const long skip = left ? 0 : split, cores = left ? split : order - split;
            float *const *const at = memory + skip, *const *const to = grads + skip;
            const Side side = {cores, left, modes + skip, ranks + skip, at, at + order, to, to + order, threshold};
            factors.push_back({side, layout[left ? 2 : 3], side.work(), made[2 * k + !left],
                               left ? nullptr : biases[k], left ? nullptr : dbiases[k]});
        }
        layout += 5 + 2 * order;
        memory += 2 * order - 1, grads += 2 * order - 1;
    }
    return factors;
}

// body(factor, room) for all factors: those with the most work first, so that threads, each of which takes the next one,
// finish together.
template <class Body>
void for_all(std::vector<Factor> factors, int threads, Body body) {
    static thread_local Workspace threads_workspace;
    long size = 0;
    for (const Factor& factor : factors) size = std::max(size, factor.side.scratch());
    std::stable_sort(factors.begin(), factors.end(), [](const Factor& a, const Factor& b) { return a.work > b.work; });
    Workspace& workspace = threads_workspace;
    workspace.reserve(threads, size);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (const Factor& factor : factors) body(factor, Room{workspace.own()});
}

}  // namespace

extern "C" {

int merge(long count, const long* layout, float* const* memory, float threshold, Threads threads) {
    return status([=] {
        for_all(factors_of(count, layout, memory, threshold, false), threads, [](const Factor& factor, Room room) {
            const auto& [side, features, work, at, bias, dbias] = factor;
            if (side.left) return make_a(side, features, at, room);
            if (bias) copy(features, bias, at);
            make_b(side, features, at + (bias ? features : 0), room);
        });
    });
}
EXPORT(merge);

int merge_backward(long count, const long* layout, float* const* memory, float threshold, Threads threads) {
    return status([=] {
        for_all(factors_of(count, layout, memory, threshold, true), threads, [](const Factor& factor, Room room) {
            const auto& [side, features, work, at, bias, dbias] = factor;
            if (!at) return zero_gradients(side);
            if (side.left) return through_a(side, features, at, room);
            if (bias) copy(features, at, dbias);
            through_b(side, features, at + (bias ? features : 0), room);
        });
    });
}
EXPORT(merge_backward);
}
