// Memory of wide tensors, kept when they are freed and given to the next ones whole.
//
// The allocator of the C library cuts what a wide tensor has left behind for the many small ones that come after it, and
// so takes more memory for the next wide one: a step of 32 x 128 tokens with recomputation then holds 740 MB where its
// tensors are never more than 320. Mapping each anew instead costs as many page faults as there are pages.
//
// Blocks are whole mappings, in huge pages where the system has them. A request takes the smallest free block that fits
// and is at most a quarter larger. All blocks together are never more than were once in use at a time: before another one
// is mapped, free ones go back to the system, the longest unused first.
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <new>

namespace {

// DLPack, the form in which libraries hand tensors over (github.com/dmlc/dlpack, before versions were added to it)
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

constexpr size_t PAGE = 1 << 16, HUGE_PAGE = 2 << 20;  // whole pages of any machine; what is not touched takes nothing

struct Block {
    DLManagedTensor managed;
    int64_t shape[4];
    size_t bytes;
};

struct Pool {
    std::mutex mutex;
    std::list<Block*> waiting;  // the longest unused first
    size_t in_use = 0, held = 0, most = 0;
};
Pool& pool = *new Pool;  // never destroyed: tensors may outlive everything else

void* mapped(size_t bytes) {
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
    Block* const block = pool.waiting.front();
    pool.waiting.pop_front();
    munmap(block->managed.tensor.data, block->bytes);
    pool.held -= block->bytes;
    delete block;
}

void give_back(DLManagedTensor* managed) {
    Block* const block = static_cast<Block*>(managed->context);
    const std::lock_guard<std::mutex> lock(pool.mutex);
    pool.in_use -= block->bytes;
    pool.waiting.push_back(block);
}

}  // namespace

extern "C" {

// A tensor of floats with up to four dimensions, or null where the system has no more memory.
DLManagedTensor* take_memory(int dimensions, const int64_t* shape) {
    size_t numbers = 1;
    for (int k = 0; k < dimensions; ++k) numbers *= shape[k];
    const size_t bytes = (numbers * sizeof(float) + PAGE - 1) / PAGE * PAGE;
    const std::lock_guard<std::mutex> lock(pool.mutex);
    auto best = pool.waiting.end();
    for (auto it = pool.waiting.begin(); it != pool.waiting.end(); ++it)
        if ((*it)->bytes >= bytes && (*it)->bytes <= (best == pool.waiting.end() ? bytes + bytes / 4 : (*best)->bytes - 1))
            best = it;
    Block* block;
    if (best != pool.waiting.end()) {
        block = *best;
        pool.waiting.erase(best);
    } else {
        if (pool.in_use + bytes > pool.most) pool.most = pool.in_use + bytes;
        while (pool.held + bytes > pool.most && !pool.waiting.empty()) unmap_oldest();
        void* at = mapped(bytes);
        while (!at && !pool.waiting.empty()) {  // the system has no more: what waits may be enough
            unmap_oldest();
            at = mapped(bytes);
        }
        block = at ? new (std::nothrow) Block : nullptr;
        if (!block) {
            if (at) munmap(at, bytes);
            return nullptr;
        }
        block->bytes = bytes;
        block->managed = {{at, {CPU, 0}, 0, {FLOAT, 32, 1}, block->shape, nullptr, 0}, block, give_back};
        pool.held += bytes;
    }
    block->managed.tensor.ndim = dimensions;
    std::copy_n(shape, dimensions, block->shape);
    pool.in_use += block->bytes;
    return &block->managed;
}

// In bytes.
void memory_held(int64_t* in_use, int64_t* held) {
    const std::lock_guard<std::mutex> lock(pool.mutex);
    *in_use = pool.in_use, *held = pool.held;
}
}
