// The joint norm of many tensors, and their scaling where it is too large: gradient clipping before an optimizer step.
// The sums of tiles are added in order, in float64.
#include <cmath>

#include "exports.h"
#include "tiles.h"
#include "vectors.h"

namespace {

// Σ x², in enough lanes that no float32 sum grows long.
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

// norm: that of all tensors before clipping. Where it exceeds a limit > 0, all are scaled so that theirs is the limit.
int clip(long tensors, float* const* memory, const long* counts, double limit, float* norm, Threads threads) {
    return status([=] {
        const Tiles tiles(tensors, counts);
        std::vector<double> sums(tiles.all.size());
#pragma omp parallel num_threads(tiles.useful(threads))
        {
            tiles.own([&](size_t k, const Tile& t) { sums[k] = squares(memory[t.tensor] + t.first, t.count); });
#pragma omp barrier
#pragma omp single
            {
                double total = 0;
                for (const double sum : sums) total += sum;
                *norm = (float)std::sqrt(total);
            }
            if (0 < limit && limit < *norm)
                tiles.own([&](size_t, const Tile& t) {
                    scale(memory[t.tensor] + t.first, t.count, (float)(limit / (*norm + 1e-6)));
                });
        }
    });
}
EXPORT(clip);
}
