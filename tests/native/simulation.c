/*
 * The cache's decisions under a simulated drive and scheduler: simulation SEED STEPS. One seed decides the model, the
 * order of everything, which reads fail, and all that contexts ask for. After each event all rules are checked; one that
 * does not hold prints the seed and the event, and ends with 1.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../native/prompts.h"
#include "../../native/residents.h"

enum { MOST_LAYERS = 6, MOST_EXPERTS = 24, MOST = MOST_LAYERS * MOST_EXPERTS, CONTEXTS = 5 };

enum phase { IDLE, TAKING, READING_STEP, COMPUTING };

static uint64_t seed, random_state, event_count;
static struct experts experts;
static struct layer layers[MOST_LAYERS];
static struct part parts[MOST * MAX_PARTS];
static uint32_t layers_of[MOST];
static struct residents residents;
static struct prompts prompts;
static enum phase phases[MAX_CONTEXTS];
static uint32_t turn = NO_EXPERT;             /* the context that takes slots */
static uint32_t reading[MOST], reading_count; /* experts whose reads are in flight */
static uint32_t content[1 << 16];             /* by page of the pool: 1 + the expert whose bytes are there, or 0 */
static bool is_mapped[MOST], may_fail[MAX_CONTEXTS]; /* as a read of an expert of its step has failed */
static uint64_t looked_up;
static uint32_t most_used; /* experts of a step */
static uint32_t token_counts[MAX_CONTEXTS], counts[MAX_CONTEXTS][MOST_EXPERTS], step_layers[MAX_CONTEXTS];

static uint64_t draw(uint64_t below) {
    random_state += 0x9e3779b97f4a7c15;
    uint64_t x = random_state;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return (x ^ x >> 31) % below;
}

static void require(bool holds, const char *rule) {
    if (holds) return;
    printf("seed %llu, event %llu: %s\n", (unsigned long long)seed, (unsigned long long)event_count, rule);
    exit(1);
}

/* ---- the memory ---- */

static void set_content(uint32_t expert, uint32_t value) {
    uint64_t page = residents.states[expert].slot / PAGE, count = slot_length(&experts, expert) / PAGE;
    for (uint64_t i = 0; i < count; i++) content[page + i] = value;
}

static bool has_content(uint32_t expert) {
    uint64_t page = residents.states[expert].slot / PAGE, count = slot_length(&experts, expert) / PAGE;
    for (uint64_t i = 0; i < count; i++)
        if (content[page + i] != 1 + expert) return false;
    return true;
}

static void unmap(void *data, uint32_t expert) {
    (void)data;
    require(!residents.users[expert], "an expert that is used is not unmapped");
    is_mapped[expert] = false;
}

static void punch(void *data, uint64_t offset, uint64_t length) {
    (void)data;
    for (uint32_t e = 0; e < experts.count; e++) {
        uint64_t slot = residents.states[e].slot;
        require(slot == NO_SLOT || slot >= offset + length || slot + slot_length(&experts, e) <= offset,
                "memory that is given back is nobody's slot");
    }
    memset(content + offset / PAGE, 0, length / PAGE * sizeof *content);
}

/* ---- the rules ---- */

static void check_states(void) {
    uint64_t admitted = 0, admitted_count = 0, taken = 0, resident = 0;
    for (uint32_t e = 0; e < experts.count; e++) {
        const struct resident *state = &residents.states[e];
        uint64_t length = slot_length(&experts, e);
        require((state->slot != NO_SLOT) == (state->bytes != ABSENT), "what has bytes has a slot, and nothing else has");
        if (state->bytes != ABSENT) taken += length;
        if (state->bytes == RESIDENT) resident += length;
        if (state->bytes == RESIDENT) require(has_content(e), "a resident expert's slot has its bytes");
        if (is_mapped[e]) require(state->bytes == RESIDENT, "only resident experts are mapped");
        if (state->is_admitted) admitted += length;
        admitted_count += state->is_admitted;
        require(!(state->is_admitted && state->is_leftover), "an admitted expert is no leftover");
        require(state->bytes != RESIDENT || state->is_admitted || state->is_leftover || state->is_ahead, "a resident expert has a reason");
        for (uint32_t other = 0; other < e; other++) {
            uint64_t slot = residents.states[other].slot;
            bool is_apart = slot == NO_SLOT || state->slot == NO_SLOT || slot + slot_length(&experts, other) <= state->slot ||
                            state->slot + length <= slot;
            require(is_apart, "slots do not overlap");
        }
    }
    require(residents.length == admitted, "the cache has the length of what is admitted");
    require(resident == residents.resident_length, "resident bytes are counted");
    require(taken <= residents.slots.length, "slots have memory");
    const struct tally *tally = &residents.tally;
    require(tally->hit_count + tally->miss_count + tally->draft_hit_count + tally->draft_miss_count == looked_up,
            "each lookup is a hit or a miss");
    require(tally->miss_count + tally->draft_miss_count <= admitted_count + tally->evicted_count,
            "what was missed is admitted, or was evicted");
}

static void check_order(void) {
    const struct order *order = &residents.order;
    for (uint32_t e = 0; e < experts.count; e++) {
        const struct order_entry *entry = &order->entries[e];
        const struct layer_order *layer = &order->layers[experts.layer_of[e]];
        const struct resident *state = &residents.states[e];
        require(entry->is_ordered == (state->is_admitted && !state->is_pinned), "the policy orders what may be evicted");
        if (!entry->is_ordered) continue;
        bool is_lru = order->policy == POLICY_LRU, is_recent = !is_lru && entry->last_use >= layer->last_step;
        uint64_t value = is_lru ? entry->last_use : entry->count;
        require(value >= (is_recent ? layer->least_recent : layer->least), "nothing is below the bounds of its layer");
    }
}

static void check_users(void) {
    uint8_t users[MOST] = {0};
    for (uint32_t c = 0; c < MAX_CONTEXTS; c++)
        for (uint32_t i = 0; i < residents.steps[c].used_count; i++) users[residents.steps[c].used[i]]++;
    for (uint32_t i = 0; i < residents.recent_count; i++) users[residents.recent[i]]++;
    require(!memcmp(users, residents.users, experts.count), "users are those of the steps");
    for (uint32_t c = 0; c < MAX_CONTEXTS; c++)
        for (uint32_t i = 0; phases[c] == COMPUTING && i < residents.steps[c].used_count; i++) {
            uint32_t expert = residents.steps[c].used[i];
            require(residents.states[expert].bytes == RESIDENT && is_mapped[expert] && has_content(expert),
                    "a context computes with its own experts");
        }
}

/* ---- what happens ---- */

static void begin_reading(uint32_t expert) {
    require(residents.states[expert].bytes == READING, "what is read has a slot");
    uint64_t longest = 0;
    for (uint32_t i = 0; i < MAX_CONTEXTS; i++)
        if (residents.steps[i].length > longest) longest = residents.steps[i].length;
    uint64_t needed = longest + residents.reserve + residents.pinned_length;
    require(residents.slots.length <= (needed > residents.memory ? needed : residents.memory), "reading takes no more memory than there is");
    set_content(expert, 0);
    reading[reading_count++] = expert;
}

static void end_reading(void) {
    if (!reading_count) return;
    uint32_t number = (uint32_t)draw(reading_count), expert = reading[number];
    reading[number] = reading[--reading_count];
    bool is_right = draw(50) != 0;
    if (is_right) set_content(expert, 1 + expert);
    for (uint32_t c = 0; c < MAX_CONTEXTS && !is_right; c++)
        for (uint32_t i = 0; i < residents.steps[c].used_count; i++)
            if (residents.steps[c].used[i] == expert) may_fail[c] = true;
    residents_complete(&residents, expert, is_right);
    if (residents.states[expert].bytes == RESIDENT && residents.users[expert]) is_mapped[expert] = true;
}

static void go_on(uint32_t context) {
    uint32_t expert;
    if (phases[context] == TAKING) {
        enum next_read next;
        while ((next = residents_next(&residents, context, &expert)) == READ_NEXT) {
            begin_reading(expert);
            if (draw(4) == 0) return; /* the lock is left between any two */
        }
        if (next == READ_WAIT) return;
        if (turn == context) turn = NO_EXPERT;
        phases[context] = READING_STEP;
    }
    bool has_failed;
    for (uint32_t i = 0; i < residents.steps[context].used_count; i++)
        if (residents.states[residents.steps[context].used[i]].bytes == RESIDENT) is_mapped[residents.steps[context].used[i]] = true;
    bool is_ready = residents_is_ready(&residents, context, &has_failed);
    if (has_failed) {
        require(may_fail[context], "a step fails only where a read has failed");
        residents_release(&residents, context);
        phases[context] = IDLE;
    } else if (is_ready) {
        phases[context] = COMPUTING;
        if (token_counts[context] >= MANY_TOKENS)
            prompts_look_ahead(&prompts, &residents, step_layers[context], counts[context], token_counts[context]);
    }
}

static void begin_step(uint32_t context) {
    uint32_t used[MOST_EXPERTS], used_count = 0, layer = (uint32_t)draw(experts.layer_count);
    if (context != UNANNOUNCED) {
        residents_release(&residents, context);
        phases[context] = IDLE;
        if (turn != NO_EXPERT) return;
    }
    uint32_t most = context == UNANNOUNCED ? 1 : most_used;
    memset(counts[context], 0, sizeof counts[context]);
    token_counts[context] = context != UNANNOUNCED && draw(4) == 0 ? MANY_TOKENS + (uint32_t)draw(100) : 1;
    for (uint32_t i = 0, count = 1 + (uint32_t)draw(most); i < count; i++) {
        uint32_t number = (uint32_t)draw(layers[layer].count);
        if (counts[context][number]) continue;
        counts[context][number] = 1 + (uint32_t)draw(token_counts[context]);
        used[used_count++] = layers[layer].first + number;
    }
    if (!used_count) return;
    looked_up += used_count;
    step_layers[context] = layer;
    if (context != UNANNOUNCED) prompts_begin(&prompts, &residents, layer, counts[context], token_counts[context]);
    residents_begin(&residents, context, layer, used, used_count);
    may_fail[context] = false;
    phases[context] = TAKING;
    if (context != UNANNOUNCED) turn = context;
    go_on(context);
}

static void read_ahead(void) {
    uint32_t chosen[4], expert;
    if (draw(4) == 0) {
        for (uint32_t i = 0; i < 4; i++) chosen[i] = (uint32_t)draw(experts.count);
        residents_set_ahead(&residents, chosen, 4, draw(2));
    }
    while (residents_next_ahead(&residents, &expert)) begin_reading(expert);
}

static void change_memory(uint64_t least, uint64_t most) { residents_resize(&residents, (least + draw(most - least + 1)) / PAGE * PAGE); }

static void happen(uint64_t least, uint64_t most) {
    uint32_t context = (uint32_t)draw(CONTEXTS), expert;
    switch (draw(12)) {
    case 0:
    case 1:
    case 2:
    case 3: end_reading(); break;
    case 4:
    case 5:
        if (phases[context] == IDLE || phases[context] == COMPUTING) begin_step(context);
        break;
    case 6:
    case 7:
    case 8:
        if (phases[context] == TAKING || phases[context] == READING_STEP) go_on(context);
        break;
    case 9: read_ahead(); break;
    case 10:
        if (draw(3) == 0 && phases[UNANNOUNCED] != TAKING && phases[UNANNOUNCED] != READING_STEP) begin_step(UNANNOUNCED);
        go_on(UNANNOUNCED);
        break;
    default:
        if (draw(20) == 0) change_memory(least, most);
        if (draw(10) == 0 && residents_admit(&residents, expert = (uint32_t)draw(experts.count))) begin_reading(expert);
    }
}

/* When nothing new is asked for, everything comes to an end. */
static void settle(void) {
    for (uint32_t round = 0; round < 10000; round++) {
        bool is_done = !reading_count;
        end_reading();
        for (uint32_t c = 0; c < MAX_CONTEXTS; c++) {
            if (phases[c] == TAKING || phases[c] == READING_STEP) {
                is_done = false;
                go_on(c);
            } else if (phases[c] == COMPUTING) {
                residents_release(&residents, c);
                phases[c] = IDLE;
            }
        }
        if (is_done) break;
    }
    for (uint32_t c = 0; c < MAX_CONTEXTS; c++) require(phases[c] == IDLE || phases[c] == COMPUTING, "no context waits for ever");
    /* a step that is larger than the cache stays there until the next */
    bool is_small = residents.slots.length <= residents.memory || residents.slots.length <= residents.length;
    require(!reading_count && is_small, "memory comes down to its limit");
}

static void make_model(void) {
    experts = (struct experts){.layers = layers, .parts = parts, .layer_of = layers_of};
    experts.layer_count = 1 + (uint32_t)draw(MOST_LAYERS);
    uint32_t per_layer = 2 + (uint32_t)draw(MOST_EXPERTS - 2);
    experts.class_count = 1 + (uint32_t)draw(3);
    for (uint32_t i = 0; i < experts.class_count; i++) experts.class_length[i] = PAGE * (i * 3 + 1 + draw(3));
    for (uint32_t i = 0; i < experts.layer_count; i++) {
        layers[i] = (struct layer){i, experts.count, per_layer, 1, (uint32_t)draw(experts.class_count), draw(8) == 0 && i};
        for (uint32_t e = 0; e < per_layer; e++) layers_of[experts.count++] = i;
    }
}

int main(int argument_count, char **arguments) {
    seed = random_state = argument_count > 1 ? strtoull(arguments[1], NULL, 10) : 0;
    uint64_t steps = argument_count > 2 ? strtoull(arguments[2], NULL, 10) : 10000;
    make_model();
    uint64_t longest = 0, whole = 0;
    for (uint32_t e = 0; e < experts.count; e++) {
        uint64_t length = slot_length(&experts, e);
        if (length > longest) longest = length;
        whole += length;
    }
    uint64_t reserve = longest * (1 + draw(3)), least, most = whole + reserve;
    most_used = 1 + (uint32_t)draw(layers[0].count);
    least = reserve + longest * (1 + draw(most_used)); /* or less than a large step takes */
    if (most < least) most = least;
    struct residents_owner owner = {NULL, unmap, punch};
    require(residents_init(&residents, &experts, (enum policy)draw(2), least + draw(most - least + 1), reserve, owner) &&
                prompts_init(&prompts, &experts),
            "there is memory");
    residents_leave_room(&residents, longest * draw(8));
    for (uint32_t e = 0; e < experts.count; e += 3) order_expect(&residents.order, e, (uint32_t)draw(1ull << 32));
    for (uint64_t i = draw(4); i > 0; i--) {
        uint32_t expert = (uint32_t)draw(experts.count);
        if (!residents.states[expert].is_pinned && residents_pin(&residents, expert)) least += longest;
    }
    if (most < least) most = least;
    change_memory(least, most);
    for (event_count = 0; event_count < steps; event_count++) {
        happen(least, most);
        check_states();
        check_order();
        check_users();
        if (draw(500) == 0) settle();
    }
    settle();
    residents_free(&residents);
    prompts_free(&prompts);
    return 0;
}
