/* Computes with experts where moepack keeps them in memory. An example to copy.
 *
 *     n="$(moepack include-dir)/../native"    # with CMake: find_package(moepack COMPONENTS cache)
 *     cc -I"$(moepack include-dir)" resident_experts.c "$n"/{cache,drive,guesses,library,order}.c \
 *         "$n"/{pool,prompts,residents,slots}.c -lm -lpthread -o resident_experts
 *     ./resident_experts model.moepack 8000000000 LAYER EXPERT...
 */
#include <stdio.h>
#include <stdlib.h>

#include "moepack_cache.h"

enum { MOST = 64 };

static moepack_error error;

static void check(int failed, const char *message) {
    if (failed) fprintf(stderr, "%s\n", message), exit(1);
}

int main(int argc, char **argv) {
    int32_t experts[MOST];
    const void *parts[MOST * MOEPACK_MOST_PARTS];
    check(argc < 5 || argc > 4 + MOST, "usage: resident_experts PACK MEMORY LAYER EXPERT...");

    /* Once, when the model is loaded. The rest of the options is 0: lru, digests checked once. */
    moepack_cache_options options = {0};
    moepack_cache *cache;
    uint32_t context;
    options.memory = strtoull(argv[2], NULL, 10);
    check(moepack_cache_open(argv[1], &options, &cache, &error), error.message);
    check(moepack_cache_add_context(cache, &context, &error), error.message);

    /* Once a layer: which parts an expert has. Their bytes are as in the GGUF, of GGML's types. */
    const moepack *pack = moepack_cache_pack(cache);
    const moepack_family *family;
    uint32_t layer = (uint32_t)atoi(argv[3]), count = (uint32_t)(argc - 4);
    check(moepack_find_family(pack, layer, NULL, &family, &error), error.message);

    /* For each token, when the layer's router has selected: read what is missing, and compute. */
    for (uint32_t n = 0; n < count; n++) experts[n] = atoi(argv[4 + n]);
    check(moepack_cache_use(cache, context, layer, experts, 1, count, parts, &error),
          error.message);
    for (uint32_t n = 0; n < count; n++)
        for (uint32_t p = 0; p < family->parts_per_blob; p++) {
            const moepack_part_kind *kind = moepack_part_kind_at(pack, family, p);
            const void *bytes = parts[n * family->parts_per_blob + p];
            uint64_t sum = moepack_xxh3(bytes, (size_t)kind->length);
            printf("layer %u expert %d %s: xxh3:%016llx\n", layer, experts[n], kind->name,
                   (unsigned long long)sum);
        }
    moepack_cache_close(cache);
    return 0;
}
