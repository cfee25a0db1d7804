#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cache.h"

#pragma GCC visibility push(default)
#define MOEPACK_IMPLEMENTATION
#include "../include/moepack_cache.h"
#pragma GCC visibility pop

/*
 * moepack_cache.h: a cache over the index of a pack, for engines. Only `contexts` changes after it was opened.
 */

_Static_assert((int)MOEPACK_MOST_PARTS == (int)MAX_PARTS && (int)MOEPACK_MOST_CONTEXTS == (int)UNANNOUNCED, "the header says so");

struct moepack_cache {
    moepack pack;
    struct experts experts;
    struct cache_file *files;
    char (*paths)[PATH_LENGTH];
    struct cache cache;
    _Atomic uint64_t contexts; /* those that are taken, a bit for each */
};

__attribute__((format(printf, 3, 4))) static moepack_code refuse(moepack_error *error, moepack_code code, const char *format, ...) {
    va_list list;
    va_start(list, format);
    if (error) {
        vsnprintf(error->message, sizeof error->message, format, list);
        error->code = code;
        error->system_error = 0;
    }
    va_end(list);
    return code;
}

static moepack_code refuse_memory(moepack_error *error) {
    refuse(error, MOEPACK_ERR_SYSTEM, "no memory");
    if (error) error->system_error = ENOMEM;
    return MOEPACK_ERR_SYSTEM;
}

static moepack_code translate(const struct cache_error *from, moepack_error *error) {
    static const moepack_code codes[] = {
        [CACHE_OK] = MOEPACK_OK,
        [CACHE_READ_FAILED] = MOEPACK_ERR_SYSTEM,
        [CACHE_DIGEST_DIFFERS] = MOEPACK_ERR_DIGEST,
        [CACHE_SYSTEM] = MOEPACK_ERR_SYSTEM,
    };
    moepack_code code = codes[from->code];
    if (from->system_error == ENODATA) code = MOEPACK_ERR_SHORT_READ;
    refuse(error, code, "%.255s", from->message);
    if (error) error->system_error = from->system_error;
    return code;
}

/* ---- the experts of an index ---- */

/* Lay the parts of an expert into a slot: as in its blob, or each as far behind a page's start as in its file. */
static moepack_code locate_parts(const moepack *pack, const moepack_family *family, uint32_t expert, struct part *parts,
                                 uint64_t *length, moepack_error *error) {
    moepack_blob blob = {0};
    moepack_code code = moepack_locate_blob(pack, family, expert, &blob, error);
    uint64_t end = 0;
    for (uint32_t p = 0; !code && p < family->parts_per_blob; p++) {
        moepack_part part = {0};
        code = moepack_locate_part(pack, family, expert, p, &part, error);
        if (code) break;
        uint64_t start = part.apart ? end + part.offset % PAGE : part.offset_in_blob;
        parts[p] = (struct part){part.offset, part.length, part.digest, part.file, (uint32_t)start, part.has_digest != 0, false};
        end = whole_pages(start + part.length);
    }
    *length = blob.apart ? end + PAGE : whole_pages(blob.length);
    return code;
}

static moepack_code add_layer(moepack_cache *cache, const moepack_family *family, moepack_error *error) {
    struct experts *experts = &cache->experts;
    struct layer layer = {.number = family->layer, .count = family->expert_count, .part_count = family->parts_per_blob};
    if (family->parts_per_blob > MAX_PARTS)
        return refuse(error, MOEPACK_ERR_FEATURE, "layer %u: an expert has more than %d parts", family->layer, MAX_PARTS);
    uint64_t longest = 0;
    for (uint32_t e = 0; e < family->expert_count; e++) {
        uint64_t length;
        struct part *parts = &experts->parts[(uint64_t)(experts->count + e) * MAX_PARTS];
        moepack_code code = locate_parts(&cache->pack, family, e, parts, &length, error);
        if (code) return code;
        if (length > longest) longest = length;
    }
    if (longest >= 1u << 31) return refuse(error, MOEPACK_ERR_FEATURE, "layer %u: experts of 2 GiB and more", family->layer);
    if (!experts_add_layer(experts, layer, longest))
        return refuse(error, MOEPACK_ERR_FEATURE, "layer %u: experts of more than %d lengths", family->layer, MAX_CLASSES);
    return MOEPACK_OK;
}

static moepack_code add_layers(moepack_cache *cache, const char *name, moepack_error *error) {
    const moepack *pack = &cache->pack;
    uint64_t count = 0;
    for (uint32_t i = 0; i < pack->families.count; i++) count += moepack_family_at(pack, i)->expert_count;
    if (!experts_allocate(&cache->experts, (uint32_t)pack->families.count, (uint32_t)count)) return refuse_memory(error);
    for (uint32_t number = 0; number < pack->layer_count; number++) {
        const moepack_family *family = NULL;
        if (moepack_find_family(pack, number, name, &family, NULL)) continue;
        moepack_code code = add_layer(cache, family, error);
        if (code) return code;
    }
    if (!cache->experts.layer_count) return refuse(error, MOEPACK_ERR_NO_SUCH, "no layer has such experts");
    return MOEPACK_OK;
}

/* ---- files ---- */

static moepack_code open_files(moepack_cache *cache, moepack_error *error) {
    uint32_t count = (uint32_t)cache->pack.files.count;
    cache->files = calloc(count + 1, sizeof *cache->files);
    if (!cache->files) return refuse_memory(error);
    for (uint32_t i = 0; i < count; i++) cache->files[i].places[0] = (struct place){.direct = -1, .cached = -1};
    cache->paths = calloc(count + 1, sizeof *cache->paths);
    if (!cache->paths) return refuse_memory(error);
    for (uint32_t i = 0; i < count; i++) {
        struct place *place = &cache->files[i].places[0];
        moepack_code code = moepack_file_fd(&cache->pack, i, O_CLOEXEC, &place->cached, error);
        if (!code) code = moepack_file_path(&cache->pack, i, cache->paths[i], PATH_LENGTH, error);
        if (code) return code;
        place->path = cache->paths[i];
        cache->files[i].place_count = 1;
        if (moepack_file_fd(&cache->pack, i, O_CLOEXEC | O_DIRECT, &place->direct, NULL)) place->direct = -1;
    }
    return MOEPACK_OK;
}

static void close_all(moepack_cache *cache) {
    for (uint32_t i = 0; cache->files && i < cache->pack.files.count; i++) {
        if (cache->files[i].places[0].cached >= 0) close(cache->files[i].places[0].cached);
        if (cache->files[i].places[0].direct >= 0) close(cache->files[i].places[0].direct);
    }
    free(cache->files);
    free(cache->paths);
    free(cache->experts.layers);
    free(cache->experts.parts);
    free(cache->experts.layer_of);
    moepack_close(&cache->pack);
    free(cache);
}

/* ---- the public functions ---- */

static bool read_policy(const char *name, enum policy *policy) {
    static const char *const names[] = {[POLICY_LRFU] = "lrfu", [POLICY_LRU] = "lru"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(name, names[i])) {
            *policy = (enum policy)i;
            return true;
        }
    return false;
}

/* More than any model has, but lengths may be added to it. */
static uint64_t bound(uint64_t memory) { return memory < 1ull << 62 ? memory : 1ull << 62; }

static moepack_code open_cache(moepack_cache *cache, const moepack_cache_options *options, moepack_error *error) {
    static const int checks[] = {[MOEPACK_CHECK_FIRST] = CHECK_FIRST, [MOEPACK_CHECK_ALWAYS] = CHECK_EACH, [MOEPACK_CHECK_NEVER] = CHECK_NONE};
    static const enum drive_kind kinds[] = {[MOEPACK_READS_AUTO] = DRIVE_AUTO, [MOEPACK_READS_URING] = DRIVE_URING,
                                            [MOEPACK_READS_DIRECT] = DRIVE_THREADS, [MOEPACK_READS_BUFFERED] = DRIVE_THREADS};
    struct cache_options inner = {.memory = bound(options->memory), .is_cached = options->reads == MOEPACK_READS_BUFFERED};
    if (options->check < 0 || options->check > MOEPACK_CHECK_NEVER)
        return refuse(error, MOEPACK_ERR_NO_SUCH, "no such check: %d", options->check);
    if (options->reads < 0 || options->reads > MOEPACK_READS_BUFFERED)
        return refuse(error, MOEPACK_ERR_NO_SUCH, "no such way to read: %d", options->reads);
    if (options->policy && !read_policy(options->policy, &inner.policy))
        return refuse(error, MOEPACK_ERR_NO_SUCH, "no such policy: expected lrfu or lru, found %.100s", options->policy);
    inner.check = checks[options->check];
    inner.reads = kinds[options->reads];
    uint32_t experts_used = options->experts_used ? options->experts_used : 8;
    uint64_t step = 0;
    for (uint32_t i = 0; i < cache->experts.layer_count; i++) {
        const struct layer *layer = &cache->experts.layers[i];
        uint32_t count = experts_used < layer->count ? experts_used : layer->count;
        uint64_t length = count * cache->experts.class_length[layer->slot_class];
        if (length > step) step = length;
    }
    inner.reserve = step;
    if (options->memory < 2 * step)
        return refuse(error, MOEPACK_ERR_BUFFER, "too little memory: expected %llu bytes, found %llu",
                      (unsigned long long)(2 * step), (unsigned long long)options->memory);
    struct cache_error problem;
    struct cache_owner owner = {NULL, NULL, NULL, NULL};
    if (cache_open(&cache->cache, &cache->experts, cache->files, &inner, owner, NULL, &problem))
        return translate(&problem, error);
    int system_error = cache_start(&cache->cache);
    if (!system_error) return MOEPACK_OK;
    cache_close(&cache->cache);
    refuse(error, MOEPACK_ERR_SYSTEM, "no thread: %s", strerror(system_error));
    if (error) error->system_error = system_error;
    return MOEPACK_ERR_SYSTEM;
}

moepack_code moepack_cache_open(const char *path, const moepack_cache_options *options, moepack_cache **cache,
                                moepack_error *error) {
    moepack_cache *one = calloc(1, sizeof *one);
    if (!one) return refuse_memory(error);
    moepack_code code = moepack_open(path, &one->pack, error);
    if (!code) code = add_layers(one, options->family, error);
    if (!code) code = open_files(one, error);
    if (!code) code = open_cache(one, options, error);
    if (code)
        close_all(one);
    else
        *cache = one;
    return code;
}

void moepack_cache_close(moepack_cache *cache) {
    if (!cache) return;
    cache_close(&cache->cache);
    close_all(cache);
}

const moepack *moepack_cache_pack(const moepack_cache *cache) { return &cache->pack; }

moepack_code moepack_cache_add_context(moepack_cache *cache, uint32_t *context, moepack_error *error) {
    uint64_t taken = cache->contexts;
    for (;;) {
        uint32_t first = 0;
        while (first < UNANNOUNCED && taken >> first & 1) first++;
        if (first == UNANNOUNCED) return refuse(error, MOEPACK_ERR_BUFFER, "all %d contexts are taken", UNANNOUNCED);
        if (!atomic_compare_exchange_weak(&cache->contexts, &taken, taken | 1ull << first)) continue;
        *context = first;
        return MOEPACK_OK;
    }
}

static bool is_taken(const moepack_cache *cache, uint32_t context) {
    return context < UNANNOUNCED && cache->contexts >> context & 1;
}

void moepack_cache_remove_context(moepack_cache *cache, uint32_t context) {
    if (!is_taken(cache, context)) return;
    cache_release(&cache->cache, context);
    atomic_fetch_and(&cache->contexts, ~(1ull << context));
}

/* Find a layer by its number in the model, and check the experts of a step. */
static moepack_code find_layer(const moepack_cache *cache, uint32_t number, const int32_t *experts, size_t count,
                               uint32_t *layer, moepack_error *error) {
    for (uint32_t i = 0; i < cache->experts.layer_count; i++) {
        const struct layer *one = &cache->experts.layers[i];
        if (one->number != number) continue;
        *layer = i;
        for (size_t n = 0; n < count; n++)
            if (experts[n] < 0 || (uint32_t)experts[n] >= one->count)
                return refuse(error, MOEPACK_ERR_NO_SUCH, "layer %u: no expert %d", number, experts[n]);
        return MOEPACK_OK;
    }
    return refuse(error, MOEPACK_ERR_NO_SUCH, "no layer %u with experts", number);
}

moepack_code moepack_cache_use(moepack_cache *cache, uint32_t context, uint32_t layer, const int32_t *experts,
                               uint32_t rows, uint32_t columns, const void **addresses, moepack_error *error) {
    uint32_t index = 0;
    struct cache_error problem;
    size_t count = (size_t)rows * columns;
    moepack_code code = find_layer(cache, layer, experts, count, &index, error);
    if (code) moepack_cache_release(cache, context);
    if (code) return code;
    if (!is_taken(cache, context)) return refuse(error, MOEPACK_ERR_NO_SUCH, "no context %u", context);
    if (cache_use(&cache->cache, context, index, experts, rows, columns, &problem)) return translate(&problem, error);
    const struct layer *of = &cache->experts.layers[index];
    for (size_t n = 0; addresses && n < count; n++) {
        uint32_t expert = of->first + (uint32_t)experts[n];
        char *slot = cache_address(&cache->cache, expert);
        for (uint32_t p = 0; p < of->part_count; p++)
            addresses[n * of->part_count + p] = slot + part_of(&cache->experts, expert, p)->slot_offset;
    }
    return MOEPACK_OK;
}

void moepack_cache_release(moepack_cache *cache, uint32_t context) {
    if (is_taken(cache, context)) cache_release(&cache->cache, context);
}

moepack_code moepack_cache_prefetch(moepack_cache *cache, uint32_t layer, const int32_t *experts, uint32_t count,
                                    moepack_error *error) {
    uint32_t index = 0, numbers[MOEPACK_MOST_PREFETCHED];
    moepack_code code = find_layer(cache, layer, experts, count, &index, error);
    if (code) return code;
    if (count > MOEPACK_MOST_PREFETCHED) count = MOEPACK_MOST_PREFETCHED;
    for (uint32_t i = 0; i < count; i++) numbers[i] = cache->experts.layers[index].first + (uint32_t)experts[i];
    cache_read_ahead(&cache->cache, numbers, count);
    return MOEPACK_OK;
}

moepack_code moepack_cache_resize(moepack_cache *cache, uint64_t memory, moepack_error *error) {
    uint64_t least = 2 * cache->cache.options.reserve;
    if (memory < least)
        return refuse(error, MOEPACK_ERR_BUFFER, "too little memory: expected %llu bytes, found %llu",
                      (unsigned long long)least, (unsigned long long)memory);
    cache_resize(&cache->cache, bound(memory));
    return MOEPACK_OK;
}

void moepack_cache_count(const moepack_cache *cache, moepack_cache_counts *counts) {
    const struct cache_statistics *statistics = cache->cache.statistics;
    *counts = (moepack_cache_counts){statistics->hit_count, statistics->miss_count, statistics->read_length,
                                     statistics->wasted_length, statistics->wait_nanoseconds, statistics->resident_length,
                                     statistics->memory};
}
