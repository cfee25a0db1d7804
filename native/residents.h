/*
 * Which experts are in memory: lookups, evictions, slots and what is in use. The rules of docs/policies.md.
 *
 * Decides, and does nothing: no locks, no system calls, no waiting; whoever calls has the lock of the cache. What must
 * happen outside is done by two functions of its owner: to unmap an expert, and to give a slot's memory back. So the
 * same code runs under a simulated drive and scheduler.
 *
 * A context is a sequence of steps that use experts; a step's experts stay until the context's next step, or until it
 * is released. An expert is admitted (the cache counts it, and the policy orders it) or not, and apart from that its
 * bytes are absent, being read, or resident: one that was evicted keeps its bytes until its slot is needed.
 */
#ifndef RESIDENTS_H
#define RESIDENTS_H

#include "order.h"
#include "slots.h"

/* The last context is of uses that nobody announced; its steps have one expert each, and may use the reserve. The last
 * few of these experts stay as far as the reserve has room: the threads that wanted them have yet to read them. */
enum { MAX_CONTEXTS = 64, UNANNOUNCED = MAX_CONTEXTS - 1, MOST_RECENT = 16 };

enum bytes { ABSENT, READING, RESIDENT };

struct resident {
    uint64_t slot;
    uint8_t bytes;
    bool is_admitted, is_pinned;
    bool is_ahead;     /* read before it is used, and not admitted */
    bool is_cancelled; /* being read, but for nobody */
    bool is_leftover;  /* evicted, and in the list of those */
    bool is_checked;   /* its digest was found right once */
};

struct step {
    uint32_t used_count, missing_count, next_missing;
    uint32_t *used, *missing;
    uint64_t length; /* of its slots */
};

struct tally {
    uint64_t hit_count, miss_count; /* lookups, but for those of drafts: of rare layers, in steps that were announced */
    uint64_t draft_hit_count, draft_miss_count;
    uint64_t wasted_length, evicted_count;
};

struct residents_owner {
    void *data;
    void (*unmap)(void *data, uint32_t expert);
    void (*punch)(void *data, uint64_t offset, uint64_t length);
};

struct residents {
    const struct experts *experts;
    struct residents_owner owner;
    uint64_t memory, reserve; /* bytes of all slots; of those beside the cache's budget */
    uint64_t most_room;       /* bytes beside both, for guesses */
    uint64_t pinned_length;
    struct resident *states;
    struct order order;
    uint64_t budget, length, whole_length; /* bytes of the cache: what it may take, has admitted, would take for all */
    struct slots slots;
    uint8_t *of_step, *users; /* by expert: is of the current step; the contexts that use it */
    uint32_t *ordered;
    uint32_t *leftovers, leftover_count;
    uint32_t *ahead, ahead_count; /* read before use: queued, being read or there */
    uint32_t next_ahead;          /* the first that is queued */
    uint64_t ahead_length;        /* of the budget, lent to reading ahead */
    bool is_guess;
    struct step steps[MAX_CONTEXTS];
    uint32_t recent[MOST_RECENT], recent_count; /* of unannounced uses, the last one at the end */
    uint64_t recent_length;
    struct tally tally;
    uint32_t common_count, common_resident_count; /* experts of layers that are not rare; resident ones */
    uint64_t resident_length;
};

enum next_read { READ_NEXT, READ_WAIT, READ_NONE };

/* false without memory; `policy` as in docs/policies.md */
bool residents_init(struct residents *residents, const struct experts *experts, enum policy policy, uint64_t memory,
                    uint64_t reserve, struct residents_owner owner);
void residents_free(struct residents *residents);

/* Leave room for experts that are read by guesses, unless all experts fit: so many bytes, or 1/32 of the memory if that
 * is less. Before the first step. */
void residents_leave_room(struct residents *residents, uint64_t length);

/* Begin a step of a context: `used` are experts of one layer, each once, in the order of their last routing. Its last
 * step is released. */
void residents_begin(struct residents *residents, uint32_t context, uint32_t layer, const uint32_t *used, uint32_t count);
/* Take a slot for the next missing expert of a context's step. READ_WAIT: another context has to release some first.
 * No other context may begin a step meanwhile, but the one of unannounced uses: so the wait comes to an end. */
enum next_read residents_next(struct residents *residents, uint32_t context, uint32_t *expert);
/* Release the slot of one expert that was evicted, while a step waits anyway; false if there is none. */
bool residents_release_leftover(struct residents *residents);
/* Is the step's every expert resident? `has_failed`: one could not be read, and no other is being read. */
bool residents_is_ready(const struct residents *residents, uint32_t context, bool *has_failed);
/* A context no longer uses its experts. */
void residents_release(struct residents *residents, uint32_t context);
/* A read has ended. One that failed leaves the cache. */
void residents_complete(struct residents *residents, uint32_t expert, bool is_right);

/* Read experts ahead of the next step, in this order, instead of those so far. A guess takes no slot of another length
 * that has an expert's bytes. */
void residents_set_ahead(struct residents *residents, const uint32_t *experts, uint32_t count, bool is_guess);
/* Take a slot for the next of them; false if there is none, or no room. */
bool residents_next_ahead(struct residents *residents, uint32_t *expert);

/* Admit an expert that nobody used yet, if there is room, and take a slot for it. */
bool residents_admit(struct residents *residents, uint32_t expert);
/* Never evict an expert; false if it would exceed its budget. Before the first step. */
bool residents_pin(struct residents *residents, uint32_t expert);

/* Set other bytes for all slots. Experts beyond them are evicted; those in use go when they are released. */
void residents_resize(struct residents *residents, uint64_t memory);
/* Evict an expert out of turn. */
void residents_evict(struct residents *residents, uint32_t expert);
/* Is it admitted, and may the policy evict it? */
bool residents_is_evictable(const struct residents *residents, uint32_t expert);
/* Bytes of the budget that are neither admitted nor lent; below 0 after a step that was larger. */
int64_t residents_free_length(const struct residents *residents);
/* Are all experts of common layers resident, and does nothing evict them? */
bool residents_holds_all(const struct residents *residents);

#endif
