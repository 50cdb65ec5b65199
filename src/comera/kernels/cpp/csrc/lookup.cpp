// Rows of tables, each the product of two parts L and R, and the gradients of these (ops/lookup/kernel.py): all tables of a
// model in one call. Of the id n
//
//     row = L[i] R[k]ᵀ   (X × r)(r × Y),   n = i · M_R + k      backward   ∂L[i] += ∂row R[k],   ∂R[k] += ∂rowᵀ L[i]
//
// A row takes some hundred multiplications. What batched matrix products need around them took several times as long:
// the different pairs to be found, operands gathered, results scattered. Here one pass over the ids does all. Of narrow
// rows, W elements at a time: their sums over the ranks stay vectors to the end, where they are added together, log2 W
// steps for all of them; one by one this took longer than the multiplications. For wide rows R[k] is transposed first, so
// that the elements of a row are contiguous in the products (products.h): 3 times as fast for rows of 16 x 48 from rank 30.
//
// R may come as a core (r, K) whose ranks are first, with gates between L and R, one at or below its threshold counted as 0:
//
//     R[k, q] = core[q, k] g[q]                backward   ∂core[q, k] = ∂R[k, q] g[q],   ∂g[q] = Σ_k ∂R[k, q] core[q, k]
//
// A table without R is dense: its rows are those of L (M_L, X).
//
// Threads share the forward in chunks of ids of one table, the backward in parts: ∂L or ∂R of a table, or every so many
// runs of its rows where one table is a large part of all work. A part goes over all ids of its table and adds to its own
// rows alone, in the order of the ids; ∂g is summed run by run. So sums do not depend on the number of threads. The largest
// parts first, of which each is at most an even share: the last thread is done at most a third later than by an even split.
// Rejected: one ∂L and ∂R a thread, summed in the end, which takes as long as the rest where a table is large and a batch
// small; a call for each table, where threads meet for some ten microseconds of work.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "exports.h"
#include "products.h"
#include "scratch.h"
#include "vectors.h"

namespace {

constexpr long WORK = 1 << 15;  // multiplications; fewer are not worth a thread
constexpr long LEAST_RUN = 16;  // consecutive rows of one owner: two threads seldom write to one cache line
constexpr long COLUMNS = 256;   // of a core that are transposed at a time
constexpr long RUNS = 32;       // of a table at least, where its rows allow it: they are shared evenly

// Twenty words from Python. Of L (left_rows, x, rank) and R (right_rows, y, rank).
struct Table {
    const int64_t* ids;  // `pairs` of them, `stride` apart, each below `limit`; the row of `padding` is zero
    long stride, pairs, limit, padding;
    long left_rows, right_rows, x, y, rank, dense;  // dense: there is no R; x is the width, y, rank and right_rows are 1
    long apart;                                     // elements from one of `rows` to the next
    const float *left, *core, *gates;  // no core: R is given; no gates: they are one
    float *right, *rows;               // R: made of the core in the forward; rows: their gradients in the backward
    float *dleft, *dright, *dgates;    // null where they are not wanted; ∂R is in the layout of the core, where there is one

    long row() const { return x * y; }
    bool wide() const { return x >= 4 && y % W == 0 && rank >= W; }
    long multiplications() const { return pairs * row() * rank; }
    long columns() const { return right_rows * y; }
};

// A table with what is the same for all its ids.
struct Lookup : Table {
    std::vector<float> factors;  // the gates, 0 where they are pruned
    std::vector<char> pruned;
    std::vector<float> sums;  // of ∂g, run by run

    Lookup(const Table& table, float threshold) : Table(table) {
        for (long q = 0; gates && q < rank; ++q) {
            pruned.push_back(gates[q] <= threshold);
            factors.push_back(pruned.back() ? 0.0f : gates[q]);
        }
    }
    // Consecutive rows of R or L, each `size` long, that have one owner: some COLUMNS of a core, unless runs were few.
    static long run(long rows, long size) {
        const long most = std::max(1l, COLUMNS / (LEAST_RUN * std::max(1l, size)));
        return LEAST_RUN * std::clamp(rows / (RUNS * LEAST_RUN), 1l, most);
    }
    // The rows of L and R that an id stands for; false for one whose row is zero, and `wrong` where there is no such row.
    bool find(long n, long& i, long& k, bool& wrong) const {
        const int64_t id = ids[n * stride];
        if ((uint64_t)id >= (uint64_t)limit) return wrong = true, false;
        if (id >> 32) i = id / right_rows, k = id % right_rows;  // a division of 64 bits takes several times as long
        else i = (uint32_t)id / (uint32_t)right_rows, k = (uint32_t)id % (uint32_t)right_rows;
        return id != padding;
    }
};

std::vector<Lookup> lookups(long count, const Table* tables, const float* thresholds) {
    std::vector<Lookup> all;
    all.reserve(count);
    for (long t = 0; t < count; ++t) all.emplace_back(tables[t], thresholds[t]);
    return all;
}

int useful(long work, int threads) { return (int)std::min((long)threads, work / WORK + 1); }

// Products whose sum is that of a and b.
INLINE inline Vec products(long count, const float* a, const float* b) {
    Vec sums{};
    long c = 0;
    for (; c + W <= count; c += W) sums = multiply_add(load(a + c), load(b + c), sums);
    if (c < count) sums = multiply_add(load_part(a + c, count - c), load_part(b + c, count - c), sums);
    return sums;
}

// The sum of each of W vectors, in the lane of its number.
template <int apart>
INLINE inline Vec totals(Vec* x) {
#pragma GCC unroll 16
    for (int j = 0; j < apart; ++j) {
        exchange<apart>(x[j], x[j + apart]);
        x[j] += x[j + apart];
    }
    if constexpr (apart > 1) return totals<apart / 2>(x);
    return x[0];
}

void write_row(const Table& t, const float* left, const float* right, float* row) {
    long x = 0, y = 0;
    for (long first = 0; first < t.row(); first += W) {
        const long count = std::min((long)W, t.row() - first);
        Vec sums[W] = {};
        for (long j = 0; j < count; ++j) {
            sums[j] = products(t.rank, left + x * t.rank, right + y * t.rank);
            if (++y == t.y) ++x, y = 0;
        }
        const Vec elements = totals<W / 2>(sums);
        if (count == W) store(row + first, elements);
        else store_part(row + first, elements, count);
    }
}

// transposed: room for R[k]ᵀ (rank, y).
void write_wide_row(const Table& t, const float* left, const float* right, float* transposed, float* row) {
    transpose(t.y, t.rank, right, t.rank, transposed, t.y);
    product(t.x, t.y, t.rank, {left, t.rank, 1}, transposed, t.y, row, t.y, false);
}

// One vector, or the first `count` of one, of M rows of ∂ (m, ·) += d (m, n) b (n, ·): rows of ∂ and b are `rank` apart.
template <int M, bool PART>
INLINE inline void add_rows(long n, long rank, long count, const float* d, long row, long column, const float* b,
                            float* gradient) {
    Vec sums[M];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) sums[i] = PART ? load_part(gradient + i * rank, count) : load(gradient + i * rank);
    for (long j = 0; j < n; ++j) {
        const Vec right = PART ? load_part(b + j * rank, count) : load(b + j * rank);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) sums[i] = multiply_add(splat(d[i * row + j * column]), right, sums[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
        if (PART) store_part(gradient + i * rank, sums[i], count);
        else store(gradient + i * rank, sums[i]);
    }
}

// The same of all m rows, eight sums at a time: each must wait for the last product that it took, so fewer leave the
// processor idle.
template <bool PART>
inline void add_column(long m, long n, long rank, long count, const float* d, long row, long column, const float* b,
                       float* gradient) {
    long i = 0;
    for (; i + 8 <= m; i += 8) add_rows<8, PART>(n, rank, count, d + i * row, row, column, b, gradient + i * rank);
    for (; i + 4 <= m; i += 4) add_rows<4, PART>(n, rank, count, d + i * row, row, column, b, gradient + i * rank);
    for (; i < m; ++i) add_rows<1, PART>(n, rank, count, d + i * row, row, column, b, gradient + i * rank);
}

void add_product(long m, long n, long rank, const float* d, long row, long column, const float* b, float* gradient) {
    long c = 0;
    for (; c + W <= rank; c += W) add_column<false>(m, n, rank, W, d, row, column, b + c, gradient + c);
    if (c < rank) add_column<true>(m, n, rank, rank - c, d, row, column, b + c, gradient + c);
}

// x[c] *= by(c, n) for n elements from c on, vector by vector.
template <class By>
INLINE inline void scale(long count, float* x, By by) {
    long c = 0;
    for (; c + W <= count; c += W) store(x + c, load(x + c) * by(c, W));
    if (c < count) store_part(x + c, load_part(x + c, count - c) * by(c, count - c), count - c);
}

// R from the columns [first, first + count) of the core.
void transpose_core(const Lookup& t, long first, long count) {
    float* const rows = t.right + first * t.rank;
    transpose(t.rank, count, t.core + first, t.columns(), rows, t.rank);
    const float* const g = t.factors.data();
    for (long k = 0; t.gates && k < count; ++k)
        scale(t.rank, rows + k * t.rank, [=](long q, long n) { return n == W ? load(g + q) : load_part(g + q, n); });
}

// Rows of the ids from `first` to `end`. transposed: room for R[k]ᵀ (rank, y) where rows are wide.
void write_rows(const Lookup& t, long first, long end, float* transposed, bool& wrong) {
    for (long n = first, i, k; n < end; ++n) {
        float* const row = t.rows + n * t.apart;
        if (!t.find(n, i, k, wrong)) {
            std::fill_n(row, t.row(), 0.0f);
            continue;
        }
        const float *const l = t.left + i * t.x * t.rank, *const r = t.right + k * t.y * t.rank;
        if (t.dense) std::copy_n(l, t.x, row);
        else if (t.wide()) write_wide_row(t, l, r, transposed, row);
        else write_row(t, l, r, row);
    }
}

// What one thread does in the backward: ∂L or ∂R of a table, of every `shares`-th run of rows.
struct Part {
    Lookup* table;
    bool left;
    long work, share, shares;

    long rows() const { return left ? table->left_rows : table->right_rows; }
    long size() const { return left ? table->x : table->y; }  // of a row, times the rank
    long run() const { return Lookup::run(rows(), size()); }
    long runs() const { return (rows() + run() - 1) / run(); }
    // body(number of the run, its first row, its rows) for its own runs.
    template <class Body>
    void for_runs(Body body) const {
        for (long at = share; at < runs(); at += shares) body(at, at * run(), std::min(run(), rows() - at * run()));
    }
};

// Rows must be cleared as well, which takes about as long for an element as a multiplication.
long work_of(const Part& part) { return part.table->multiplications() + part.rows() * part.size() * part.table->rank; }

std::vector<Part> parts_of(std::vector<Lookup>& tables, int threads) {
    std::vector<Part> whole, parts;
    long total = 0;
    for (Lookup& t : tables)
        for (const bool left : {true, false})
            if (left ? t.dleft : t.dright) {
                whole.push_back({&t, left, 0, 0, 1});
                total += whole.back().work = work_of(whole.back());
                if (!left && t.gates) t.sums.resize(whole.back().runs() * t.rank);
            }
    for (Part part : whole) {
        part.shares = std::clamp((part.work * threads + total - 1) / std::max(1l, total), 1l, std::max(1l, part.runs()));
        part.work /= part.shares;
        for (part.share = 0; part.share < part.shares; ++part.share) parts.push_back(part);
    }
    std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.work > b.work; });
    return parts;
}

// Adds to the rows of ∂L or ∂R, which `gradient` holds with their ranks last, what the ids contribute.
void add_gradients(const Part& part, float* gradient, bool& wrong) {
    const Lookup& t = *part.table;
    const long row = part.size() * t.rank, run = part.run();
    part.for_runs([=](long, long first, long rows) { std::fill_n(gradient + first * row, rows * row, 0.0f); });
    for (long n = 0, i, k; n < t.pairs; ++n) {
        if (!t.find(n, i, k, wrong)) continue;
        const long own = part.left ? i : k;
        if (part.shares > 1 && own / run % part.shares != part.share) continue;
        const float* const d = t.rows + n * t.apart;
        if (t.dense) for (long c = 0; c < t.x; ++c) gradient[own * row + c] += d[c];
        else if (part.left) add_product(t.x, t.y, t.rank, d, t.y, 1, t.right + k * t.y * t.rank, gradient + own * row);
        else add_product(t.y, t.x, t.rank, d, 1, t.y, t.left + i * t.x * t.rank, gradient + own * row);
    }
}

// ∂core and the sums of ∂g from the rows of ∂R.
void through_core(const Part& part, const float* gradient) {
    Lookup& t = *part.table;
    const long columns = t.columns();
    part.for_runs([&](long at, long first_row, long rows) {
        const long first = first_row * t.y, count = rows * t.y;
        transpose(count, t.rank, gradient + first * t.rank, t.rank, t.dright + first, columns);
        for (long q = 0; t.gates && q < t.rank; ++q) {
            float* const d = t.dright + q * columns + first;
            const Vec parts = products(count, d, t.core + q * columns + first);
            float sum = 0;
            for (int j = 0; j < W; ++j) sum += parts[j];
            t.sums[at * t.rank + q] = sum;
            const Vec gate = splat(t.factors[q]);
            scale(count, d, [=](long, long) { return gate; });
        }
    });
}

void add_up_gates(const Lookup& t) {
    std::fill_n(t.dgates, t.rank, 0.0f);
    for (long at = 0; at < (long)t.sums.size(); at += t.rank)
        for (long q = 0; q < t.rank; ++q) t.dgates[q] += t.pruned[q] ? 0.0f : t.sums[at + q];
}

// Rows of a core that one thread transposes, or ids whose rows it makes.
struct Chunk {
    const Lookup* table;
    long first, end;
};

void cut(std::vector<Chunk>& chunks, const Lookup& table, long count, long size) {
    for (long first = 0; first < count; first += size) chunks.push_back({&table, first, std::min(first + size, count)});
}

thread_local Workspace threads_workspace;

}  // namespace

extern "C" {

// Rows (pairs, x, y) of every table, and R of those that have a core.
int pair_rows(long count, const Table* given, const float* thresholds, Threads threads) {
    return status([=, &workspace = threads_workspace] {
        const std::vector<Lookup> tables = lookups(count, given, thresholds);
        std::vector<Chunk> cores, ids;
        long work = 0, scratch = 0;
        for (const Lookup& t : tables) {
            if (t.core) cut(cores, t, t.columns(), COLUMNS), work += t.columns() * t.rank;
            cut(ids, t, t.pairs, std::max(1l, WORK / std::max(1l, t.row() * t.rank))), work += t.multiplications();
            if (t.wide()) scratch = std::max(scratch, t.rank * t.y);
        }
        const int used = useful(work, threads);
        workspace.reserve(used, scratch);
        bool wrong = false;
#pragma omp parallel num_threads(used)
        {
#pragma omp for schedule(dynamic)
            for (const Chunk& chunk : cores) transpose_core(*chunk.table, chunk.first, chunk.end - chunk.first);
#pragma omp for schedule(dynamic) reduction(|| : wrong)
            for (const Chunk& chunk : ids) write_rows(*chunk.table, chunk.first, chunk.end, workspace.own(), wrong);
        }
        if (wrong) throw std::invalid_argument("no such row");
    });
}
EXPORT(pair_rows);

// Gradients of L, of R or its core, and of the gates, all of which are written where they are wanted.
int pair_rows_backward(long count, const Table* given, const float* thresholds, Threads threads) {
    return status([=, &workspace = threads_workspace] {
        std::vector<Lookup> tables = lookups(count, given, thresholds);
        long work = 0, scratch = 0;
        for (const Lookup& t : tables) {
            work += t.multiplications();
            if (t.core && t.dright) scratch = std::max(scratch, t.columns() * t.rank);
        }
        const int used = useful(2 * work, threads);
        const std::vector<Part> parts = parts_of(tables, used);
        workspace.reserve(used, scratch);
        bool wrong = false;
#pragma omp parallel for schedule(dynamic) num_threads(used) reduction(|| : wrong)
        for (const Part& part : parts) {
            const Lookup& t = *part.table;
            const bool through = !part.left && t.core;
            float* const gradient = through ? workspace.own() : part.left ? t.dleft : t.dright;
            add_gradients(part, gradient, wrong);
            if (through) through_core(part, gradient);
        }
        if (wrong) throw std::invalid_argument("no such row");
        for (const Lookup& t : tables)
            if (t.dgates) add_up_gates(t);
    });
}
EXPORT(pair_rows_backward);
}
