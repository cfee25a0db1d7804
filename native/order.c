#include "order.h"

#include <stdlib.h>
#include <string.h>

/*
 * LRU, LFU and least-stale give each expert a rank, and evict the least; a heap finds it. S3-FIFO
 * has queues, and the random policy a list.
 */

enum { SMALL, MAIN, GHOSTS, IN_NONE };
enum { SMALL_SHARE = 10, MOST_USES = 3 };

static const uint64_t USE = 1ull << 48, MOST_COUNTED = 65535; /* LFU: the lower bits of a rank are the time of the last use */
static const uint64_t FRESH = 1ull << 63; /* least-stale: those fresh are evicted after all stale ones */
static const uint64_t PLACE = 0xffff;     /* of a fresh expert in its step */

bool order_init(struct order *order, enum policy policy, const struct experts *experts, struct order_entry *entries,
                uint32_t capacity) {
    *order = (struct order){.policy = policy, .experts = experts, .entries = entries};
    for (unsigned i = 0; i < 3; i++) order->queues[i] = (struct queue){NO_EXPERT, NO_EXPERT, 0};
    order->heap = calloc((size_t)capacity + 1, sizeof *order->heap);
    order->scratch = calloc((size_t)capacity + 1, sizeof *order->scratch);
    return order->heap && order->scratch;
}

void order_free(struct order *order) {
    free(order->heap);
    free(order->scratch);
}

/* ---- the heap: the least rank first ---- */

static void put_at(struct order *order, uint32_t position, uint32_t expert) {
    order->heap[position] = expert;
    order->entries[expert].position = position;
}

static uint64_t rank_at(const struct order *order, uint32_t position) {
    return order->entries[order->heap[position]].rank;
}

/* Move what is at a position to where its rank belongs. */
static void settle(struct order *order, uint32_t position) {
    uint32_t expert = order->heap[position];
    uint64_t rank = order->entries[expert].rank;
    while (position && rank_at(order, (position - 1) / 2) > rank) {
        put_at(order, position, order->heap[(position - 1) / 2]);
        position = (position - 1) / 2;
    }
    for (uint32_t child; (child = 2 * position + 1) < order->count; position = child) {
        if (child + 1 < order->count && rank_at(order, child + 1) < rank_at(order, child)) child++;
        if (rank_at(order, child) >= rank) break;
        put_at(order, position, order->heap[child]);
    }
    put_at(order, position, expert);
}

static void heap_add(struct order *order, uint32_t expert) {
    put_at(order, order->count++, expert);
    settle(order, order->count - 1);
}

static void heap_remove(struct order *order, uint32_t expert) {
    uint32_t position = order->entries[expert].position;
    uint32_t last = order->heap[--order->count];
    order->entries[expert].position = NO_EXPERT;
    if (last == expert) return;
    put_at(order, position, last);
    settle(order, position);
}

static void set_rank(struct order *order, uint32_t expert, uint64_t rank) {
    struct order_entry *entry = &order->entries[expert];
    entry->rank = rank;
    if (entry->position == NO_EXPERT)
        heap_add(order, expert);
    else
        settle(order, entry->position);
}

static bool may_go(const struct order *order, uint32_t expert, const uint8_t *kept, uint32_t slot_class) {
    return !kept[expert] && (slot_class == ANY_CLASS || class_of(order->experts, expert) == slot_class);
}

/* Look through the heap for the least rank that may go. A subtree whose root may go holds nothing less, so only what
 * may not go is passed: the experts of the step, and other classes. */
static uint32_t least_below(const struct order *order, uint32_t position, const uint8_t *kept, uint32_t slot_class,
                            uint32_t best) {
    if (position >= order->count) return best;
    uint32_t expert = order->heap[position];
    if (best != NO_EXPERT && order->entries[best].rank <= order->entries[expert].rank) return best;
    if (may_go(order, expert, kept, slot_class)) return expert;
    best = least_below(order, 2 * position + 1, kept, slot_class, best);
    return least_below(order, 2 * position + 2, kept, slot_class, best);
}

/* ---- the ranks ---- */

static void record_lru(struct order *order, const uint32_t *used, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) set_rank(order, used[i], ++order->clock);
}

static void record_lfu(struct order *order, const uint32_t *used, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        uint64_t uses = order->entries[used[i]].rank / USE;
        set_rank(order, used[i], (uses < MOST_COUNTED ? uses + 1 : uses) * USE + ++order->clock);
    }
}

/* Fresh experts have the number of their layer's last step in their rank, the latest first, then their place in it. */
static void record_least_stale(struct order *order, uint32_t layer, const uint32_t *used, uint32_t count) {
    const struct layer *of = &order->experts->layers[layer];
    uint32_t *by_place = order->scratch;
    for (uint32_t i = 0; i < of->count; i++) by_place[i] = NO_EXPERT;
    for (uint32_t expert = of->first; expert < of->first + of->count; expert++) {
        const struct order_entry *entry = &order->entries[expert];
        if (entry->position != NO_EXPERT && entry->rank & FRESH) by_place[entry->rank & PLACE] = expert;
    }
    for (uint32_t i = 0; i < count; i++) {
        const struct order_entry *entry = &order->entries[used[i]];
        if (entry->position != NO_EXPERT && entry->rank & FRESH) by_place[entry->rank & PLACE] = NO_EXPERT;
    }
    for (uint32_t i = 0; i < of->count; i++)
        if (by_place[i] != NO_EXPERT) set_rank(order, by_place[i], ++order->clock);
    uint64_t step = (1ull << 47) - 1 - ++order->clock;
    for (uint32_t i = 0; i < count; i++) set_rank(order, used[i], FRESH | step << 16 | i);
}

/* ---- S3-FIFO ---- */

static void leave(struct order *order, uint32_t expert) {
    struct order_entry *entry = &order->entries[expert];
    struct queue *queue = &order->queues[entry->queue];
    if (entry->previous == NO_EXPERT)
        queue->first = entry->next;
    else
        order->entries[entry->previous].next = entry->next;
    if (entry->next == NO_EXPERT)
        queue->last = entry->previous;
    else
        order->entries[entry->next].previous = entry->previous;
    queue->count--;
    entry->queue = IN_NONE;
}

static void join(struct order *order, uint32_t expert, uint8_t number) {
    struct order_entry *entry = &order->entries[expert];
    struct queue *queue = &order->queues[number];
    entry->queue = number;
    entry->next = NO_EXPERT;
    entry->previous = queue->last;
    if (queue->last == NO_EXPERT)
        queue->first = expert;
    else
        order->entries[queue->last].next = expert;
    queue->last = expert;
    queue->count++;
}

static bool is_queued(const struct order *order, uint32_t expert) {
    uint8_t queue = order->entries[expert].queue;
    return order->entries[expert].position != NO_EXPERT && queue <= MAIN;
}

static void record_s3fifo(struct order *order, const uint32_t *used, const bool *is_miss, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        struct order_entry *entry = &order->entries[used[i]];
        if (!is_miss[i] && is_queued(order, used[i]) && entry->uses < MOST_USES) entry->uses++;
    }
    for (uint32_t i = 0; i < count; i++) {
        struct order_entry *entry = &order->entries[used[i]];
        if (!is_miss[i]) continue;
        bool is_ghost = entry->position != NO_EXPERT && entry->queue == GHOSTS;
        if (is_ghost) leave(order, used[i]);
        entry->position = 0; /* its queue means something */
        entry->uses = 0;
        join(order, used[i], is_ghost ? MAIN : SMALL);
    }
}

static uint32_t first_that_may_go(const struct order *order, uint8_t number, const uint8_t *kept, uint32_t slot_class) {
    uint32_t expert = order->queues[number].first;
    while (expert != NO_EXPERT && !may_go(order, expert, kept, slot_class)) expert = order->entries[expert].next;
    return expert;
}

/* Evict an expert of the small queue, which leaves a ghost; or move it to the main one. */
static bool leaves_small(struct order *order, uint32_t expert) {
    struct order_entry *entry = &order->entries[expert];
    struct queue *queues = order->queues;
    leave(order, expert);
    bool stays = entry->uses > 1;
    entry->uses = 0;
    join(order, expert, stays ? MAIN : GHOSTS);
    while (queues[GHOSTS].count > queues[SMALL].count + queues[MAIN].count) leave(order, queues[GHOSTS].first);
    return !stays;
}

static bool leaves_main(struct order *order, uint32_t expert) {
    struct order_entry *entry = &order->entries[expert];
    leave(order, expert);
    if (!entry->uses) return true;
    entry->uses--;
    join(order, expert, MAIN);
    return false;
}

static uint32_t evict_s3fifo(struct order *order, const uint8_t *kept, uint32_t slot_class) {
    for (;;) { /* each turn evicts one, uses one up or moves one on */
        const struct queue *queues = order->queues;
        bool is_main_first = queues[SMALL].count * SMALL_SHARE < queues[SMALL].count + queues[MAIN].count;
        uint32_t expert = first_that_may_go(order, is_main_first ? MAIN : SMALL, kept, slot_class);
        if (expert == NO_EXPERT) expert = first_that_may_go(order, is_main_first ? SMALL : MAIN, kept, slot_class);
        if (expert == NO_EXPERT) return NO_EXPERT;
        bool has_left = order->entries[expert].queue == SMALL ? leaves_small(order, expert) : leaves_main(order, expert);
        if (has_left) return expert;
    }
}

/* ---- random ---- */

/* SplitMix64 (Steele, Lea, Flood 2014) from 0. */
static uint64_t draw(struct order *order) {
    uint64_t x = order->random_state += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

static void remove_from_list(struct order *order, uint32_t expert) {
    uint32_t position = order->entries[expert].position;
    uint32_t last = order->heap[--order->count];
    if (last != expert) put_at(order, position, last);
    order->entries[expert].position = NO_EXPERT;
}

static uint32_t evict_random(struct order *order, const uint8_t *kept, uint32_t slot_class) {
    uint64_t start = order->count ? draw(order) % order->count : 0;
    for (uint32_t i = 0; i < order->count; i++) {
        uint32_t expert = order->heap[(start + i) % order->count];
        if (!may_go(order, expert, kept, slot_class)) continue;
        remove_from_list(order, expert);
        return expert;
    }
    return NO_EXPERT;
}

/* ---- all of them ---- */

void order_record(struct order *order, uint32_t layer, const uint32_t *used, const bool *is_miss, uint32_t count) {
    switch (order->policy) {
    case POLICY_LRU: record_lru(order, used, count); break;
    case POLICY_LFU: record_lfu(order, used, count); break;
    case POLICY_LEAST_STALE: record_least_stale(order, layer, used, count); break;
    case POLICY_S3FIFO: record_s3fifo(order, used, is_miss, count); break;
    case POLICY_RANDOM:
        for (uint32_t i = 0; i < count; i++)
            if (is_miss[i]) put_at(order, order->count++, used[i]);
        break;
    }
}

uint32_t order_evict(struct order *order, const uint8_t *kept, uint32_t slot_class) {
    if (order->policy == POLICY_S3FIFO) return evict_s3fifo(order, kept, slot_class);
    if (order->policy == POLICY_RANDOM) return evict_random(order, kept, slot_class);
    uint32_t expert = least_below(order, 0, kept, slot_class, NO_EXPERT);
    if (expert != NO_EXPERT) heap_remove(order, expert);
    return expert;
}

void order_remove(struct order *order, uint32_t expert) {
    if (order->policy == POLICY_S3FIFO) {
        if (is_queued(order, expert)) leave(order, expert);
    } else if (order->entries[expert].position == NO_EXPERT) {
        return;
    } else if (order->policy == POLICY_RANDOM) {
        remove_from_list(order, expert);
    } else {
        heap_remove(order, expert);
    }
}
