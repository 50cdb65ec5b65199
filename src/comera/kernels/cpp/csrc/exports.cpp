// What a library says of itself: its signatures, and whether what all kernels are made of is right on this processor.
#include "exports.h"

#include <cmath>
#include <vector>

#include "activations.h"
#include "products.h"

// constructed on first use: exports of other files may be recorded before the variables of this one are initialized
static std::string& signatures() {
    static std::string text;
    return text;
}

void Export::record(const char* name, const std::string& kinds) {
    signatures() += std::string(name) + "=" + kinds + ";";
}

static bool near(double found, double expected) { return std::abs(found - expected) <= 1e-5 * (std::abs(expected) + 0.1); }

// An activation beside its formula and the difference quotient of that, in every lane, from -6 to 6.
template <class Act>
static bool activates(double (*formula)(double)) {
    for (float start = -6; start < 6; start += 0.37f * W) {
        Vec y, value, slope;
        for (int l = 0; l < W; ++l) y[l] = start + 0.37f * l;
        Act::slope(y, value, slope);
        const Vec again = Act::value(y);
        for (int l = 0; l < W; ++l) {
            const double x = y[l], quotient = (formula(x + 1e-6) - formula(x - 1e-6)) / 2e-6;
            if (!near(value[l], formula(x)) || !near(again[l], formula(x)) || !near(slope[l], quotient)) return false;
        }
    }
    return true;
}

// Products of all numbers of rows and vectors that a tile may have, from a and from its transpose.
static bool multiplies() {
    constexpr long M = 2 * SUMS + 1, N = 5 * W, K = 19;
    std::vector<float> a(M * K), across(M * K), b(K * N), c(M * N);
    std::vector<double> expected(M * N);
    for (long i = 0; i < M * K; ++i) a[i] = (float)std::sin(i);
    for (long i = 0; i < K * N; ++i) b[i] = (float)std::cos(i);
    transpose(M, K, a.data(), K, across.data(), M);
    for (long i = 0; i < M; ++i)
        for (long j = 0; j < N; ++j)
            for (long k = 0; k < K; ++k) expected[i * N + j] += 2.0 * a[i * K + k] * b[k * N + j];
    for (long m = 1; m <= M; ++m)
        for (long n = W; n <= N; n += W) {
            product(m, n, K, Matrix{a.data(), K, 1}, b.data(), N, c.data(), N, false);
            product(m, n, K, Matrix{across.data(), 1, M}, b.data(), N, c.data(), N, true);
            for (long i = 0; i < m; ++i)
                for (long j = 0; j < n; ++j)
                    if (!near(c[i * N + j], expected[i * N + j])) return false;
        }
    return true;
}

// The first `count` elements and no other, for every count below a vector.
static bool loads_parts() {
    for (long count = 0; count < W; ++count) {
        float from[W], to[W];
        for (int l = 0; l < W; ++l) from[l] = 1.0f + l, to[l] = -1;
        const Vec part = load_part(from, count);
        store_part(to, part, count);
        for (int l = 0; l < W; ++l)
            if (part[l] != (l < count ? from[l] : 0) || to[l] != (l < count ? from[l] : -1)) return false;
    }
    return true;
}

extern "C" {

// "name=kinds;" of every exported function.
const char* comera_signatures() { return signatures().c_str(); }

// What this library computes wrongly, null if nothing: when it is made (compiler.py) and when it is loaded (library.py), in
// some milliseconds. A wrong compiler, or a processor that is not what it says, is found here; tests find wrong sources.
const char* comera_wrong() {
    if (!activates<Gelu>([](double y) { return y * std::erfc(-y * std::sqrt(0.5)) / 2; })) return "gelu";
    if (!activates<GeluTanh>([](double y) { return y / (1 + std::exp(-1.5957691216057308 * (y + 0.044715 * y * y * y))); }))
        return "gelu_tanh";
    if (!activates<Silu>([](double y) { return y / (1 + std::exp(-y)); })) return "silu";
    if (!multiplies()) return "products";
    return loads_parts() ? nullptr : "parts of vectors";
}
}
