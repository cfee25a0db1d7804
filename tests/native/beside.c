/*
 * What a cache does beside steps: reads before the first one, reads ahead, guesses, pages that are made before they are needed.
 * beside FOLDER prints nothing, or what is wrong.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../native/cache.h"
#include "../../native/threads.h"

/* Slots of layer 2 are larger than huge pages, and the memory is large enough for these. */
enum { LAYERS = 3, PER_LAYER = 8, COUNT = LAYERS * PER_LAYER, SMALL = 3 * PAGE, LARGE = HUGE_PAGE + 5 * PAGE, LAST = 2 * PER_LAYER };

static const uint64_t LENGTHS[] = {SMALL, LARGE}, MEMORY = 96 << 20;
static struct layer layers[LAYERS] = {
    {0, 0, PER_LAYER, 1, 0, false}, {1, PER_LAYER, PER_LAYER, 1, 0, false}, {2, 2 * PER_LAYER, PER_LAYER, 1, 1, false}};
static struct part parts[COUNT * MAX_PARTS];
static uint32_t layers_of[COUNT];
static struct experts experts = {
    .layers = layers, .parts = parts, .layer_of = layers_of, .layer_count = LAYERS, .count = COUNT, .class_count = 2, .class_length = {SMALL, LARGE}};
static struct cache_file file = {.place_count = 1};
static struct cache cache;
static bool is_open;
static struct cache_options options;
static struct cache_error error;
static struct warm_expert warm[COUNT];
static atomic_uint tick_count;

#define REQUIRE(condition) \
    if (!(condition)) return printf("line %d: %s\n", __LINE__, #condition), 1

/* Wait for what the cache's own thread does. */
#define COMES(condition)                                             \
    for (int tries = 0; tries < 2000 && !(condition); tries++) usleep(5000); \
    REQUIRE(condition)

static void tick(void *data) {
    (void)data;
    atomic_fetch_add(&tick_count, 1);
}

static void close_cache(void) {
    if (is_open) cache_close(&cache);
    is_open = false;
}

static void open_cache(uint64_t memory) {
    close_cache();
    struct cache_owner owner = {NULL, NULL, NULL, tick};
    options.memory = memory;
    options.reserve = SMALL;
    is_open = !cache_open(&cache, &experts, &file, &options, owner, NULL, &error);
    if (!is_open) printf("%s\n", error.message);
}

static uint64_t memory_of_pool(void) {
    struct stat status;
    fstat(cache.pool.descriptor, &status);
    return (uint64_t)status.st_blocks * 512;
}

static int use(uint32_t layer, int32_t expert) { return cache_use(&cache, 0, layer, &expert, 1, 1, &error); }

static bool is_resident(uint32_t expert) {
    pthread_mutex_lock(&cache.lock);
    bool is_so = cache.residents.states[expert].bytes == RESIDENT;
    pthread_mutex_unlock(&cache.lock);
    return is_so;
}

/* ---- before the first step ---- */

static int warm_up(void) {
    open_cache(6 * SMALL); /* of which the reserve is one */
    for (uint32_t i = 0; i < COUNT; i++) warm[i] = (struct warm_expert){(5 * i + 3) % LAST, UINT32_MAX / (i + 1)};
    cache_warm_up(&cache, warm, COUNT);
    REQUIRE(!cache_start(&cache));
    COMES(!atomic_load(&cache.statistics->is_warming) && atomic_load(&cache.statistics->resident_length) == 5 * SMALL);
    for (uint32_t i = 0; i < COUNT; i++) REQUIRE(is_resident((5 * i + 3) % LAST) == (i < 5 || (i >= 16 && i - 16 < 5)));
    REQUIRE(cache.statistics->read_length == 5 * SMALL && !cache.statistics->miss_count && !cache.ahead_in_flight);
    REQUIRE(!use(0, 3) && cache.statistics->hit_count == 1);
    return 0;
}

/* After the first step, pinned experts alone are read. */
static int warm_up_pinned(void) {
    open_cache(9 * SMALL);
    for (uint32_t i = 0; i < 4; i++) warm[i] = (struct warm_expert){i, UINT32_MAX};
    REQUIRE(cache_pin(&cache, 0) && cache_pin(&cache, 1));
    cache_warm_up(&cache, warm, 4);
    REQUIRE(!use(1, 0) && !use(1, 1) && atomic_load(&cache.statistics->is_warming));
    REQUIRE(!cache_start(&cache));
    COMES(!atomic_load(&cache.statistics->is_warming) && is_resident(0) && is_resident(1));
    usleep(20000);
    REQUIRE(!is_resident(2) && !is_resident(3) && cache.statistics->read_length == 4 * SMALL);
    return 0;
}

/* ---- ahead ---- */

static int read_ahead(void) {
    open_cache(9 * SMALL);
    REQUIRE(!use(0, 0));
    cache_read_ahead(&cache, (uint32_t[]){9, 10, 11}, 3);
    REQUIRE(cache.ahead_in_flight == 3 * SMALL); /* at once */
    REQUIRE(!cache_start(&cache));
    COMES(is_resident(9) && is_resident(10) && is_resident(11));
    cache_read_ahead(&cache, NULL, 0);
    REQUIRE(!is_resident(9) && !is_resident(10) && !is_resident(11));
    REQUIRE(!use(0, 0) && !cache.ahead_in_flight && cache.statistics->wasted_length == 3 * SMALL);
    uint32_t before = atomic_load(&tick_count);
    COMES(atomic_load(&tick_count) >= before + 2); /* a few times a second */
    return 0;
}

/* Likely experts of the next layer are read after a step of many tokens, unless nobody waits for the program. */
static int read_the_next_layer(void) {
    int32_t all[MANY_TOKENS];
    for (int32_t i = 0; i < MANY_TOKENS; i++) all[i] = i % PER_LAYER;
    for (uint32_t count = MANY_TOKENS - 1; count <= MANY_TOKENS; count++)
        for (int is_idle = 0; is_idle < 2; is_idle++) {
            open_cache((PER_LAYER + 2) * SMALL); /* of which a step leaves one */
            atomic_store(&cache.is_idle, is_idle);
            REQUIRE(!cache_use(&cache, 0, 1, all, MANY_TOKENS, 1, &error) && !cache.residents.ahead_count);
            REQUIRE(!cache_use(&cache, 0, 0, all, count, 1, &error));
            REQUIRE(cache.residents.ahead_count == (count == MANY_TOKENS && !is_idle));
        }
    return 0;
}

static int guess(void) {
    uint32_t named[] = {4, 5, 5, 6};
    open_cache(9 * SMALL);
    REQUIRE(!cache_wants_guess(&cache, 0, 1)); /* nobody has asked for guesses */
    options.prefetches = true;
    open_cache(9 * SMALL);
    REQUIRE(cache_wants_guess(&cache, 0, 1) && cache_wants_guess(&cache, 0, MOST_GUESSED_TOKENS));
    REQUIRE(!cache_wants_guess(&cache, 0, MOST_GUESSED_TOKENS + 1) && !cache_wants_guess(&cache, 2, 1));
    layers[1].is_rare = true;
    REQUIRE(!cache_wants_guess(&cache, 0, 1));
    layers[1].is_rare = false;
    REQUIRE(cache.residents.most_room == 3 * SMALL && !use(0, 0) && cache.guesses.miss_time > 0);
    cache_guess(&cache, 0, 0, named, 4, 2, 1000);
    cache_guess(&cache, 1, 0, named, 0, 1, 1000); /* another names nothing, and ends nothing */
    REQUIRE(!cache_start(&cache));
    COMES(is_resident(12) && is_resident(13) && is_resident(14));
    REQUIRE(!use(1, 5) && cache.statistics->guessed_count == 3 && cache.statistics->right_count == 1);
    REQUIRE(cache.statistics->ahead_count == 3 && cache.statistics->ahead_right_count == 1 && cache.statistics->read_length == 4 * SMALL);
    for (int i = 0; i < 16; i++) cache_record_control(&cache, false);
    REQUIRE(!cache_wants_guess(&cache, 0, 1) && !use(0, 0) && cache.statistics->guesses_are_off);
    REQUIRE(cache.statistics->control_count == 16 && !cache.statistics->control_right_count);
    options.prefetches = false;
    return 0;
}

/* ---- pages ---- */

/* Nanoseconds for which the cache's own thread has computed. */
static uint64_t own_time(void) {
    clockid_t clock;
    struct timespec time = {0, 0};
    if (!pthread_getcpuclockid(cache.thread, &clock)) clock_gettime(clock, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

/* Slots get pages before they are needed, of all classes alike, up to what the classes or the memory have. */
static int prepare(void) {
    experts.is_aligned = true;
    for (int is_prepared = 0; is_prepared < 2; is_prepared++) {
        uint64_t started = now();
        options.is_prepared = is_prepared;
        atomic_store(&tick_count, 0);
        open_cache(MEMORY);
        REQUIRE(!cache_start(&cache));
        uint64_t whole = 16 * SMALL + 8 * LARGE;
        if (is_prepared) {
            COMES(cache.prepared_lengths[0] == 16 * SMALL && cache.prepared_lengths[1] == 8 * LARGE && memory_of_pool() >= whole);
        }
        REQUIRE(memory_of_pool() <= (is_prepared ? whole + 2 * HUGE_PAGE : 0));
        REQUIRE(atomic_load(&tick_count) <= 2 + (now() - started) / 240000000);
        uint64_t before = own_time();
        usleep(100000);
        REQUIRE(own_time() - before < 5000000); /* it sleeps where nothing is to be done */
        cache_resize(&cache, 4 * SMALL); /* what nobody has used goes at once */
        REQUIRE(memory_of_pool() <= 4 * SMALL + HUGE_PAGE && !use(0, 1) && memory_of_pool() >= SMALL);
        cache_resize(&cache, MEMORY);
        if (is_prepared) {
            COMES(cache.prepared_lengths[1] == 8 * LARGE);
        }
    }
    open_cache((64 << 20) - 1); /* too little for huge pages */
    REQUIRE(!cache_start(&cache) && !use(2, 1));
    usleep(20000);
    REQUIRE(memory_of_pool() == LARGE);
    options.is_prepared = experts.is_aligned = false;
    return 0;
}

int __real_madvise(void *start, size_t length, int advice);
int __wrap_madvise(void *start, size_t length, int advice);

/* Whether the memory shrinks as soon as a slot of the second class gets pages. */
static atomic_bool shrinks;

int __wrap_madvise(void *start, size_t length, int advice) {
    if (cache.prepared_lengths[1] && atomic_exchange(&shrinks, false)) cache_resize(&cache, 4 * SMALL);
    return __real_madvise(start, length, advice);
}

/* Pages that come after their slot was given back are given back as well. */
static int give_back_meanwhile(void) {
    experts.is_aligned = options.is_prepared = true;
    open_cache(MEMORY);
    atomic_store(&shrinks, true);
    REQUIRE(!cache_start(&cache));
    COMES(!atomic_load(&shrinks));
    usleep(100000);
    REQUIRE(memory_of_pool() <= 4 * SMALL + HUGE_PAGE);
    options.is_prepared = experts.is_aligned = false;
    return 0;
}

int main(int argument_count, char **arguments) {
    char path[PATH_LENGTH];
    if (argument_count < 2) return 2;
    alarm(100);
    snprintf(path, sizeof path, "%s/experts", arguments[1]);
    file.places[0] = (struct place){.path = path, .cached = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600), .direct = -1};
    uint64_t offset = 0;
    for (uint32_t e = 0; e < COUNT; e++) {
        layers_of[e] = e / PER_LAYER;
        parts[e * MAX_PARTS] = (struct part){.offset = offset, .length = LENGTHS[layers[layers_of[e]].slot_class]};
        offset += LENGTHS[layers[layers_of[e]].slot_class];
    }
    if (ftruncate(file.places[0].cached, (off_t)offset)) return 2;
    int (*const stories[])(void) = {warm_up, warm_up_pinned, read_ahead, read_the_next_layer, guess, prepare, give_back_meanwhile};
    for (unsigned i = 0; i < sizeof stories / sizeof *stories; i++) {
        if (stories[i]()) return 1;
        close_cache();
    }
    return 0;
}
