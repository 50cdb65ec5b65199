// Features of all n-grams of a batch of sequences (ops/ngram.py), for heads of rank 1: gathers, prefix products and norms of a
// position in one pass, while its features are in the L1 cache.
//
//     x_k = e_{k-1} ⊙ C_k[t_{i-k}] ⊙ n_k,   ρ_k = 1/√(|x_k|²/count_k + eps),   e_k = ρ_k x_k        k = 1 … N − 1, e_0 = C_0[t_i]
//
// n_k are ones on the features that order k + 1 needs, count_k how many; an id that a position may not reach multiplies by one.
//
//     dx_k = ρ_k n_k (g − e_k (g · e_k)/count_k),   g = de_k + dx_{k+1} ⊙ C_{k+1}[·]
//     dC_k[t_{i-k}] += dx_k ⊙ e_{k-1},   dC_0[t_i] += dx_1 ⊙ C_1[·]
//
// The second line is another pass, over all positions for some columns of one table: so threads share no element of a gradient,
// and sums are in the order of positions, however many threads there are.
//
// Rejected: positions sorted by their ids, as for lookups. Tables have few rows here, which stay in cache; sorting six shifts
// of the ids would cost more than the sums.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "elementwise.h"
#include "exports.h"
#include "scratch.h"

namespace {

constexpr long COLUMNS = 64;  // of a table that a thread sums at a time

struct Table {
    const float* rows;    // C_k (V, width)
    long width;           // at most that of the table before
    const float* needed;  // n_k (width); none of C_0
    float* grad;          // dC_k
};

struct Ids {
    const int64_t* ids;    // (batch, length), the last `positions` of which are those of the sequence
    const int64_t* reach;  // (batch, positions)
    long batch, length, positions, rows;
    long all() const { return batch * positions; }
    long at(long place, int k) const {
        const long b = place / positions, i = place % positions;
        return ids[b * length + length - positions + i - k];
    }
    bool reached(long place, int k) const { return reach[place] >= k; }
    // Whether the tables have a row for each id that is read.
    bool valid(int orders) const {
        for (long p = 0; p < all(); ++p)
            for (int k = 0; k < orders && (!k || reached(p, k)); ++k)
                if (at(p, k) < 0 || at(p, k) >= rows) return false;
        return true;
    }
};

float total(const Vec* sums) {
    const Vec all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float sum = 0.0f, part[W];
    ::store(part, all);
    for (float each : part) sum += each;
    return sum;
}

long count(const Table& table) {
    long found = 0;
    for (long c = 0; c < table.width; ++c) found += table.needed[c] != 0.0f;
    return std::max(found, 1L);
}

// Where the features of each order begin in a row, and how long a row is.
long starts(const Table* tables, int orders, long* start) {
    long at = 0;
    for (int k = 1; k < orders; ++k) start[k] = at, at += tables[k].width;
    return at;
}

constexpr int MOST = 64;  // orders

thread_local Workspace carried;

}  // namespace

extern "C" {

// e (positions of all, Σ width of C_1 …), rho (positions of all, orders - 1).
int ngrams(Table* tables, int orders, Ids* about, float eps, float* e, float* rho, Threads threads) {
    const Ids ids = *about;
    long start[MOST], counts[MOST];
    if (orders > MOST || !ids.valid(orders)) return 2;
    const long row = starts(tables, orders, start);
    for (int k = 1; k < orders; ++k) counts[k] = count(tables[k]);
#pragma omp parallel for schedule(static) num_threads(useful(threads, ids.all() * row))
    for (long p = 0; p < ids.all(); ++p) {
        const float* before = tables[0].rows + ids.at(p, 0) * tables[0].width;
        for (int k = 1; k < orders; ++k) {
            const Table& table = tables[k];
            float* const made = e + p * row + start[k];
            const bool reached = ids.reached(p, k);
            const float* const c_k = reached ? table.rows + ids.at(p, k) * table.width : table.rows;
            const float* const needed = table.needed;
            Vec squares[4] = {};
            over(table.width, [=, &squares](long c, long n, int which) INLINE {
                Vec x = load(before + c, n) * load(needed + c, n);
                if (reached) x = x * load(c_k + c, n);
                squares[which] += x * x;
                store(made + c, x, n);
            });
            const float inverse = rho[p * (orders - 1) + k - 1] = 1.0f / std::sqrt(total(squares) / counts[k] + eps);
            over(table.width, [=](long c, long n, int) INLINE { store(made + c, load(made + c, n) * inverse, n); });
            before = made;
        }
    }
    return 0;
}
EXPORT(ngrams);

// de, e: as above; dx: as e, and d0 (positions of all, width of C_0): scratch. The gradients of the tables are overwritten.
int ngrams_backward(Table* tables, int orders, Ids* about, const float* de, const float* e, const float* rho, float* dx,
                    float* d0, Threads threads) {
    return status([&] {
        const Ids ids = *about;
        long start[MOST], counts[MOST];
        if (orders > MOST || !ids.valid(orders)) throw std::invalid_argument("ids");
        const long row = starts(tables, orders, start), widest = tables[0].width;
        for (int k = 1; k < orders; ++k) counts[k] = count(tables[k]);
        const int team = useful(threads, ids.all() * row);
        carried.reserve(team, widest);
        Workspace& workspace = carried;
#pragma omp parallel num_threads(team)
        {
            float* const carry = workspace.own();
#pragma omp for schedule(static)
            for (long p = 0; p < ids.all(); ++p) {
                std::fill_n(carry, widest, 0.0f);  // of what a longer order does not have
                for (int k = orders - 1; k > 0; --k) {
                    const Table& table = tables[k];
                    const float *const made = e + p * row + start[k], *const given = de + p * row + start[k];
                    float* const out = dx + p * row + start[k];
                    const float* const needed = table.needed;
                    const bool reached = ids.reached(p, k);
                    const float* const c_k = reached ? table.rows + ids.at(p, k) * table.width : table.rows;
                    Vec along[4] = {};
                    over(table.width, [=, &along](long c, long n, int which) INLINE {
                        const Vec g = load(given + c, n) + load(carry + c, n);
                        along[which] += g * load(made + c, n);
                        store(out + c, g, n);
                    });
                    const float inverse = rho[p * (orders - 1) + k - 1], slope = total(along) / counts[k];
                    over(table.width, [=](long c, long n, int) INLINE {
                        const Vec v = (load(out + c, n) - load(made + c, n) * slope) * inverse * load(needed + c, n);
                        store(out + c, v, n);
                        store(carry + c, reached ? v * load(c_k + c, n) : v, n);
                    });
                }
                std::copy_n(carry, widest, d0 + p * widest);
            }
#pragma omp for schedule(dynamic) collapse(2)
            for (int k = 0; k < orders; ++k)
                for (long first = 0; first < widest; first += COLUMNS) {
                    const Table& table = tables[k];
                    const long cols = std::min(COLUMNS, table.width - first);
                    if (cols <= 0) continue;
                    float* const grad = table.grad + first;
                    for (long r = 0; r < ids.rows; ++r) std::fill_n(grad + r * table.width, cols, 0.0f);
                    for (long p = 0; p < ids.all(); ++p) {
                        if (k && !ids.reached(p, k)) continue;
                        float* const sum = grad + ids.at(p, k) * table.width;
                        const float* const from = k ? dx + p * row + start[k] + first : d0 + p * widest + first;
                        if (!k) {
                            over(cols, [=](long c, long n, int) INLINE {
                                store(sum + c, load(sum + c, n) + load(from + c, n), n);
                            });
                            continue;
                        }
                        const float* const before =
                            (k > 1 ? e + p * row + start[k - 1] : tables[0].rows + ids.at(p, 0) * widest) + first;
                        over(cols, [=](long c, long n, int) INLINE {
                            store(sum + c, multiply_add(load(from + c, n), load(before + c, n), load(sum + c, n)), n);
                        });
                    }
                }
        }
    });
}
EXPORT(ngrams_backward);
}
