#define _GNU_SOURCE
#include "reads.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "../include/moepack.h"
#include "threads.h"

/* Memory and drives fail late. A prime, so that experts which are read in turn are all met. */
enum { LATER_PERIOD = 997 };
static const uint64_t MEASUREMENT_AGE = 1000000000; /* nanoseconds after which a drive is measured anew */

int cache_fail(struct cache_error *error, int code, int system_error, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(error->message, sizeof error->message, format, list);
    va_end(list);
    error->code = code;
    error->system_error = system_error;
    error->expert = NO_EXPERT;
    return code;
}

/* Say which bytes an error is of. */
static void set_place(struct cache_error *error, uint32_t expert, uint32_t part, uint32_t place, uint64_t offset, uint64_t found) {
    error->expert = expert;
    error->part = part;
    error->place = place;
    error->offset = offset;
    error->found = found;
}

/* Choose the place that will be done first: by queued bytes over recent throughput. One without a recent measurement is
 * tried. */
static uint8_t choose_place(struct cache_file *file, bool has_mirror, uint64_t length, uint64_t time) {
    uint8_t best = 0;
    double shortest = 0;
    for (uint8_t i = 0; has_mirror && i < file->place_count; i++) {
        const struct place *place = &file->places[i];
        bool is_measured = place->throughput > 0 && time - place->measured_at < MEASUREMENT_AGE;
        if (!is_measured && !place->queued_length) return i;
        double seconds = (double)(place->queued_length + length) / (is_measured ? place->throughput : 1e-3);
        if (i && seconds >= shortest) continue;
        best = i;
        shortest = seconds;
    }
    return best;
}

/* Measure a place from when it began to be busy. */
static void measure_place(struct place *place, uint64_t length, uint64_t time) {
    place->queued_length -= length;
    place->busy_length += length;
    if (time <= place->began_at) return;
    place->throughput = (double)place->busy_length / (double)(time - place->began_at);
    place->measured_at = time;
}

/* A program would wait for one page after the other. Where many reads are queued, this waits for some: so without the
 * lock. */
void reads_queue_edges(const struct cache *cache, uint32_t expert) {
    for (uint32_t i = 0; i < layer_of(cache->experts, expert)->part_count; i++) {
        const struct part *part = part_of(cache->experts, expert, i);
        int file = cache->files[part->file].places[0].cached;
        uint64_t end = part->offset + part->length;
        if (part->offset % PAGE) posix_fadvise(file, (off_t)part->offset, 1, POSIX_FADV_WILLNEED);
        if (end % PAGE) posix_fadvise(file, (off_t)end - 1, 1, POSIX_FADV_WILLNEED);
    }
}

/* Queue a read of bytes of a file, from the start of a part; the lock is held, and there is a free tag. */
static void queue_read(struct cache *cache, uint32_t expert, uint32_t first, uint64_t length, bool has_mirror) {
    const struct part *part = part_of(cache->experts, expert, first);
    uint64_t time = now(), offset = part->offset;
    char *address = cache_address(cache, expert) + part->slot_offset;
    uint8_t number = choose_place(&cache->files[part->file], has_mirror, length, time);
    struct place *place = &cache->files[part->file].places[number];
    uint32_t tag = cache->first_free;
    struct pending *pending = &cache->pending[tag];
    cache->first_free = pending->next_free;
    cache->pending_count++;
    uint64_t lead = offset % PAGE;
    /* O_DIRECT reads whole pages into whole pages. */
    bool is_direct = place->direct >= 0 && !place->refuses_direct && !cache->options.is_cached && (uintptr_t)(address - lead) % PAGE == 0;
    if (!is_direct) lead = 0;
    uint64_t whole = is_direct ? (lead + length + PAGE - 1) / PAGE * PAGE : length;
    *pending = (struct pending){.expert = expert, .part = first, .place = number, .has_mirror = has_mirror,
                                .offset = offset - lead, .address = address - lead, .length = (uint32_t)whole, .needed = (uint32_t)(lead + length)};
    if (!place->queued_length) {
        place->began_at = time;
        place->busy_length = 0;
    }
    place->queued_length += whole;
    cache->in_flight[expert].read_count++;
    struct read read = {pending->offset, pending->length, is_direct ? place->direct : place->cached, pending->address, tag};
    drive_add(cache->drive, &read);
    add(&cache->statistics->read_length, whole);
}

/* One read for parts that lie side by side both in the file and in the slot. */
void reads_queue(struct cache *cache, uint32_t expert) {
    uint32_t part_count = layer_of(cache->experts, expert)->part_count;
    cache->in_flight[expert] = (struct in_flight){0};
    for (uint32_t i = 0; i < part_count;) {
        uint32_t number = i;
        const struct part *first = part_of(cache->experts, expert, i), *last = first;
        bool has_mirror = first->has_mirror;
        for (i++; i < part_count; i++) {
            const struct part *next = part_of(cache->experts, expert, i);
            uint64_t gap = next->offset - (last->offset + last->length);
            bool is_beside = next->file == first->file && next->offset >= last->offset + last->length && gap < PAGE &&
                             next->offset - first->offset == (uint64_t)next->slot_offset - first->slot_offset;
            if (!is_beside) break;
            last = next;
            has_mirror = has_mirror && next->has_mirror;
        }
        queue_read(cache, expert, number, last->offset + last->length - first->offset, has_mirror);
    }
}

/* Read once more, by the page cache: after a short read, where O_DIRECT is refused, or from another place. `has_failed`:
 * the place itself. */
static int read_again(const struct cache_file *file, const struct pending *pending, bool *has_failed) {
    int error = read_fully(file->places[pending->place].cached, pending->address, pending->needed, pending->offset);
    *has_failed = error != 0;
    if (error && pending->has_mirror)
        error = read_fully(file->places[1 - pending->place].cached, pending->address, pending->needed, pending->offset);
    return error;
}

/* Read an expert again of which a mirror may have had wrong bytes; false if none was read from there. */
static bool read_without_mirror(const struct cache *cache, uint32_t expert) {
    bool has_mirror = false;
    for (uint32_t i = 0; i < layer_of(cache->experts, expert)->part_count; i++) {
        const struct part *part = part_of(cache->experts, expert, i);
        if (!part->has_mirror) continue;
        has_mirror = true;
        char *address = cache_address(cache, expert) + part->slot_offset;
        if (read_fully(cache->files[part->file].places[0].cached, address, part->length, part->offset)) return false;
    }
    return has_mirror;
}

/* Compare an expert's bytes with their digests; the parts without one are not known. */
static bool has_right_digests(const struct cache *cache, uint32_t expert, struct cache_error *error) {
    const struct layer *layer = layer_of(cache->experts, expert);
    for (uint32_t i = 0; i < layer->part_count; i++) {
        const struct part *part = part_of(cache->experts, expert, i);
        if (!part->has_digest) continue;
        uint64_t found = moepack_xxh3(cache_address(cache, expert) + part->slot_offset, (size_t)part->length);
        if (found == part->digest) continue;
        cache_fail(error, CACHE_DIGEST_DIFFERS, 0,
             "%s: layer %" PRIu32 " expert %" PRIu32 " part %" PRIu32 ": expected xxh3:%016" PRIx64 ", found xxh3:%016" PRIx64,
             cache->files[part->file].places[0].path, layer->number, expert - layer->first, i, part->digest, found);
        set_place(error, expert, i, 0, part->offset, found);
        return false;
    }
    return true;
}

uint32_t reads_end(struct cache *cache, const struct ended *ended, struct pending *pending) {
    *pending = cache->pending[ended->tag];
    cache->pending[ended->tag].next_free = cache->first_free;
    cache->first_free = ended->tag;
    cache->pending_count--;
    struct in_flight *in_flight = &cache->in_flight[pending->expert];
    const struct part *part = part_of(cache->experts, pending->expert, pending->part);
    struct cache_file *file = &cache->files[part->file];
    struct place *place = &file->places[pending->place];
    bool is_whole = ended->result >= 0 && (uint32_t)ended->result >= pending->needed;
    measure_place(place, pending->length, now());
    if (ended->result == -EINVAL) place->refuses_direct = true; /* its file system refuses O_DIRECT only now */
    if (!is_whole) {
        bool has_failed;
        pthread_mutex_unlock(&cache->lock);
        int error = read_again(file, pending, &has_failed);
        pthread_mutex_lock(&cache->lock);
        if (has_failed && pending->place) file->place_count = 1; /* no longer from the mirror */
        if (error) {
            const char *problem = error == ENODATA ? "the file has become shorter" : strerror(error);
            cache_fail(&cache->error, CACHE_READ_FAILED, error, "%s: offset %" PRIu64 ": %s", place->path, pending->offset, problem);
            set_place(&cache->error, pending->expert, pending->part, pending->place, part->offset, 0);
            in_flight->has_failed = true;
        }
    }
    return --in_flight->read_count ? NO_EXPERT : pending->expert;
}

/* Is a read that has ended held against its digests? Of those after an expert's first, each LATER_PERIOD-th. */
static bool is_to_be_checked(struct cache *cache, uint32_t expert) {
    if (cache->options.check != CHECK_FIRST) return cache->options.check == CHECK_EACH;
    if (!cache->residents.states[expert].is_checked) return true;
    bool has_digest = false;
    for (uint32_t i = 0; i < layer_of(cache->experts, expert)->part_count; i++)
        has_digest = has_digest || part_of(cache->experts, expert, i)->has_digest;
    if (!has_digest || ++cache->later_count % LATER_PERIOD) return false;
    add(&cache->statistics->rechecked_count, 1);
    return true;
}

void reads_complete(struct cache *cache, uint32_t expert) {
    struct resident *state = &cache->residents.states[expert];
    bool is_right = !cache->in_flight[expert].has_failed;
    if (is_right && is_to_be_checked(cache, expert)) {
        struct cache_error error;
        pthread_mutex_unlock(&cache->lock);
        is_right = has_right_digests(cache, expert, &error);
        bool is_read_again = !is_right && read_without_mirror(cache, expert);
        if (is_read_again) is_right = has_right_digests(cache, expert, &error);
        pthread_mutex_lock(&cache->lock);
        if (is_read_again && is_right) cache->files[part_of(cache->experts, expert, 0)->file].place_count = 1;
        state->is_checked = is_right;
        if (!is_right) cache->error = error;
    }
    if (cache->in_flight[expert].is_ahead) cache->ahead_in_flight -= slot_length(cache->experts, expert);
    residents_complete(&cache->residents, expert, is_right);
    bool is_wanted = state->bytes == RESIDENT && (state->is_admitted || cache->residents.users[expert]);
    if (is_wanted && cache->owner.map) cache->owner.map(cache->owner.data, expert);
}
