// A step of AdamW (Loshchilov, Hutter: Decoupled weight decay regularization, ICLR 2019) on many tensors, as torch's
// fused implementation takes it:
//
//     t += 1,   m = β1 m + (1 - β1) g,   v = β2 v + (1 - β2) g²
//     x = (1 - lr λ) x - lr / (1 - β1^t) m / (√v / √(1 - β2^t) + ε)
//
// Each tensor has its own t, a float32 scalar as in torch, lr and λ. Coefficients are computed in float64.
//
// In the same pass the rule of rank adaptation, of a step that has one (docs/method.md §2). A gradient is, as read,
//
//     g ← c g + a + 2β x                          c: of all tensors; a: the size's slope, of gates; β: of cores
//     s ← s + w ((x g)² - s)                      after the step, of gates with an importance s; only finite squares
#include <cmath>

#include "exports.h"
#include "tiles.h"
#include "vectors.h"

namespace {

constexpr long GATES = 256;

struct State {
    float *mean, *square, *count;
};

struct Rule {
    const float* added;  // a, or null
    float* importance;   // s, or null
};

struct Rates {
    double lr, decay, pull, weight;  // lr, λ, 2β, w
};

struct Coefficients {
    float beta1, rest1, beta2, rest2, eps, scale;  // shared
    float decay, rate, root, pull;                 // of one tensor: 1 - lr λ, lr / (1 - β1^t), 1 / √(1 - β2^t), 2β
};

__attribute__((always_inline)) inline Vec square_root(Vec x) {
    float lanes[W];
    store(lanes, x);
    for (int j = 0; j < W; ++j) lanes[j] = std::sqrt(lanes[j]);
    return load(lanes);
}

__attribute__((always_inline)) inline void vector(const Coefficients& c, Vec slope, float* x, float* m, float* v) {
    const Vec mean = load(m) * c.beta1 + slope * c.rest1, square = load(v) * c.beta2 + slope * slope * c.rest2;
    store(m, mean);
    store(v, square);
    store(x, load(x) * c.decay - mean * c.rate / (square_root(square) * c.root + c.eps));
}

// The gradient as the step takes it; without a rule exactly g, whatever x is.
__attribute__((always_inline)) inline Vec adjusted(const Coefficients& c, const float* g, const float* x) {
    return c.scale == 1 && c.pull == 0 ? load(g) : load(g) * c.scale + load(x) * c.pull;
}

void update(Coefficients c, long count, const float* g, float* x, float* m, float* v) {
    long i = 0;
    for (; i + W <= count; i += W) vector(c, adjusted(c, g + i, x + i), x + i, m + i, v + i);
    if (const size_t bytes = (count - i) * sizeof(float)) {  // the same arithmetic wherever a tensor is cut
        float end[4][W] = {};
        const float* const from[4] = {g + i, x + i, m + i, v + i};
        for (int k = 0; k < 4; ++k) std::memcpy(end[k], from[k], bytes);
        vector(c, adjusted(c, end[0], end[1]), end[1], end[2], end[3]);
        float* const to[4] = {nullptr, x + i, m + i, v + i};
        for (int k = 1; k < 4; ++k) std::memcpy(to[k], end[k], bytes);
    }
}

void measure(long count, const float* g, const float* x, float weight, float* s) {
    for (long i = 0; i < count; ++i) {
        const float square = x[i] * g[i] * (x[i] * g[i]);
        if (std::isfinite(square)) s[i] = weight == 1 ? square : s[i] + weight * (square - s[i]);
    }
}

// Gates, whose gradient has something added: vectors of one inner rank, which fit a tile's scratch.
void update_gates(const Coefficients& c, const Rule& rule, float weight, long count, const float* g, float* x, float* m,
                  float* v) {
    for (long first = 0; first < count; first += GATES) {
        const long part = std::min(GATES, count - first);
        float slope[GATES];
        for (long i = 0; i < part; ++i)
            slope[i] = c.scale * g[first + i] + (rule.added ? rule.added[first + i] : 0);
        Coefficients plain = c;
        plain.scale = 1;
        update(plain, part, slope, x + first, m + first, v + first);
        if (rule.importance) measure(part, slope, x + first, weight, rule.importance + first);
    }
}

}  // namespace

extern "C" {

// gradients: g; params: x; states: m, v and t; rules: a and s, or null where no tensor has any; counts: elements of each
// tensor.
int adamw(long tensors, float* const* gradients, float* const* params, const State* states, const Rule* rules,
          const long* counts, const Rates* rates, double beta1, double beta2, double eps, double scale,
          Threads threads) {
    return status([=] {
        const Tiles tiles(tensors, counts);
        std::vector<Coefficients> of(tensors);
        double before = 0, mean = 0, root = 0;
        for (long k = 0; k < tensors; ++k) {
            const Rates& r = rates[k];
            const double steps = *states[k].count += 1;
            if (steps != before) {  // most tensors are as old as the one before
                mean = 1 / (1 - std::pow(beta1, steps));
                root = 1 / std::sqrt(1 - std::pow(beta2, steps));
                before = steps;
            }
            of[k] = {float(beta1), float(1 - beta1),        float(beta2),       float(1 - beta2), float(eps),
                     float(scale), float(1 - r.lr * r.decay), float(r.lr * mean), float(root),      float(r.pull)};
        }
#pragma omp parallel num_threads(tiles.useful(threads))
        tiles.own([&](size_t, const Tile& t) {
            const long k = t.tensor, i = t.first;
            float *x = params[k] + i, *m = states[k].mean + i, *v = states[k].square + i;
            if (rules && (rules[k].added || rules[k].importance)) {
                const Rule here = {rules[k].added ? rules[k].added + i : nullptr,
                                   rules[k].importance ? rules[k].importance + i : nullptr};
                update_gates(of[k], here, float(rates[k].weight), t.count, gradients[k] + i, x, m, v);
            } else {
                update(of[k], t.count, gradients[k] + i, x, m, v);
            }
        });
    });
}
EXPORT(adamw);
}
