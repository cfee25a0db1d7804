#include "slots.h"

#include <stdlib.h>

bool slots_init(struct slots *slots, const struct experts *experts) {
    *slots = (struct slots){.class_count = experts->class_count};
    uint32_t counts[MAX_CLASSES] = {0};
    for (uint32_t i = 0; i < experts->layer_count; i++) counts[experts->layers[i].slot_class] += experts->layers[i].count;
    for (uint32_t i = 0; i < slots->class_count; i++) {
        struct slot_class *one = &slots->classes[i];
        one->length = experts->class_length[i];
        one->stride = slot_stride(experts, i);
        if (is_aligned_class(experts, i)) slots->file_length = (slots->file_length + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        one->first = one->next = slots->file_length;
        one->count = counts[i];
        slots->file_length += one->stride * counts[i];
        one->spare = calloc(counts[i], sizeof *one->spare);
        one->empty = calloc(counts[i], sizeof *one->empty);
        if (!one->spare || !one->empty) return false;
    }
    return true;
}

void slots_free(struct slots *slots) {
    for (uint32_t i = 0; i < slots->class_count; i++) {
        free(slots->classes[i].spare);
        free(slots->classes[i].empty);
    }
}

uint64_t slots_take_spare(struct slots *slots, uint32_t slot_class) {
    struct slot_class *one = &slots->classes[slot_class];
    if (!one->spare_count) return NO_SLOT;
    one->taken_count++;
    return one->spare[--one->spare_count];
}

uint64_t slots_take_new(struct slots *slots, uint32_t slot_class) {
    struct slot_class *one = &slots->classes[slot_class];
    slots->length += one->length;
    one->taken_count++;
    if (one->empty_count) return one->empty[--one->empty_count];
    uint64_t slot = one->next;
    one->next += one->stride;
    return slot;
}

void slots_release(struct slots *slots, uint32_t slot_class, uint64_t slot) {
    struct slot_class *one = &slots->classes[slot_class];
    one->taken_count--;
    one->spare[one->spare_count++] = slot;
}

bool slots_empty_spare(struct slots *slots, uint32_t kept, uint64_t *slot, uint64_t *length) {
    for (uint32_t i = 0; i < slots->class_count; i++) {
        struct slot_class *one = &slots->classes[i];
        if (i == kept || !one->spare_count) continue;
        *slot = one->empty[one->empty_count++] = one->spare[--one->spare_count];
        *length = one->length;
        slots->length -= one->length;
        return true;
    }
    return false;
}
