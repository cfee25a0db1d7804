#include "order.h"

#include <stdlib.h>

/*
 * Each expert has a rank, and the least is evicted. A lower bound of the ranks in each layer tells which few layers have
 * to be looked through: most bounds hold over many steps.
 */

enum { HALF_LIFE = 16 }; /* calls */

static const uint64_t MOST = 1ull << 62;              /* more than any rank */
static const uint64_t FIRST_STEP = 1ull << 32;        /* its time */
static const uint64_t USE = 1ull << 32;               /* what a use counts, before it decays */
static const uint64_t RECENT = HALF_LIFE * (1ull << 32); /* what an expert of its layer's last step counts more */

bool order_init(struct order *order, enum policy policy, const struct experts *experts) {
    *order = (struct order){.policy = policy, .experts = experts, .lowest_layer = UINT32_MAX};
    order->clock = order->first_use = FIRST_STEP;
    order->entries = calloc(experts->count, sizeof *order->entries);
    order->layers = calloc(experts->layer_count, sizeof *order->layers);
    for (uint32_t i = 0; order->layers && i < experts->layer_count; i++)
        order->layers[i] = (struct layer_order){.last_step = FIRST_STEP, .least = MOST, .least_recent = MOST};
    return order->entries && order->layers;
}

void order_free(struct order *order) {
    free(order->entries);
    free(order->layers);
}

static bool is_recent(const struct order *order, const struct layer_order *layer, const struct order_entry *entry) {
    return order->policy == POLICY_LRFU && entry->last_use >= layer->last_step;
}

/* The rank of an expert, without what it has more while it is recent. */
static uint64_t value_of(const struct order *order, const struct order_entry *entry) {
    return order->policy == POLICY_LRU ? entry->last_use : entry->count;
}

static void lower(uint64_t *bound, uint64_t value) {
    if (value < *bound) *bound = value;
}

/* ---- uses ---- */

static void halve_counts(struct order *order) {
    for (uint32_t i = 0; i < order->experts->count; i++) order->entries[i].count /= 2;
    for (uint32_t i = 0; i < order->experts->layer_count; i++) {
        order->layers[i].least /= 2;
        order->layers[i].least_recent /= 2;
    }
}

void order_record(struct order *order, uint32_t layer, const uint32_t *used, uint32_t count) {
    if (layer <= order->lowest_layer) {
        order->lowest_layer = layer;
        if (++order->call_count % HALF_LIFE == 0) halve_counts(order);
    }
    order->latest_layer = layer;
    struct layer_order *of = &order->layers[layer];
    lower(&of->least, order->policy == POLICY_LRU ? order->clock : of->least_recent);
    of->least_recent = USE;
    of->last_step = order->clock;
    for (uint32_t i = 0; i < count; i++) {
        struct order_entry *entry = &order->entries[used[i]];
        entry->count += USE;
        entry->last_use = order->clock++;
        entry->is_ordered = true;
    }
}

void order_expect(struct order *order, uint32_t expert, uint32_t share) {
    order->entries[expert].count = HALF_LIFE * (uint64_t)share;
}

void order_admit(struct order *order, uint32_t expert) {
    struct order_entry *entry = &order->entries[expert];
    entry->last_use = --order->first_use;
    entry->is_ordered = true;
    lower(&order->layers[order->experts->layer_of[expert]].least, value_of(order, entry));
}

/* ---- evictions ---- */

/* The expert of a layer that is evicted first, if its rank is below `limit`, which is set to it; else NO_EXPERT. */
static uint32_t first_of_layer(const struct order *order, uint32_t number, const uint8_t *kept, uint64_t *limit) {
    const struct layer *layer = &order->experts->layers[number];
    struct layer_order *of = &order->layers[number];
    uint32_t first = NO_EXPERT;
    of->least = of->least_recent = MOST;
    for (uint32_t i = layer->first; i < layer->first + layer->count; i++) {
        const struct order_entry *entry = &order->entries[i];
        if (!entry->is_ordered) continue;
        bool has_more = is_recent(order, of, entry);
        uint64_t value = value_of(order, entry), rank = value + (has_more ? RECENT : 0);
        lower(has_more ? &of->least_recent : &of->least, value);
        bool is_older = first != NO_EXPERT && rank == *limit && entry->last_use < order->entries[first].last_use;
        if ((rank >= *limit && !is_older) || kept[i]) continue;
        first = i;
        *limit = rank;
    }
    return first;
}

uint32_t order_evict(struct order *order, const uint8_t *kept, uint32_t slot_class) {
    uint32_t layer_count = order->experts->layer_count, first = NO_EXPERT;
    uint64_t limit = MOST;
    for (uint32_t i = 0; i < layer_count; i++) {
        /* the layer whose turn is furthest away first; for LRU, without equal ranks, the one that is likely to be it */
        uint32_t distance = order->policy == POLICY_LRU ? i + 1 : layer_count - i;
        uint32_t layer = (order->latest_layer + distance) % layer_count;
        bool is_alike = slot_class == ANY_CLASS || order->experts->layers[layer].slot_class == slot_class;
        const struct layer_order *of = &order->layers[layer];
        if (!is_alike || (of->least >= limit && of->least_recent + RECENT >= limit)) continue;
        uint32_t expert = first_of_layer(order, layer, kept, &limit);
        if (expert != NO_EXPERT) first = expert;
    }
    if (first != NO_EXPERT) order->entries[first].is_ordered = false;
    return first;
}

void order_remove(struct order *order, uint32_t expert) { order->entries[expert].is_ordered = false; }
