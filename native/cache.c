#define _GNU_SOURCE
#include "cache.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "reads.h"
#include "threads.h"

enum {
    CAPACITY = 4096,      /* reads in flight */
    WAIT = 250,           /* milliseconds after which a waiting thread looks again */
    AHEAD_LIMIT = 64 << 20, /* bytes ahead in flight: demanded reads wait for these at most */
    LEAST_FOR_HUGE_PAGES = 64 << 20,
    GUESSED_STEPS = 3, /* for whose experts guesses have room */
};

static void set(_Atomic uint64_t *counter, uint64_t value) {
    atomic_store_explicit(counter, value, memory_order_relaxed);
}

/* ---- opening and closing ---- */

static void unmap(void *data, uint32_t expert) {
    struct cache *cache = data;
    if (cache->owner.unmap) cache->owner.unmap(cache->owner.data, expert);
}

static void punch(void *data, uint64_t offset, uint64_t length) {
    struct cache *cache = data;
    pool_punch(&cache->pool, offset, length);
}

static bool allocate(struct cache *cache) {
    const struct experts *experts = cache->experts;
    uint64_t reserve = cache->options.reserve;
    struct residents_owner owner = {cache, unmap, punch};
    cache->in_flight = calloc(experts->count, sizeof *cache->in_flight);
    cache->pending = calloc(CAPACITY, sizeof *cache->pending);
    cache->counts_length = most_in_layer(experts);
    cache->counts = calloc(2 * (size_t)MAX_CONTEXTS * cache->counts_length, sizeof *cache->counts);
    bool has_residents = residents_init(&cache->residents, experts, cache->options.policy, cache->options.memory,
                                        reserve, owner);
    bool has_prompts = prompts_init(&cache->prompts, experts), has_guesses = guesses_init(&cache->guesses);
    for (uint32_t i = 0; cache->pending && i < CAPACITY; i++) cache->pending[i].next_free = i + 1;
    return has_residents && has_prompts && has_guesses && cache->in_flight && cache->pending && cache->counts;
}

static void release_memory(struct cache *cache) {
    residents_free(&cache->residents);
    prompts_free(&cache->prompts);
    guesses_free(&cache->guesses);
    free(cache->in_flight);
    free(cache->pending);
    free(cache->counts);
}

static int fail_to_open(struct cache *cache, struct cache_error *error, int system_error, const char *problem) {
    release_memory(cache);
    return cache_fail(error, CACHE_SYSTEM, system_error, "%s: %s", problem, strerror(system_error));
}

static void publish_memory(struct cache *cache) {
    set(&cache->statistics->memory, cache->options.memory);
    set(&cache->statistics->budget, cache->residents.budget);
}

int cache_open(struct cache *cache, const struct experts *experts, struct cache_file *files,
               const struct cache_options *options, struct cache_owner owner, struct cache_statistics *statistics,
               struct cache_error *error) {
    *cache = (struct cache){.experts = experts, .options = *options, .files = files, .owner = owner, .turn = NO_CONTEXT};
    cache->statistics = statistics ? statistics : &cache->own_statistics;
    if (!allocate(cache)) return fail_to_open(cache, error, ENOMEM, "no memory for the tables of experts");
    if (options->prefetches) residents_leave_room(&cache->residents, GUESSED_STEPS * options->reserve);
    if (!pool_open(&cache->pool, cache->residents.slots.file_length, experts->is_aligned))
        return fail_to_open(cache, error, errno, "no memory for experts");
    cache->drive = drive_open(options->is_cached ? DRIVE_THREADS : options->reads, CAPACITY);
    if (!cache->drive) {
        int system_error = errno;
        pool_close(&cache->pool);
        return fail_to_open(cache, error, system_error, "the system begins no reads");
    }
    pthread_mutex_init(&cache->lock, NULL);
    init_condition(&cache->changed);
    init_condition(&cache->has_work);
    publish_memory(cache);
    return CACHE_OK;
}

void cache_close(struct cache *cache) {
    pthread_mutex_lock(&cache->lock);
    cache->is_closing = true;
    pthread_cond_signal(&cache->has_work);
    pthread_mutex_unlock(&cache->lock);
    if (cache->has_thread) pthread_join(cache->thread, NULL);
    drive_close(cache->drive);
    pool_close(&cache->pool);
    release_memory(cache);
    pthread_mutex_destroy(&cache->lock);
    pthread_cond_destroy(&cache->changed);
    pthread_cond_destroy(&cache->has_work);
}

char *cache_address(const struct cache *cache, uint32_t expert) {
    return cache->pool.start + cache->residents.states[expert].slot;
}

/* Is there more to read before it is used? After the first step pinned experts alone, which come first. */
static bool is_warming(const struct cache *cache) {
    if (cache->warm_up_next >= cache->warm_up_count) return false;
    return !cache->has_stepped || cache->residents.states[cache->warm_up[cache->warm_up_next].expert].is_pinned;
}

static void publish(struct cache *cache) {
    const struct residents *residents = &cache->residents;
    struct cache_statistics *statistics = cache->statistics;
    set(&statistics->hit_count, residents->tally.hit_count);
    set(&statistics->miss_count, residents->tally.miss_count);
    set(&statistics->draft_hit_count, residents->tally.draft_hit_count);
    set(&statistics->draft_miss_count, residents->tally.draft_miss_count);
    set(&statistics->wasted_length, residents->tally.wasted_length);
    set(&statistics->evicted_count, residents->tally.evicted_count);
    set(&statistics->guessed_count, cache->guesses.guessed_count);
    set(&statistics->right_count, cache->guesses.right_count);
    set(&statistics->ahead_count, cache->guesses.ahead_count);
    set(&statistics->ahead_right_count, cache->guesses.ahead_right_count);
    set(&statistics->control_count, cache->guesses.control_count);
    set(&statistics->control_right_count, cache->guesses.control_right_count);
    set(&statistics->guesses_are_off, !guesses_is_understood(&cache->guesses));
    set(&statistics->resident_length, residents->resident_length);
    set(&statistics->slots_length, residents->slots.length);
    set(&statistics->holds_all, residents_holds_all(residents));
    set(&statistics->is_warming, is_warming(cache));
}

/* Take a read that has ended; the lock is held, and left meanwhile. Nobody does while a thread waits for the drive: that
 * would wait on for what was taken. One at a time, so that others take the next meanwhile. */
static bool collect(struct cache *cache) {
    struct ended ended;
    struct pending pending;
    if (cache->is_waiting || !drive_collect(cache->drive, &ended)) return false;
    cache->collecting_count++;
    uint32_t expert = reads_end(cache, &ended, &pending);
    if (expert != NO_EXPERT) reads_complete(cache, expert);
    cache->collecting_count--;
    publish(cache);
    pthread_cond_broadcast(&cache->changed);
    return true;
}

/* Wait for any change: as the one who waits for the drive, or for that one, or for who has taken a read. The lock is
 * held, and left meanwhile. */
static void wait_for_change(struct cache *cache) {
    if (cache->is_waiting || cache->collecting_count || !cache->pending_count) {
        pthread_cond_wait(&cache->changed, &cache->lock);
        return;
    }
    cache->is_waiting = true;
    pthread_mutex_unlock(&cache->lock);
    drive_wait(cache->drive, WAIT);
    pthread_mutex_lock(&cache->lock);
    cache->is_waiting = false;
    pthread_cond_broadcast(&cache->changed);
}

static bool has_tags(const struct cache *cache) {
    return cache->pending_count + (cache->beginning_count + 1) * MAX_PARTS <= CAPACITY;
}

/* Where memory is small, huge pages around slots would be too much of it. */
static bool has_huge_pages(const struct cache *cache) { return cache->options.memory >= LEAST_FOR_HUGE_PAGES; }

/* The bytes of all slots of a class that were ever taken. */
static uint64_t ever_taken(const struct slot_class *one) { return (one->next - one->first) / one->stride * one->length; }

/* Give back pages that were made ready for slots of other classes than those that now take the memory; the lock is
 * held. */
static void give_back_prepared(struct cache *cache) {
    const struct slots *slots = &cache->residents.slots;
    uint64_t total = slots->length, *lengths = cache->prepared_lengths, unused[MAX_CLASSES];
    for (uint32_t i = 0; i < slots->class_count; i++) {
        uint64_t taken = ever_taken(&slots->classes[i]);
        unused[i] = lengths[i] > taken ? lengths[i] - taken : 0;
        total += unused[i];
    }
    for (uint32_t i = 0; i < slots->class_count; i++) {
        const struct slot_class *one = &slots->classes[i];
        for (; total > cache->options.memory && unused[i]; total -= one->length, unused[i] -= one->length) {
            lengths[i] -= one->length;
            pool_give_back(&cache->pool, one->first + lengths[i] / one->length * one->stride, one->length);
        }
    }
}

/* Make the pages of a slot ready and queue the reads of its expert; the lock is held, and left meanwhile. */
static void begin_read(struct cache *cache, uint32_t expert, bool is_ahead) {
    uint64_t slot = cache->residents.states[expert].slot, length = slot_length(cache->experts, expert);
    bool is_prepared = has_huge_pages(cache);
    give_back_prepared(cache);
    cache->beginning_count++;
    pthread_mutex_unlock(&cache->lock);
    bool is_new = is_prepared && pool_prepare(&cache->pool, slot, length);
    if (cache->options.has_edges) reads_queue_edges(cache, expert);
    pthread_mutex_lock(&cache->lock);
    cache->beginning_count--;
    reads_queue(cache, expert);
    if (is_new) drive_submit(cache->drive); /* it reads while the next pages are made */
    cache->in_flight[expert].is_ahead = is_ahead;
    if (is_ahead) cache->ahead_in_flight += length;
}

/* Begin to read experts ahead, as far as the limit allows. */
static void begin_ahead(struct cache *cache) {
    uint32_t expert;
    while (cache->ahead_in_flight < AHEAD_LIMIT && has_tags(cache) && residents_next_ahead(&cache->residents, &expert))
        begin_read(cache, expert, true);
    drive_submit(cache->drive);
}

/* ---- steps ---- */

/* Each expert once, in the order of its last routing, and how many tokens were routed to each. */
static uint32_t unique(const struct layer *layer, const int32_t *routed, size_t count, uint32_t *counts, uint32_t *used) {
    uint32_t used_count = 0;
    memset(counts, 0, layer->count * sizeof *counts);
    for (size_t i = count; i-- > 0;)
        if (!counts[routed[i]]++) used[used_count++] = layer->first + (uint32_t)routed[i];
    for (uint32_t i = 0; i < used_count / 2; i++) {
        uint32_t last = used[used_count - 1 - i];
        used[used_count - 1 - i] = used[i];
        used[i] = last;
    }
    return used_count;
}

static void map_used(struct cache *cache, uint32_t context) {
    const struct step *step = &cache->residents.steps[context];
    for (uint32_t i = 0; cache->owner.map && i < step->used_count; i++)
        if (cache->residents.states[step->used[i]].bytes == RESIDENT) cache->owner.map(cache->owner.data, step->used[i]);
}

/* Read what a step misses, and wait until all of it is there; the lock is held. */
static int finish_step(struct cache *cache, uint32_t context, struct cache_error *error) {
    uint32_t expert;
    bool has_failed = false, is_first = true;
    uint64_t started = 0;
    uint32_t missing_count = cache->residents.steps[context].missing_count;
    for (;;) {
        while (has_tags(cache) && residents_next(&cache->residents, context, &expert) == READ_NEXT)
            begin_read(cache, expert, false);
        drive_submit(cache->drive);
        const struct step *step = &cache->residents.steps[context];
        if (cache->turn == context && step->next_missing == step->missing_count) {
            cache->turn = NO_CONTEXT;
            pthread_cond_broadcast(&cache->changed);
        }
        if (is_first) map_used(cache, context); /* while the drive reads */
        is_first = false;
        if (residents_is_ready(&cache->residents, context, &has_failed) || has_failed) break;
        if (!started) started = now();
        bool has_worked = collect(cache) || (context != UNANNOUNCED && residents_release_leftover(&cache->residents));
        if (!has_worked) wait_for_change(cache);
    }
    if (started) {
        uint64_t waited = now() - started;
        add(&cache->statistics->wait_nanoseconds, waited);
        guesses_record_wait(&cache->guesses, (double)waited, missing_count);
    }
    publish(cache);
    if (!has_failed) return CACHE_OK;
    residents_release(&cache->residents, context);
    pthread_cond_broadcast(&cache->changed); /* what it released */
    *error = cache->error;
    return error->code ? error->code : cache_fail(error, CACHE_READ_FAILED, EIO, "an expert could not be read");
}

/* Note that a context's call has come to a layer; the lock is held. Layers that few programs use are calls of their own. */
static void note_step(struct cache *cache, uint32_t context, uint32_t layer, uint32_t rows) {
    struct call *call = &cache->calls[context];
    if (cache->experts->layers[layer].is_rare) return;
    if (!call->started) call->started = now();
    if (rows > call->rows) call->rows = rows; /* the last layer may have fewer */
    call->length += cache->residents.steps[context].length;
}

static void end_call(struct cache *cache, uint32_t context) {
    struct call call = cache->calls[context];
    struct cache_statistics *statistics = cache->statistics;
    cache->calls[context] = (struct call){0};
    if (!call.rows || call.rows >= MANY_TOKENS) return;
    add(&statistics->decoding_count, 1);
    add(&statistics->decoded_count, call.rows);
    add(&statistics->decoding_nanoseconds, now() - call.started);
    add(&statistics->decoded_length, call.length);
}

static bool has_next(const struct cache *cache, uint32_t layer) {
    return layer + 1 < cache->experts->layer_count && !cache->experts->layers[layer + 1].is_rare;
}

int cache_use(struct cache *cache, uint32_t context, uint32_t layer, const int32_t *routed, uint32_t rows,
              uint32_t columns, struct cache_error *error) {
    uint32_t *counts = cache->counts + 2 * (size_t)context * cache->counts_length, *used = counts + cache->counts_length;
    uint32_t used_count = unique(&cache->experts->layers[layer], routed, (size_t)rows * columns, counts, used);
    pthread_mutex_lock(&cache->lock);
    cache->has_stepped = true;
    residents_release(&cache->residents, context);
    if (!used_count) {
        pthread_mutex_unlock(&cache->lock);
        return CACHE_OK;
    }
    pthread_cond_broadcast(&cache->changed); /* what it released */
    while (cache->turn != NO_CONTEXT)
        if (!collect(cache)) wait_for_change(cache);
    cache->turn = context;
    while (cache->pending_count && collect(cache)) continue; /* what was read ahead */
    guesses_settle(&cache->guesses, cache->experts, context, layer, counts);
    prompts_begin(&cache->prompts, &cache->residents, layer, counts, rows);
    residents_begin(&cache->residents, context, layer, used, used_count);
    note_step(cache, context, layer, rows);
    int code = finish_step(cache, context, error);
    if (!code && rows >= MANY_TOKENS && !atomic_load(&cache->is_idle)) {
        prompts_look_ahead(&cache->prompts, &cache->residents, layer, counts, rows);
        begin_ahead(cache);
        pthread_cond_signal(&cache->has_work); /* the thread goes on with them */
    }
    if (has_next(cache, layer)) add(&cache->statistics->routed_count, rows);
    pthread_mutex_unlock(&cache->lock);
    return code;
}

bool cache_wants_guess(struct cache *cache, uint32_t layer, uint32_t rows) {
    if (!cache->options.prefetches || rows > MOST_GUESSED_TOKENS || !has_next(cache, layer) || atomic_load(&cache->statistics->holds_all)) return false;
    pthread_mutex_lock(&cache->lock);
    bool is_wanted = guesses_is_wanted(&cache->guesses);
    pthread_mutex_unlock(&cache->lock);
    return is_wanted;
}

void cache_guess(struct cache *cache, uint32_t context, uint32_t layer, const uint32_t *experts, uint32_t count,
                 uint32_t rows, uint64_t nanoseconds) {
    uint32_t chosen[MAX_GUESSED];
    pthread_mutex_lock(&cache->lock);
    uint32_t chosen_count = guesses_choose(&cache->guesses, &cache->residents, context, layer + 1, experts, count, rows,
                                           (double)nanoseconds, chosen);
    bool is_demanded = cache->turn != NO_CONTEXT; /* another context waits for its own */
    if (chosen_count && !is_demanded) {
        residents_set_ahead(&cache->residents, chosen, chosen_count, true);
        begin_ahead(cache);
    }
    pthread_mutex_unlock(&cache->lock);
}

void cache_record_control(struct cache *cache, bool is_right) {
    pthread_mutex_lock(&cache->lock);
    guesses_record_control(&cache->guesses, is_right);
    pthread_mutex_unlock(&cache->lock);
}

void cache_release(struct cache *cache, uint32_t context) {
    pthread_mutex_lock(&cache->lock);
    end_call(cache, context);
    residents_release(&cache->residents, context);
    pthread_cond_broadcast(&cache->changed);
    pthread_mutex_unlock(&cache->lock);
}

int cache_bring(struct cache *cache, uint32_t expert, struct cache_error *error) {
    pthread_mutex_lock(&cache->lock);
    add(&cache->statistics->fault_count, 1);
    residents_begin(&cache->residents, UNANNOUNCED, cache->experts->layer_of[expert], &expert, 1);
    int code = finish_step(cache, UNANNOUNCED, error);
    pthread_mutex_unlock(&cache->lock);
    return code;
}

/* ---- beside steps ---- */

void cache_read_ahead(struct cache *cache, const uint32_t *experts, uint32_t count) {
    pthread_mutex_lock(&cache->lock);
    residents_set_ahead(&cache->residents, experts, count, false);
    begin_ahead(cache);
    pthread_cond_signal(&cache->has_work);
    pthread_mutex_unlock(&cache->lock);
}

void cache_resize(struct cache *cache, uint64_t memory) {
    pthread_mutex_lock(&cache->lock);
    cache->options.memory = memory;
    residents_resize(&cache->residents, memory);
    give_back_prepared(cache);
    publish_memory(cache);
    publish(cache);
    pthread_cond_broadcast(&cache->changed);
    pthread_mutex_unlock(&cache->lock);
}

bool cache_pin(struct cache *cache, uint32_t expert) { return residents_pin(&cache->residents, expert); }

void cache_warm_up(struct cache *cache, const struct warm_expert *experts, uint32_t count) {
    cache->warm_up = experts;
    cache->warm_up_count = count;
    for (uint32_t i = 0; i < count; i++) order_expect(&cache->residents.order, experts[i].expert, experts[i].share);
}

/* Read the next experts of the warm-up, as long as there is room. One that is there was used before it was announced. */
static void begin_warm_up(struct cache *cache) {
    while (is_warming(cache) && has_tags(cache) && cache->ahead_in_flight < AHEAD_LIMIT) {
        uint32_t expert = cache->warm_up[cache->warm_up_next].expert;
        bool is_there = cache->residents.states[expert].bytes != ABSENT;
        if (!is_there && !residents_admit(&cache->residents, expert)) {
            cache->warm_up_count = cache->warm_up_next;
            break;
        }
        cache->warm_up_next++;
        if (!is_there) begin_read(cache, expert, true);
    }
}

/* Make the pages of the next slot ready before it is needed; false if all have some. The lock is held, and left
 * meanwhile. */
static bool prepare_slot(struct cache *cache) {
    uint64_t *lengths = cache->prepared_lengths, total = 0;
    uint32_t least = MAX_CLASSES;
    if (!cache->options.is_prepared || !has_huge_pages(cache)) return false;
    for (uint32_t i = 0; i < cache->experts->class_count; i++) {
        const struct slot_class *one = &cache->residents.slots.classes[i];
        uint64_t taken = (uint64_t)one->taken_count * one->length;
        if (lengths[i] < taken) lengths[i] = taken;
        total += lengths[i];
        bool has_more = lengths[i] < one->length * one->count;
        if (has_more && (least == MAX_CLASSES || lengths[i] < lengths[least])) least = i;
    }
    if (least == MAX_CLASSES) return false;
    const struct slot_class *of = &cache->residents.slots.classes[least];
    uint64_t length = of->length, offset = of->first + lengths[least] / length * of->stride;
    if (total + length > cache->residents.memory) return false;
    uint64_t end = lengths[least] += length;
    pthread_mutex_unlock(&cache->lock);
    pool_prepare(&cache->pool, offset, length);
    pthread_mutex_lock(&cache->lock);
    /* Who needed the memory may have given it back before it had all its pages. */
    if (lengths[least] < end && ever_taken(of) < end) pool_give_back(&cache->pool, offset, length);
    return true;
}

/* Sleep until there is work; the lock is held, and left meanwhile. */
static void rest(struct cache *cache) {
    struct timespec until = time_in(WAIT);
    pthread_cond_timedwait(&cache->has_work, &cache->lock, &until);
}

static void *read_beside(void *data) {
    struct cache *cache = data;
    uint64_t next_tick = 0;
    pthread_mutex_lock(&cache->lock);
    while (!cache->is_closing) {
        if (cache->owner.tick && now() >= next_tick) {
            pthread_mutex_unlock(&cache->lock);
            cache->owner.tick(cache->owner.data);
            pthread_mutex_lock(&cache->lock);
            next_tick = now() + WAIT * 1000000ull;
        }
        begin_warm_up(cache);
        begin_ahead(cache);
        if (collect(cache)) continue;
        if (prepare_slot(cache)) continue;
        if (cache->ahead_in_flight)
            wait_for_change(cache);
        else
            rest(cache);
    }
    pthread_mutex_unlock(&cache->lock);
    return NULL;
}

int cache_start(struct cache *cache) {
    int error = start_thread(&cache->thread, read_beside, cache);
    cache->has_thread = !error;
    return error;
}
