/*
 * A cache under readers that announce what they read and others that do not: readers FOLDER READS SEED STEPS FAILS. Experts
 * are mapped where they are resident, and nothing is there else: an access brings them, by the signal's handler, as in
 * programs. Each word of an expert tells whose it is. The memory changes meanwhile, experts are read ahead, and reads of
 * threads are slow, short or refused. With FAILS 1 many fail for good: then nobody reads what was not announced, and steps
 * may fail. Whoever reads anything else than the expert's own bytes ends the program with 1, and a wait without end does
 * with SIGALRM.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../include/moepack.h"
#include "../../native/cache.h"

enum { LAYERS = 5, PER_LAYER = 12, COUNT = LAYERS * PER_LAYER, STRIDE = 1 << 20, USERS = 3, FAULTERS = 3, COLUMNS = 3, USES = 40 };

static const uint64_t LENGTHS[LAYERS] = {PAGE, 3 * PAGE, PAGE, 160 * PAGE, 9 * PAGE};
static struct layer layers[LAYERS];
static struct part parts[COUNT * MAX_PARTS];
static uint32_t layers_of[COUNT], step_count;
static struct experts experts = {.layers = layers, .parts = parts, .layer_of = layers_of, .layer_count = LAYERS};
static struct cache_file file = {.place_count = 1};
static struct cache cache;
static char *region;
static bool may_fail;
static atomic_bool is_over;
static atomic_uint brought, failed;

static void require(bool holds, const char *rule) {
    if (holds) return;
    dprintf(1, "%s\n", rule);
    _exit(1);
}

static uint32_t draw(uint64_t *state, uint32_t below) {
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33) % below;
}

static uint64_t word_of(uint32_t expert, uint64_t number) { return (expert + 1) * 0x9e3779b97f4a7c15ull + number; }

/* ---- the drive: pread of the library is called by this name ---- */

ssize_t __real_pread(int descriptor, void *buffer, size_t length, off_t offset);
ssize_t __wrap_pread(int descriptor, void *buffer, size_t length, off_t offset);

ssize_t __wrap_pread(int descriptor, void *buffer, size_t length, off_t offset) {
    static _Thread_local uint64_t state = 7;
    switch (draw(&state, 40)) {
    case 0: usleep(2000); break;
    case 1: length = length / 2 + 1; break;
    case 2: errno = EINTR; return -1;
    case 3:
        if (descriptor == file.places[0].direct) return errno = EINVAL, -1;
        break;
    default:
        if (may_fail && draw(&state, 4) == 0) return errno = EIO, -1;
    }
    return __real_pread(descriptor, buffer, length, offset);
}

/* ---- the program ---- */

static void map(void *data, uint32_t expert) {
    (void)data;
    uint64_t length = slot_length(&experts, expert);
    void *mapped = mmap(region + (uint64_t)expert * STRIDE, length, PROT_READ, MAP_SHARED | MAP_FIXED, cache.pool.descriptor,
                        (off_t)cache.residents.states[expert].slot);
    require(mapped != MAP_FAILED, "it is mapped");
}

static void unmap(void *data, uint32_t expert) {
    (void)data;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    void *mapped = mmap(region + (uint64_t)expert * STRIDE, slot_length(&experts, expert), PROT_NONE, flags, -1, 0);
    require(mapped != MAP_FAILED, "it is unmapped");
}

static void on_fault(int number, siginfo_t *information, void *context) {
    (void)number, (void)context;
    struct cache_error error;
    int before = errno;
    uint64_t offset = (uint64_t)((char *)information->si_addr - region);
    require(offset < (uint64_t)COUNT * STRIDE, "only experts are not there");
    require(!cache_bring(&cache, (uint32_t)(offset / STRIDE), &error), error.message);
    atomic_fetch_add(&brought, 1);
    errno = before;
}

static void check(const char *address, uint32_t expert, uint64_t *state) {
    for (int i = 0; i < USES; i++) {
        uint64_t number = draw(state, (uint32_t)(slot_length(&experts, expert) / 8));
        require(((const uint64_t *)address)[number] == word_of(expert, number), "a reader gets the expert's own bytes");
    }
}

/* The same where it is mapped, and may be unmapped meanwhile: that is no race, since the next access is a fault. */
__attribute__((no_sanitize("thread"))) static void check_mapped(uint32_t expert, uint64_t *state) {
    for (int i = 0; i < USES; i++) {
        uint64_t number = draw(state, (uint32_t)(slot_length(&experts, expert) / 8));
        const uint64_t *mapped = (const uint64_t *)(region + (uint64_t)expert * STRIDE);
        require(mapped[number] == word_of(expert, number), "a reader that announces nothing gets the expert's own bytes");
    }
}

static void *announce(void *data) {
    uint32_t context = (uint32_t)(uintptr_t)data;
    uint64_t state = context + 100;
    for (uint32_t step = 0; step < step_count; step++) {
        struct cache_error error;
        uint32_t layer = draw(&state, LAYERS), rows = draw(&state, 8) ? 1 : MANY_TOKENS, most = PER_LAYER;
        int32_t routed[COLUMNS * MANY_TOKENS];
        for (uint32_t i = 0; i < rows * COLUMNS; i++) routed[i] = (int32_t)draw(&state, most);
        if (cache_use(&cache, context, layer, routed, rows, COLUMNS, &error)) {
            require(may_fail && error.system_error == EIO, error.message);
            atomic_fetch_add(&failed, 1);
            continue;
        }
        for (uint32_t i = 0; i < rows * COLUMNS && i < 12; i++) {
            uint32_t expert = layers[layer].first + (uint32_t)routed[i];
            check(cache_address(&cache, expert), expert, &state);
            check_mapped(expert, &state);
        }
        if (draw(&state, 3) == 0) cache_release(&cache, context);
    }
    cache_release(&cache, context);
    return NULL;
}

static void *read_all(void *data) {
    uint64_t state = (uint64_t)(uintptr_t)data;
    while (!atomic_load(&is_over)) {
        check_mapped(draw(&state, COUNT), &state);
    }
    return NULL;
}

static void *disturb(void *data) {
    uint64_t least = *(uint64_t *)data, state = 5;
    while (!atomic_load(&is_over)) {
        uint32_t chosen[6];
        for (unsigned i = 0; i < 6; i++) chosen[i] = draw(&state, COUNT);
        cache_read_ahead(&cache, chosen, 6);
        cache_resize(&cache, least + least / 2 * draw(&state, 4));
        usleep(1000);
    }
    return NULL;
}

static void make_model(const char *folder) {
    static char path[PATH_LENGTH];
    snprintf(path, sizeof path, "%s/experts", folder);
    int descriptor = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    static uint64_t words[STRIDE / 8];
    uint64_t offset = 0;
    for (uint32_t i = 0; i < LAYERS; i++) {
        uint32_t slot_class = 0;
        while (slot_class < experts.class_count && experts.class_length[slot_class] != LENGTHS[i]) slot_class++;
        if (slot_class == experts.class_count) experts.class_length[experts.class_count++] = LENGTHS[i];
        layers[i] = (struct layer){i, experts.count, PER_LAYER, 1, slot_class, false};
        for (uint32_t e = experts.count; e < experts.count + PER_LAYER; e++) {
            parts[e * MAX_PARTS] = (struct part){.offset = offset, .length = LENGTHS[i], .has_digest = true};
            layers_of[e] = i;
            for (uint64_t n = 0; n < LENGTHS[i] / 8; n++) words[n] = word_of(e, n);
            parts[e * MAX_PARTS].digest = moepack_xxh3(words, LENGTHS[i]);
            require(pwrite(descriptor, words, LENGTHS[i], (off_t)offset) == (ssize_t)LENGTHS[i], "the file is written");
            offset += LENGTHS[i];
        }
        experts.count += PER_LAYER;
    }
    file.places[0] = (struct place){.path = path, .cached = descriptor, .direct = open(path, O_RDONLY | O_DIRECT)};
}

int main(int argument_count, char **arguments) {
    if (argument_count < 6) return 2;
    may_fail = atoi(arguments[5]) != 0;
    unsigned seed = (unsigned)atoi(arguments[3]);
    step_count = (uint32_t)atoi(arguments[4]);
    make_model(arguments[1]);
    alarm(120);
    region = mmap(NULL, (size_t)COUNT * STRIDE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &ours, NULL);
    uint64_t step = COLUMNS * LENGTHS[3], least = 2 * step;
    struct cache_options options = {.memory = least, .reserve = step, .policy = (enum policy)(seed % 2),
                                    .reads = (enum drive_kind)atoi(arguments[2]), .is_prepared = seed % 2, .check = (int)seed % 3};
    struct cache_owner owner = {NULL, map, unmap, NULL};
    struct cache_error error;
    require(!cache_open(&cache, &experts, &file, &options, owner, NULL, &error), error.message);
    if (seed % 2) cache_pin(&cache, 0);
    static struct warm_expert warm[COUNT];
    for (uint32_t i = 0; i < COUNT; i++) warm[i] = (struct warm_expert){i, UINT32_MAX / (i + 1)};
    cache_warm_up(&cache, warm, COUNT);
    require(!cache_start(&cache), "there is a thread");
    pthread_t users[USERS], faulters[FAULTERS], other;
    for (unsigned i = 0; i < USERS; i++) pthread_create(&users[i], NULL, announce, (void *)(uintptr_t)i);
    for (unsigned i = 0; i < FAULTERS && !may_fail; i++) pthread_create(&faulters[i], NULL, read_all, (void *)(uintptr_t)(i + seed));
    pthread_create(&other, NULL, disturb, &least);
    for (unsigned i = 0; i < USERS; i++) pthread_join(users[i], NULL);
    atomic_store(&is_over, true);
    for (unsigned i = 0; i < FAULTERS && !may_fail; i++) pthread_join(faulters[i], NULL);
    pthread_join(other, NULL);
    cache_close(&cache);
    require(atomic_load(may_fail ? &failed : &brought) > 0, "some fail, or are brought by faults");
    return 0;
}
