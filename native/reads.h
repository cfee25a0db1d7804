/*
 * The reads of an expert: from which place, what each reads, and what becomes of those that end: read again, held
 * against digests, mapped.
 *
 * Part of the cache, whose lock is held by whoever calls, but for reads_queue_edges. It is left as said below.
 */
#ifndef READS_H
#define READS_H

#include "cache.h"

static inline void add(_Atomic uint64_t *counter, uint64_t value) {
    atomic_fetch_add_explicit(counter, value, memory_order_relaxed);
}

int cache_fail(struct cache_error *error, int code, int system_error, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Have the system read the pages at the edges of an expert's parts ahead. Without the lock. */
void reads_queue_edges(const struct cache *cache, uint32_t expert);
/* Queue the reads of an expert that has a slot; there are free tags. */
void reads_queue(struct cache *cache, uint32_t expert);
/* Take the end of a read; the lock is left where it is read again. Return its expert if that was the last one of it,
 * else NO_EXPERT. */
uint32_t reads_end(struct cache *cache, const struct ended *ended, struct pending *pending);
/* An expert's bytes are there: check them, without the lock, and let its users go on. */
void reads_complete(struct cache *cache, uint32_t expert);

#endif
