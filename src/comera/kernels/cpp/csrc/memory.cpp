// Memory of large tensors, kept when they are freed and handed whole to the next ones.
//
// The C library's allocator splits what a large tensor leaves behind among the many small ones that follow, and so asks
// for more memory for the next large one: a step of 32 x 128 tokens with recomputation then holds 740 MB though its
// tensors never exceed 320. Mapping each tensor anew would cost as many page faults as it has pages.
//
// Blocks are whole mappings, in huge pages where the system has them. A request takes the smallest free block that fits
// and is at most a quarter larger, or at most twice as large where another one could be mapped only in place of free ones:
// batches of other lengths would else map all their blocks anew. All blocks together exceed what was once in use at a time
// by a sixteenth at most: before another one is mapped, free blocks go back to the system, the longest unused first. What
// was once in use is forgotten: a block that nobody takes in AGE requests, dozens of steps, goes back as well, so that one
// large evaluation does not hold its memory for the rest of a run; of blocks that fit alike the last one freed is taken. With
// no spare at all tensors of several sizes, in use one after the other, mapped each other's blocks anew in every step: 67
// instead of 62 ms for a language model of four blocks, whose table of 4 MB meets hidden tensors of 1 and 2.8.
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <new>

#include "exports.h"

namespace {

// DLPack, the format in which libraries exchange tensors (github.com/dmlc/dlpack, before it was versioned)
struct DLTensor {
    void* data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};
struct DLManagedTensor {
    DLTensor tensor;
    void* context;
    void (*deleter)(DLManagedTensor*);
};
constexpr int32_t CPU = 1;
constexpr uint8_t FLOAT = 2;

constexpr size_t AGE = 10000;
constexpr size_t PAGE = 1 << 16, HUGE_PAGE = 2 << 20;  // whole pages on any machine; untouched ones cost nothing

struct Block {
    DLManagedTensor managed;
    int64_t shape[4];
    size_t bytes, freed;  // after how many requests
    std::list<Block*> node;  // its place in the pool's list while in use: freeing a tensor must not need memory
};

struct Pool {
    std::mutex mutex;
    std::list<Block*> free;  // the longest unused first
    size_t in_use = 0, held = 0, most = 0, requests = 0;
};
Pool& pool = *new Pool;  // never destroyed: tensors may outlive everything else

void* map(size_t bytes) {
    const size_t all = bytes + HUGE_PAGE;
    void* const at = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return nullptr;
    char* const from = static_cast<char*>(at);
    const size_t before = (HUGE_PAGE - reinterpret_cast<uintptr_t>(from) % HUGE_PAGE) % HUGE_PAGE;
    if (before) munmap(from, before);
    munmap(from + before + bytes, HUGE_PAGE - before);
#ifdef MADV_HUGEPAGE
    madvise(from + before, bytes, MADV_HUGEPAGE);
#endif
    return from + before;
}

void unmap_oldest() {
    Block* const block = pool.free.front();
    munmap(block->managed.tensor.data, block->bytes);
    pool.held -= block->bytes;
    pool.free.pop_front();
    delete block;
}

// Free blocks that were freed before as many requests, and what was once in use with them.
void unmap_older_than(size_t requests) {
    if (pool.free.empty() || pool.free.front()->freed >= requests) return;
    while (!pool.free.empty() && pool.free.front()->freed < requests) unmap_oldest();
    pool.most = pool.held;
}

void give_back(DLManagedTensor* managed) {
    Block* const block = static_cast<Block*>(managed->context);
    const std::lock_guard<std::mutex> lock(pool.mutex);
    pool.in_use -= block->bytes;
    block->freed = pool.requests;
    pool.free.splice(pool.free.end(), block->node);
}

}  // namespace

extern "C" {

// A float tensor of up to four dimensions.
int take_memory(int dimensions, const int64_t* shape, DLManagedTensor** tensor) {
    size_t elements = 1;
    for (int k = 0; k < dimensions; ++k) elements *= shape[k];
    const size_t bytes = (elements * sizeof(float) + PAGE - 1) / PAGE * PAGE;
    const std::lock_guard<std::mutex> lock(pool.mutex);
    if (++pool.requests > AGE) unmap_older_than(pool.requests - AGE);
    const size_t most = std::max(pool.most, pool.in_use + bytes), limit = most + most / 16;
    const size_t largest = pool.held + bytes > limit ? 2 * bytes : bytes + bytes / 4;
    auto best = pool.free.end();
    for (auto it = pool.free.begin(); it != pool.free.end(); ++it)
        if ((*it)->bytes >= bytes && (*it)->bytes <= (best == pool.free.end() ? largest : (*best)->bytes)) best = it;
    Block* block;
    if (best != pool.free.end()) {
        block = *best;
        block->node.splice(block->node.end(), pool.free, best);
    } else {
        while (pool.held + bytes > limit && !pool.free.empty()) unmap_oldest();
        void* at = map(bytes);
        while (!at && !pool.free.empty()) {  // the system has no more: free blocks may be enough
            unmap_oldest();
            at = map(bytes);
        }
        if (!at) return 1;
        try {
            block = new Block;
            block->node.push_back(block);
        } catch (const std::bad_alloc&) {
            munmap(at, bytes);
            return 1;
        }
        block->bytes = bytes;
        block->managed = {{at, {CPU, 0}, 0, {FLOAT, 32, 1}, block->shape, nullptr, 0}, block, give_back};
        pool.most = most;
        pool.held += bytes;
    }
    block->managed.tensor.ndim = dimensions;
    std::copy_n(shape, dimensions, block->shape);
    pool.in_use += block->bytes;
    *tensor = &block->managed;
    return 0;
}
EXPORT(take_memory);

// All free blocks go back to the system.
int release_memory() {
    const std::lock_guard<std::mutex> lock(pool.mutex);
    unmap_older_than(pool.requests + 1);
    return 0;
}
EXPORT(release_memory);

// In bytes.
int memory_held(int64_t* in_use, int64_t* held) {
    const std::lock_guard<std::mutex> lock(pool.mutex);
    *in_use = pool.in_use, *held = pool.held;
    return 0;
}
EXPORT(memory_held);
}
