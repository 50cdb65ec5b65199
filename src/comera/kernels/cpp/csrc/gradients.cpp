// The norm of many tensors together, and the product of each with one number where it is too large: a gradient before
// the optimizer takes it. Sums of pieces are added in their order, in float64.
#include <cmath>

#include "tiles.h"
#include "vectors.h"

namespace {

// Squares are added in so many lanes that no sum of float32 grows long.
double squares(const float* x, long count) {
    Vec lanes[4] = {};
    long i = 0;
    for (; i + 4 * W <= count; i += 4 * W)
        for (int j = 0; j < 4; ++j) lanes[j] += load(x + i + j * W) * load(x + i + j * W);
    double sum = 0;
    for (; i < count; ++i) sum += double(x[i]) * x[i];
    for (const Vec& lane : lanes)
        for (int j = 0; j < W; ++j) sum += lane[j];
    return sum;
}

void scale(float* x, long count, float factor) {
    long i = 0;
    for (; i + W <= count; i += W) store(x + i, load(x + i) * factor);
    for (; i < count; ++i) x[i] *= factor;
}

}  // namespace

extern "C" {

// Scales all tensors down to a norm of `limit` where theirs is larger, and 0 < limit; returns their norm before.
float clip(long tensors, float* const* memory, const long* counts, double limit, int threads) {
    const Pieces pieces(tensors, counts);
    std::vector<double> sums(pieces.all.size());
    float norm = 0;
#pragma omp parallel num_threads(pieces.useful(threads))
    {
        pieces.own([&](size_t k, const Piece& p) { sums[k] = squares(memory[p.tensor] + p.first, p.count); });
#pragma omp barrier
#pragma omp single
        {
            double total = 0;
            for (const double sum : sums) total += sum;
            norm = (float)std::sqrt(total);
        }
        if (0 < limit && limit < norm)
            pieces.own([&](size_t, const Piece& p) {
                scale(memory[p.tensor] + p.first, p.count, (float)(limit / (norm + 1e-6)));
            });
    }
    return norm;
}
}
