/*
 * Several threads use one cache of a pack: stress PACK MEMORY READS THREADS STEPS SEED. Each compares what it uses with the
 * digests of the pack; another thread changes the memory, and reads ahead. Prints how many experts were used.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "../../include/moepack_cache.h"

enum { COLUMNS = 2, MOST_ROWS = 3 };

static moepack_cache *cache;
static uint64_t memory;
static uint32_t step_count;
static atomic_ulong used_count;
static atomic_bool is_over;

static void fail(const char *what, const char *message) {
    printf("%s: %s\n", what, message);
    exit(1);
}

static uint32_t draw(uint64_t *state, uint32_t below) {
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33) % below;
}

static const moepack_family *any_family(uint64_t *state) {
    const moepack *pack = moepack_cache_pack(cache);
    return moepack_family_at(pack, draw(state, (uint32_t)pack->families.count));
}

static void check(const moepack_family *family, const int32_t *experts, uint32_t count, const void **addresses) {
    moepack_error error;
    const moepack *pack = moepack_cache_pack(cache);
    for (uint32_t n = 0; n < count; n++)
        for (uint32_t p = 0; p < family->parts_per_blob; p++) {
            moepack_part part;
            if (moepack_locate_part(pack, family, (uint32_t)experts[n], p, &part, &error)) fail("locate", error.message);
            if (moepack_check_part(pack, &part, addresses[n * family->parts_per_blob + p], &error)) fail("check", error.message);
        }
    atomic_fetch_add(&used_count, count);
}

static void *use(void *data) {
    uint64_t state = (uint64_t)(uintptr_t)data;
    uint32_t context;
    moepack_error error;
    if (moepack_cache_add_context(cache, &context, &error)) fail("context", error.message);
    for (uint32_t i = 0; i < step_count; i++) {
        const moepack_family *family = any_family(&state);
        int32_t experts[COLUMNS * MOST_ROWS];
        const void *addresses[COLUMNS * MOST_ROWS * 16];
        uint32_t rows = 1 + draw(&state, MOST_ROWS);
        for (uint32_t n = 0; n < rows * COLUMNS; n++) experts[n] = (int32_t)draw(&state, family->expert_count);
        if (moepack_cache_use(cache, context, family->layer, experts, rows, COLUMNS, addresses, &error)) fail("use", error.message);
        check(family, experts, rows * COLUMNS, addresses);
        if (draw(&state, 10) == 0) moepack_cache_release(cache, context);
    }
    moepack_cache_release(cache, context);
    return NULL;
}

static void *disturb(void *data) {
    uint64_t state = (uint64_t)(uintptr_t)data;
    moepack_error error;
    moepack_cache_counts counts;
    while (!atomic_load(&is_over)) {
        const moepack_family *family = any_family(&state);
        int32_t experts[3];
        for (uint32_t n = 0; n < 3; n++) experts[n] = (int32_t)draw(&state, family->expert_count);
        if (moepack_cache_prefetch(cache, family->layer, experts, 3, &error)) fail("prefetch", error.message);
        if (moepack_cache_resize(cache, memory + memory / 4 * draw(&state, 4), &error)) fail("resize", error.message);
        moepack_cache_count(cache, &counts);
        struct timespec pause = {0, 1000000};
        nanosleep(&pause, NULL);
    }
    return NULL;
}

int main(int count, char **arguments) {
    if (count < 7) return 2;
    memory = strtoull(arguments[2], NULL, 10);
    step_count = (uint32_t)atoi(arguments[5]);
    moepack_error error;
    moepack_cache_options options = {.memory = memory, .reads = atoi(arguments[3]), .experts_used = COLUMNS, .policy = "lrfu", .check = MOEPACK_CHECK_ALWAYS};
    if (moepack_cache_open(arguments[1], &options, &cache, &error)) fail("open", error.message);
    pthread_t threads[16], other;
    int thread_count = atoi(arguments[4]), seed = atoi(arguments[6]);
    for (int i = 0; i < thread_count; i++) pthread_create(&threads[i], NULL, use, (void *)(uintptr_t)(seed * 100 + i + 1));
    pthread_create(&other, NULL, disturb, (void *)(uintptr_t)(seed + 7));
    for (int i = 0; i < thread_count; i++) pthread_join(threads[i], NULL);
    atomic_store(&is_over, true);
    pthread_join(other, NULL);
    moepack_cache_close(cache);
    printf("%lu\n", atomic_load(&used_count));
    return 0;
}
