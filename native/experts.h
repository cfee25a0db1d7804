/*
 * The experts of a model: which there are, where their parts lie in files, and where in a slot.
 *
 * Filled once and never changed, so any thread may read it. There is one layer or more, and each has one expert or more.
 * Experts are numbered over all layers: those of layer 0 first. A slot is the memory of one expert, in whole pages.
 *
 * Slots that hold whole blobs begin with a huge page if they are as long as one: then it can be mapped as one. What
 * follows such a slot up to the next huge page has no memory.
 */
#ifndef EXPERTS_H
#define EXPERTS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

enum { PAGE = 4096, HUGE_PAGE = 2 << 20, MAX_PARTS = 16, MAX_CLASSES = 64 };

#define NO_EXPERT UINT32_MAX

struct part {
    uint64_t offset, length; /* in its file */
    uint64_t digest;         /* XXH3-64, where `has_digest` */
    uint32_t file;
    uint32_t slot_offset;
    bool has_digest, has_mirror; /* the bytes lie in the second place of its file as well */
};

struct layer {
    uint32_t number;       /* of the model */
    uint32_t first, count; /* its experts */
    uint32_t part_count;
    uint32_t slot_class; /* of its experts' slots, by their length */
    bool is_rare;        /* for multi-token prediction: programs may never use it */
};

struct experts {
    struct layer *layers; /* in ascending order */
    struct part *parts;   /* [count][MAX_PARTS] */
    uint32_t *layer_of;   /* by expert, an index of `layers` */
    uint32_t layer_count, count, class_count;
    uint64_t class_length[MAX_CLASSES]; /* bytes of a slot */
    bool is_aligned;                    /* to huge pages */
};

static inline uint32_t most_in_layer(const struct experts *experts) {
    uint32_t most = 0;
    for (uint32_t i = 0; i < experts->layer_count; i++)
        if (experts->layers[i].count > most) most = experts->layers[i].count;
    return most;
}

/* ---- filling ---- */

/* Allocate all layers and experts; false: no memory. */
static inline bool experts_allocate(struct experts *experts, uint32_t layer_count, uint32_t expert_count) {
    experts->layers = calloc((size_t)layer_count + 1, sizeof *experts->layers);
    experts->parts = calloc(((size_t)expert_count + 1) * MAX_PARTS, sizeof *experts->parts);
    experts->layer_of = calloc((size_t)expert_count + 1, sizeof *experts->layer_of);
    return experts->layers && experts->parts && experts->layer_of;
}

/* Round up to whole pages: where the next part may begin in a slot. */
static inline uint64_t whole_pages(uint64_t length) { return (length + PAGE - 1) / PAGE * PAGE; }

/* The class of slots of a length, a new one if there is none; MAX_CLASSES: there are as many as there may be. */
static inline uint32_t class_for(struct experts *experts, uint64_t length) {
    for (uint32_t i = 0; i < experts->class_count; i++)
        if (experts->class_length[i] == length) return i;
    if (experts->class_count == MAX_CLASSES) return MAX_CLASSES;
    experts->class_length[experts->class_count] = length;
    return experts->class_count++;
}

/* Add a layer, whose parts are filled, in slots of `length` bytes; false: there are too many lengths. */
static inline bool experts_add_layer(struct experts *experts, struct layer layer, uint64_t length) {
    layer.first = experts->count;
    layer.slot_class = class_for(experts, length);
    for (uint32_t i = 0; i < layer.count; i++) experts->layer_of[experts->count++] = experts->layer_count;
    experts->layers[experts->layer_count++] = layer;
    return layer.slot_class < MAX_CLASSES;
}

/* ---- reading ---- */

static inline const struct layer *layer_of(const struct experts *experts, uint32_t expert) {
    return &experts->layers[experts->layer_of[expert]];
}

static inline uint32_t class_of(const struct experts *experts, uint32_t expert) {
    return layer_of(experts, expert)->slot_class;
}

static inline uint64_t slot_length(const struct experts *experts, uint32_t expert) {
    return experts->class_length[class_of(experts, expert)];
}

static inline bool is_aligned_class(const struct experts *experts, uint32_t slot_class) {
    return experts->is_aligned && experts->class_length[slot_class] >= HUGE_PAGE;
}

/* Bytes from the start of one slot to that of the next. */
static inline uint64_t slot_stride(const struct experts *experts, uint32_t slot_class) {
    uint64_t length = experts->class_length[slot_class];
    return is_aligned_class(experts, slot_class) ? (length + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE : length;
}

static inline const struct part *part_of(const struct experts *experts, uint32_t expert, uint32_t part) {
    return &experts->parts[(uint64_t)expert * MAX_PARTS + part];
}

#endif
