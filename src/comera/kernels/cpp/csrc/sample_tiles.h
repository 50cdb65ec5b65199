// Tiles in which the samples of a feature are contiguous: (features, SAMPLES), padded with zeros.
#pragma once

#include <algorithm>

#include "products.h"
#include "scratch.h"

namespace {

// (samples, columns) with row stride `row`, transposed to (columns, SAMPLES), padded with zeros.
template <long SAMPLES>
void transpose_tile(const float* from, long row, long samples, long columns, float* to) {
    if (samples < SAMPLES) std::fill_n(to, columns * SAMPLES, 0.0f);
    transpose(samples, columns, from, row, to, SAMPLES);
}

// to (samples, rows) with row stride `row` = the sum over threads of their tiles (rows, SAMPLES). A thread's tiles start
// `offset` into its memory, `stride` from one to the next.
template <long SAMPLES>
void add_up(const Workspace& sums, int threads, long offset, long stride, long rows, long samples, float* to,
            long row) {
#pragma omp for schedule(static)
    for (long first = 0; first < samples; first += SAMPLES)
        for (long r = 0; r < rows; ++r)
            for (long j = 0; j < std::min(SAMPLES, samples - first); ++j) {
                const long at = offset + first / SAMPLES * stride + r * SAMPLES + j;
                float sum = sums.of(0)[at];
                for (int t = 1; t < threads; ++t) sum += sums.of(t)[at];
                to[(first + j) * row + r] = sum;
            }
}

}  // namespace
