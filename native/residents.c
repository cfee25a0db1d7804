#include "residents.h"

#include <stdlib.h>
#include <string.h>

enum { ROOM_SHARE = 32 }; /* of the memory, the least part that guesses leave */

/* ---- making and freeing ---- */

static void set_budget(struct residents *residents, uint64_t memory) {
    uint64_t budget = memory > residents->reserve ? memory - residents->reserve : 0, room = memory / ROOM_SHARE;
    if (room > residents->most_room) room = residents->most_room;
    if (budget < residents->whole_length) budget -= room < budget ? room : budget;
    residents->memory = memory;
    residents->budget = budget;
}

void residents_leave_room(struct residents *residents, uint64_t length) {
    residents->most_room = length;
    set_budget(residents, residents->memory);
}

static bool make_steps(struct residents *residents) {
    uint32_t most = most_in_layer(residents->experts);
    for (uint32_t i = 0; i < MAX_CONTEXTS; i++) {
        residents->steps[i].used = calloc(most, sizeof(uint32_t));
        residents->steps[i].missing = calloc(most, sizeof(uint32_t));
        if (!residents->steps[i].used || !residents->steps[i].missing) return false;
    }
    residents->ordered = calloc(most, sizeof(uint32_t));
    return residents->ordered;
}

bool residents_init(struct residents *residents, const struct experts *experts, enum policy policy, uint64_t memory,
                    uint64_t reserve, struct residents_owner owner) {
    *residents = (struct residents){.experts = experts, .owner = owner, .reserve = reserve};
    size_t count = experts->count;
    residents->states = calloc(count, sizeof *residents->states);
    residents->of_step = calloc(count, 1);
    residents->users = calloc(count, 1);
    residents->leftovers = calloc(count, sizeof(uint32_t));
    residents->ahead = calloc(count, sizeof(uint32_t));
    bool has_memory = residents->states && residents->of_step && residents->users && residents->leftovers && residents->ahead;
    if (!order_init(&residents->order, policy, experts) || !make_steps(residents) || !has_memory) return false;
    for (uint32_t i = 0; i < experts->count; i++) {
        residents->states[i].slot = NO_SLOT;
        residents->common_count += !layer_of(experts, i)->is_rare;
        residents->whole_length += slot_length(experts, i);
    }
    set_budget(residents, memory);
    return slots_init(&residents->slots, experts);
}

void residents_free(struct residents *residents) {
    order_free(&residents->order);
    for (uint32_t i = 0; i < MAX_CONTEXTS; i++) {
        free(residents->steps[i].used);
        free(residents->steps[i].missing);
    }
    slots_free(&residents->slots);
    free(residents->states);
    free(residents->of_step);
    free(residents->users);
    free(residents->ordered);
    free(residents->leftovers);
    free(residents->ahead);
}

/* ---- slots ---- */

static void remove_at(uint32_t *list, uint32_t *count, uint32_t position) {
    (*count)--;
    memmove(list + position, list + position + 1, (*count - position) * sizeof *list);
}

static void set_resident(struct residents *residents, uint32_t expert, bool is_resident) {
    struct resident *state = &residents->states[expert];
    uint64_t length = slot_length(residents->experts, expert);
    uint32_t common = layer_of(residents->experts, expert)->is_rare ? 0 : 1;
    state->bytes = is_resident ? RESIDENT : ABSENT;
    if (is_resident) {
        residents->resident_length += length;
        residents->common_resident_count += common;
    } else {
        residents->resident_length -= length;
        residents->common_resident_count -= common;
    }
}

static void release_slot(struct residents *residents, uint32_t expert) {
    struct resident *state = &residents->states[expert];
    slots_release(&residents->slots, class_of(residents->experts, expert), state->slot);
    state->slot = NO_SLOT;
}

/* Unmap an expert that nobody uses, and release its slot. */
static void drop_bytes(struct residents *residents, uint32_t expert) {
    residents->owner.unmap(residents->owner.data, expert);
    set_resident(residents, expert, false);
    release_slot(residents, expert);
}

static void keep_leftover(struct residents *residents, uint32_t expert) {
    struct resident *state = &residents->states[expert];
    if (state->bytes == ABSENT || state->is_leftover) return;
    state->is_leftover = true;
    residents->leftovers[residents->leftover_count++] = expert;
}

static void unkeep_leftover(struct residents *residents, uint32_t expert) {
    uint32_t position = 0;
    if (!residents->states[expert].is_leftover) return;
    residents->states[expert].is_leftover = false;
    while (residents->leftovers[position] != expert) position++;
    remove_at(residents->leftovers, &residents->leftover_count, position);
}

/* Release the slot of an expert that was evicted, of a class or of any other but it. */
static bool reclaim(struct residents *residents, uint32_t slot_class, bool is_alike) {
    for (uint32_t i = 0; i < residents->leftover_count; i++) {
        uint32_t expert = residents->leftovers[i];
        bool is_free = !residents->users[expert] && residents->states[expert].bytes == RESIDENT;
        if (!is_free || (class_of(residents->experts, expert) == slot_class) != is_alike) continue;
        residents->states[expert].is_leftover = false;
        remove_at(residents->leftovers, &residents->leftover_count, i);
        drop_bytes(residents, expert);
        return true;
    }
    return false;
}

bool residents_release_leftover(struct residents *residents) { return reclaim(residents, ANY_CLASS, false); }

static bool punch_spare(struct residents *residents, uint32_t kept_class) {
    uint64_t slot, length;
    if (!slots_empty_spare(&residents->slots, kept_class, &slot, &length)) return false;
    residents->owner.punch(residents->owner.data, slot, length);
    return true;
}

static bool evict_by_policy(struct residents *residents, const uint8_t *kept, uint32_t slot_class);

/* Slots of other classes would have to be punched out of huge pages, so one of the same class is evicted first. A few
 * of each class stay: else unannounced uses would wait for one in turn. */
static bool evict_alike(struct residents *residents, uint32_t slot_class) {
    const struct slot_class *slots = &residents->slots.classes[slot_class];
    return slots->taken_count * slots->length > 2 * residents->reserve &&
           evict_by_policy(residents, residents->users, slot_class);
}

static void end_ahead(struct residents *residents, uint32_t expert, bool is_used);

/* Give up an expert that was read ahead, for one that is needed now. */
static bool drop_ahead(struct residents *residents) {
    for (uint32_t i = residents->ahead_count; i-- > 0;) {
        struct resident *state = &residents->states[residents->ahead[i]];
        if (!state->is_ahead || state->bytes != RESIDENT) continue;
        end_ahead(residents, residents->ahead[i], false);
        return true;
    }
    return false;
}

/* The bytes that all slots may take. A step that is larger than the memory takes more; then nothing else has any. */
static uint64_t most_memory(const struct residents *residents) {
    uint64_t longest = 0;
    for (uint32_t i = 0; i < MAX_CONTEXTS; i++)
        if (residents->steps[i].length > longest) longest = residents->steps[i].length;
    uint64_t needed = longest + residents->reserve + residents->pinned_length;
    return needed > residents->memory ? needed : residents->memory;
}

enum room { ROOM_GUESS, ROOM_FREE, ROOM_EVICT };

/* Release a slot of a class, or the memory of a free one of another; from ROOM_FREE on that of any expert that was
 * evicted, with ROOM_EVICT also by evicting one more. */
static bool make_room(struct residents *residents, uint32_t slot_class, enum room room) {
    bool is_over = residents->slots.length > most_memory(residents); /* since that was made smaller */
    if (reclaim(residents, slot_class, true)) return true;
    if (room == ROOM_GUESS) return punch_spare(residents, slot_class);
    if (room == ROOM_EVICT && evict_alike(residents, slot_class) && reclaim(residents, slot_class, true)) return true;
    if (punch_spare(residents, is_over ? ANY_CLASS : slot_class)) return true;
    if (reclaim(residents, slot_class, false)) return true;
    return room == ROOM_EVICT && (drop_ahead(residents) || evict_by_policy(residents, residents->users, ANY_CLASS));
}

static bool take_slot(struct residents *residents, uint32_t expert, enum room room) {
    struct slots *slots = &residents->slots;
    uint32_t slot_class = class_of(residents->experts, expert);
    uint64_t length = slot_length(residents->experts, expert), slot = NO_SLOT;
    uint64_t limit = most_memory(residents);
    while (slot == NO_SLOT) {
        if (slots->length <= limit) slot = slots_take_spare(slots, slot_class);
        if (slot == NO_SLOT && slots->length + length <= limit) slot = slots_take_new(slots, slot_class);
        if (slot == NO_SLOT && !make_room(residents, slot_class, room)) return false;
    }
    struct resident *state = &residents->states[expert];
    state->slot = slot;
    state->bytes = READING;
    state->is_cancelled = false;
    return true;
}

/* ---- the cache ---- */

static void leave_cache(struct residents *residents, uint32_t expert) {
    residents->states[expert].is_admitted = false;
    residents->tally.evicted_count++;
    residents->length -= slot_length(residents->experts, expert);
    keep_leftover(residents, expert);
}

static bool evict_by_policy(struct residents *residents, const uint8_t *kept, uint32_t slot_class) {
    uint32_t expert = order_evict(&residents->order, kept, slot_class);
    if (expert != NO_EXPERT) leave_cache(residents, expert);
    return expert != NO_EXPERT;
}

static void shrink(struct residents *residents) {
    while (residents->length > residents->budget)
        if (!evict_by_policy(residents, residents->of_step, ANY_CLASS)) return;
}

static void enter_cache(struct residents *residents, uint32_t expert) {
    residents->states[expert].is_admitted = true;
    residents->length += slot_length(residents->experts, expert);
    unkeep_leftover(residents, expert);
}

/* Note that an expert which was read ahead is used, or that it is not. */
static void end_ahead(struct residents *residents, uint32_t expert, bool is_used) {
    struct resident *state = &residents->states[expert];
    state->is_ahead = false;
    if (is_used || state->bytes == ABSENT) return;
    if (state->bytes == READING) {
        state->is_cancelled = !residents->users[expert]; /* of a step that has not come to read it yet */
        return;
    }
    residents->tally.wasted_length += slot_length(residents->experts, expert);
    if (residents->users[expert])
        keep_leftover(residents, expert);
    else
        drop_bytes(residents, expert);
}

/* End reading ahead, but for experts that are `kept`; these were read for a use with `is_used`. */
static void end_all_ahead(struct residents *residents, const uint8_t *kept, bool is_used) {
    for (uint32_t i = 0; i < residents->ahead_count; i++) {
        uint32_t expert = residents->ahead[i];
        bool is_kept = kept && kept[expert];
        if (residents->states[expert].is_ahead && (is_used || !is_kept)) end_ahead(residents, expert, is_kept);
    }
    residents->ahead_count = residents->next_ahead = 0;
    residents->ahead_length = 0;
}

static void look_up(struct residents *residents, uint32_t layer, const uint32_t *used, uint32_t count, bool is_draft) {
    struct tally *tally = &residents->tally;
    uint64_t *hit_count = is_draft ? &tally->draft_hit_count : &tally->hit_count;
    uint64_t *miss_count = is_draft ? &tally->draft_miss_count : &tally->miss_count;
    uint32_t ordered_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        bool is_miss = !residents->states[used[i]].is_admitted;
        *miss_count += is_miss;
        *hit_count += !is_miss;
        if (is_miss) enter_cache(residents, used[i]);
        if (!residents->states[used[i]].is_pinned) residents->ordered[ordered_count++] = used[i];
    }
    order_record(&residents->order, layer, residents->ordered, ordered_count);
    shrink(residents);
}

/* ---- steps ---- */

/* Give back memory beyond the limit, as far as nothing uses it. */
static void trim(struct residents *residents) {
    while (residents->slots.length > residents->memory)
        if (!punch_spare(residents, ANY_CLASS) && !reclaim(residents, ANY_CLASS, false) && !drop_ahead(residents)) return;
}

static void release(struct residents *residents, uint32_t context) {
    struct step *step = &residents->steps[context];
    for (uint32_t i = 0; i < step->used_count; i++) residents->users[step->used[i]]--;
    step->used_count = step->missing_count = step->next_missing = 0;
    step->length = 0;
}

void residents_release(struct residents *residents, uint32_t context) {
    release(residents, context);
    trim(residents);
}

static void forget_oldest(struct residents *residents) {
    uint32_t oldest = residents->recent[0];
    remove_at(residents->recent, &residents->recent_count, 0);
    residents->users[oldest]--;
    residents->recent_length -= slot_length(residents->experts, oldest);
}

/* Keep the experts of the last unannounced uses, as far as the reserve has room beside this one. */
static void keep_recent(struct residents *residents, uint32_t expert) {
    uint64_t length = slot_length(residents->experts, expert);
    while (residents->recent_count && (residents->recent_count == MOST_RECENT || residents->recent_length + length > residents->reserve))
        forget_oldest(residents);
    if (residents->recent_length + length > residents->reserve) return;
    residents->recent[residents->recent_count++] = expert;
    residents->recent_length += length;
    residents->users[expert]++;
}

void residents_begin(struct residents *residents, uint32_t context, uint32_t layer, const uint32_t *used, uint32_t count) {
    struct step *step = &residents->steps[context];
    release(residents, context);
    if (context == UNANNOUNCED) keep_recent(residents, used[0]);
    for (uint32_t i = 0; i < count; i++) {
        residents->of_step[used[i]] = 1;
        residents->users[used[i]]++;
        step->length += slot_length(residents->experts, used[i]);
    }
    if (context != UNANNOUNCED)
        end_all_ahead(residents, residents->of_step, true);
    else
        residents->states[used[0]].is_ahead = false;
    look_up(residents, layer, used, count, context != UNANNOUNCED && residents->experts->layers[layer].is_rare);
    memcpy(step->used, used, count * sizeof *used);
    step->used_count = count;
    for (uint32_t i = 0; i < count; i++) {
        residents->of_step[used[i]] = 0;
        residents->states[used[i]].is_cancelled = false;
        if (residents->states[used[i]].bytes == ABSENT) step->missing[step->missing_count++] = used[i];
    }
}

/* Does a step fit beside those of the other contexts, with the reserve left to unannounced uses? */
static bool fits_beside(const struct residents *residents, uint32_t context) {
    uint64_t length = 0;
    if (context == UNANNOUNCED) return true;
    for (uint32_t i = 0; i < UNANNOUNCED; i++) length += residents->steps[i].length;
    return length + residents->reserve + residents->pinned_length <= most_memory(residents);
}

enum next_read residents_next(struct residents *residents, uint32_t context, uint32_t *expert) {
    struct step *step = &residents->steps[context];
    if (step->next_missing < step->missing_count && !fits_beside(residents, context)) return READ_WAIT;
    while (step->next_missing < step->missing_count) {
        uint32_t next = step->missing[step->next_missing];
        bool is_absent = residents->states[next].bytes == ABSENT; /* or another context has begun to read it */
        if (is_absent && !take_slot(residents, next, ROOM_EVICT)) return READ_WAIT;
        step->next_missing++;
        if (!is_absent) continue;
        *expert = next;
        return READ_NEXT;
    }
    return READ_NONE;
}

bool residents_is_ready(const struct residents *residents, uint32_t context, bool *has_failed) {
    const struct step *step = &residents->steps[context];
    bool is_complete = step->next_missing == step->missing_count, is_absent = false;
    for (uint32_t i = 0; i < step->used_count; i++) {
        uint8_t bytes = residents->states[step->used[i]].bytes;
        if (bytes == READING) is_complete = false;
        if (bytes == ABSENT) is_absent = true;
    }
    *has_failed = is_complete && is_absent;
    return is_complete && !is_absent;
}

void residents_complete(struct residents *residents, uint32_t expert, bool is_right) {
    struct resident *state = &residents->states[expert];
    if (is_right && !state->is_cancelled) {
        set_resident(residents, expert, true);
        if (!state->is_admitted && !state->is_ahead) keep_leftover(residents, expert); /* evicted meanwhile */
        return;
    }
    state->bytes = ABSENT;
    if (is_right) residents->tally.wasted_length += slot_length(residents->experts, expert);
    unkeep_leftover(residents, expert);
    release_slot(residents, expert);
    state->is_cancelled = state->is_ahead = false;
    if (state->is_admitted) {
        order_remove(&residents->order, expert);
        leave_cache(residents, expert);
    }
    trim(residents);
}

/* ---- before use ---- */

void residents_set_ahead(struct residents *residents, const uint32_t *experts, uint32_t count, bool is_guess) {
    residents->is_guess = is_guess;
    for (uint32_t i = 0; i < count; i++) residents->of_step[experts[i]] = 1;
    end_all_ahead(residents, residents->of_step, false);
    for (uint32_t i = 0; i < count; i++) {
        if (!residents->of_step[experts[i]]) continue; /* it is named twice */
        residents->of_step[experts[i]] = 0;
        residents->ahead[residents->ahead_count++] = experts[i];
        residents->ahead_length += slot_length(residents->experts, experts[i]);
    }
}

bool residents_next_ahead(struct residents *residents, uint32_t *expert) {
    while (residents->next_ahead < residents->ahead_count) {
        uint32_t next = residents->ahead[residents->next_ahead];
        struct resident *state = &residents->states[next];
        if (state->is_cancelled) { /* what an earlier list asked for, and is still being read */
            state->is_cancelled = false;
            state->is_ahead = true;
        }
        bool is_wanted = state->bytes == ABSENT && !state->is_admitted;
        if (is_wanted && !take_slot(residents, next, residents->is_guess ? ROOM_GUESS : ROOM_FREE)) return false;
        residents->next_ahead++;
        if (!is_wanted) continue;
        state->is_ahead = true;
        *expert = next;
        return true;
    }
    return false;
}

bool residents_admit(struct residents *residents, uint32_t expert) {
    struct resident *state = &residents->states[expert];
    bool has_room = state->is_pinned || residents->length + slot_length(residents->experts, expert) <= residents->budget;
    if (state->bytes != ABSENT || (state->is_admitted && !state->is_pinned) || !has_room) return false;
    if (!take_slot(residents, expert, ROOM_FREE)) return false;
    if (state->is_pinned) return true;
    enter_cache(residents, expert);
    order_admit(&residents->order, expert);
    return true;
}

bool residents_pin(struct residents *residents, uint32_t expert) {
    struct resident *state = &residents->states[expert];
    if (state->is_admitted) return true;
    if (residents->length + slot_length(residents->experts, expert) > residents->budget) return false;
    state->is_pinned = true;
    residents->pinned_length += slot_length(residents->experts, expert);
    enter_cache(residents, expert);
    return true;
}

/* ---- memory ---- */

void residents_resize(struct residents *residents, uint64_t memory) {
    end_all_ahead(residents, NULL, false);
    set_budget(residents, memory);
    shrink(residents);
    trim(residents);
}

void residents_evict(struct residents *residents, uint32_t expert) {
    order_remove(&residents->order, expert);
    leave_cache(residents, expert);
}

bool residents_is_evictable(const struct residents *residents, uint32_t expert) {
    return residents->states[expert].is_admitted && !residents->states[expert].is_pinned;
}

int64_t residents_free_length(const struct residents *residents) {
    return (int64_t)(residents->budget - residents->length - residents->ahead_length);
}

bool residents_holds_all(const struct residents *residents) {
    return residents->whole_length <= residents->budget && residents->common_resident_count == residents->common_count;
}
