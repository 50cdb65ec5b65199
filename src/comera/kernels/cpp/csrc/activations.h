// Activations and their derivatives, a vector at a time, in the order of ACTIVATIONS in kernels/cpp/gated.py.
#pragma once

#include "vectors.h"

struct Gelu {
    // y Φ(y) without cancellation on either side of 0
    static Vec value(Vec y) {
        Vec density, tail;
        normal(y, density, tail);
        return larger(y, splat(0.0f)) - magnitude(y) * tail;
    }
    static void slope(Vec y, Vec& h, Vec& dh) {
        Vec density, tail;
        normal(y, density, tail);
        const Vec below = y < splat(0.0f) ? tail : 1.0f - tail;
        h = y * below;
        dh = below + y * density * 0.39894228f;
    }
};

struct GeluTanh {
    // y/2 (1 + tanh u) = y s with s = 1/(1 + exp(-2u)), u = sqrt(2/pi) (y + 0.044715 y³)
    static Vec gate(Vec y) { return 1.0f / (1.0f + exponential(y * (y * y * 0.044715f + 1.0f) * -1.59576912f)); }
    static Vec value(Vec y) { return y * gate(y); }
    static void slope(Vec y, Vec& h, Vec& dh) {
        const Vec s = gate(y);
        h = y * s;
        dh = s + y * s * (1.0f - s) * (y * y * (3 * 0.044715f) + 1.0f) * 1.59576912f;
    }
};

struct Relu {
    static Vec value(Vec y) { return larger(y, splat(0.0f)); }
    static void slope(Vec y, Vec& h, Vec& dh) {
        h = value(y);
        dh = y <= splat(0.0f) ? splat(0.0f) : splat(1.0f);
    }
};

struct Silu {
    static Vec gate(Vec y) { return 1.0f / (1.0f + exponential(-y)); }
    static Vec value(Vec y) { return y * gate(y); }
    static void slope(Vec y, Vec& h, Vec& dh) {
        const Vec s = gate(y);
        h = y * s;
        dh = s + h * (1.0f - s);
    }
};
