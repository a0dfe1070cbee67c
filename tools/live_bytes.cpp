// Counts the bytes of live tensors on the CPU: an allocator in front of torch's own. See measure_memory_rank.py.
//
// Storages that gloo's threads release are counted too, which torch's profiler, one per thread, does not see.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace {

// in front of every storage stands its size; what follows stays aligned as torch aligns it
constexpr size_t kHeader = 64;
constexpr uint8_t kPriority = 100;

std::atomic<int64_t> live{0};
std::atomic<int64_t> peak{0};

void nothing(void*) {}

void release(void* data) {
    auto* block = static_cast<char*>(data) - kHeader;
    live -= *reinterpret_cast<int64_t*>(block);
    c10::free_cpu(block);
}

struct Counting final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        const c10::Device cpu(c10::DeviceType::CPU);
        if (size == 0) {
            return {nullptr, nullptr, &nothing, cpu};
        }
        auto* block = static_cast<char*>(c10::alloc_cpu(size + kHeader));
        *reinterpret_cast<int64_t*>(block) = static_cast<int64_t>(size);
        const int64_t now = live += static_cast<int64_t>(size);
        int64_t highest = peak;
        while (now > highest && !peak.compare_exchange_weak(highest, now)) {
        }
        return {block + kHeader, block + kHeader, &release, cpu};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &release; }

    void copy_data(void* to, const void* from, std::size_t size) const override {
        default_copy_data(to, from, size);
    }
};

Counting counting;

}  // namespace

extern "C" {

// from now on; storages that exist already are not counted, nor is their release
void count_tensors() { c10::SetCPUAllocator(&counting, kPriority); }

int64_t live_bytes() { return live; }

int64_t peak_bytes() { return peak; }

void forget_peak() { peak = live.load(); }
}
