// The narrow product of a compressed layer, P = A xᵀ (rank, batch), and U = B dyᵀ likewise (contract/two_sided.py).
//
// The batch is read once, 48 samples at a time, by threads that share it; A, turned, stands in panels of two vectors, of
// which 128 features at a time stay in the first cache; sums of that length, added up, lose as few digits as torch's.
//
// Rejected: the general product of a library, which at a rank of 30 runs at half the speed, for it spends on packing the
// batch what so few rows of A never give back; and own code for the wide products Pᵀ B and P dy, where it gains nothing.
#include <algorithm>

#include "products.h"

namespace {

constexpr long PANEL = 2 * W, SAMPLES = 48, DEPTH = 128;

thread_local Scratch own, shared;

// (rank, wide) turned, in panels (wide, PANEL) of the rank, filled up with zeros.
void pack_turned(const float* from, long rank, long wide, float* to) {
#pragma omp for schedule(static)
    for (long i = 0; i < wide; ++i)
        for (long r = 0; r < padded(rank, PANEL); ++r)
            to[(r / PANEL * wide + i) * PANEL + r % PANEL] = r < rank ? from[r * wide + i] : 0.0f;
}

}  // namespace

extern "C" {

// a (rank, features), x (samples, features), p (rank, samples).
void narrow(long samples, long features, long rank, const float* a, const float* x, float* p, int threads) {
    const long width = padded(rank, PANEL);
    float* const panels = shared.numbers(width * features);
#pragma omp parallel num_threads(threads)
    {
        pack_turned(a, rank, features, panels);
        float* const tile = own.numbers(SAMPLES * width);
#pragma omp for schedule(static)
        for (long first = 0; first < samples; first += SAMPLES) {
            const long m = std::min(SAMPLES, samples - first);
            std::fill(tile, tile + m * width, 0.0f);
            for (long i = 0; i < features; i += DEPTH)
                for (long r = 0; r < width; r += PANEL)
                    product(m, PANEL, std::min(DEPTH, features - i), {x + first * features + i, features, 1},
                            panels + r * features + i * PANEL, PANEL, tile + r, width, true);
            for (long r = 0; r < rank; ++r)
                for (long s = 0; s < m; ++s) p[r * samples + first + s] = tile[s * width + r];
        }
    }
}
}
