// The norm of many tensors together, and a product of each with one number: a gradient before the optimizer takes it.
//
// Tensors are cut into pieces that threads share; the sums of the pieces are added in their order, in float64.
#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

namespace {

constexpr long PIECE = 1 << 16;

struct Piece {
    float* at;
    long count;
};

std::vector<Piece> pieces(long tensors, float* const* memory, const long* counts) {
    std::vector<Piece> all;
    for (long t = 0; t < tensors; ++t)
        for (long first = 0; first < counts[t]; first += PIECE)
            all.push_back({memory[t] + first, std::min(PIECE, counts[t] - first)});
    return all;
}

}  // namespace

extern "C" {

double norm(long tensors, float* const* memory, const long* counts, int threads) {
    const std::vector<Piece> all = pieces(tensors, memory, counts);
    std::vector<double> sums(all.size());
#pragma omp parallel for schedule(static) num_threads(threads)
    for (size_t k = 0; k < all.size(); ++k) {
        // squares are added in so many lanes that no sum of float32 grows long
        Vec lanes[4] = {};
        const float* x = all[k].at;
        long i = 0;
        for (; i + 4 * W <= all[k].count; i += 4 * W)
            for (int j = 0; j < 4; ++j) lanes[j] += load(x + i + j * W) * load(x + i + j * W);
        double sum = 0;
        for (; i < all[k].count; ++i) sum += double(x[i]) * x[i];
        for (const Vec& lane : lanes)
            for (int j = 0; j < W; ++j) sum += lane[j];
        sums[k] = sum;
    }
    double total = 0;
    for (const double sum : sums) total += sum;
    return std::sqrt(total);
}

void scale(long tensors, float* const* memory, const long* counts, float factor, int threads) {
    const std::vector<Piece> all = pieces(tensors, memory, counts);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (size_t k = 0; k < all.size(); ++k) {
        float* x = all[k].at;
        long i = 0;
        for (; i + W <= all[k].count; i += W) store(x + i, load(x + i) * factor);
        for (; i < all[k].count; ++i) x[i] *= factor;
    }
}
}
