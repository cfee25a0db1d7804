/* Guesses of the next layer's experts: which are read, and what ends that. It prints nothing, or what is wrong. */
#include <stdio.h>
#include <stdlib.h>

#include "../../native/guesses.h"

enum { COUNT = 32, RANKS = 4, LAYER = 1 };

static struct layer layers[2] = {{0, 0, COUNT, 1, 0, false}, {1, COUNT, COUNT, 1, 0, false}};
static struct experts experts = {.layers = layers, .layer_count = 2, .count = 2 * COUNT};
static struct resident states[2 * COUNT];
static struct residents residents = {.experts = &experts, .states = states};

#define REQUIRE(condition) \
    if (!(condition)) return printf("line %d: %s\n", __LINE__, #condition), 1

/* Guess experts 0 to 3, of which those below `right_count` are routed; return how many are read. */
static uint32_t guess(struct guesses *guesses, uint32_t right_count, double cost) {
    uint32_t ranked[RANKS] = {0, 1, 2, 3}, chosen[MAX_GUESSED], counts[COUNT] = {0};
    uint32_t count = guesses_choose(guesses, &residents, 0, LAYER, ranked, RANKS, 1, cost, chosen);
    for (uint32_t i = 0; i < right_count; i++) counts[i] = 1;
    guesses_record_wait(guesses, 1000, 1);
    guesses_settle(guesses, &experts, 0, LAYER, counts);
    return count;
}

static int guess_often(struct guesses *guesses) {
    REQUIRE(guess(guesses, 2, 10) == 4);
    for (int i = 0; i < 300; i++) guess(guesses, 2, 10);
    REQUIRE(guess(guesses, 2, 10) == 2); /* the ranks that come true */
    REQUIRE(guesses_is_wanted(guesses) && guesses_is_wanted(guesses));
    states[COUNT].bytes = RESIDENT;
    REQUIRE(guess(guesses, 2, 10) == 1); /* what is not there */
    states[COUNT].bytes = ABSENT;
    for (int i = 0; i < 300; i++) guess(guesses, 0, 10);
    REQUIRE(guess(guesses, 0, 10) == 0);
    for (int i = 0; i < 300; i++) guess(guesses, 4, 10);
    REQUIRE(guess(guesses, 4, 10) == 4); /* again */
    return 0;
}

/* One that takes longer than what it saves is made seldom. */
static int guess_seldom(struct guesses *guesses) {
    for (int i = 0; i < 2000; i++) guess(guesses, 4, 1e6);
    uint32_t count = 0;
    for (int i = 0; i < 1600; i++) count += guesses_is_wanted(guesses);
    REQUIRE(count == 100);
    return 0;
}

/* What it saves is the time that a step waits for each expert that it misses. */
static int weigh(struct guesses *guesses) {
    for (int i = 0; i < 3000; i++) guess(guesses, 4, 3900);
    for (int i = 0; i < 3; i++) REQUIRE(guesses_is_wanted(guesses));
    for (int i = 0; i < 3000; i++) guess(guesses, 4, 4100);
    REQUIRE(!guesses_is_wanted(guesses));
    for (int i = 0; i < 3000; i++) guesses_record_wait(guesses, 8000, 4);
    guesses_record_wait(guesses, 1e9, 0); /* it has waited for another's */
    for (int i = 0; i < 3000; i++) {
        uint32_t ranked[RANKS] = {0, 1, 2, 3}, chosen[MAX_GUESSED], counts[COUNT] = {1, 1, 1, 1};
        guesses_choose(guesses, &residents, 0, LAYER, ranked, RANKS, 1, 7900, chosen);
        guesses_settle(guesses, &experts, 0, LAYER, counts);
    }
    REQUIRE(guesses_is_wanted(guesses) && guesses_is_wanted(guesses));
    return 0;
}

/* Each expert counts once, for the next step of the context and of that layer alone. */
static int count_once(struct guesses *guesses) {
    uint32_t ranked[] = {0, 0, 1, 0}, chosen[MAX_GUESSED], counts[COUNT] = {1};
    REQUIRE(guesses_choose(guesses, &residents, 0, LAYER, ranked, 4, 2, 10, chosen) == 2 && chosen[0] == COUNT && chosen[1] == COUNT + 1);
    REQUIRE(guesses_choose(guesses, &residents, 0, LAYER, ranked, 4, 2, 10, chosen) == 2);
    guesses_settle(guesses, &experts, 1, LAYER, counts);
    guesses_settle(guesses, &experts, 0, 0, counts);
    REQUIRE(!guesses->guessed_count);
    guesses_settle(guesses, &experts, 0, LAYER, counts);
    REQUIRE(guesses->guessed_count == 2 && guesses->right_count == 1 && guesses->ahead_count == 2 && guesses->ahead_right_count == 1);
    REQUIRE(guesses->shares[0] == 0.75 + 0.25 / 64 && guesses->shares[1] == 0.75 - 0.75 / 64); /* ranks of two tokens */
    guesses_settle(guesses, &experts, 0, LAYER, counts);
    REQUIRE(guesses->guessed_count == 2);
    return 0;
}

static int control(struct guesses *guesses) {
    for (int i = 0; i < 15; i++) guesses_record_control(guesses, false);
    REQUIRE(guesses_is_understood(guesses)); /* so few tell nothing */
    for (int i = 0; i < 285; i++) guesses_record_control(guesses, true);
    REQUIRE(guesses_is_understood(guesses) && guesses->control_count == 300);
    guesses_record_control(guesses, false);
    REQUIRE(!guesses_is_understood(guesses) && !guesses_is_wanted(guesses));
    return 0;
}

static int control_first(struct guesses *guesses) {
    for (int i = 0; i < 16; i++) guesses_record_control(guesses, i > 0);
    REQUIRE(!guesses_is_understood(guesses));
    return 0;
}

int main(void) {
    int (*const checks[])(struct guesses *) = {guess_often, guess_seldom, weigh, count_once, control, control_first};
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        struct guesses guesses;
        if (!guesses_init(&guesses)) return 2;
        if (checks[i](&guesses)) return 1;
        guesses_free(&guesses);
    }
    return 0;
}
