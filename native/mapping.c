#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "seam.h"

/*
 * Experts at the addresses where programs expect them. With only CPUs, a pack's experts are whole blobs in a region of
 * ours, and their tensors get its addresses and another stride: one mapping an expert. Else each part is mapped over its
 * whole pages in the file's regions.
 *
 * `is_mapped` is guarded by the lock of the cache; the strided region is made once.
 */

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* of Linux 5.14 */
#endif

enum { LEAST_POPULATED = 1 << 20 }; /* of a slot: the pages of larger ones are put into the tables at once */

static bool *is_mapped;
static char *blobs; /* the strided region */
static uint64_t blobs_length;
static uint64_t *layer_offsets, *strides;

static const struct table_part *table_part(uint32_t expert, uint32_t part) {
    const struct table_part *parts = seam_array(seam.table->parts);
    return parts + (uint64_t)expert * MAX_PARTS + part;
}

bool mapping_open(void) {
    const struct experts *experts = &seam.experts;
    is_mapped = calloc(experts->count, sizeof *is_mapped);
    layer_offsets = calloc(experts->layer_count, sizeof *layer_offsets);
    strides = calloc(experts->layer_count, sizeof *strides);
    if (!is_mapped || !layer_offsets || !strides) return false;
    if (!seam.is_strided) return true;
    for (uint32_t i = 0; i < experts->layer_count; i++) {
        layer_offsets[i] = blobs_length;
        strides[i] = slot_stride(experts, experts->layers[i].slot_class);
        /* Kernels may read a little beyond the last. */
        blobs_length = (blobs_length + strides[i] * experts->layers[i].count + PAGE + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    }
    blobs = real_mmap(NULL, blobs_length + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (blobs == MAP_FAILED) return false;
    blobs = (char *)(((uintptr_t)blobs + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    for (uint32_t i = 0; i < experts->layer_count; i++)
        if (mprotect(blobs + layer_offsets[i] + strides[i] * experts->layers[i].count, PAGE, PROT_READ)) return false;
    return true;
}

char *mapping_blob(uint32_t layer) { return blobs + layer_offsets[layer]; }
uint64_t mapping_stride(uint32_t layer) { return strides[layer]; }

bool mapping_is_strided_address(const void *address) {
    const char *wanted = address;
    return blobs && wanted >= blobs && wanted < blobs + blobs_length;
}

uint32_t mapping_expert_at(const void *address) {
    if (!mapping_is_strided_address(address)) return NO_EXPERT;
    uint64_t offset = (uint64_t)((const char *)address - blobs);
    uint32_t layer = seam.experts.layer_count - 1;
    while (offset < layer_offsets[layer]) layer--;
    uint64_t expert = (offset - layer_offsets[layer]) / strides[layer];
    return expert < seam.experts.layers[layer].count ? seam.experts.layers[layer].first + (uint32_t)expert : NO_EXPERT;
}

/* ---- mapping and unmapping ---- */

static int map_slot(void *data, char *address, uint64_t length, uint64_t behind) {
    uint64_t slot = *(const uint64_t *)data;
    int flags = MAP_SHARED | MAP_FIXED | (length >= LEAST_POPULATED ? MAP_POPULATE : 0);
    void *mapped = real_mmap(address, length, PROT_READ, flags, seam.cache.pool.descriptor, (off_t)(slot + behind));
    return mapped == MAP_FAILED ? errno : 0;
}

static int hide(void *data, char *address, uint64_t length, uint64_t behind) {
    (void)data, (void)behind;
    return hide_range(address, length);
}

void mapping_forget_in_child(void) {
    if (blobs && hide_range(blobs, blobs_length)) seam_end("the model cannot be mapped in a forked child");
}

/* Map the shard itself again, in the place of a slot. */
static int show_file(void *data, char *address, uint64_t length, uint64_t behind) {
    const struct table_part *part = data;
    int descriptor = seam.files[part->file].places[0].cached;
    int error = show_range(address, length, descriptor, whole_pages(part->mapped_offset) + behind);
    if (!error) madvise(address, length, MADV_RANDOM);
    return error;
}

/* Do something to the pages of each part that are its alone, wherever they are mapped. */
static int each_part(uint32_t expert, bool is_slot) {
    const struct layer *layer = layer_of(&seam.experts, expert);
    uint64_t slot = seam.cache.residents.states[expert].slot;
    int error = 0;
    for (uint32_t p = 0; p < layer->part_count && !error; p++) {
        const struct table_part *part = table_part(expert, p);
        uint64_t start = whole_pages(part->mapped_offset);
        uint64_t end = (part->mapped_offset + part->length) / PAGE * PAGE;
        if (start >= end) continue;
        uint64_t source = slot + part_of(&seam.experts, expert, p)->slot_offset + (start - part->mapped_offset);
        if (is_slot)
            error = regions_each(part->mapped_file, start, end - start, map_slot, &source);
        else
            error = regions_each(part->mapped_file, start, end - start, seam.is_image ? hide : show_file, (void *)(uintptr_t)part);
    }
    return error;
}

/* Map a blob; where nothing follows it, with a page that has no memory as long as no kernel reads beyond the blob. */
static int map_blob(uint32_t expert, char *address, uint64_t length, uint64_t whole) {
    uint64_t slot = seam.cache.residents.states[expert].slot;
    int flags = MAP_SHARED | MAP_FIXED;
    void *mapped = real_mmap(address, whole, PROT_READ, flags, seam.cache.pool.descriptor, (off_t)slot);
    if (mapped == MAP_FAILED) return errno;
    if (length >= LEAST_POPULATED) madvise(address, length, MADV_POPULATE_READ);
    return 0;
}

static int change_blob(uint32_t expert, bool is_slot) {
    uint32_t layer = seam.experts.layer_of[expert];
    char *address = mapping_blob(layer) + strides[layer] * (expert - seam.experts.layers[layer].first);
    uint64_t length = slot_length(&seam.experts, expert), whole = strides[layer] > length ? length + PAGE : length;
    return is_slot ? map_blob(expert, address, length, whole) : hide_range(address, whole);
}

static void change(uint32_t expert, bool is_slot) {
    if (is_mapped[expert] == is_slot) return;
    int error = seam.is_strided ? change_blob(expert, is_slot) : each_part(expert, is_slot);
    if (error) seam_end("the system maps no more memory (%s; see vm.max_map_count)", strerror(error));
    is_mapped[expert] = is_slot;
}

void mapping_map(void *data, uint32_t expert) {
    (void)data;
    change(expert, true);
}

void mapping_unmap(void *data, uint32_t expert) {
    (void)data;
    change(expert, false);
}

/* Map all again that is mapped elsewhere. */
void mapping_renew(void) {
    if (seam.is_strided) return;
    pthread_mutex_lock(&seam.cache.lock);
    for (uint32_t i = 0; i < seam.experts.count; i++) {
        if (!is_mapped[i]) continue;
        is_mapped[i] = false;
        change(i, true);
    }
    pthread_mutex_unlock(&seam.cache.lock);
}

#ifdef COMPARES

enum { MOST_PIECES = 16 };

struct pieces { /* of a part, wherever it is mapped */
    struct piece {
        const char *address;
        uint64_t length, behind;
    } list[MOST_PIECES];
    uint32_t count;
};

static int add_piece(void *data, char *address, uint64_t length, uint64_t behind) {
    struct pieces *pieces = data;
    if (pieces->count < MOST_PIECES) pieces->list[pieces->count++] = (struct piece){address, length, behind};
    return 0;
}

static void compare_part(uint32_t expert, uint32_t number) {
    const struct part *part = part_of(&seam.experts, expert, number);
    const struct table_part *mapped = table_part(expert, number);
    const struct layer *layer = layer_of(&seam.experts, expert);
    uint32_t index = seam.experts.layer_of[expert], own = expert - layer->first;
    struct pieces pieces = {.count = 0};
    char *expected = malloc(part->length);
    if (!expected || pread(seam.files[part->file].places[0].cached, expected, part->length, (off_t)part->offset) != (ssize_t)part->length)
        seam_end("a part cannot be read to be compared");
    if (seam.is_strided)
        add_piece(&pieces, mapping_blob(index) + strides[index] * own + part->slot_offset, part->length, 0);
    else
        regions_each(mapped->mapped_file, mapped->mapped_offset, mapped->length, add_piece, &pieces);
    for (uint32_t i = 0; i < pieces.count; i++)
        if (memcmp(pieces.list[i].address, expected + pieces.list[i].behind, pieces.list[i].length))
            seam_end("layer %u expert %u part %u is not mapped as its file has it", layer->number, own, number);
    free(expected);
}

void mapping_compare(const struct step *step) {
    for (uint32_t i = 0; i < step->used_count; i++)
        for (uint32_t p = 0; p < layer_of(&seam.experts, step->used[i])->part_count; p++) compare_part(step->used[i], p);
}

#endif
