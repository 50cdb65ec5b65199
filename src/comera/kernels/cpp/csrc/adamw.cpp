// A step of AdamW (Loshchilov, Hutter: Decoupled weight decay regularization, ICLR 2019) on many tensors, as torch's
// fused implementation takes it:
//
//     t += 1,   m = β1 m + (1 - β1) g,   v = β2 v + (1 - β2) g²
//     x = (1 - lr λ) x - lr / (1 - β1^t) m / (√v / √(1 - β2^t) + ε)
//
// Each tensor has its own t, a float32 scalar as in torch, lr and λ. Coefficients are computed in float64.
#include <cmath>

#include "exports.h"
#include "tiles.h"
#include "vectors.h"

namespace {

struct State {
    float *mean, *square, *count;
};

struct Coefficients {
    float beta1, rest1, beta2, rest2, eps;  // shared
    float decay, rate, root;                // of one tensor: 1 - lr λ, lr / (1 - β1^t), 1 / √(1 - β2^t)
};

__attribute__((always_inline)) inline Vec square_root(Vec x) {
    float lanes[W];
    store(lanes, x);
    for (int j = 0; j < W; ++j) lanes[j] = std::sqrt(lanes[j]);
    return load(lanes);
}

__attribute__((always_inline)) inline void vector(const Coefficients& c, const float* g, float* x, float* m, float* v) {
    const Vec slope = load(g);
    const Vec mean = load(m) * c.beta1 + slope * c.rest1, square = load(v) * c.beta2 + slope * slope * c.rest2;
    store(m, mean);
    store(v, square);
    store(x, load(x) * c.decay - mean * c.rate / (square_root(square) * c.root + c.eps));
}

void update(Coefficients c, long count, const float* g, float* x, float* m, float* v) {
    long i = 0;
    for (; i + W <= count; i += W) vector(c, g + i, x + i, m + i, v + i);
    if (const size_t bytes = (count - i) * sizeof(float)) {  // the same arithmetic wherever a tensor is cut
        float end[4][W] = {};
        const float* const from[4] = {g + i, x + i, m + i, v + i};
        for (int k = 0; k < 4; ++k) std::memcpy(end[k], from[k], bytes);
        vector(c, end[0], end[1], end[2], end[3]);
        float* const to[4] = {nullptr, x + i, m + i, v + i};
        for (int k = 1; k < 4; ++k) std::memcpy(to[k], end[k], bytes);
    }
}

}  // namespace

extern "C" {

// gradients: g; params: x; states: m, v and t; counts: elements of each tensor; rates: lr and λ of each.
int adamw(long tensors, float* const* gradients, float* const* params, const State* states, const long* counts,
          const double* rates, double beta1, double beta2, double eps, Threads threads) {
    return status([=] {
        const Tiles tiles(tensors, counts);
        std::vector<Coefficients> of(tensors);
        double before = 0, mean = 0, root = 0;
        for (long k = 0; k < tensors; ++k) {
            const double steps = *states[k].count += 1, lr = rates[2 * k], decay = rates[2 * k + 1];
            if (steps != before) {  // most tensors are as old as the one before
                mean = 1 / (1 - std::pow(beta1, steps));
                root = 1 / std::sqrt(1 - std::pow(beta2, steps));
                before = steps;
            }
            of[k] = {float(beta1),          float(1 - beta1), float(beta2), float(1 - beta2), float(eps),
                     float(1 - lr * decay), float(lr * mean), float(root)};
        }
#pragma omp parallel num_threads(tiles.useful(threads))
        tiles.own([&](size_t, const Tile& t) {
            const long k = t.tensor, i = t.first;
            update(of[k], t.count, gradients[k] + i, params[k] + i, states[k].mean + i, states[k].square + i);
        });
    });
}
EXPORT(adamw);
}
