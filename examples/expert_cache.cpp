// A cache of experts in an engine's own tensors: gate, up and down apart, as engines keep them.
//
//     c++ -std=c++17 -I"$(moepack include-dir)" expert_cache.cpp -o expert_cache
//     ./expert_cache model.moepack BUDGET LAYER:EXPERT...
//
// The hottest experts are loaded first. For an expert that is missing, the least recently used one
// is evicted, and one read brings all of its parts into the slot: no byte is copied on the way if
// the parts are whole pages, as those of nearly all models are. BUDGET is bytes.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // for O_DIRECT and preadv
#endif
#define MOEPACK_IMPLEMENTATION
#include "moepack.h"

#include <algorithm>
#include <list>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

constexpr uint32_t BLOCK = 4096;

// Bytes on a page, as O_DIRECT needs them. An engine takes memory that its GPU can read: pinned by
// cudaHostAlloc, or shared on machines with one memory.
struct Memory {
    struct Freeing {
        void operator()(char *bytes) const { free(bytes); }
    };
    std::unique_ptr<char, Freeing> bytes;

    explicit Memory(size_t length) {
        void *pages = nullptr;
        if (posix_memalign(&pages, BLOCK, std::max<size_t>(length, 1))) throw std::bad_alloc();
        bytes.reset(static_cast<char *>(pages));
    }
    char *data() const { return bytes.get(); }
};

class Pack {
  public:
    moepack pack{};
    std::vector<int> fds;

    explicit Pack(const char *path) {
        check([&](moepack_error *error) { return moepack_open(path, &pack, error); });
        for (uint32_t n = 0; n < pack.files.count; n++) fds.push_back(open_file(n));
    }
    Pack(const Pack &) = delete;
    ~Pack() {
        for (int fd : fds)
            if (fd >= 0) close(fd);
        moepack_close(&pack);
    }

    template <typename Call> static void check(Call call) {
        moepack_error error{};
        if (call(&error)) throw std::runtime_error(error.message);
    }

  private:
    int open_file(uint32_t n) {
        int fd = -1;
        if (moepack_file_fd(&pack, n, O_DIRECT, &fd, nullptr))  // not on every file system
            check([&](moepack_error *error) { return moepack_file_fd(&pack, n, 0, &fd, error); });
        return fd;
    }
};

class ExpertCache {
  public:
    using Key = std::pair<const moepack_family *, uint32_t>;
    using Addresses = std::vector<void *>;  // one for each part

    ExpertCache(const Pack &from, uint64_t budget) : from_(from) {
        // The parts of a layer may be longer than those of another: a slot takes the longest.
        std::vector<uint64_t> longest;
        for (uint32_t n = 0; n < from.pack.families.count; n++) {
            const moepack_family *family = moepack_family_at(&from.pack, n);
            longest.resize(std::max<size_t>(longest.size(), family->parts_per_blob));
            for (uint32_t p = 0; p < family->parts_per_blob; p++) {
                uint64_t length = moepack_part_kind_at(&from.pack, family, p)->length;
                longest[p] = std::max(longest[p], on_pages(length));
            }
        }
        uint64_t slot_length = 0;
        for (uint64_t length : longest) slot_length += length;
        slots_.resize(std::max<uint64_t>(1, std::min(budget / slot_length, from.pack.blobs.count)));
        for (uint64_t length : longest) {
            tensors_.emplace_back(length * slots_.size());
            for (size_t slot = 0; slot < slots_.size(); slot++)
                slots_[slot].push_back(tensors_.back().data() + slot * length);
        }
        for (size_t slot = 0; slot < slots_.size(); slot++) free_.push_back(slot);
    }

    // Load the hottest experts into all slots, the hottest of all last: it is evicted last.
    uint32_t warm_up() {
        std::vector<moepack_hot_expert> hottest(slots_.size());
        uint32_t count = 0;
        Pack::check([&](moepack_error *error) {
            return moepack_hottest(&from_.pack, nullptr, UINT64_MAX, hottest.data(),
                                   static_cast<uint32_t>(hottest.size()), &count, error);
        });
        hottest.resize(std::min<size_t>(count, hottest.size()));
        std::reverse(hottest.begin(), hottest.end());
        for (const moepack_hot_expert &hot : hottest) get({hot.family, hot.expert});
        return static_cast<uint32_t>(hottest.size());
    }

    // Return the addresses of an expert's parts; `was_read` tells a miss from a hit.
    const Addresses &get(Key key, bool *was_read = nullptr) {
        auto entry = entries_.find(key);
        if (was_read) *was_read = entry == entries_.end();
        if (entry != entries_.end()) {
            recent_.splice(recent_.begin(), recent_, entry->second);
            return slots_[recent_.front().slot];
        }
        size_t slot = take_slot();
        free_.push_back(slot);  // as long as the read may fail
        Pack::check([&](moepack_error *error) {
            return moepack_read_parts(&from_.pack, from_.fds.data(), key.first, key.second, BLOCK,
                                      slots_[slot].data(), error);
        });
        free_.pop_back();
        recent_.push_front({key, slot});
        entries_[key] = recent_.begin();
        return slots_[slot];
    }

  private:
    struct Entry {
        Key key;
        size_t slot;
    };

    static uint64_t on_pages(uint64_t length) { return (length + BLOCK - 1) / BLOCK * BLOCK; }

    size_t take_slot() {
        if (free_.empty()) {
            free_.push_back(recent_.back().slot);
            entries_.erase(recent_.back().key);
            recent_.pop_back();
        }
        size_t slot = free_.back();
        free_.pop_back();
        return slot;
    }

    const Pack &from_;
    std::vector<Memory> tensors_;    // one for each part: [slots, bytes]
    std::vector<Addresses> slots_;
    std::vector<size_t> free_;
    std::list<Entry> recent_;        // the most recently used first
    std::map<Key, std::list<Entry>::iterator> entries_;
};

// Read the dense tensors once, when the model is loaded.
static void load_dense(const Pack &from) {
    Pack::check([&](moepack_error *error) {
        return moepack_check_tensor_records(&from.pack, error);
    });
    for (uint32_t n = 0; n < from.pack.tensors.count; n++) {
        moepack_tensor tensor;
        Pack::check([&](moepack_error *error) {
            return moepack_tensor_at(&from.pack, n, &tensor, error);
        });
        moepack_range range = moepack_round_range(tensor.offset, tensor.length, BLOCK);
        Memory memory(range.length);
        Pack::check([&](moepack_error *error) {
            moepack_code code = moepack_read_range(&from.pack, from.fds[tensor.file], tensor.file,
                                                   &range, memory.data(), error);
            return code ? code : moepack_check_tensor(&from.pack, &tensor,
                                                      memory.data() + range.lead, error);
        });
        printf("dense %s: %s, %" PRIu64 " bytes\n", tensor.name, tensor.type_name, tensor.length);
    }
}

// Where an engine computes. Here each part is checked and printed.
static void use(const Pack &from, ExpertCache::Key key, ExpertCache &cache) {
    bool was_read = false;
    const ExpertCache::Addresses &addresses = cache.get(key, &was_read);
    for (uint32_t p = 0; p < key.first->parts_per_blob; p++) {
        moepack_part part;
        Pack::check([&](moepack_error *error) {
            moepack_code code =
                moepack_locate_part(&from.pack, key.first, key.second, p, &part, error);
            return code ? code : moepack_check_part(&from.pack, &part, addresses[p], error);
        });
        printf("%s layer %" PRIu32 " expert %" PRIu32 " %s: xxh3:%016" PRIx64 "\n",
               was_read ? "read" : "hit", key.first->layer, key.second, part.kind->name,
               moepack_xxh3(addresses[p], part.length));
    }
}

int main(int argc, char **argv) try {
    if (argc < 3) throw std::runtime_error("usage: expert_cache PACK BUDGET LAYER:EXPERT...");
    Pack from(argv[1]);
    load_dense(from);
    ExpertCache cache(from, std::stoull(argv[2]));
    printf("%" PRIu32 " of %" PRIu64 " experts are loaded\n", cache.warm_up(),
           from.pack.blobs.count);
    for (int i = 3; i < argc; i++) {
        const std::string text = argv[i];
        const auto expert = static_cast<uint32_t>(std::stoul(text.substr(text.find(':') + 1)));
        const moepack_family *family = nullptr;
        Pack::check([&](moepack_error *error) {
            return moepack_find_family(&from.pack, static_cast<uint32_t>(std::stoul(text)), nullptr,
                                       &family, error);
        });
        use(from, {family, expert}, cache);
    }
} catch (const std::exception &problem) {
    fprintf(stderr, "%s\n", problem.what());
    return 1;
}
