// The halves of many tensor trains, and the gradients of their cores (contract/together.py, contract/halves.py):
//
//     G'_k = G_k D_k for k < order, d at or below the threshold counted as 0
//     L_1 = G'_1, L_k = L_{k-1} G'_k, A = L_splitᵀ;       R_order = G_order, R_k = G'_k R_{k+1}, B = R_{split+1}
//     ∂G'_k = L_{k-1}ᵀ ∂L_k, ∂L_{k-1} = ∂L_k G'_kᵀ;       ∂G'_k = ∂R_k R_{k+1}ᵀ, ∂R_{k+1} = G'_kᵀ ∂R_k
//     ∂G_k = ∂G'_k D_k,  ∂d_k = Σ ∂G'_k G_k where d_k is active
//
// A half is a task of a few products in the caches of one core, threads share the tasks. The partial products, all but
// the last and largest, are made again in the backward, so that nothing is kept but the parameters. What is widest, A and
// B and their gradients, is written and read once: B as it comes out of its product, A in blocks turned while they are
// near.
//
// Rejected: the chains of one kind stacked and merged by batched products, as contract/together.py does on other
// devices: stacking, masks and the cutting of gradients took several times as long as the products. Strips of b copied
// together before they are multiplied: 7 % slower. All kinds of chains in one call: no faster than one after the other.
#include <algorithm>
#include <functional>
#include <numeric>
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
    long wide(long k) const { return modes[k] * ranks[k + 1]; }
    float factor(long k, long s) const { return !absorbs(k) ? 1.0f : d[k][s] > threshold ? d[k][s] : 0.0f; }
    // Between the rows of G'_k (rank[k], wide): whole vectors where it is the b of products, nothing where it is the a.
    long apart(long k) const { return first || k == order - 1 ? padded(wide(k), W) : wide(k); }
    long features() const { return std::accumulate(modes, modes + order, 1l, std::multiplies<long>()); }
    // Multiplications of the partial products.
    long work() const {
        long done = 1, all = 0;
        for (long step = 0; step < order; ++step) {
            const long k = first ? step : order - 1 - step;
            done *= modes[k], all += done * ranks[k] * ranks[k + 1];
        }
        return all;
    }
};

thread_local Scratch own;

// The memory of one half: a piece after the other, of numbers that are not set to anything. Where rows are filled up to
// whole vectors they stay so, since what products make of these is cut off again.
struct Room {
    float* next;
    float* take(long count) {
        float* const from = next;
        next += padded(count, 16);
        return from;
    }
    // As much as the backward takes, which is more than the forward does.
    static Room of(const Half& half) {
        long done = 1, all = 0;
        for (long step = 0; step < half.order; ++step) {
            const long k = half.first ? step : half.order - 1 - step;
            const long left = padded(std::max(1l, half.ranks[k]), W), right = padded(half.ranks[k + 1], W);
            const long partial = half.first ? done * half.modes[k] * right : left * half.modes[k] * padded(done, W);
            all += 7 * left * half.modes[k] * right + 5 * partial + 16 * 16;
            done *= half.modes[k];
        }
        return {own.numbers(all)};
    }
};

// How (groups, rows, n) stand: from one group, and from one row, to the next.
struct Strides {
    long group, row;
};

inline void copy(long n, const float* from, float* to) {
    if (n < W) {
        for (long k = 0; k < n; ++k) to[k] = from[k];
        return;
    }
    for (long k = 0; k + W <= n; k += W) store(to + k, load(from + k));
    store(to + n - W, load(from + n - W));  // the last ones, and some once more
}

// Numbers in other places; where they are if that is the same.
const float* placed(long groups, long rows, long n, const float* x, Strides from, Strides to, Room& room) {
    if (from.row == to.row && (groups == 1 || from.group == to.group)) return x;
    float* const y = room.take(groups * to.group);
    for (long group = 0; group < groups; ++group)
        for (long row = 0; row < rows; ++row)
            copy(n, x + group * from.group + row * from.row, y + group * to.group + row * to.row);
    return y;
}

// `product` with one strip of b after the other, for a b that is larger than the nearest cache and a that is not.
void product_by_strips(long m, long n, long depth, Matrix a, const float* b, float* c, bool add) {
    for (long j = 0; j < n; j += 2 * W) product(m, std::min(2l * W, n - j), depth, a, b + j, n, c + j, n, add);
}

// What D_k multiplies each of the numbers of a row of G_k by.
const float* factors(const Half& half, long k, Room& room) {
    const long right = half.ranks[k + 1];
    float* const f = room.take(half.wide(k));
    for (long s = 0; s < right; ++s) f[s] = half.factor(k, s);
    for (long at = right; at < half.wide(k); ++at) f[at] = f[at - right];
    return f;
}

// G'_k of all k.
std::vector<const float*> all_absorbed(const Half& half, Room& room) {
    std::vector<const float*> g;
    for (long k = 0; k < half.order; ++k) {
        const long left = half.ranks[k], n = half.wide(k), apart = half.apart(k);
        const float *from = half.cores[k], *const f = factors(half, k, room);
        float* to = room.take(left * apart);
        g.push_back(to);
        for (long i = 0; i < left; ++i, from += n, to += apart) {
            long j = 0;
            for (; j + W <= n; j += W) store(to + j, load(from + j) * load(f + j));
            for (; j < n; ++j) to[j] = from[j] * f[j];
        }
    }
    return g;
}

// The gradients of G_k and d_k from that of G'_k, its rows `apart` numbers from each other.
void release(const Half& half, long k, const float* grad, long apart, Room& room) {
    const long right = half.ranks[k + 1], n = half.wide(k);
    const float *g = half.cores[k], *const f = factors(half, k, room);
    float *to = half.dcores[k], *const sums = room.take(n);
    std::fill_n(sums, n, 0.0f);
    for (long i = 0; i < half.ranks[k]; ++i, g += n, grad += apart, to += n) {
        long j = 0;
        for (; j + W <= n; j += W) {
            store(sums + j, load(sums + j) + load(grad + j) * load(g + j));
            store(to + j, load(grad + j) * load(f + j));
        }
        for (; j < n; ++j) sums[j] += grad[j] * g[j], to[j] = grad[j] * f[j];
    }
    if (!half.absorbs(k)) return;
    for (long s = 0; s < right; ++s) {
        float sum = 0.0f;
        for (long at = s; at < n; at += right) sum += sums[at];
        half.dd[k][s] = half.d[k][s] > half.threshold ? sum : 0.0f;
    }
}

// The first `count` of L_1, L_2, ..., as (N_1 ... N_k, S_k), or of R_order, R_{order-1}, ..., as (R_k, N_k ... N_order)
// with its rows filled up to whole vectors.
std::vector<const float*> partial_products(const Half& half, const std::vector<const float*>& g, long count,
                                           Room& room) {
    std::vector<const float*> made;
    long done = 1;
    for (long step = 0; step < count; ++step) {
        const long k = half.first ? step : half.order - 1 - step;
        const long left = half.ranks[k], mode = half.modes[k], right = half.ranks[k + 1];
        if (step == 0) {
            made.push_back(g[k]);
        } else if (half.first) {
            const long n = mode * right, row = padded(n, W);
            float* const c = room.take(done * row);
            product(done, row, left, {made[step - 1], left, 1}, g[k], row, c, row, false);
            made.push_back(placed(1, done, n, c, {0, row}, {done * n, n}, room));
        } else {
            const long row = padded(done, W);
            float* const c = room.take(left * mode * row);
            product(left * mode, row, right, {g[k], right, 1}, made[step - 1], row, c, row, false);
            made.push_back(placed(left, mode, done, c, {mode * row, row}, {padded(mode * done, W), done}, room));
        }
        done *= mode;
    }
    return made;
}

// A = L_orderᵀ (rank, features), some features of L at a time, while they are near.
void make_a(const Half& half, long features, float* a) {
    constexpr long BLOCK = 24;
    Room room = Room::of(half);
    const long k = half.order - 1, left = half.ranks[k], mode = half.modes[k], rank = half.ranks[half.order];
    const std::vector<const float*> g = all_absorbed(half, room), made = partial_products(half, g, k, room);
    if (k == 0) return turn(features, rank, g[0], rank, a, features);
    const long n = mode * rank, row = padded(n, W), done = half.features() / mode;
    float* const c = room.take(std::min(BLOCK, done) * row);
    for (long first = 0; first * mode < features; first += BLOCK) {
        const long count = std::min(BLOCK, done - first);
        product(count, row, left, {made[k - 1] + first * left, left, 1}, g[k], row, c, row, false);
        Room spare = room;
        const float* const l = placed(1, count, n, c, {0, row}, {count * n, n}, spare);
        turn(std::min(count * mode, features - first * mode), rank, l, rank, a + first * mode, features);
    }
}

// B = R_1 (rank, features)
void make_b(const Half& half, long features, float* b) {
    Room room = Room::of(half);
    const std::vector<const float*> g = all_absorbed(half, room);
    const long rank = half.ranks[0], mode = half.modes[0], right = half.ranks[1], all = half.features();
    const long done = all / mode;
    if (half.order > 1 && done % W == 0 && all == features) {
        const std::vector<const float*> made = partial_products(half, g, half.order - 1, room);
        return product(rank * mode, done, right, {g[0], right, 1}, made.back(), done, b, done, false);
    }
    const float* const r = partial_products(half, g, half.order, room).back();
    for (long i = 0; i < rank; ++i) copy(features, r + i * padded(all, W), b + i * features);
}

// The gradients of the cores of the left half from that of A.
void through_a(const Half& half, long features, const float* da) {
    constexpr long BLOCK = 96;  // of rows of ∂L at a time, while they are near
    Room room = Room::of(half);
    const long last = half.order - 1;
    const std::vector<const float*> g = all_absorbed(half, room), made = partial_products(half, g, last, room);
    const float* grad = nullptr;  // of L_k (done, row), but of the last one, which is made a block at a time
    long done = half.features();
    for (long k = last; k >= 0; --k) {
        const long left = half.ranks[k], mode = half.modes[k], right = half.ranks[k + 1];
        const long n = mode * right, row = padded(n, W), width = padded(left, W);
        done /= mode;
        float* const block = k == last ? room.take(std::min(BLOCK, done) * n) : nullptr;
        auto rows = [&](long first, long count, Room& room) {
            if (k < last) return grad + first * row;
            const long there = std::max(0l, std::min(count * mode, features - first * mode));
            turn(right, there, da + first * mode, features, block, right);
            std::fill_n(block + there * right, (count * mode - there) * right, 0.0f);
            return placed(1, count, n, block, {0, n}, {count * row, row}, room);
        };
        if (k == 0) return release(half, 0, rows(0, 1, room), row, room);
        float *const dg = room.take(left * row), *const turned = room.take(n * width);
        float* const before = room.take(done * width);
        turn(left, n, g[k], row, turned, width);
        for (long first = 0; first < done; first += BLOCK) {
            Room spare = room;
            const long count = std::min(BLOCK, done - first);
            const float* const dl = rows(first, count, spare);
            product_by_strips(left, row, count, {made[k - 1] + first * left, 1, left}, dl, dg, first > 0);
            product(count, width, n, {dl, row, 1}, turned, width, before + first * width, width, false);
        }
        release(half, k, dg, row, room);
        const long mode_before = half.modes[k - 1];
        grad = placed(done / mode_before, mode_before, left, before, {mode_before * width, width},
                      {padded(mode_before * left, W), left}, room);
    }
}

// The gradients of the cores of the right half from that of B.
void through_b(const Half& half, long features, const float* db) {
    Room room = Room::of(half);
    const long last = half.order - 1;
    const std::vector<const float*> g = all_absorbed(half, room), made = partial_products(half, g, last, room);
    long done = half.features();
    const float* grad = nullptr;  // of R_k (left * mode, row), but (left, mode) of the last core
    for (long k = 0; k <= last; ++k) {
        const long left = half.ranks[k], mode = half.modes[k], right = half.ranks[k + 1];
        const long pieces = k == last ? 1 : mode;
        const long n = done / pieces, row = padded(n, W), width = padded(right, W);
        if (k > 0) {
            grad = placed(left, pieces, n, grad, {padded(done, W), n}, {pieces * row, row}, room);
        } else if (features == done && row == n) {
            grad = db;
        } else {
            float* const wide = room.take(left * pieces * row);
            std::fill_n(wide, left * pieces * row, 0.0f);
            for (long i = 0; i < left * pieces; ++i) {
                const long first = i % pieces * n;
                copy(std::max(0l, std::min(n, features - first)), db + i / pieces * features + first, wide + i * row);
            }
            grad = wide;
        }
        if (k == last) return release(half, k, grad, row, room);
        float *const turned = room.take(n * width), *const dg = room.take(left * mode * width);
        turn(right, n, made[last - 1 - k], row, turned, width);
        product(left * mode, width, n, {grad, row, 1}, turned, width, dg, width, false);
        const float* const close = placed(1, left * mode, right, dg, {0, width}, {left * mode * right, right}, room);
        release(half, k, close, mode * right, room);
        float* const next = room.take(right * row);
        product_by_strips(right, row, left * mode, {g[k], 1, right}, grad, next, false);
        grad = next, done = n;
    }
}

// Of a half whose gradient never came, while that of the other did.
void without_gradient(const Half& half) {
    for (long k = 0; k < half.order; ++k) {
        std::fill_n(half.dcores[k], half.ranks[k] * half.wide(k), 0.0f);
        if (half.absorbs(k)) std::fill_n(half.dd[k], half.ranks[k + 1], 0.0f);
    }
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

// layout: of each chain order, split, in_features, out_features, modes, ranks. pointers: all cores and d, a chain after
// the other; all biases; all a and b; and in the backward the gradients of cores and d, and of biases.
std::vector<Chain> chains_of(long count, const long* layout, float* const* pointers, bool backward) {
    long numbers = 0;
    for (long k = 0, at = 0; k < count; ++k, at += 5 + 2 * layout[at]) numbers += 2 * layout[at] - 1;
    float *const *biases = pointers + numbers, *const *halves = biases + count, *const *grads = halves + 2 * count;
    std::vector<Chain> chains;
    for (long k = 0; k < count; ++k) {
        const long order = layout[0];
        Chain chain{order, layout[1], layout[2], layout[3], layout + 4, layout + 4 + order, pointers, pointers + order,
                    biases[k], halves[2 * k], halves[2 * k + 1], nullptr, nullptr, nullptr};
        if (backward) chain.dcores = grads, chain.dd = grads + order, chain.dbias = halves[2 * count + numbers + k];
        layout += 5 + 2 * order;
        pointers += 2 * order - 1, grads += 2 * order - 1;
        chains.push_back(chain);
    }
    return chains;
}

// A half of a chain.
struct Task {
    const Chain* chain;
    bool first;
    long work;
};

// Those with the most work first, so that threads, each of which takes the next one, end together.
std::vector<Task> tasks_of(const std::vector<Chain>& chains) {
    std::vector<Task> tasks;
    for (const Chain& chain : chains)
        for (bool first : {true, false}) tasks.push_back({&chain, first, chain.half(first, 0.0f).work()});
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.work > b.work; });
    return tasks;
}

}  // namespace

extern "C" {

void merge(long count, const long* layout, float* const* pointers, float threshold, int threads) {
    const std::vector<Chain> chains = chains_of(count, layout, pointers, false);
    const std::vector<Task> tasks = tasks_of(chains);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (const Task& task : tasks) {
        const Chain& chain = *task.chain;
        const Half half = chain.half(task.first, threshold);
        if (task.first) {
            make_a(half, chain.in_features, chain.a);
        } else {
            if (chain.bias) copy(chain.out_features, chain.bias, chain.b);
            make_b(half, chain.out_features, chain.b + (chain.bias ? chain.out_features : 0));
        }
    }
}

void merge_backward(long count, const long* layout, float* const* pointers, float threshold, int threads) {
    const std::vector<Chain> chains = chains_of(count, layout, pointers, true);
    const std::vector<Task> tasks = tasks_of(chains);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (const Task& task : tasks) {
        const Chain& chain = *task.chain;
        const Half half = chain.half(task.first, threshold);
        if (!(task.first ? chain.a : chain.b)) {
            without_gradient(half);
        } else if (task.first) {
            through_a(half, chain.in_features, chain.a);
        } else {
            if (chain.bias) copy(chain.out_features, chain.b, chain.dbias);
            through_b(half, chain.out_features, chain.b + (chain.bias ? chain.out_features : 0));
        }
    }
}
}
