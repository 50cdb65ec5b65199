// Scratch memory, kept from call to call; its contents are what the last call left there.
#pragma once

#include <omp.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

class Scratch {
    std::unique_ptr<float, decltype(&std::free)> memory{nullptr, std::free};
    long size = 0;

   public:
    float* at() const { return memory.get(); }

    // Throws std::bad_alloc.
    float* floats(long count) {
        if (count > size) {
            memory.reset();
            size = 0;
            memory.reset(static_cast<float*>(std::aligned_alloc(64, (count + 15) / 16 * 16 * sizeof(float))));
            if (!memory) throw std::bad_alloc();
            size = count;
        }
        return at();
    }
};

// One scratch for each thread of a parallel region. The calling thread reserves all of them before the region, since an
// exception inside of one would end the process.
class Workspace {
    std::vector<Scratch> scratches;

   public:
    void reserve(int threads, long count) {
        while ((int)scratches.size() < threads) scratches.emplace_back();
        for (int t = 0; t < threads; ++t) scratches[t].floats(count);
    }
    float* of(int thread) const { return scratches[thread].at(); }
    float* own() const { return of(omp_get_thread_num()); }
};

// Hands out a scratch in consecutive parts that start on cache lines.
struct Room {
    float* next;
    float* take(long count) {
        float* const part = next;
        next += (count + 15) / 16 * 16;
        return part;
    }
};
