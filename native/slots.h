/*
 * Slots: which ranges of the pool have memory, and which of them are free. Decides, and does nothing: no locks and no
 * system calls; whoever calls has the lock of the cache.
 *
 * Slots of one class are of one length. The file has room for all experts of a model, so that a slot never moves; only
 * slots that were taken have memory. A released slot keeps it for the next expert of its class, since new pages are
 * filled with zeros first.
 */
#ifndef SLOTS_H
#define SLOTS_H

#include "experts.h"

#define NO_SLOT UINT64_MAX

struct slot_class {
    uint64_t length, stride;
    uint64_t first, next; /* the next slot that was never taken */
    uint64_t *spare;       /* released ones, which have memory */
    uint64_t *empty;       /* those whose memory was given back */
    uint32_t spare_count, empty_count, taken_count, count;
};

struct slots {
    struct slot_class classes[MAX_CLASSES];
    uint32_t class_count;
    uint64_t file_length;
    uint64_t length; /* bytes that have memory: of taken slots, and of spare ones */
};

/* false without memory */
bool slots_init(struct slots *slots, const struct experts *experts);
void slots_free(struct slots *slots);

/* Take a spare slot; NO_SLOT if there is none. */
uint64_t slots_take_spare(struct slots *slots, uint32_t slot_class);
/* Take a slot that has no memory yet. */
uint64_t slots_take_new(struct slots *slots, uint32_t slot_class);
void slots_release(struct slots *slots, uint32_t slot_class, uint64_t slot);
/* Take the memory of a spare slot, of any class but `kept`, out of the count; its owner punches the hole. */
bool slots_empty_spare(struct slots *slots, uint32_t kept, uint64_t *slot, uint64_t *length);

#endif
