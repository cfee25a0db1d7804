/* Slots: taken, released and emptied, of classes that begin with huge pages or do not. It prints nothing, or what is wrong. */
#include <stdio.h>

#include "../../native/slots.h"

static struct layer layers[] = {
    {.count = 3, .slot_class = 0},
    {.first = 3, .count = 2, .slot_class = 1},
    {.first = 5, .count = 1, .slot_class = 0},
    {.first = 6, .count = 1, .slot_class = 2},
};
static struct experts experts = {
    .layers = layers,
    .layer_count = 4,
    .count = 7,
    .class_count = 3,
    .class_length = {3 * PAGE, HUGE_PAGE + PAGE, HUGE_PAGE},
};

#define REQUIRE(condition) \
    if (!(condition)) return printf("line %d: %s\n", __LINE__, #condition), 1

/* Slots of one class lie one behind the other, and those of the next behind all of them. */
static int take(struct slots *slots, uint64_t first, uint64_t stride) {
    uint64_t taken[4];
    for (uint64_t i = 0; i < 4; i++) {
        REQUIRE(slots_take_spare(slots, 0) == NO_SLOT);
        taken[i] = slots_take_new(slots, 0);
        REQUIRE(taken[i] == i * 3 * PAGE && slots->length == (i + 1) * 3 * PAGE);
    }
    REQUIRE(slots_take_new(slots, 1) == first && slots_take_new(slots, 1) == first + stride);
    REQUIRE(slots->length == 12 * PAGE + 2 * (HUGE_PAGE + PAGE));
    REQUIRE(slots->classes[2].first == first + 2 * stride && slots->file_length == first + 2 * stride + HUGE_PAGE);
    REQUIRE(slots->classes[2].count == 1 && slots->classes[2].stride == HUGE_PAGE && slots->classes[0].count == 4 && slots->classes[1].count == 2);
    REQUIRE(slots->classes[0].taken_count == 4 && slots->classes[1].taken_count == 2);
    return 0;
}

/* A released slot keeps its memory until it is emptied for another class; then the next one of its class takes it. */
static int give_back(struct slots *slots, uint64_t first) {
    uint64_t slot, length, before = slots->length;
    REQUIRE(!slots_empty_spare(slots, UINT32_MAX, &slot, &length));
    slots_release(slots, 0, 3 * PAGE);
    slots_release(slots, 0, 6 * PAGE);
    slots_release(slots, 1, first);
    REQUIRE(slots->length == before && slots->classes[0].taken_count == 2 && slots->classes[1].taken_count == 1);
    REQUIRE(slots_take_spare(slots, 0) == 6 * PAGE && slots->classes[0].taken_count == 3);
    REQUIRE(slots_empty_spare(slots, 0, &slot, &length) && slot == first && length == HUGE_PAGE + PAGE);
    REQUIRE(!slots_empty_spare(slots, 0, &slot, &length));
    REQUIRE(slots_empty_spare(slots, UINT32_MAX, &slot, &length) && slot == 3 * PAGE && length == 3 * PAGE);
    REQUIRE(slots->length == before - 4 * PAGE - HUGE_PAGE);
    REQUIRE(slots_take_spare(slots, 0) == NO_SLOT && slots_take_spare(slots, 1) == NO_SLOT);
    REQUIRE(slots_take_new(slots, 0) == 3 * PAGE && slots_take_new(slots, 1) == first);
    REQUIRE(slots->length == before && slots->classes[0].taken_count == 4 && slots->classes[1].taken_count == 2);
    return 0;
}

int main(void) {
    for (int is_aligned = 0; is_aligned < 2; is_aligned++) {
        struct slots slots;
        experts.is_aligned = is_aligned;
        uint64_t first = is_aligned ? HUGE_PAGE : 12 * PAGE, stride = is_aligned ? 2 * HUGE_PAGE : HUGE_PAGE + PAGE;
        if (!slots_init(&slots, &experts)) return 2;
        if (take(&slots, first, stride) || give_back(&slots, first)) return 1;
        slots_free(&slots);
    }
    return 0;
}
