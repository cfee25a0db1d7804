/*
 * Reading ahead for steps of few tokens: the router of the next layer, asked with the input of this one, names experts.
 * Which of them are worth a read is told by how often such guesses came true. docs/policies.md has the rules.
 *
 * No locks and no system calls: whoever calls has the lock of the cache.
 */
#ifndef GUESSES_H
#define GUESSES_H

#include "residents.h"

enum { MOST_GUESSED_TOKENS = 8, MAX_RANKS = 32, MAX_GUESSED = MOST_GUESSED_TOKENS * MAX_RANKS };

struct guess { /* of a context's next step: experts, each once */
    uint32_t layer, count;
    uint32_t experts[MAX_GUESSED];
    uint8_t ranks[MAX_GUESSED];
    bool is_missing[MAX_GUESSED], is_read[MAX_GUESSED];
};

struct guesses {
    struct guess *of; /* by context */
    double shares[MAX_RANKS]; /* by rank: how many of the missing experts at that rank came true, of late */
    double gain, cost;        /* nanoseconds of a guess, of late */
    double miss_time;         /* nanoseconds that a step waits for a missing expert, of late */
    uint32_t left_out_count;  /* guesses since the last one */
    uint64_t guessed_count, right_count;    /* experts; those that were routed */
    uint64_t ahead_count, ahead_right_count; /* that were read ahead; those that were routed */
    uint64_t control_count, control_right_count;
};

/* false without memory */
bool guesses_init(struct guesses *guesses);
void guesses_free(struct guesses *guesses);

/* Is the next guess worth its time? If it was not of late, one in a few is. */
bool guesses_is_wanted(struct guesses *guesses);
/* Note a guess for a context's next step, up to MAX_GUESSED `experts` of a layer by rank, with as many tokens in each; and
 * choose those to read. `cost` is nanoseconds. */
uint32_t guesses_choose(struct guesses *guesses, const struct residents *residents, uint32_t context, uint32_t layer,
                        const uint32_t *experts, uint32_t count, uint32_t token_count, double cost, uint32_t *chosen);
/* Hold the guess against a step of the context: `counts` by the layer's experts, the tokens routed to each. */
void guesses_settle(struct guesses *guesses, const struct experts *experts, uint32_t context, uint32_t layer,
                    const uint32_t *counts);
/* Note how long a step has waited for the experts that it missed. */
void guesses_record_wait(struct guesses *guesses, double nanoseconds, uint32_t missing_count);
/* Note whether a layer's own router, asked with its own input, names what was routed. It always does if routers are
 * understood; if not, nothing is guessed any more. */
void guesses_record_control(struct guesses *guesses, bool is_right);
bool guesses_is_understood(const struct guesses *guesses);

#endif
