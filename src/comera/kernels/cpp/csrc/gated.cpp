// The hidden activation of a feed-forward block (ops/gated.py), in one pass over memory each way; u is one without a gate:
//
//     h = act(g) u,   dg = act'(g) u dh,   du = act(g) dh
#include "activations.h"
#include "elementwise.h"
#include "exports.h"

namespace {

template <class Act>
void forward(long count, const float* g, const float* u, float* h, int threads) {
#pragma omp parallel for schedule(static) num_threads(useful(threads, count))
    for (long at = 0; at < count; at += CHUNK)
        over(std::min(CHUNK, count - at), [=](long c, long n, int) INLINE {
            const Vec act = Act::value(load(g + at + c, n));
            store(h + at + c, u ? act * load(u + at + c, n) : act, n);
        });
}

template <class Act>
void backward(long count, const float* dh, const float* g, const float* u, float* dg, float* du, int threads) {
#pragma omp parallel for schedule(static) num_threads(useful(threads, count))
    for (long at = 0; at < count; at += CHUNK)
        over(std::min(CHUNK, count - at), [=](long c, long n, int) INLINE {
            const Vec grad = load(dh + at + c, n);
            Vec act, slope;
            Act::slope(load(g + at + c, n), act, slope);
            if (u) {
                store(dg + at + c, grad * load(u + at + c, n) * slope, n);
                store(du + at + c, grad * act, n);
            } else {
                store(dg + at + c, grad * slope, n);
            }
        });
}

}  // namespace

extern "C" {

// activation: 0 gelu, 1 gelu_tanh, 2 relu, 3 silu. g, u or null, h (count).
int gated(int activation, long count, const float* g, const float* u, float* h, Threads threads) {
    constexpr decltype(&forward<Gelu>) run[] = {forward<Gelu>, forward<GeluTanh>, forward<Relu>, forward<Silu>};
    run[activation](count, g, u, h, threads);
    return 0;
}
EXPORT(gated);

// dh, g, u, dg, du (count); du is null where u is.
int gated_backward(int activation, long count, const float* dh, const float* g, const float* u, float* dg, float* du,
                   Threads threads) {
    constexpr decltype(&backward<Gelu>) run[] = {backward<Gelu>, backward<GeluTanh>, backward<Relu>, backward<Silu>};
    run[activation](count, dh, g, u, dg, du, threads);
    return 0;
}
EXPORT(gated_backward);
}
