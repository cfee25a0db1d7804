/*
 * The order in which resident experts are evicted: the policies of docs/policies.md.
 *
 * No locks and no system calls: whoever calls has the lock of the cache. An order knows the experts
 * that share one budget, all of a model or those of a layer, and of them only those that are
 * admitted and not pinned.
 */
#ifndef ORDER_H
#define ORDER_H

#include "experts.h"

enum policy { POLICY_LRU, POLICY_LFU, POLICY_S3FIFO, POLICY_LEAST_STALE, POLICY_RANDOM };

#define ANY_CLASS UINT32_MAX

/* What an order knows of one expert; all orders of a cache share one array. */
struct order_entry {
    uint64_t rank;           /* least first; for LFU it outlives eviction */
    uint32_t position;       /* in the heap or the list; NO_EXPERT: not in this order */
    uint32_t next, previous; /* in a queue of S3-FIFO */
    uint8_t queue, uses;
};

struct queue {
    uint32_t first, last, count;
};

struct order {
    enum policy policy;
    const struct experts *experts;
    struct order_entry *entries;
    uint32_t *heap; /* of experts, by rank; for POLICY_RANDOM a list */
    uint32_t *scratch;
    uint32_t count;
    uint64_t clock, random_state;
    struct queue queues[3]; /* small, main, ghosts */
};

/* Make an order for up to `capacity` experts; false without memory. */
bool order_init(struct order *order, enum policy policy, const struct experts *experts, struct order_entry *entries,
                uint32_t capacity);
void order_free(struct order *order);

/* Record the `count` experts that a step of a layer uses, in order; is_miss[n]: newly admitted. */
void order_record(struct order *order, uint32_t layer, const uint32_t *used, const bool *is_miss, uint32_t count);

/* Remove and return the next expert to evict that is not marked in `kept` (by expert), and whose slot is of a class;
 * NO_EXPERT if there is none. */
uint32_t order_evict(struct order *order, const uint8_t *kept, uint32_t slot_class);

/* Remove an expert out of turn, if it is in this order. */
void order_remove(struct order *order, uint32_t expert);

#endif
