/*
 * The policies that run, beside plain ones that look at all experts each time, as docs/policies.md has them: order SEED
 * EVENTS. Both are told the same, and must evict the same. Where they do not, it prints the seed, and ends with 1.
 */
#include <stdio.h>
#include <stdlib.h>

#include "../../native/order.h"

enum { LAYERS = 5, MOST_EXPERTS = 8, MOST = LAYERS * MOST_EXPERTS, CLASSES = 2, HALF_LIFE = 16 };

static const uint64_t USE = 1ull << 32;

static uint64_t seed, state;
static struct layer layers[LAYERS];
static uint32_t layers_of[MOST];
static struct experts experts = {.layers = layers, .layer_of = layers_of, .layer_count = LAYERS};
static struct order order;

static struct {
    bool is_lru;
    uint64_t counts[MOST];
    int64_t last_uses[MOST]; /* below 0: admitted before it was used */
    bool is_ordered[MOST], is_recent[MOST];
    int64_t time, admitted_count;
    uint32_t call_count, lowest, latest;
} plain = {.lowest = LAYERS};

static uint32_t draw(uint32_t below) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(state >> 33) % below;
}

static void use(void) {
    uint32_t layer = draw(LAYERS), used[MOST_EXPERTS] = {0}, count = 0, first = layers[layer].first;
    if (layer <= plain.lowest) {
        plain.lowest = layer;
        for (uint32_t e = 0, is_halved = ++plain.call_count % HALF_LIFE == 0; e < experts.count && is_halved; e++) plain.counts[e] /= 2;
    }
    plain.latest = layer;
    for (uint32_t e = first; e < first + layers[layer].count; e++) {
        plain.is_recent[e] = draw(MOST_EXPERTS + 1) <= e % MOST_EXPERTS; /* some far more often than others */
        if (plain.is_recent[e]) used[count++] = e;
    }
    for (uint32_t i = 0; i < count; i++) {
        plain.counts[used[i]] += USE;
        plain.last_uses[used[i]] = plain.time++;
        plain.is_ordered[used[i]] = true;
    }
    order_record(&order, layer, used, count);
}

static void admit(void) {
    uint32_t expert = draw(experts.count);
    if (plain.is_ordered[expert]) return;
    plain.is_ordered[expert] = true;
    plain.is_recent[expert] = false;
    plain.last_uses[expert] = -++plain.admitted_count;
    order_admit(&order, expert);
}

static uint64_t rank_of(uint32_t expert) {
    return plain.counts[expert] + (plain.is_recent[expert] ? HALF_LIFE * USE : 0);
}

/* Is an expert of a layer that comes later, or of the same, evicted before another? */
static bool is_before(uint32_t expert, uint32_t other) {
    bool is_older = plain.last_uses[expert] < plain.last_uses[other];
    if (plain.is_lru) return is_older;
    if (rank_of(expert) != rank_of(other)) return rank_of(expert) < rank_of(other);
    return layers_of[expert] == layers_of[other] && is_older;
}

static bool evict(void) {
    uint8_t kept[MOST] = {0};
    uint32_t expected = NO_EXPERT, slot_class = draw(2) ? ANY_CLASS : draw(CLASSES);
    for (uint32_t e = 0; e < experts.count; e++) kept[e] = draw(4) == 0;
    for (uint32_t turn = 0; turn < LAYERS; turn++) {
        const struct layer *layer = &layers[(plain.latest + LAYERS - turn) % LAYERS];
        for (uint32_t e = layer->first; e < layer->first + layer->count; e++) {
            bool may_go = plain.is_ordered[e] && !kept[e] && (slot_class == ANY_CLASS || layer->slot_class == slot_class);
            if (may_go && (expected == NO_EXPERT || is_before(e, expected))) expected = e;
        }
    }
    if (expected != NO_EXPERT) plain.is_ordered[expected] = false;
    return order_evict(&order, kept, slot_class) == expected;
}

static void leave(void) {
    uint32_t expert = draw(experts.count);
    plain.is_ordered[expert] = false;
    order_remove(&order, expert);
}

int main(int argument_count, char **arguments) {
    if (argument_count < 3) return 2;
    seed = state = strtoull(arguments[1], NULL, 10);
    for (uint32_t i = 0; i < LAYERS; i++) {
        layers[i] = (struct layer){.number = i, .first = experts.count, .count = 1 + draw(MOST_EXPERTS), .slot_class = draw(CLASSES)};
        for (uint32_t e = 0; e < layers[i].count; e++) layers_of[experts.count++] = i;
    }
    plain.is_lru = seed % 2;
    if (!order_init(&order, plain.is_lru ? POLICY_LRU : POLICY_LRFU, &experts)) return 2;
    for (uint32_t e = 0; e < experts.count; e += 2) {
        uint32_t share = draw(UINT32_MAX);
        plain.counts[e] = HALF_LIFE * (uint64_t)share;
        order_expect(&order, e, share);
    }
    for (int left = atoi(arguments[2]); left; left--) {
        uint32_t chance = draw(10);
        bool is_warming = left > atoi(arguments[2]) - 50; /* experts are admitted before they are used */
        if (chance < 4 && !is_warming) use();
        if (chance == 4 || (chance < 4 && is_warming)) admit();
        if (chance == 5) leave();
        if (chance > 5 && !evict()) return printf("seed %d: another is evicted, %d events before the end\n", (int)seed, left), 1;
    }
    order_free(&order);
    return 0;
}
