/*
 * The memory of slots: where it is mapped, when it has pages, and when they are the system's again. It prints nothing, or what
 * is wrong.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../native/experts.h"
#include "../../native/pool.h"

#define REQUIRE(condition) \
    if (!(condition)) return printf("line %d: %s\n", __LINE__, #condition), 1

void *__real_mmap(void *, size_t, int, int, int, off_t);
void *__wrap_mmap(void *, size_t, int, int, int, off_t);
static int maps_left = -1; /* until one fails; below 0: none does */
static size_t shift;       /* of what the system would choose */

void *__wrap_mmap(void *address, size_t length, int protection, int flags, int descriptor, off_t offset) {
    if (!maps_left--) return errno = ENOMEM, MAP_FAILED;
    size_t before = address ? 0 : shift;
    char *start = __real_mmap(address, length + before, protection, flags, descriptor, offset);
    if (before) munmap(start, before);
    return start + before;
}

static uint64_t memory_of(const struct pool_memory *pool) {
    struct stat status;
    fstat(pool->descriptor, &status);
    return (uint64_t)status.st_blocks * 512;
}

static bool is_mapped(const char *address) {
    unsigned char vector;
    return !mincore((void *)(uintptr_t)address, PAGE, &vector);
}

/* The pages of a file beside those of slots; nothing of it is left beside it in the address space. */
static int open_one(struct pool_memory *pool, uint64_t length, uint64_t whole) {
    struct stat status;
    REQUIRE(pool_open(pool, length, true) && pool->length == whole && !memory_of(pool));
    REQUIRE(!fstat(pool->descriptor, &status) && (uint64_t)status.st_size == whole);
    REQUIRE((uintptr_t)pool->start % HUGE_PAGE == 0 && is_mapped(pool->start) && is_mapped(pool->start + whole - PAGE));
    REQUIRE(fcntl(pool->descriptor, F_GETFD) & FD_CLOEXEC);
    memset(pool->start, 1, PAGE);
    memset(pool->start + whole - PAGE, 1, PAGE);
    pool_punch(pool, 0, whole);
    return 0;
}

/* The bytes of the address space that this process takes. */
static uint64_t address_space(void) {
    FILE *file = fopen("/proc/self/statm", "r");
    unsigned long pages = 0;
    if (!file || fscanf(file, "%lu", &pages) != 1) return 0;
    fclose(file);
    return pages * PAGE;
}

static int open_and_close(void) {
    struct pool_memory pool;
    uint64_t before = address_space(); /* what reading it takes is there from now on */
    before = address_space();
    if (open_one(&pool, 3 * PAGE, HUGE_PAGE)) return 1;
    int descriptor = pool.descriptor;
    REQUIRE(address_space() == before + HUGE_PAGE);
    pool_close(&pool);
    REQUIRE(address_space() == before && fcntl(descriptor, F_GETFD) < 0);
    if (open_one(&pool, HUGE_PAGE - 1, HUGE_PAGE)) return 1;
    pool_close(&pool);
    if (open_one(&pool, HUGE_PAGE, 2 * HUGE_PAGE)) return 1;
    pool_close(&pool);
    return 0;
}

/* Wherever the system has room, and wherever it has none. */
static int open_anywhere(void) {
    struct pool_memory pool;
    for (shift = 0; shift < HUGE_PAGE; shift += 100 * PAGE) {
        uint64_t before = address_space();
        if (open_one(&pool, PAGE, HUGE_PAGE)) return 1;
        REQUIRE(address_space() == before + HUGE_PAGE);
        pool_close(&pool);
        REQUIRE(address_space() == before);
    }
    for (maps_left = 0; maps_left < 2; maps_left++) {
        int next = dup(0), number = maps_left;
        uint64_t before = address_space();
        close(next);
        errno = 0;
        REQUIRE(!pool_open(&pool, PAGE, true) && errno == ENOMEM && address_space() == before);
        REQUIRE(dup(0) == next); /* no descriptor is left */
        close(next);
        maps_left = number;
    }
    maps_left = -1;
    shift = 0;
    return 0;
}

/* Slots of small classes share huge pages: each of these is made once, and whole where the system has them. */
static int prepare_small(void) {
    struct pool_memory pool;
    if (open_one(&pool, 4 * HUGE_PAGE, 5 * HUGE_PAGE)) return 1;
    REQUIRE(pool_prepare(&pool, 0, 3 * PAGE));
    uint64_t once = memory_of(&pool);
    REQUIRE(once >= PAGE && once <= HUGE_PAGE);
    REQUIRE(!pool_prepare(&pool, 3 * PAGE, 3 * PAGE) && memory_of(&pool) == once);
    REQUIRE(!pool_prepare(&pool, 0, HUGE_PAGE));
    REQUIRE(pool_prepare(&pool, HUGE_PAGE - PAGE, 2 * PAGE) && memory_of(&pool) == 2 * once); /* the second of the two */
    REQUIRE(!pool_prepare(&pool, HUGE_PAGE, HUGE_PAGE));
    REQUIRE(pool_prepare(&pool, 3 * HUGE_PAGE - PAGE, PAGE) && pool_prepare(&pool, 3 * HUGE_PAGE, PAGE));
    pool_punch(&pool, 0, 5 * HUGE_PAGE);
    REQUIRE(!memory_of(&pool) && !pool_prepare(&pool, 0, PAGE)); /* whoever writes there gets pages */
    pool_close(&pool);
    return 0;
}

/* A slot of more than a huge page begins with one, and takes of its last one what it needs. */
static int prepare_large(void) {
    struct pool_memory pool;
    if (open_one(&pool, 6 * HUGE_PAGE, 7 * HUGE_PAGE)) return 1;
    REQUIRE(pool_prepare(&pool, 0, HUGE_PAGE));
    uint64_t once = memory_of(&pool);
    REQUIRE(pool_prepare(&pool, 2 * HUGE_PAGE, HUGE_PAGE + 3 * PAGE) && memory_of(&pool) == 2 * once + 3 * PAGE);
    REQUIRE(!pool_prepare(&pool, 2 * HUGE_PAGE, HUGE_PAGE + 3 * PAGE));
    pool_close(&pool);
    return 0;
}

/* What was made ready and never written is made ready anew; not the huge pages that it shares with what is behind it. */
static int give_back(void) {
    struct pool_memory pool;
    if (open_one(&pool, 6 * HUGE_PAGE, 7 * HUGE_PAGE)) return 1;
    REQUIRE(pool_prepare(&pool, PAGE, 2 * HUGE_PAGE));
    uint64_t before = memory_of(&pool);
    memset(pool.start + 2 * HUGE_PAGE + PAGE, 1, PAGE);
    pool_give_back(&pool, PAGE, 2 * HUGE_PAGE);
    REQUIRE(memory_of(&pool) < before && pool.start[2 * HUGE_PAGE + PAGE] == 1);
    REQUIRE(!pool_prepare(&pool, 0, PAGE) && pool_prepare(&pool, HUGE_PAGE, PAGE) && !pool_prepare(&pool, 2 * HUGE_PAGE, PAGE));
    REQUIRE(pool_prepare(&pool, 4 * HUGE_PAGE, 2 * HUGE_PAGE));
    pool_give_back(&pool, 4 * HUGE_PAGE, HUGE_PAGE);
    REQUIRE(pool_prepare(&pool, 4 * HUGE_PAGE, PAGE) && !pool_prepare(&pool, 5 * HUGE_PAGE, PAGE));
    pool_close(&pool);
    return 0;
}

int main(void) { return open_and_close() || open_anywhere() || prepare_small() || prepare_large() || give_back(); }
