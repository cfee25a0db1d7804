/* moepack_cache.h - keeps experts of a pack in memory, within a budget, and reads those that are missing.
 *
 * For engines that compute with experts where they lie in memory. The library is C17 for Linux; link with
 * -lmoepack_cache, or compile native/ into the engine. C++ and Rust use the same functions.
 *
 *     moepack_cache_options options = {.memory = 8ull << 30};
 *     moepack_cache *cache;
 *     moepack_error error;
 *     if (moepack_cache_open("model.moepack", &options, &cache, &error)) die(error.message);
 *     uint32_t context;                                  // one for each sequence of steps
 *     if (moepack_cache_add_context(cache, &context, &error)) die(error.message);
 *
 *     const void *parts[8 * 3];                          // in each layer, for a token's 8 experts
 *     if (moepack_cache_use(cache, context, layer, experts, 8, 1, parts, &error)) die(error.message);
 *     // parts[3 * n + p]: part p of expert experts[n], in the order of the layer's family in the index.
 *     // They stay there until the context's next use, or its release.
 *
 * A path of an index over shards (`moepack index`) works like that of a pack.
 *
 * Threads: all functions may be called in any thread, each context in one at a time; moepack_cache_close is the last.
 * After fork, only the parent may use a cache.
 *
 * MIT License, Copyright (c) the moepack authors. See LICENSE.
 */
#ifndef MOEPACK_CACHE_H
#define MOEPACK_CACHE_H

#include "moepack.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct moepack_cache moepack_cache;

enum {
    MOEPACK_CHECK_FIRST = 0, /* compare with digests when an expert is read first */
    MOEPACK_CHECK_EACH = 1,  /* whenever it is read */
    MOEPACK_CHECK_NEVER = 2
};

enum {
    MOEPACK_READS_AUTO = 0,   /* io_uring, or threads where it is forbidden; with O_DIRECT where files allow it */
    MOEPACK_READS_URING = 1,
    MOEPACK_READS_THREADS = 2,
    MOEPACK_READS_CACHED = 3  /* threads, through the page cache */
};

typedef struct moepack_cache_options {
    uint64_t memory;    /* bytes for experts: at least those of two tokens in a layer */
    const char *policy; /* of docs/policies.md; NULL: "lru" */
    const char *family; /* NULL: each layer's main one */
    uint32_t experts_used; /* by a token, in each layer; 0: 8 */
    int check, reads;
} moepack_cache_options;

/* Counts since the cache was opened; bytes in whole pages. */
typedef struct moepack_cache_counts {
    uint64_t hit_count, miss_count; /* lookups: one for each expert of a step */
    uint64_t read_length, wasted_length, wait_nanoseconds, resident_length, memory;
} moepack_cache_counts;

/* Open a pack, or an index over shards, for reading experts. Errors: as moepack_open; BUFFER (too little memory, or no
 * such policy); SYSTEM. */
MOEPACK_API moepack_code moepack_cache_open(const char *path, const moepack_cache_options *options,
                                            moepack_cache **cache, moepack_error *error);
MOEPACK_API void moepack_cache_close(moepack_cache *cache);

/* The open pack: its families, part kinds and dense tensors. It lives as long as the cache. */
MOEPACK_API const moepack *moepack_cache_pack(const moepack_cache *cache);

/* Take a context. There are 63 of them; none is given back. Errors: BUFFER. */
MOEPACK_API moepack_code moepack_cache_add_context(moepack_cache *cache, uint32_t *context, moepack_error *error);

/* Have the experts of one step in memory: `rows` tokens with `columns` experts each, row by row. Waits for their reads.
 * addresses[n * parts_per_blob + p]: part p of expert experts[n], for rows * columns experts; NULL: none are wanted.
 * Steps of 64 tokens and more also begin to read what the next layer likely uses.
 * A step that is larger than the memory takes more, until it is released.
 * Errors: NO_SUCH (layer or expert), SYSTEM, SHORT_READ, DIGEST. */
MOEPACK_API moepack_code moepack_cache_use(moepack_cache *cache, uint32_t context, uint32_t layer,
                                           const int32_t *experts, uint32_t rows, uint32_t columns,
                                           const void **addresses, moepack_error *error);

/* The context needs none of its experts any more. */
MOEPACK_API void moepack_cache_release(moepack_cache *cache, uint32_t context);

/* Begin to read experts that the next use likely needs, instead of those prefetched so far. They take free memory
 * alone; demanded reads wait for 64 MiB of them at most. Errors: NO_SUCH. */
MOEPACK_API moepack_code moepack_cache_prefetch(moepack_cache *cache, uint32_t layer, const int32_t *experts,
                                                uint32_t count, moepack_error *error);

/* Set other bytes for experts; those in use go when they are released. Errors: BUFFER. */
MOEPACK_API moepack_code moepack_cache_resize(moepack_cache *cache, uint64_t memory, moepack_error *error);

MOEPACK_API void moepack_cache_count(const moepack_cache *cache, moepack_cache_counts *counts);

#ifdef __cplusplus
}
#endif
#endif
