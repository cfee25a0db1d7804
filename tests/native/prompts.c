/*
 * Steps of a few tokens and of many, beside the rules for prompts of docs/policies.md, written again from that page: prompts
 * SEED STEPS. What is evicted for a step and what is read ahead must be as the page has it. Where it is not, this prints the
 * seed and the step, and ends with 1.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../native/prompts.h"

enum { LAYERS = 5, MOST_EXPERTS = 10, MOST = LAYERS * MOST_EXPERTS, FEW = 16, FILES = 3, MOST_COUNTED = 16384 };

static uint64_t seed, state, step;
static struct layer layers[LAYERS];
static struct part parts[MOST * MAX_PARTS];
static uint32_t layers_of[MOST];
static struct experts experts = {.layers = layers, .parts = parts, .layer_of = layers_of, .layer_count = LAYERS};
static struct residents residents;
static struct prompts prompts;
static double routed[MOST], tokens[LAYERS], width; /* c, n and w of the page */
static bool is_admitted[MOST];                     /* expected */
static bool is_regular;                            /* many experts have like shares */

static uint32_t draw(uint32_t below) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(state >> 33) % below;
}

static void require(bool holds, const char *rule) {
    if (holds) return;
    printf("seed %d, step %d: %s\n", (int)seed, (int)step, rule);
    exit(1);
}

static void do_nothing_to(void *data, uint32_t expert) { (void)data, (void)expert; }
static void give_back(void *data, uint64_t offset, uint64_t length) { (void)data, (void)offset, (void)length; }

/* ---- the page ---- */

static double share_of(uint32_t expert) {
    uint32_t layer = layers_of[expert];
    return (routed[expert] + 16 * width / layers[layer].count) / (tokens[layer] + 16);
}

static double likelihood_of(uint32_t expert, double independent) {
    double share = share_of(expert);
    return 1 - pow(1 - (share > 1 ? 1 : share), independent);
}

static void count_tokens(uint32_t layer, const uint32_t *counts, uint32_t token_count) {
    double half = (tokens[layer] += token_count) > MOST_COUNTED ? 0.5 : 1;
    tokens[layer] *= half;
    for (uint32_t i = 0; i < layers[layer].count; i++) routed[layers[layer].first + i] = (routed[layers[layer].first + i] + counts[i]) * half;
}

static bool may_go(uint32_t expert, uint32_t layer, const uint32_t *counts) {
    bool is_used = layers_of[expert] == layer && counts[expert - layers[layer].first];
    return is_admitted[expert] && !is_used && !residents.states[expert].is_pinned;
}

static uint32_t turn_of(uint32_t expert, uint32_t layer) { return (layer + LAYERS - layers_of[expert]) % LAYERS; }

static int64_t free_length(void) {
    int64_t length = (int64_t)residents.budget;
    for (uint32_t e = 0; e < experts.count; e++) length -= is_admitted[e] ? (int64_t)slot_length(&experts, e) : 0;
    return length;
}

static void expect_room(int64_t length, uint32_t layer, const uint32_t *counts) {
    while (free_length() < length) {
        uint32_t first = NO_EXPERT;
        for (uint32_t e = 0; e < experts.count; e++) {
            if (!may_go(e, layer, counts)) continue;
            bool is_before = first == NO_EXPERT || share_of(e) < share_of(first);
            bool is_alike = first != NO_EXPERT && share_of(e) == share_of(first);
            if (is_before || (is_alike && turn_of(e, layer) < turn_of(first, layer))) first = e;
        }
        if (first == NO_EXPERT) return;
        is_admitted[first] = false;
    }
}

static double independent_tokens(uint32_t layer, uint32_t used_count, double token_count) {
    double least = 0, most = token_count;
    for (int i = 0; i < 20; i++) {
        double sum = 0, middle = (least + most) / 2;
        for (uint32_t e = 0; e < layers[layer].count; e++) sum += likelihood_of(layers[layer].first + e, middle);
        *(sum < used_count ? &least : &most) = middle;
    }
    return most;
}

/* The experts of a layer that are read ahead, by their likelihood; return how many. */
static uint32_t expect_ahead(uint32_t layer, double independent, int64_t length, uint32_t *chosen) {
    bool is_tried[MOST] = {false};
    double unlikely = 0, likely = 0;
    uint32_t first = layers[layer].first, count = 0;
    for (uint32_t e = first; e < first + layers[layer].count; e++) likely += likelihood_of(e, independent);
    for (uint32_t i = 0; i < layers[layer].count; i++) {
        uint32_t best = first;
        while (is_tried[best]) best++;
        for (uint32_t e = best + 1; e < first + layers[layer].count; e++)
            if (!is_tried[e] && likelihood_of(e, independent) > likelihood_of(best, independent)) best = e;
        is_tried[best] = true;
        if (residents.states[best].bytes != ABSENT) continue;
        unlikely += 1 - likelihood_of(best, independent);
        length -= (int64_t)slot_length(&experts, best);
        if (unlikely > likely / 20 || length < 0) break;
        chosen[count++] = best;
    }
    return count;
}

static int by_place(const void *first, const void *second) {
    const struct part *a = &parts[*(const uint32_t *)first * MAX_PARTS], *b = &parts[*(const uint32_t *)second * MAX_PARTS];
    if (a->file != b->file) return a->file < b->file ? -1 : 1;
    return a->offset < b->offset ? -1 : 1;
}

/* ---- what happens ---- */

static void check_admitted(const char *rule) {
    for (uint32_t e = 0; e < experts.count; e++) require(residents.states[e].is_admitted == is_admitted[e], rule);
}

static void look_ahead(uint32_t layer, const uint32_t *counts, uint32_t token_count) {
    uint32_t chosen[MOST] = {0}, count = 0, used_count = 0;
    uint64_t length = 0;
    int64_t most = free_length();
    for (uint32_t e = 0; e < experts.count; e++) most += may_go(e, layer, counts) ? (int64_t)slot_length(&experts, e) : 0;
    for (uint32_t i = 0; i < layers[layer].count; i++) used_count += counts[i] > 0;
    if (layer + 1 < LAYERS && !layers[layer + 1].is_rare)
        count = expect_ahead(layer + 1, independent_tokens(layer, used_count, token_count), most, chosen);
    count_tokens(layer, counts, token_count);
    for (uint32_t i = 0; i < count; i++) length += slot_length(&experts, chosen[i]);
    expect_room((int64_t)length, layer, counts);
    qsort(chosen, count, sizeof *chosen, by_place);
    prompts_look_ahead(&prompts, &residents, layer, counts, token_count);
    check_admitted("room is made for what is read ahead");
    require(residents.ahead_count == count && !memcmp(residents.ahead, chosen, count * sizeof *chosen), "the likeliest are read ahead");
    require(residents.ahead_length == length && !residents.is_guess, "the budget lends its memory");
}

static void compute(uint32_t layer, uint32_t token_count) {
    uint32_t counts[MOST_EXPERTS] = {0}, used[MOST_EXPERTS], used_count = 0, total = 0, expert;
    uint64_t missing = 0;
    uint32_t most = seed % 3 == 1 ? 2 * token_count : token_count; /* engines may name an expert twice for a token */
    for (uint32_t i = 0, share = 1 + draw(4); i < layers[layer].count; i++) {
        if (draw(4) < share) counts[i] = is_regular ? token_count : 1 + draw(most);
        if (counts[i]) used[used_count++] = layers[layer].first + i;
        if (counts[i] && !is_admitted[layers[layer].first + i]) missing += slot_length(&experts, layers[layer].first + i);
        total += counts[i];
    }
    if (!used_count) return;
    residents_release(&residents, 0);
    if (token_count > FEW)
        expect_room((int64_t)missing, layer, counts);
    else
        count_tokens(layer, counts, token_count);
    prompts_begin(&prompts, &residents, layer, counts, token_count);
    check_admitted("room is made for what a step uses");
    width = (double)total / token_count;
    residents_begin(&residents, 0, layer, used, used_count);
    while (residents_next(&residents, 0, &expert) == READ_NEXT) residents_complete(&residents, expert, true);
    for (uint32_t e = 0; e < experts.count; e++) is_admitted[e] = residents.states[e].is_admitted;
    if (token_count > FEW) look_ahead(layer, counts, token_count);
    require(prompts.token_counts[layer] == tokens[layer], "tokens are counted, and halved");
    for (uint32_t left = draw(4); left && residents_next_ahead(&residents, &expert); left--) residents_complete(&residents, expert, true);
}

static void make_model(void) {
    is_regular = seed % 3 == 0;
    experts.class_count = 2;
    experts.class_length[0] = PAGE * (1 + draw(3));
    experts.class_length[1] = PAGE * 5;
    for (uint32_t i = 0; i < LAYERS; i++) {
        layers[i] = (struct layer){i, experts.count, is_regular ? MOST_EXPERTS : 2 + draw(MOST_EXPERTS - 1), 1, draw(2), i == LAYERS - 1 && draw(2)};
        for (uint32_t e = experts.count; e < experts.count + layers[i].count; e++) {
            parts[e * MAX_PARTS] = (struct part){.file = draw(FILES), .offset = (uint64_t)draw(1 << 20) * MOST + e};
            layers_of[e] = i;
        }
        experts.count += layers[i].count;
    }
}

int main(int argument_count, char **arguments) {
    if (argument_count < 3) return 2;
    seed = state = strtoull(arguments[1], NULL, 10);
    make_model();
    struct residents_owner owner = {NULL, do_nothing_to, give_back};
    uint64_t whole = 0, reserve = 2 * 5 * PAGE;
    for (uint32_t e = 0; e < experts.count; e++) whole += slot_length(&experts, e);
    if (!residents_init(&residents, &experts, POLICY_LRFU, (reserve + whole / 12 * (1 + draw(12))) / PAGE * PAGE, reserve, owner)) return 2;
    if (!prompts_init(&prompts, &experts)) return 2;
    uint32_t pinned = draw(2 * experts.count);
    if (pinned < experts.count) is_admitted[pinned] = residents_pin(&residents, pinned);
    while (tokens[0] < MOST_COUNTED) compute(0, MOST_COUNTED / 2); /* and not halved */
    while (tokens[0] == MOST_COUNTED) compute(0, 1);
    for (uint32_t i = 0; i < (uint32_t)atoi(arguments[2]); i++) {
        step = i;
        if (is_regular)
            compute(i % LAYERS, i % 200 ? FEW + 1 : FEW);
        else
            compute(draw(3) ? i % LAYERS : draw(LAYERS), draw(3) ? FEW + 1 + draw(600) : 1 + draw(FEW));
    }
    prompts_free(&prompts);
    residents_free(&residents);
    return 0;
}
