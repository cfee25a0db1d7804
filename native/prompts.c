#include "prompts.h"

#include <math.h>
#include <stdlib.h>

static const double MOST_UNUSED = 0.05; /* share of a layer's experts read ahead that may be unused */
static const double PRIOR = 16;         /* tokens of a uniform router that each layer begins with */
static const double HALF_LIFE = 16384;  /* tokens after which all counts are halved */
enum { HALVINGS = 20 };

struct ranked { /* experts in an order: the least `value` first, then the least `distance` */
    double value;
    uint64_t distance;
    uint32_t expert;
};

bool prompts_init(struct prompts *prompts, const struct experts *experts) {
    size_t count = experts->count;
    *prompts = (struct prompts){.experts = experts};
    prompts->counts = calloc(count, sizeof *prompts->counts);
    prompts->token_counts = calloc(experts->layer_count, sizeof *prompts->token_counts);
    prompts->ranked = calloc(count, sizeof *prompts->ranked);
    prompts->chosen = calloc(count, sizeof *prompts->chosen);
    return prompts->counts && prompts->token_counts && prompts->ranked && prompts->chosen;
}

void prompts_free(struct prompts *prompts) {
    free(prompts->counts);
    free(prompts->token_counts);
    free(prompts->ranked);
    free(prompts->chosen);
}

static int compare_ranked(const void *first, const void *second) {
    const struct ranked *a = first, *b = second;
    if (a->value != b->value) return a->value < b->value ? -1 : 1;
    if (a->distance != b->distance) return a->distance < b->distance ? -1 : 1;
    return a->expert < b->expert ? -1 : a->expert > b->expert;
}

/* ---- history ---- */

static void set_width(struct prompts *prompts, uint32_t layer, const uint32_t *counts, uint32_t token_count) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < prompts->experts->layers[layer].count; i++) total += counts[i];
    prompts->width = (double)total / token_count;
}

static void add_history(struct prompts *prompts, uint32_t layer, const uint32_t *counts, uint32_t token_count) {
    const struct layer *of = &prompts->experts->layers[layer];
    double *totals = prompts->counts + of->first, *tokens = &prompts->token_counts[layer];
    set_width(prompts, layer, counts, token_count);
    *tokens += token_count;
    bool is_halved = *tokens > HALF_LIFE;
    if (is_halved) *tokens /= 2;
    for (uint32_t i = 0; i < of->count; i++) {
        totals[i] += counts[i];
        if (is_halved) totals[i] /= 2;
    }
}

/* The share of a layer's tokens that uses an expert. */
static double share_of(const struct prompts *prompts, uint32_t expert) {
    const struct layer *layer = layer_of(prompts->experts, expert);
    double tokens = prompts->token_counts[prompts->experts->layer_of[expert]];
    return (prompts->counts[expert] + PRIOR * prompts->width / layer->count) / (tokens + PRIOR);
}

/* How likely `token_count` independent tokens use an expert. */
static double likelihood_of(const struct prompts *prompts, uint32_t expert, double token_count) {
    double share = share_of(prompts, expert);
    return 1 - pow(1 - (share < 1 ? share : 1), token_count);
}

/* Tokens of one text are routed alike: a step is worth as many independent ones as explain its number of experts. */
static double independent_tokens(const struct prompts *prompts, uint32_t layer, uint32_t used_count, uint32_t token_count) {
    const struct layer *of = &prompts->experts->layers[layer];
    double few = 0, many = token_count;
    for (int i = 0; i < HALVINGS; i++) {
        double middle = (few + many) / 2, expected = 0;
        for (uint32_t j = 0; j < of->count; j++) expected += likelihood_of(prompts, of->first + j, middle);
        if (expected < used_count)
            few = middle;
        else
            many = middle;
    }
    return many;
}

/* ---- room ---- */

/* May an expert be evicted for the step of a layer? Not if the step itself uses it, as `counts` has it. */
static bool may_go(const struct residents *residents, const struct layer *layer, const uint32_t *counts, uint32_t expert) {
    bool is_used = expert >= layer->first && expert < layer->first + layer->count && counts[expert - layer->first];
    return !is_used && residents_is_evictable(residents, expert);
}

/* Evict until `length` bytes are free, what is used least often first; of those alike the layers behind `layer` first:
 * they are computed last of all. Not the experts of the layer that `counts` has. */
static void make_room(struct prompts *prompts, struct residents *residents, uint64_t length, uint32_t layer,
                      const uint32_t *counts) {
    const struct experts *experts = prompts->experts;
    const struct layer *of = &experts->layers[layer];
    int64_t missing = (int64_t)length - residents_free_length(residents);
    uint32_t count = 0;
    if (missing <= 0) return;
    for (uint32_t i = 0; i < experts->count; i++) {
        if (!may_go(residents, of, counts, i)) continue;
        uint32_t distance = (layer + experts->layer_count - experts->layer_of[i]) % experts->layer_count;
        prompts->ranked[count++] = (struct ranked){share_of(prompts, i), distance, i};
    }
    qsort(prompts->ranked, count, sizeof *prompts->ranked, compare_ranked);
    for (uint32_t i = 0; i < count && missing > 0; i++) {
        residents_evict(residents, prompts->ranked[i].expert);
        missing -= (int64_t)slot_length(experts, prompts->ranked[i].expert);
    }
}

void prompts_begin(struct prompts *prompts, struct residents *residents, uint32_t layer, const uint32_t *counts,
                   uint32_t token_count) {
    const struct layer *of = &prompts->experts->layers[layer];
    residents->ahead_length = 0;
    if (token_count < MANY_TOKENS) {
        add_history(prompts, layer, counts, token_count);
        return;
    }
    uint64_t length = 0;
    for (uint32_t i = 0; i < of->count; i++)
        if (counts[i] && !residents->states[of->first + i].is_admitted) length += slot_length(prompts->experts, of->first);
    make_room(prompts, residents, length, layer, counts);
}

/* ---- the next layer ---- */

/* The bytes that may be had for reading ahead: free ones, and those of experts that may be evicted. */
static int64_t most_ahead(const struct prompts *prompts, const struct residents *residents, uint32_t layer,
                          const uint32_t *counts) {
    const struct layer *of = &prompts->experts->layers[layer];
    int64_t length = residents_free_length(residents);
    for (uint32_t i = 0; i < prompts->experts->count; i++)
        if (may_go(residents, of, counts, i)) length += (int64_t)slot_length(prompts->experts, i);
    return length;
}

/* Choose the likeliest missing experts of a layer, up to `length` bytes: only a small share of those that will be used
 * is expected to be read in vain. */
static uint32_t choose(struct prompts *prompts, const struct residents *residents, uint32_t layer, double token_count,
                       int64_t length) {
    const struct layer *of = &prompts->experts->layers[layer];
    double unused = 0;
    uint32_t count = 0;
    for (uint32_t i = 0; i < of->count; i++) {
        double likelihood = likelihood_of(prompts, of->first + i, token_count);
        prompts->ranked[i] = (struct ranked){-likelihood, i, of->first + i};
        unused += MOST_UNUSED * likelihood;
    }
    qsort(prompts->ranked, of->count, sizeof *prompts->ranked, compare_ranked);
    for (uint32_t i = 0; i < of->count; i++) {
        uint32_t expert = prompts->ranked[i].expert;
        if (residents->states[expert].bytes != ABSENT) continue;
        unused -= 1 + prompts->ranked[i].value;
        length -= (int64_t)slot_length(prompts->experts, expert);
        if (unused < 0 || length < 0) break;
        prompts->chosen[count++] = expert;
    }
    return count;
}

/* Order experts as they lie in their files. */
static void sort_by_place(struct prompts *prompts, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        const struct part *part = part_of(prompts->experts, prompts->chosen[i], 0);
        prompts->ranked[i] = (struct ranked){part->file, part->offset, prompts->chosen[i]};
    }
    qsort(prompts->ranked, count, sizeof *prompts->ranked, compare_ranked);
    for (uint32_t i = 0; i < count; i++) prompts->chosen[i] = prompts->ranked[i].expert;
}

void prompts_look_ahead(struct prompts *prompts, struct residents *residents, uint32_t layer, const uint32_t *counts,
                        uint32_t token_count) {
    const struct experts *experts = prompts->experts;
    uint32_t next = layer + 1, count = 0, used_count = 0;
    uint64_t length = 0;
    for (uint32_t i = 0; i < experts->layers[layer].count; i++) used_count += counts[i] > 0;
    set_width(prompts, layer, counts, token_count);
    if (next < experts->layer_count && !experts->layers[next].is_rare) {
        double tokens = independent_tokens(prompts, layer, used_count, token_count);
        count = choose(prompts, residents, next, tokens, most_ahead(prompts, residents, layer, counts));
    }
    add_history(prompts, layer, counts, token_count);
    for (uint32_t i = 0; i < count; i++) length += slot_length(experts, prompts->chosen[i]);
    make_room(prompts, residents, length, layer, counts);
    sort_by_place(prompts, count);
    residents_set_ahead(residents, prompts->chosen, count, false);
}
