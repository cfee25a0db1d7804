#include "guesses.h"

#include <stdlib.h>

static const double RATE = 1.0 / 64;         /* of what is new in averages */
static const double LEAST_SHARE = 0.5;       /* of guesses that come true, for which it is read */
static const double FIRST_SHARE = 0.75;      /* before anything is known */
static const double FIRST_GAIN = 1e6;        /* nanoseconds */
static const double LEAST_UNDERSTOOD = 0.95; /* of controls */
enum { PROBE = 16, LEAST_CONTROLS = 16 };    /* one guess in PROBE is made though the last ones did not pay */

bool guesses_init(struct guesses *guesses) {
    *guesses = (struct guesses){.gain = FIRST_GAIN, .of = calloc(MAX_CONTEXTS, sizeof *guesses->of)};
    for (uint32_t i = 0; i < MAX_RANKS; i++) guesses->shares[i] = FIRST_SHARE;
    return guesses->of;
}

void guesses_free(struct guesses *guesses) { free(guesses->of); }

static void move_average(double *average, double value) { *average += (value - *average) * RATE; }

bool guesses_is_understood(const struct guesses *guesses) {
    return guesses->control_count < LEAST_CONTROLS ||
           (double)guesses->control_right_count >= LEAST_UNDERSTOOD * (double)guesses->control_count;
}

bool guesses_is_wanted(struct guesses *guesses) {
    if (!guesses_is_understood(guesses)) return false;
    bool is_wanted = guesses->gain >= guesses->cost || ++guesses->left_out_count >= PROBE;
    if (is_wanted) guesses->left_out_count = 0;
    return is_wanted;
}

static bool is_noted(const struct guess *guess, uint32_t expert) {
    for (uint32_t i = 0; i < guess->count; i++)
        if (guess->experts[i] == expert) return true;
    return false;
}

uint32_t guesses_choose(struct guesses *guesses, const struct residents *residents, uint32_t context, uint32_t layer,
                        const uint32_t *experts, uint32_t count, uint32_t token_count, double cost, uint32_t *chosen) {
    struct guess *guess = &guesses->of[context];
    uint32_t chosen_count = 0, first = residents->experts->layers[layer].first;
    guess->layer = layer;
    guess->count = 0;
    move_average(&guesses->cost, cost);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t expert = first + experts[i], rank = i / token_count;
        if (is_noted(guess, expert)) continue;
        bool is_missing = residents->states[expert].bytes == ABSENT;
        bool is_read = is_missing && guesses->shares[rank] >= LEAST_SHARE;
        guess->experts[guess->count] = expert;
        guess->ranks[guess->count] = (uint8_t)rank;
        guess->is_missing[guess->count] = is_missing;
        guess->is_read[guess->count++] = is_read;
        if (is_read) chosen[chosen_count++] = expert;
    }
    return chosen_count;
}

void guesses_settle(struct guesses *guesses, const struct experts *experts, uint32_t context, uint32_t layer,
                    const uint32_t *counts) {
    struct guess *guess = &guesses->of[context];
    uint32_t useful_count = 0;
    if (guess->layer != layer || !guess->layer) return;
    for (uint32_t i = 0; i < guess->count; i++) {
        bool is_right = counts[guess->experts[i] - experts->layers[layer].first] > 0;
        guesses->guessed_count++;
        guesses->right_count += is_right;
        if (guess->is_missing[i]) move_average(&guesses->shares[guess->ranks[i]], is_right);
        guesses->ahead_count += guess->is_read[i];
        useful_count += is_right && guess->is_read[i];
    }
    guesses->ahead_right_count += useful_count;
    move_average(&guesses->gain, useful_count * guesses->miss_time);
    guess->layer = guess->count = 0;
}

void guesses_record_wait(struct guesses *guesses, double nanoseconds, uint32_t missing_count) {
    if (missing_count) move_average(&guesses->miss_time, nanoseconds / missing_count);
}

void guesses_record_control(struct guesses *guesses, bool is_right) {
    guesses->control_count++;
    guesses->control_right_count += is_right;
}
