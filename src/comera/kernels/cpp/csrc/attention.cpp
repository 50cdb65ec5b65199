// Attention with dropout, and its gradients (ops/attention.py). For one sample and head, with M the mask of dropout, 0 or
// 1/(1-p):
//
//     S = scale Q Kᵀ + mask,  P = softmax(S) over the keys,  O = (M P) V
//     dV = (M P)ᵀ dO,  dP = M (dO Vᵀ),  dS = P (dP - D),  D = Σ P dP = Σ O dO,  dQ = scale dS K,  dK = scale dSᵀ Q
//
// Scores exist only as tiles of KEYS x QUERIES in the caches of a core, transposed: with contiguous queries a softmax over
// the keys is arithmetic on whole vectors, and of the seven products only those that make scores need transposed operands,
// Qᵀ and dOᵀ. A query's sum and its O so far are scaled down when a later tile has a larger score (Milakov and Gimelshein,
// Online normalizer calculation for softmax, 2018; Dao et al., FlashAttention, 2022). The backward needs O and, for each
// query, the largest score and one over the sum of exponentials below it: their log-sum-exp as a single number would lose
// digits where scores are large, or where a mask hides by large finite numbers. The dropout mask follows from a seed
// (random.h): its rows are the keys of one sample and head after the other, the entries of a row the queries. Threads
// divide samples and heads; in the backward, the groups of heads that share their keys.
//
// Rejected: scores with contiguous keys, which take horizontal sums and a third transposed operand; larger tiles, or
// operands in place instead of packed, which gain nothing: products take three quarters of the time, at 85 GFLOP/s of the
// 104 that a core of an AMD EPYC 7003 has.
#include <algorithm>

#include "exports.h"
#include "products.h"
#include "random.h"
#include "scratch.h"
#include "views.h"

namespace {

constexpr long QUERIES = 64, KEYS = 96;  // QUERIES: the entries of a block in random.h
constexpr long ROWS = 24;                // of a product on the diagonal
constexpr int VECS = QUERIES / W;
constexpr float INF = __builtin_inff();

// Seven words from Python.
struct Sizes {
    long batch, heads, kv_heads, queries, keys, width, value_width;
};

struct Problem : Sizes {
    View q, k, v, mask;   // mask null if there is none, strides 0 where it is broadcast
    const int64_t* seed;  // of dropout; null without
    long dropped;         // of 2^16
    float kept_scale, scale;
    int causal;
};

// The queries from t and the keys from s on, of one sample and head.
struct Tile {
    long b, h, t, s, queries, keys;
    bool diagonal;  // some of its queries do not see some of its keys, which are later

    // The queries that see key `s + i`, and those before them up to a whole vector: they end at `queries`.
    long first_query(long i) const { return diagonal ? std::max(0l, s + i - t) / W * W : 0; }
    // The keys that the queries before `t + j` see: they begin at 0.
    long end_key(long j) const { return diagonal ? std::min(keys, t + j - s) : keys; }
};

// body(i, count) for the rows of a tile: at once, or on the diagonal a few at a time, so that each product leaves out most
// of what its rows do not see. A multiple of the six rows of products.h.
template <class Body>
inline void over_rows(const Tile& at, long rows, Body body) {
    const long step = at.diagonal ? ROWS : rows;
    for (long i = 0; i < rows; i += step) body(i, std::min(step, rows - i));
}

// (rows, columns) times `scale`, padded with zeros: rows to whole vectors, columns to `width`.
void pack(const float* from, long row, long rows, long columns, float scale, float* to, long width) {
    const long whole = columns / W * W;
    for (long r = 0; r < rows; ++r, from += row, to += width) {
        for (long c = 0; c < whole; c += W) store(to + c, load(from + c) * scale);
        for (long c = whole; c < width; ++c) to[c] = c < columns ? from[c] * scale : 0.0f;
    }
    std::fill(to, to + (padded(rows, W) - rows) * width, 0.0f);
}

// The reverse of pack. past_caches: the view that `to` is in `streams`.
void unpack(const float* from, long width, long rows, long columns, float scale, float* to, long row, bool past_caches) {
    const long whole = columns / W * W;
    for (long r = 0; r < rows; ++r, from += width, to += row) {
        for (long c = 0; c < whole; c += W)
            past_caches ? stream(to + c, load(from + c) * scale) : store(to + c, load(from + c) * scale);
        for (long c = whole; c < columns; ++c) to[c] = from[c] * scale;
    }
}

// `streams` for a view with so many rows in all.
bool streams(View view, long rows, long columns) {
    return ::streams(view.at, rows, columns) && (view.batch | view.head | view.row) % LINE == 0;
}

// The same rows of the next head, which as a rule lie beside these: fetched while this head is computed.
Prefetch beside(const float* from, long row, long rows, long columns) { return {from + columns, row, columns, rows}; }

// Row r of (rows, width) times factors[r].
void scale_rows(float* x, long rows, long width, const float* factors) {
    for (long r = 0; r < rows; ++r, x += width)
        for (long c = 0; c < width; c += W) store(x + c, load(x + c) * factors[r]);
}

// The mask added to the scores of a tile, and -inf where a key is later than its query. spare: two tiles.
void hide(const Problem& problem, const Tile& at, float* scores, float* spare) {
    const long n = padded(at.queries, W);
    if (problem.mask.at) {
        const float* mask = problem.mask.from(at.b, at.h, at.t) + at.s;
        float* const transposed = spare + QUERIES * KEYS;
        if (problem.mask.row) {
            pack(mask, problem.mask.row, at.queries, at.keys, 1.0f, spare, KEYS);
            transpose(n, KEYS, spare, KEYS, transposed, QUERIES);
        }
        for (long s = 0; s < at.keys; ++s)
            for (long j = s * QUERIES; j < s * QUERIES + n; j += W)
                store(scores + j, load(scores + j) + (problem.mask.row ? load(transposed + j) : splat(mask[s])));
    }
    if (problem.causal)
        for (long s = 0; s < at.keys; ++s)
            std::fill_n(scores + s * QUERIES, std::max(0l, std::min(n, at.s + s - at.t)), -INF);
}

inline void keep(const Problem& problem, const Tile& at, long s, Vec factors[VECS]) {
    const long row = (at.b * problem.heads + at.h) * problem.keys + at.s + s, blocks = padded(problem.queries, 64) / 64;
    keep_factors(*problem.seed, row * blocks + at.t / 64, problem.dropped, problem.kept_scale, factors);
}

// Scores of a tile become exponentials relative to the largest so far, times M; sums and o are rescaled to match.
void softmax(const Problem& problem, const Tile& at, float* scores, Vec* top, Vec* sum, float* o, long o_width) {
    const long vecs = padded(at.queries, W) / W;
    Vec before[VECS], base[VECS], factors[VECS];
    for (long j = 0; j < vecs; ++j) before[j] = top[j];
    for (long s = 0; s < at.keys; ++s)
        for (long j = at.first_query(s) / W; j < vecs; ++j) top[j] = larger(load(scores + s * QUERIES + j * W), top[j]);
    for (long j = 0; j < vecs; ++j) base[j] = top[j] == -INF ? splat(0.0f) : top[j];
    if (at.s > 0) {
        float less[QUERIES];
        for (long j = 0; j < vecs; ++j) {
            const Vec by = exponential(before[j] - base[j]);
            sum[j] *= by;
            store(less + j * W, by);
        }
        scale_rows(o, at.queries, o_width, less);
    }
    for (long s = 0; s < at.keys; ++s, scores += QUERIES) {
        if (problem.seed) keep(problem, at, s, factors);
        const long first = at.first_query(s);
        std::fill_n(scores, first, 0.0f);
        for (long j = first / W; j < vecs; ++j) {
            const Vec p = exponential(load(scores + j * W) - base[j]);
            sum[j] += p;
            store(scores + j * W, problem.seed ? p * factors[j] : p);
        }
    }
}

thread_local Workspace threads_workspace;

void forward(const Problem& problem, View out, float* tops, float* shares, int threads) {
    const long keys = padded(problem.keys, W);
    const long width = padded(problem.width, W), o_width = padded(problem.value_width, W);
    Workspace& workspace = threads_workspace;
    workspace.reserve(threads, QUERIES * (2 * width + o_width + 3 * KEYS) + keys * (width + o_width) + 64);
    const bool past_caches = streams(out, problem.batch * problem.heads * problem.queries, problem.value_width);
#pragma omp parallel num_threads(threads)
    {
        Room room = {workspace.own()};
        float *const q = room.take(QUERIES * width), *const qt = room.take(QUERIES * width);
        float *const o = room.take(QUERIES * o_width);
        float *const scores = room.take(QUERIES * KEYS), *const spare = room.take(2 * QUERIES * KEYS);
        float *const k = room.take(keys * width), *const v = room.take(keys * o_width);
#pragma omp for schedule(static)
        for (long unit = 0; unit < problem.batch * problem.heads; ++unit) {
            const long b = unit / problem.heads, h = unit % problem.heads, kv = h * problem.kv_heads / problem.heads;
            const float *const k_from = problem.k.from(b, kv, 0), *const v_from = problem.v.from(b, kv, 0);
            pack(k_from, problem.k.row, problem.keys, problem.width, 1.0f, k, width);
            pack(v_from, problem.v.row, problem.keys, problem.value_width, 1.0f, v, o_width);
            Prefetch next_q = beside(problem.q.from(b, h, 0), problem.q.row, problem.queries, problem.width);
            Prefetch next_k = beside(k_from, problem.k.row, problem.keys, problem.width);
            Prefetch next_v = beside(v_from, problem.v.row, problem.keys, problem.value_width);
            for (long t = 0; t < problem.queries; t += QUERIES) {
                const long count = std::min(QUERIES, problem.queries - t), n = padded(count, W);
                pack(problem.q.from(b, h, t), problem.q.row, count, problem.width, problem.scale, q, width);
                transpose(n, width, q, width, qt, QUERIES);
                Vec top[VECS], sum[VECS];
                std::fill_n(top, VECS, splat(-INF));
                std::fill_n(sum, VECS, splat(0.0f));
                std::fill_n(o, count * o_width, 0.0f);
                const long end = problem.causal ? std::min(problem.keys, t + count) : problem.keys;
                for (long s = 0; s < end; s += KEYS) {
                    const long some = std::min(KEYS, end - s);
                    const Tile at = {b, h, t, s, count, some, problem.causal && s + some - 1 > t};
                    over_rows(at, some, [&](long i, long rows) {
                        const long j = at.first_query(i);
                        product(rows, n - j, problem.width, {k + (s + i) * width, width, 1}, qt + j, QUERIES,
                                scores + i * QUERIES + j, QUERIES, false, next_k.done() ? next_q : next_k);
                    });
                    hide(problem, at, scores, spare);
                    softmax(problem, at, scores, top, sum, o, o_width);
                    over_rows(at, count, [&](long j, long rows) {
                        product(rows, o_width, at.end_key(j + rows), {scores + j, 1, QUERIES}, v + s * o_width, o_width,
                                o + j * o_width, o_width, true, next_v.done() ? next_q : next_v);
                    });
                }
                float share[QUERIES];
                for (long j = 0; j < count; ++j) {
                    const float largest = top[j / W][j % W], all = sum[j / W][j % W];
                    tops[unit * problem.queries + t + j] = largest == -INF ? 0.0f : largest;
                    shares[unit * problem.queries + t + j] = share[j] = all == 0.0f ? 0.0f : 1.0f / all;
                }
                scale_rows(o, count, o_width, share);
                unpack(o, o_width, count, problem.value_width, 1.0f, out.from(b, h, t), out.row, past_caches);
            }
        }
        streamed();
    }
}

// P of a tile in place of its scores, and M P in `kept`.
void weights(const Problem& problem, const Tile& at, const float* top, const float* share, float* p, float* kept) {
    const long vecs = padded(at.queries, W) / W;
    Vec factors[VECS];
    for (long s = 0; s < at.keys; ++s, p += QUERIES, kept += QUERIES) {
        if (problem.seed) keep(problem, at, s, factors);
        const long first = at.first_query(s);
        std::fill_n(p, first, 0.0f);
        std::fill_n(kept, first, 0.0f);
        for (long j = first / W; j < vecs; ++j) {
            const Vec x = exponential(load(p + j * W) - load(top + j * W)) * load(share + j * W);
            store(p + j * W, x);
            if (problem.seed) store(kept + j * W, x * factors[j]);
        }
    }
}

// dS = M P (dO Vᵀ) - P D, in place of dO Vᵀ.
void through_softmax(const Tile& at, const float* p, const float* kept, const float* d, float* ds) {
    const long n = padded(at.queries, W);
    for (long s = 0; s < at.keys; ++s, p += QUERIES, kept += QUERIES, ds += QUERIES) {
        const long first = at.first_query(s);
        std::fill_n(ds, first, 0.0f);
        for (long j = first; j < n; j += W) store(ds + j, load(kept + j) * load(ds + j) - load(p + j) * load(d + j));
    }
}

// Σ a b over each row of a (rows, width), padded with zeros, and b (rows, columns).
void row_sums(const float* a, long width, const float* b, long row, long rows, long columns, float* to) {
    const long whole = columns / W * W;
    for (long r = 0; r < rows; ++r, a += width, b += row) {
        Vec sums = splat(0.0f);
        for (long c = 0; c < whole; c += W) sums += load(a + c) * load(b + c);
        float sum = 0.0f;
        for (long c = whole; c < columns; ++c) sum += a[c] * b[c];
        for (int i = 0; i < W; ++i) sum += sums[i];
        to[r] = sum;
    }
}

void backward(const Problem& problem, View d_out, View out, const float* tops, const float* shares, View dq_out,
              View dk_out, View dv_out, int threads) {
    const long keys = padded(problem.keys, W);
    const long width = padded(problem.width, W), o_width = padded(problem.value_width, W);
    const long group = problem.heads / problem.kv_heads;
    const long tiles = QUERIES * (3 * width + 2 * o_width + 5 * KEYS + 3);
    Workspace& workspace = threads_workspace;
    workspace.reserve(threads, tiles + 2 * keys * (width + o_width) + 64);
    const long all_keys = problem.batch * problem.kv_heads * problem.keys;
    const bool dq_streams = streams(dq_out, problem.batch * problem.heads * problem.queries, problem.width);
    const bool dk_streams = streams(dk_out, all_keys, problem.width);
    const bool dv_streams = streams(dv_out, all_keys, problem.value_width);
#pragma omp parallel num_threads(threads)
    {
        Room room = {workspace.own()};
        auto take = [&room](long count) { return room.take(count); };
        float *const q = take(QUERIES * width), *const qt = take(QUERIES * width), *const dq = take(QUERIES * width);
        float *const d_o = take(QUERIES * o_width), *const dot = take(QUERIES * o_width);
        float *const p = take(QUERIES * KEYS), *const ds = take(QUERIES * KEYS);
        float *const kept = problem.seed ? take(QUERIES * KEYS) : p, *const spare = take(2 * QUERIES * KEYS);
        float *const top = take(QUERIES), *const share = take(QUERIES), *const d = take(QUERIES);
        float *const k = take(keys * width), *const v = take(keys * o_width);
        float *const dk = take(keys * width), *const dv = take(keys * o_width);
#pragma omp for schedule(static)
        for (long unit = 0; unit < problem.batch * problem.kv_heads; ++unit) {
            const long b = unit / problem.kv_heads, kv = unit % problem.kv_heads;
            const float *const k_from = problem.k.from(b, kv, 0), *const v_from = problem.v.from(b, kv, 0);
            pack(k_from, problem.k.row, problem.keys, problem.width, 1.0f, k, width);
            pack(v_from, problem.v.row, problem.keys, problem.value_width, 1.0f, v, o_width);
            Prefetch next_k = beside(k_from, problem.k.row, problem.keys, problem.width);
            Prefetch next_v = beside(v_from, problem.v.row, problem.keys, problem.value_width);
            std::fill_n(dk, keys * width, 0.0f);
            std::fill_n(dv, keys * o_width, 0.0f);
            for (long h = kv * group; h < (kv + 1) * group; ++h) {
                Prefetch next_q = beside(problem.q.from(b, h, 0), problem.q.row, problem.queries, problem.width);
                Prefetch next_do = beside(d_out.from(b, h, 0), d_out.row, problem.queries, problem.value_width);
                Prefetch next_o = beside(out.from(b, h, 0), out.row, problem.queries, problem.value_width);
                for (long t = 0; t < problem.queries; t += QUERIES) {
                    const long count = std::min(QUERIES, problem.queries - t), n = padded(count, W);
                    pack(problem.q.from(b, h, t), problem.q.row, count, problem.width, problem.scale, q, width);
                    pack(d_out.from(b, h, t), d_out.row, count, problem.value_width, 1.0f, d_o, o_width);
                    transpose(n, width, q, width, qt, QUERIES);
                    transpose(n, o_width, d_o, o_width, dot, QUERIES);
                    row_sums(d_o, o_width, out.from(b, h, t), out.row, count, problem.value_width, d);
                    const long first = (b * problem.heads + h) * problem.queries + t;
                    for (long j = 0; j < n; ++j) {  // padding: 0
                        top[j] = j < count ? tops[first + j] : 0.0f;
                        share[j] = j < count ? shares[first + j] : 0.0f;
                        d[j] = j < count ? d[j] : 0.0f;
                    }
                    std::fill_n(dq, count * width, 0.0f);
                    const long end = problem.causal ? std::min(problem.keys, t + count) : problem.keys;
                    for (long s = 0; s < end; s += KEYS) {
                        const long some = std::min(KEYS, end - s);
                        const Tile at = {b, h, t, s, count, some, problem.causal && s + some - 1 > t};
                        const float *const ks = k + s * width, *const vs = v + s * o_width;
                        float *const dks = dk + s * width, *const dvs = dv + s * o_width;
                        over_rows(at, some, [&](long i, long rows) {
                            const long j = at.first_query(i), ij = i * QUERIES + j;
                            product(rows, n - j, problem.width, {ks + i * width, width, 1}, qt + j, QUERIES, p + ij,
                                    QUERIES, false, next_k);
                            product(rows, n - j, problem.value_width, {vs + i * o_width, o_width, 1}, dot + j, QUERIES,
                                    ds + ij, QUERIES, false, next_v);
                        });
                        hide(problem, at, p, spare);
                        weights(problem, at, top, share, p, kept);
                        through_softmax(at, p, kept, d, ds);
                        over_rows(at, some, [&](long i, long rows) {
                            const long j = at.first_query(i), ij = i * QUERIES + j;
                            product(rows, o_width, count - j, {kept + ij, QUERIES, 1}, d_o + j * o_width, o_width,
                                    dvs + i * o_width, o_width, true, next_q);
                            product(rows, width, count - j, {ds + ij, QUERIES, 1}, q + j * width, width,
                                    dks + i * width, width, true, next_do);
                        });
                        over_rows(at, count, [&](long j, long rows) {
                            product(rows, width, at.end_key(j + rows), {ds + j, 1, QUERIES}, ks, width, dq + j * width,
                                    width, true, next_o);
                        });
                    }
                    unpack(dq, width, count, problem.width, problem.scale, dq_out.from(b, h, t), dq_out.row, dq_streams);
                }
            }
            unpack(dk, width, problem.keys, problem.width, 1.0f, dk_out.from(b, kv, 0), dk_out.row, dk_streams);
            unpack(dv, o_width, problem.keys, problem.value_width, 1.0f, dv_out.from(b, kv, 0), dv_out.row, dv_streams);
        }
        streamed();
    }
}

}  // namespace

extern "C" {

// views: q, k, v, mask (at null for none), o. norms (2, batch, heads, queries): for each query the largest score, and one
// over the sum of exponentials below it.
int attention(const Sizes* sizes, const View* views, const int64_t* seed, long dropped, float kept_scale, float scale,
              int causal, float* norms, Threads threads) {
    return status([=] {
        const Problem problem{*sizes, views[0], views[1], views[2], views[3], seed, dropped, kept_scale, scale, causal};
        forward(problem, views[4], norms, norms + problem.batch * problem.heads * problem.queries, threads);
    });
}
EXPORT(attention);

// views: q, k, v, mask, do, o, dq, dk, dv.
int attention_backward(const Sizes* sizes, const View* views, const int64_t* seed, long dropped, float kept_scale,
                       float scale, int causal, const float* norms, Threads threads) {
    return status([=] {
        const Problem problem{*sizes, views[0], views[1], views[2], views[3], seed, dropped, kept_scale, scale, causal};
        const float* const shares = norms + problem.batch * problem.heads * problem.queries;
        backward(problem, views[4], views[5], norms, shares, views[6], views[7], views[8], threads);
    });
}
EXPORT(attention_backward);
}
