// Many tensors cut into pieces, of which each thread takes about as many numbers, in their order. Where the cuts are
// does not depend on the threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

struct Piece {
    long tensor, first, count;
    long before;  // numbers in the pieces before it
};

struct Pieces {
    static constexpr long MOST = 1 << 14;  // fewer numbers are not worth a thread
    std::vector<Piece> all;
    long numbers = 0;

    Pieces(long tensors, const long* counts) {
        all.reserve(tensors);
        for (long t = 0; t < tensors; ++t)
            for (long first = 0; first < counts[t]; first += MOST) {
                all.push_back({t, first, std::min(MOST, counts[t] - first), numbers});
                numbers += all.back().count;
            }
    }

    int useful(int threads) const { return (int)std::min((long)threads, numbers / MOST + 1); }

    // body(k, piece) for those of this thread, within a parallel region.
    template <class Body>
    void own(Body body) const {
        const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const long from = numbers * thread / threads, to = numbers * (thread + 1) / threads;
        for (size_t k = 0; k < all.size(); ++k)
            if (from <= all[k].before && all[k].before < to) body(k, all[k]);
    }
};
