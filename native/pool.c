#define _GNU_SOURCE
#include "pool.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "experts.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* of Linux 5.14 */
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* of Linux 6.1; whatever /sys/kernel/mm/transparent_hugepage says */
#endif

/* Map the file where a huge page begins; its length is one of huge pages. */
static char *map_aligned(int descriptor, uint64_t length) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *wide = mmap(NULL, length + HUGE_PAGE, PROT_NONE, flags, -1, 0);
    if (wide == MAP_FAILED) return NULL;
    char *start = (char *)(((uintptr_t)wide + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    char *end = start + length;
    void *mapped = mmap(start, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, descriptor, 0);
    if (start > wide) munmap(wide, (size_t)(start - wide));
    if (end < wide + length + HUGE_PAGE) munmap(end, (size_t)(wide + length + HUGE_PAGE - end));
    if (mapped != MAP_FAILED) return start;
    munmap(start, length);
    return NULL;
}

bool pool_open(struct pool_memory *pool, uint64_t length, bool is_aligned) {
    length = (length + HUGE_PAGE) / HUGE_PAGE * HUGE_PAGE;
    *pool = (struct pool_memory){.descriptor = memfd_create("moepack-experts", MFD_CLOEXEC), .length = length, .is_aligned = is_aligned};
    if (pool->descriptor < 0) return false;
    pool->is_prepared = calloc(length / HUGE_PAGE, sizeof *pool->is_prepared);
    if (pool->is_prepared && !ftruncate(pool->descriptor, (off_t)length)) pool->start = map_aligned(pool->descriptor, length);
    if (pool->start) return true;
    int error = errno;
    close(pool->descriptor);
    free(pool->is_prepared);
    errno = error;
    return false;
}

void pool_close(struct pool_memory *pool) {
    munmap(pool->start, pool->length);
    close(pool->descriptor);
    free(pool->is_prepared);
}

bool pool_prepare(struct pool_memory *pool, uint64_t offset, uint64_t length) {
    bool is_new = false, is_alone = pool->is_aligned && length >= HUGE_PAGE;
    for (uint64_t page = offset / HUGE_PAGE; page <= (offset + length - 1) / HUGE_PAGE; page++) {
        if (atomic_exchange(&pool->is_prepared[page], 1)) continue;
        is_new = true;
        char *start = pool->start + page * HUGE_PAGE;
        uint64_t rest = offset + length - page * HUGE_PAGE;
        if (is_alone && rest < HUGE_PAGE) {
            madvise(start, rest, MADV_POPULATE_WRITE); /* nothing follows that would use the rest of a huge page */
            continue;
        }
        /* A range without any page is not collapsed. Nothing is written to it: its start may be of another slot, into
         * which is being read. */
        if (!madvise(start, PAGE, MADV_POPULATE_WRITE)) madvise(start, HUGE_PAGE, MADV_COLLAPSE);
    }
    return is_new;
}

void pool_punch(struct pool_memory *pool, uint64_t offset, uint64_t length) {
    fallocate(pool->descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)length);
}

void pool_give_back(struct pool_memory *pool, uint64_t offset, uint64_t length) {
    pool_punch(pool, offset, length);
    uint64_t end = (offset + length) / HUGE_PAGE; /* of the pages that no slot behind this one shares */
    for (uint64_t page = (offset + HUGE_PAGE - 1) / HUGE_PAGE; page < end; page++) atomic_store(&pool->is_prepared[page], 0);
}
