/*
 * The order in which resident experts are evicted: the policies of docs/policies.md.
 *
 * No locks and no system calls: whoever calls has the lock of the cache. An order knows of all experts what their uses
 * count, and evicts those that are admitted and not pinned.
 */
#ifndef ORDER_H
#define ORDER_H

#include "experts.h"

enum policy { POLICY_LRFU, POLICY_LRU };

#define ANY_CLASS UINT32_MAX

struct order_entry { /* of an expert */
    uint64_t count;    /* of its uses, decayed; it outlives eviction */
    uint64_t last_use; /* a time of the clock */
    bool is_ordered;
};

struct layer_order {
    uint64_t last_step;           /* when it began */
    uint64_t least, least_recent; /* bounds: of the ranks of those that step did not use; of the counts of those it did */
};

struct order {
    enum policy policy;
    const struct experts *experts;
    struct order_entry *entries;
    struct layer_order *layers;
    uint64_t clock; /* of uses */
    uint64_t first_use; /* the time of whatever is admitted before it is used: before all others */
    uint64_t call_count;
    uint32_t lowest_layer, latest_layer; /* of the steps so far */
};

/* false without memory */
bool order_init(struct order *order, enum policy policy, const struct experts *experts);
void order_free(struct order *order);

/* Record the `count` experts that a step of a layer uses, in order. */
void order_record(struct order *order, uint32_t layer, const uint32_t *used, uint32_t count);

/* Before the first step: count an expert as if the last tokens had used it with a share, in 2^-32. */
void order_expect(struct order *order, uint32_t expert, uint32_t share);
/* Add an expert that no step has used yet, as if it had been used before all others. */
void order_admit(struct order *order, uint32_t expert);

/* Remove and return the next expert to evict that is not marked in `kept` (by expert), and whose slot is of a class;
 * NO_EXPERT if there is none. */
uint32_t order_evict(struct order *order, const uint8_t *kept, uint32_t slot_class);

/* Remove an expert out of turn, if it is in this order. */
void order_remove(struct order *order, uint32_t expert);

#endif
