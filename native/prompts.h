/*
 * Steps of many tokens: they use most experts of a layer, and then none. Counts of the experts that were routed so far
 * tell which of them the next layer likely uses. docs/policies.md has the rules.
 *
 * No locks and no system calls: whoever calls has the lock of the cache.
 */
#ifndef PROMPTS_H
#define PROMPTS_H

#include "residents.h"

enum { MANY_TOKENS = 17 }; /* of a step, from which on it is one of a prompt, and the next layer is read ahead */

struct prompts {
    const struct experts *experts;
    double *counts;       /* by expert: tokens that were routed to it */
    double *token_counts; /* by layer */
    double width;         /* the experts that a token uses in a layer */
    struct ranked *ranked;
    uint32_t *chosen;
};

/* false without memory */
bool prompts_init(struct prompts *prompts, const struct experts *experts);
void prompts_free(struct prompts *prompts);

/* Before a step is begun: `counts` by the layer's experts, the tokens routed to each. Makes room for many tokens. */
void prompts_begin(struct prompts *prompts, struct residents *residents, uint32_t layer, const uint32_t *counts,
                   uint32_t token_count);
/* After a step of many tokens was begun: read ahead what the next layer likely uses. */
void prompts_look_ahead(struct prompts *prompts, struct residents *residents, uint32_t layer, const uint32_t *counts,
                        uint32_t token_count);

#endif
