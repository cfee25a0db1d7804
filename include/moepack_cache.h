/* moepack_cache.h - keeps experts of a pack in memory, within a budget, and reads those that are missing.
 *
 * For engines that compute with experts where they lie in memory. This header is C99 and C++17; the library is C17 for
 * Linux with glibc, on x86-64 and AArch64. CMake has it as moepack::cache (find_package(moepack COMPONENTS cache)). By
 * hand, with native/ beside the folder of this header:
 *
 *     cd native && cc -std=c17 -O2 -shared -fPIC -fvisibility=hidden -o libmoepack_cache.so \
 *         cache.c drive.c guesses.c library.c order.c pool.c prompts.c reads.c residents.c slots.c -lm -lpthread
 *
 * It contains the functions of moepack.h: do not define MOEPACK_IMPLEMENTATION, or MOEPACK_STATIC, beside it.
 *
 *     moepack_cache_options options = {0};               // {} in C++
 *     options.memory = 8ull << 30;
 *     moepack_cache *cache;
 *     moepack_error error;
 *     if (moepack_cache_open("model.moepack", &options, &cache, &error)) die(error.message);
 *     uint32_t context;                                  // one for each sequence of steps
 *     if (moepack_cache_add_context(cache, &context, &error)) die(error.message);
 *
 *     const moepack *pack = moepack_cache_pack(cache);   // names and types of parts, once a layer
 *     const moepack_family *family;
 *     if (moepack_find_family(pack, layer, NULL, &family, &error)) die(error.message);
 *     const moepack_part_kind *kind = moepack_part_kind_at(pack, family, p); // kind->name, type_id, ne0, ne1, length
 *
 *     const void *parts[8 * MOEPACK_MOST_PARTS];         // in each layer, for a token's 8 experts
 *     if (moepack_cache_use(cache, context, layer, experts, 8, 1, parts, &error)) die(error.message);
 *     // parts[n * family->parts_per_blob + p]: kind->length bytes of part p of expert experts[n]
 *
 * The bytes are those of the GGUF, and stay where they are until the context's next use or its release; read them, never
 * write to them. A pack's weights start at multiples of its alignment (header->part_alignment); those of an index over
 * shards (`moepack index`), which works like a pack, only where the GGUF has them (32 bytes). Up to the end of its page
 * more may be read than a part has.
 *
 * Memory: each context keeps the experts of its last step, and a use waits while these leave no room. With room for one
 * step more than there are contexts, none waits for another; with less, release a context before its thread waits for
 * anything else, and never use two in turn in one thread. A step that is larger than all memory waits until no
 * other context has experts, and takes more until it is released. The memory is shared memory (memfd) in whole pages, and
 * comes as it is needed; from 64 MiB on in huge ones, of which up to 2 MiB for each length of experts are more than was
 * set. Beside it the tables take a MiB, and less than a KiB for each expert of the model.
 *
 * Threads: all functions may be called in any thread, each context in one at a time; moepack_cache_close is the last. The
 * library has a thread of its own, and eight more where there is no io_uring; none of them takes signals. After fork, only
 * the parent may use a cache, or close it.
 *
 * Errors are those of moepack.h; after one, a context has no experts, and the cache goes on.
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
    MOEPACK_MOST_PARTS = 16, /* of an expert; others are refused */
    MOEPACK_MOST_CONTEXTS = 63,
    MOEPACK_MOST_PREFETCHED = 1024
};

enum {
    MOEPACK_CHECK_FIRST = 0,  /* compare with digests when an expert is read first */
    MOEPACK_CHECK_ALWAYS = 1, /* whenever it is read */
    MOEPACK_CHECK_NEVER = 2
};

enum {
    MOEPACK_READS_AUTO = 0,    /* uring, or direct where io_uring is forbidden */
    MOEPACK_READS_URING = 1,   /* io_uring; this and the next with O_DIRECT where the file system has it */
    MOEPACK_READS_DIRECT = 2,  /* threads */
    MOEPACK_READS_BUFFERED = 3 /* threads, through the page cache */
};

/* All others may be 0. */
typedef struct moepack_cache_options {
    uint64_t memory;       /* bytes for experts: at least those of two tokens in a layer. More than the model: all stay */
    const char *policy;    /* lrfu or lru (docs/policies.md); NULL: lrfu */
    const char *family;    /* of the layers, by its name; NULL: each layer's main one */
    uint32_t experts_used; /* by a token, in each layer; 0: 8 */
    int check, reads;      /* MOEPACK_CHECK_…, MOEPACK_READS_… */
} moepack_cache_options;

/* Counts since the cache was opened; bytes in whole pages. */
typedef struct moepack_cache_counts {
    uint64_t hit_count, miss_count; /* lookups, of each expert of a step one. What was prefetched is a miss, of which no
                                       bytes are read: hits are those of the policy, as `moepack simulate` counts them */
    uint64_t read_length;           /* of all reads, those in vain included */
    uint64_t wasted_length;         /* of experts that were prefetched, and not used next */
    uint64_t wait_nanoseconds;      /* in which uses waited for reads, of all contexts together */
    uint64_t resident_length;       /* experts in memory now */
    uint64_t memory;                /* what was set */
} moepack_cache_counts;

/* Open a pack, or an index over shards, for reading experts. Its path is a folder. *cache is set on success alone.
 * Errors: as moepack_open, of moepack_file_fd; BUFFER (too little memory: the message says what is needed); NO_SUCH
 * (policy, check, way to read or family); FEATURE (more than MOEPACK_MOST_PARTS parts, an expert of 2 GiB, experts of more
 * than 64 lengths); SYSTEM (memory, threads, io_uring). */
MOEPACK_API moepack_code moepack_cache_open(const char *path, const moepack_cache_options *options,
                                            moepack_cache **cache, moepack_error *error);
/* Wait for reads in flight, and free everything. NULL is allowed. */
MOEPACK_API void moepack_cache_close(moepack_cache *cache);

/* The open pack: its families, part kinds and dense tensors. It lives as long as the cache. */
MOEPACK_API const moepack *moepack_cache_pack(const moepack_cache *cache);

/* Take a context; MOEPACK_MOST_CONTEXTS may be taken at once. Errors: BUFFER. */
MOEPACK_API moepack_code moepack_cache_add_context(moepack_cache *cache, uint32_t *context, moepack_error *error);
/* Release it, and give it back. */
MOEPACK_API void moepack_cache_remove_context(moepack_cache *cache, uint32_t context);

/* Have the experts of one step in memory: `rows` tokens with `columns` experts each, row by row. Waits for their reads.
 * The context's last step is released. addresses[n * parts_per_blob + p]: part p of expert experts[n], for rows * columns
 * experts, equal ones included; NULL: none are wanted. Steps of 64 tokens and more also begin to read what the next layer
 * likely uses, instead of what was prefetched.
 * Errors: NO_SUCH (layer, expert or context), SYSTEM, SHORT_READ, DIGEST. */
MOEPACK_API moepack_code moepack_cache_use(moepack_cache *cache, uint32_t context, uint32_t layer,
                                           const int32_t *experts, uint32_t rows, uint32_t columns,
                                           const void **addresses, moepack_error *error);

/* The context needs none of its experts any more. */
MOEPACK_API void moepack_cache_release(moepack_cache *cache, uint32_t context);

/* Begin to read the experts that the next use, of any context, likely needs, in this order, and end the reading of others
 * that were prefetched; that use ends it as well. They take memory that nothing else needs, and the first
 * MOEPACK_MOST_PREFETCHED are read; demanded reads wait for 64 MiB of them at most. Errors: NO_SUCH. */
MOEPACK_API moepack_code moepack_cache_prefetch(moepack_cache *cache, uint32_t layer, const int32_t *experts,
                                                uint32_t count, moepack_error *error);

/* Set other bytes for experts; those in use go when they are released. Errors: BUFFER. */
MOEPACK_API moepack_code moepack_cache_resize(moepack_cache *cache, uint64_t memory, moepack_error *error);

MOEPACK_API void moepack_cache_count(const moepack_cache *cache, moepack_cache_counts *counts);

#ifdef __cplusplus
}
#endif
#endif
