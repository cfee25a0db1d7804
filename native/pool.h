/*
 * The memory of slots: a file without a name, mapped here for good, in huge pages where the system has them.
 *
 * pool_prepare may be called by any thread, without a lock; all else with the lock of the cache held.
 */
#ifndef POOL_H
#define POOL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct pool_memory {
    int descriptor;
    char *start; /* on a huge page */
    uint64_t length;
    bool is_aligned;           /* slots of a huge page and more begin with one */
    atomic_uchar *is_prepared; /* by huge page */
};

/* false with errno */
bool pool_open(struct pool_memory *pool, uint64_t length, bool is_aligned);
void pool_close(struct pool_memory *pool);
/* Get huge pages for a slot that was never written; false if they are there. Without them, small ones come when they are
 * written. */
bool pool_prepare(struct pool_memory *pool, uint64_t offset, uint64_t length);
/* Give the memory of bytes back to the system. */
void pool_punch(struct pool_memory *pool, uint64_t offset, uint64_t length);
/* The same for a slot that was made ready and never written: it may be made ready again. */
void pool_give_back(struct pool_memory *pool, uint64_t offset, uint64_t length);

#endif
