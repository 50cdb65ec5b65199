// Many tensors cut into tiles. Each thread takes about the same number of elements, in order; where the cuts are does not
// depend on the number of threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

struct Tile {
    long tensor, first, count;
    long before;  // elements in all earlier tiles
};

struct Tiles {
    static constexpr long MOST = 1 << 14;  // fewer elements are not worth a thread
    std::vector<Tile> all;
    long elements = 0;

    Tiles(long tensors, const long* counts) {
        all.reserve(tensors);
        for (long t = 0; t < tensors; ++t)
            for (long first = 0; first < counts[t]; first += MOST) {
                all.push_back({t, first, std::min(MOST, counts[t] - first), elements});
                elements += all.back().count;
            }
    }

    int useful(int threads) const { return (int)std::min((long)threads, elements / MOST + 1); }

    // body(k, tile) for this thread's tiles; call it inside a parallel region.
    template <class Body>
    void own(Body body) const {
        const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const long from = elements * thread / threads, to = elements * (thread + 1) / threads;
        for (size_t k = 0; k < all.size(); ++k)
            if (from <= all[k].before && all[k].before < to) body(k, all[k]);
    }
};
