/*
 * Which slot a missing expert takes, what leaves the cache, and what is counted, as docs/policies.md has it, in small stories.
 * It prints nothing, or what is wrong.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "../../native/residents.h"

/* Layers 0 and 1 have experts of one page, layer 2 of two, layer 3 of three pages; layer 3 is for drafts. */
enum { SMALL = 0, ALSO_SMALL = 8, LARGE = 16, DRAFT = 24, COUNT = 32, PER_LAYER = 8, RESERVE = 2 };

static struct layer layers[] = {
    {0, SMALL, PER_LAYER, 1, 0, false},
    {1, ALSO_SMALL, PER_LAYER, 1, 0, false},
    {2, LARGE, PER_LAYER, 1, 1, false},
    {3, DRAFT, PER_LAYER, 1, 2, true},
};
static uint32_t layers_of[COUNT];
static struct experts experts = {
    .layers = layers, .layer_of = layers_of, .layer_count = 4, .count = COUNT, .class_count = 3, .class_length = {PAGE, 2 * PAGE, 3 * PAGE}};
static struct residents residents;
static uint32_t unmapped, unmapped_count, punched_count;
static uint64_t punched_offset, punched_length;

#define REQUIRE(condition) \
    if (!(condition)) return printf("line %d: %s\n", __LINE__, #condition), 1

static void unmap(void *data, uint32_t expert) {
    (void)data;
    unmapped = expert;
    unmapped_count++;
}

static void punch(void *data, uint64_t offset, uint64_t length) {
    (void)data;
    punched_count++;
    punched_offset = offset;
    punched_length = length;
}

/* Open a cache with a budget and the reserve, in pages. */
static void open_cache(enum policy policy, uint64_t budget) {
    unmapped_count = punched_count = 0;
    residents_init(&residents, &experts, policy, (budget + RESERVE) * PAGE, RESERVE * PAGE, (struct residents_owner){NULL, unmap, punch});
}

static bool is_resident(uint32_t expert) { return residents.states[expert].bytes == RESIDENT; }
static bool is_admitted(uint32_t expert) { return residents.states[expert].is_admitted; }
static uint64_t slot_of(uint32_t expert) { return residents.states[expert].slot; }

static void begin(uint32_t context, uint32_t count, ...) {
    uint32_t used[PER_LAYER];
    va_list list;
    va_start(list, count);
    for (uint32_t i = 0; i < count; i++) used[i] = va_arg(list, uint32_t);
    va_end(list);
    residents_begin(&residents, context, layers_of[used[0]], used, count);
}

/* Read all that a context's step misses; return how many reads that took, or COUNT if it has to wait. */
static uint32_t read_step(uint32_t context) {
    uint32_t expert, count = 0;
    enum next_read next;
    while ((next = residents_next(&residents, context, &expert)) == READ_NEXT) {
        residents_complete(&residents, expert, true);
        count++;
    }
    return next == READ_WAIT ? COUNT : count;
}

static uint32_t use(uint32_t expert) {
    begin(0, 1, expert);
    return read_step(0);
}

/* ---- slots ---- */

static int take_slots(void) {
    open_cache(POLICY_LRU, 4);
    for (uint32_t e = 0; e < 6; e++) REQUIRE(use(e) == 1 && slot_of(e) == e * PAGE); /* new memory, up to all there is */
    REQUIRE(residents.tally.evicted_count == 2 && !is_admitted(0) && !is_admitted(1) && is_admitted(2));
    REQUIRE(!unmapped_count && is_resident(0) && is_resident(1)); /* these keep their slots */
    REQUIRE(use(1) == 0 && residents.tally.miss_count == 7 && is_admitted(1) && !is_admitted(2)); /* there, but a miss */
    REQUIRE(use(6) == 1 && unmapped == 0 && slot_of(6) == 0 && !is_resident(0)); /* the slot of what was evicted longest ago */
    begin(1, 1, 2);
    REQUIRE(read_step(1) == 0 && !is_admitted(4));
    REQUIRE(use(2) == 0 && use(ALSO_SMALL) == 1 && unmapped == 3); /* not of what a step uses */
    REQUIRE(residents.slots.length == 6 * PAGE && !punched_count);
    REQUIRE(residents.resident_length == 6 * PAGE && residents.length == 4 * PAGE);
    return 0;
}

/* A slot of another length: a free one, then those of evicted experts, then one more is evicted. */
static int take_other_lengths(void) {
    open_cache(POLICY_LRU, 6);
    for (uint32_t e = 0; e < 8; e++) use(e); /* 0 and 1 are evicted, 8 pages of memory taken */
    residents_release(&residents, 0);
    REQUIRE(residents_release_leftover(&residents) && unmapped == 0 && !punched_count);
    REQUIRE(use(LARGE) == 1 && unmapped_count == 2 && unmapped == 1);
    REQUIRE(punched_count == 2 && punched_length == PAGE && residents.slots.length == 8 * PAGE);
    REQUIRE(!is_admitted(2) && !is_admitted(3) && is_resident(2) && is_resident(3) && is_admitted(4));
    REQUIRE(use(0) == 1 && unmapped == 2); /* alike is nearest */
    REQUIRE(use(LARGE + 1) == 1 && unmapped_count == 5);
    return 0;
}

/* Where slots of a length take more than two reserves, one of them is evicted before those of others are taken. */
static int take_of_a_large_class(void) {
    open_cache(POLICY_LRU, 8);
    use(LARGE);
    for (uint32_t e = 0; e < 6; e++) use(e);
    use(LARGE + 1);
    for (uint32_t e = 0; e < 6; e++) REQUIRE(use(e) == 0);
    REQUIRE(residents.slots.length == 10 * PAGE && residents.tally.evicted_count == 1);
    REQUIRE(use(6) == 1 && unmapped == 0 && residents.tally.evicted_count == 3 && is_resident(LARGE) && is_resident(LARGE + 1));
    return 0;
}

/* Up to two reserves of a length are left to it: those of others are taken first. */
static int leave_a_few(void) {
    open_cache(POLICY_LRU, 6);
    use(LARGE);
    for (uint32_t e = 0; e < 4; e++) use(e);
    use(LARGE + 1);
    for (uint32_t e = 0; e < 4; e++) REQUIRE(use(e) == 0);
    REQUIRE(residents.slots.length == 8 * PAGE && residents.tally.evicted_count == 1);
    REQUIRE(use(4) == 1 && residents.tally.evicted_count == 2 && is_admitted(0) && unmapped == LARGE && is_resident(LARGE + 1));
    return 0;
}

/* ---- steps ---- */

/* Steps of several contexts wait for room, and have what is theirs until they release it. */
static int share_memory(void) {
    bool has_failed;
    uint32_t expert;
    open_cache(POLICY_LRFU, 4);
    begin(0, 3, 0, 1, 2);
    REQUIRE(read_step(0) == 3 && residents_is_ready(&residents, 0, &has_failed) && !has_failed);
    begin(1, 2, 3, 4);
    REQUIRE(read_step(1) == COUNT && !residents_is_ready(&residents, 1, &has_failed) && !has_failed);
    begin(UNANNOUNCED, 1, ALSO_SMALL);
    REQUIRE(read_step(UNANNOUNCED) == 1); /* it has the reserve */
    residents_release(&residents, 0);
    REQUIRE(residents_next(&residents, 1, &expert) == READ_NEXT && expert == 3);
    REQUIRE(!residents_is_ready(&residents, 1, &has_failed) && !has_failed);
    residents_complete(&residents, 3, false);
    REQUIRE(!is_admitted(3) && !residents_is_ready(&residents, 1, &has_failed) && !has_failed); /* 4 is still missing */
    REQUIRE(residents_next(&residents, 1, &expert) == READ_NEXT && expert == 4);
    residents_complete(&residents, 4, true);
    REQUIRE(!residents_is_ready(&residents, 1, &has_failed) && has_failed && residents.tally.wasted_length == 0);
    return 0;
}

/* What is evicted while it is read, and cannot be read, is nowhere. */
static int fail_when_evicted(void) {
    uint32_t expert;
    open_cache(POLICY_LRU, 4);
    begin(0, 1, 0);
    REQUIRE(residents_next(&residents, 0, &expert) == READ_NEXT);
    residents_resize(&residents, 0);
    REQUIRE(!is_admitted(0) && residents.leftover_count == 1 && residents.slots.length == PAGE);
    residents_complete(&residents, 0, false);
    REQUIRE(!residents.leftover_count && !residents.slots.length && residents.tally.evicted_count == 1);
    return 0;
}

/* A step that is larger than the memory has it all the same, and nothing beside it. */
static int use_more_than_there_is(void) {
    open_cache(POLICY_LRU, 3);
    begin(0, 8, 0, 1, 2, 3, 4, 5, 6, 7);
    REQUIRE(read_step(0) == 8 && residents.slots.length == 8 * PAGE && residents.length == 8 * PAGE);
    REQUIRE(residents_free_length(&residents) == -5 * (int64_t)PAGE);
    REQUIRE(use(ALSO_SMALL) == 1 && residents.length == 3 * PAGE && residents.slots.length == 5 * PAGE);
    return 0;
}

/* The last unannounced uses stay while the reserve has room for them. */
static int keep_unannounced(void) {
    open_cache(POLICY_LRU, 4);
    for (uint32_t e = 0; e < 3; e++) {
        begin(UNANNOUNCED, 1, e);
        read_step(UNANNOUNCED);
    }
    REQUIRE(residents.recent_count == 2 && residents.recent[0] == 1 && residents.recent[1] == 2 && residents.recent_length == 2 * PAGE);
    REQUIRE(residents.users[0] == 0 && residents.users[1] == 1 && residents.users[2] == 2);
    begin(UNANNOUNCED, 1, LARGE);
    REQUIRE(residents.recent_count == 1 && residents.recent_length == 2 * PAGE && residents.users[LARGE] == 2 && !residents.users[1]);
    begin(UNANNOUNCED, 1, DRAFT); /* larger than the reserve */
    REQUIRE(!residents.recent_count && !residents.recent_length && residents.users[DRAFT] == 1);
    REQUIRE(residents.tally.miss_count == 5 && !residents.tally.draft_miss_count); /* nobody has announced a draft */
    return 0;
}

static int count_lookups(void) {
    open_cache(POLICY_LRFU, 20);
    use(0), use(0), use(1);
    use(DRAFT), use(DRAFT), use(DRAFT);
    REQUIRE(residents.tally.hit_count == 1 && residents.tally.miss_count == 2);
    REQUIRE(residents.tally.draft_hit_count == 2 && residents.tally.draft_miss_count == 1);
    REQUIRE(residents.common_resident_count == 2 && residents.common_count == 24 && residents.resident_length == 5 * PAGE);
    return 0;
}

/* ---- reading ahead ---- */

static uint32_t read_ahead(bool is_guess, uint32_t first, uint32_t second) {
    uint32_t expert, count = 0, list[] = {first, second};
    residents_set_ahead(&residents, list, 2, is_guess);
    for (; residents_next_ahead(&residents, &expert); count++) residents_complete(&residents, expert, true);
    return count;
}

static int read_before_use(void) {
    open_cache(POLICY_LRU, 4);
    for (uint32_t e = 0; e < 4; e++) use(e);
    REQUIRE(read_ahead(false, 4, 4) == 1 && residents.ahead_count == 1 && residents.ahead_length == PAGE); /* named twice */
    REQUIRE(residents_free_length(&residents) == -(int64_t)PAGE);
    REQUIRE(read_ahead(false, 5, 0) == 1 && !is_resident(4) && residents.tally.wasted_length == PAGE); /* 0 is there */
    REQUIRE(read_ahead(false, 5, 6) == 1 && is_resident(5) && residents.tally.wasted_length == PAGE);
    uint32_t expert, more[] = {5, 6, 7};
    residents_set_ahead(&residents, more, 3, false);
    REQUIRE(!residents_next_ahead(&residents, &expert) && residents.ahead_count == 3 && !residents.tally.evicted_count); /* no room */
    REQUIRE(use(6) == 0 && residents.tally.miss_count == 5 && residents.tally.evicted_count == 1 && !residents.states[6].is_ahead);
    REQUIRE(residents.tally.wasted_length == 2 * PAGE && !residents.ahead_count && !residents.ahead_length);
    return 0;
}

/* A guess takes free slots and evicted experts of its length, and of another length free slots alone. */
static int guess(void) {
    open_cache(POLICY_LRU, 4);
    for (uint32_t e = 0; e < 6; e++) use(e);
    REQUIRE(read_ahead(true, LARGE, LARGE) == 0 && residents.is_guess && is_resident(0));
    REQUIRE(read_ahead(true, 6, 6) == 1 && unmapped == 0);
    REQUIRE(read_ahead(true, 0, 0) == 1 && unmapped == 6); /* in the place of the last guess */
    REQUIRE(read_ahead(false, LARGE, LARGE) == 1 && !is_resident(1));
    return 0;
}

/* A step that needs room takes it from the last that was read ahead. */
static int need_what_is_read_ahead(void) {
    open_cache(POLICY_LRU, 4);
    begin(0, 2, 0, 1);
    REQUIRE(read_step(0) == 2 && read_ahead(false, 2, 3) == 2 && residents.slots.length == 4 * PAGE);
    begin(UNANNOUNCED, 1, LARGE);
    REQUIRE(read_step(UNANNOUNCED) == 1 && is_resident(2) && is_resident(3) && residents.slots.length == 6 * PAGE);
    begin(UNANNOUNCED, 1, ALSO_SMALL);
    uint64_t before = residents.tally.evicted_count;
    REQUIRE(read_step(UNANNOUNCED) == 1 && is_resident(2) && !is_resident(3) && residents.tally.wasted_length == PAGE);
    REQUIRE(residents.tally.evicted_count == before);
    begin(UNANNOUNCED, 1, ALSO_SMALL + 1);
    REQUIRE(read_step(UNANNOUNCED) == 1 && !is_resident(2) && residents.tally.wasted_length == 2 * PAGE); /* the first as well */
    REQUIRE(read_ahead(false, ALSO_SMALL, 3) == 0 && residents.ahead_count == 2 && residents.ahead_length == 2 * PAGE);
    residents_resize(&residents, residents.memory);
    REQUIRE(!residents.ahead_count && !residents.ahead_length); /* with other memory, other room */
    return 0;
}

/* What is being read for nobody any more is dropped when it comes, unless somebody wants it by then. */
static int cancel(void) {
    uint32_t expert, list[] = {0, 1};
    open_cache(POLICY_LRU, 4);
    residents_set_ahead(&residents, list, 2, false);
    REQUIRE(residents_next_ahead(&residents, &expert) && residents_next_ahead(&residents, &expert) && expert == 1);
    residents_set_ahead(&residents, NULL, 0, false);
    REQUIRE(residents.states[0].is_cancelled && residents.states[1].is_cancelled);
    residents_complete(&residents, 0, true);
    REQUIRE(!is_resident(0) && residents.tally.wasted_length == PAGE && slot_of(0) == NO_SLOT);
    residents_set_ahead(&residents, list + 1, 1, false);
    REQUIRE(!residents_next_ahead(&residents, &expert) && !residents.states[1].is_cancelled && residents.states[1].is_ahead);
    residents_set_ahead(&residents, NULL, 0, false);
    REQUIRE(use(1) == 0 && !residents.states[1].is_cancelled); /* it is being read already */
    residents_complete(&residents, 1, true);
    REQUIRE(is_resident(1) && residents.tally.wasted_length == PAGE);
    return 0;
}

/* What a step waits for, and the cache has evicted before it was read, may be read ahead: it stays for that step. */
static int read_ahead_for_a_step(void) {
    open_cache(POLICY_LRU, 4);
    begin(0, 1, 0);
    residents_resize(&residents, RESERVE * PAGE);
    REQUIRE(!is_admitted(0) && read_ahead(false, 0, 1) == 2);
    residents_set_ahead(&residents, NULL, 0, false);
    REQUIRE(is_resident(0) && !is_resident(1) && residents.leftover_count == 1 && residents.tally.wasted_length == 2 * PAGE);
    residents_release(&residents, 0);
    REQUIRE(residents_release_leftover(&residents) && !is_resident(0));
    return 0;
}

/* ---- memory ---- */

static int set_memory(void) {
    open_cache(POLICY_LRU, 10);
    for (uint32_t e = 0; e < 8; e++) use(e);
    residents_resize(&residents, 5 * PAGE);
    REQUIRE(residents.budget == 3 * PAGE && residents.memory == 5 * PAGE && residents.length == 3 * PAGE);
    REQUIRE(residents.slots.length == 5 * PAGE && punched_count == 3 && is_resident(3) && !is_resident(2));
    residents_resize(&residents, PAGE);
    REQUIRE(!residents.budget && residents.slots.length == PAGE && is_resident(7)); /* it is used */
    residents_resize(&residents, 0);
    REQUIRE(residents.slots.length == PAGE);
    residents_release(&residents, 0);
    REQUIRE(!residents.slots.length && !residents.length && punched_count == 8 && !residents.resident_length && !residents.common_resident_count);
    return 0;
}

/* Guesses have so many bytes beside the budget, or 1/32 of the memory, unless all experts fit. */
static int leave_room(void) {
    uint64_t whole = (16 + 16 + 24) * PAGE;
    open_cache(POLICY_LRU, 30);
    REQUIRE(residents.whole_length == whole);
    residents_leave_room(&residents, 100 * PAGE);
    REQUIRE(residents.budget == 29 * PAGE);
    residents_leave_room(&residents, PAGE / 2);
    REQUIRE(residents.budget == 30 * PAGE - PAGE / 2);
    residents_resize(&residents, whole + RESERVE * PAGE);
    REQUIRE(residents.budget == whole);
    residents_resize(&residents, whole + RESERVE * PAGE - 1);
    REQUIRE(residents.budget == whole - 1 - PAGE / 2);
    residents_resize(&residents, RESERVE * PAGE + 100);
    residents_leave_room(&residents, 100 * PAGE);
    REQUIRE(residents.budget == 0);
    return 0;
}

static int pin(void) {
    open_cache(POLICY_LRU, 3);
    REQUIRE(residents_pin(&residents, 7) && residents_pin(&residents, 7) && residents_pin(&residents, 6));
    REQUIRE(!residents_pin(&residents, LARGE) && residents.pinned_length == 2 * PAGE && residents.length == 2 * PAGE);
    REQUIRE(residents_admit(&residents, 7) && residents.states[7].bytes == READING && !residents_admit(&residents, 7));
    residents_complete(&residents, 7, true);
    REQUIRE(residents_admit(&residents, 0) && !residents_admit(&residents, 0) && !residents_admit(&residents, 1));
    residents_complete(&residents, 0, true);
    REQUIRE(!residents_is_evictable(&residents, 7) && residents_is_evictable(&residents, 0) && !residents_is_evictable(&residents, 1));
    REQUIRE(use(1) == 1 && !is_admitted(0) && is_admitted(7) && use(7) == 0 && use(6) == 1);
    REQUIRE(residents.tally.hit_count == 2 && residents.tally.miss_count == 1);
    return 0;
}

/* Pinned experts take room that contexts do not have. */
static int share_with_pinned(void) {
    open_cache(POLICY_LRU, 4);
    REQUIRE(residents_pin(&residents, 7) && residents_pin(&residents, 6));
    begin(0, 1, 0);
    REQUIRE(read_step(0) == 1);
    begin(1, 2, 1, 2);
    REQUIRE(read_step(1) == COUNT);
    residents_release(&residents, 0);
    REQUIRE(read_step(1) == 2);
    return 0;
}

/* What earlier runs used is evicted later than what they did not. */
static int expect(void) {
    open_cache(POLICY_LRFU, 2);
    order_expect(&residents.order, 1, UINT32_MAX);
    for (uint32_t e = 0; e < 2; e++) {
        REQUIRE(residents_admit(&residents, e));
        residents_complete(&residents, e, true);
    }
    REQUIRE(use(ALSO_SMALL) == 1 && is_admitted(1) && !is_admitted(0));
    return 0;
}

/* All experts are there, or all but those of drafts; and nothing evicts them. */
static int have_all(void) {
    open_cache(POLICY_LRU, 16 + 16 + 24);
    for (uint32_t e = 0; e < DRAFT; e++) {
        REQUIRE(!residents_holds_all(&residents));
        use(e);
    }
    REQUIRE(residents_holds_all(&residents));
    residents_resize(&residents, residents.memory - 1);
    REQUIRE(!residents_holds_all(&residents));
    return 0;
}

int main(void) {
    for (uint32_t e = 0; e < COUNT; e++) layers_of[e] = e / PER_LAYER;
    int (*const stories[])(void) = {take_slots, take_other_lengths, take_of_a_large_class, leave_a_few, share_memory, fail_when_evicted, use_more_than_there_is,
        keep_unannounced, count_lookups, read_before_use, guess, need_what_is_read_ahead, cancel, read_ahead_for_a_step, set_memory, leave_room, pin, share_with_pinned, expect, have_all};
    for (unsigned i = 0; i < sizeof stories / sizeof *stories; i++) {
        if (stories[i]()) return 1;
        residents_free(&residents);
    }
    return 0;
}
