/* Reads the experts of the next layer while those of this one are computed. An example to copy.
 *
 *     cc -I"$(moepack include-dir)" double_buffer.c -o double_buffer -luring
 *     ./double_buffer model.moepack EXPERT...
 *
 * There are two halves of memory and one io_uring. While the experts in one half are used, the
 * drive fills the other: all reads of a layer are in flight at once. The experts given are read in
 * every layer, as if each router had selected them. A real router selects after the layer before,
 * so that what is read ahead is a guess: last token's experts, or this router's choice for the last
 * layer's input. Read the experts that were not guessed by the same calls.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* for O_DIRECT */
#endif
#define MOEPACK_IMPLEMENTATION
#include "moepack.h"

#include <liburing.h>

enum { BLOCK = 4096, MAX_EXPERTS = 16, MAX_READS = MAX_EXPERTS * 64 };

struct half;

typedef struct one_read {
    struct half *half;
    moepack_range range;
    char *bytes;
} one_read;

typedef struct half {
    const moepack_family *family;
    one_read reads[MAX_READS];
    int count, in_flight;
    char *memory; /* room for all experts of the layer that has the largest */
    uint64_t used;
} half;

static moepack pack;
static moepack_error error;
static struct io_uring ring;
static uint32_t experts[MAX_EXPERTS];
static int expert_count, *fds;

static void check(int failed, const char *message) {
    if (failed) fprintf(stderr, "%s\n", message), exit(1);
}

static int open_file(uint32_t file) {
    int fd;
    moepack_code code = moepack_file_fd(&pack, file, O_DIRECT, &fd, &error);
    if (code == MOEPACK_ERR_SYSTEM) code = moepack_file_fd(&pack, file, 0, &fd, &error);
    check(code, error.message);
    return fd;
}

/* Bytes that an expert may need, whether it is one read or a read for each part. */
static uint64_t room_for(const moepack_family *family, uint32_t expert) {
    moepack_blob blob;
    check(moepack_locate_blob(&pack, family, expert, &blob, &error), error.message);
    return blob.length + 2 * BLOCK * (uint64_t)family->parts_per_blob;
}

static void submit_read(half *h, uint32_t file, uint64_t offset, uint64_t length) {
    one_read *r = h->reads + h->count++;
    struct io_uring_sqe *entry = io_uring_get_sqe(&ring);
    r->half = h;
    r->range = moepack_round_range(offset, length, BLOCK);
    r->bytes = h->memory + h->used;
    check(r->range.length > UINT32_MAX, "an expert of more than 4 GiB");
    h->used += r->range.length;
    h->in_flight++;
    io_uring_prep_read(entry, fds[file], r->bytes, (unsigned)r->range.length, r->range.offset);
    io_uring_sqe_set_data(entry, r);
}

/* Start all reads of a layer, and return at once. */
static void start(half *h, const moepack_family *family) {
    h->family = family;
    h->count = 0;
    h->used = 0;
    for (int i = 0; i < expert_count; i++) {
        moepack_blob blob;
        check(moepack_locate_blob(&pack, family, experts[i], &blob, &error), error.message);
        if (!blob.apart) submit_read(h, blob.file, blob.offset, blob.length);
        for (uint32_t p = 0; blob.apart && p < family->parts_per_blob; p++) {
            moepack_part part;
            check(moepack_locate_part(&pack, family, experts[i], p, &part, &error), error.message);
            submit_read(h, part.file, part.offset, part.length);
        }
    }
    check(io_uring_submit(&ring) != h->count, "io_uring_submit failed");
}

/* Wait for the reads of one half; those of the other may end meanwhile. */
static void finish(half *h) {
    while (h->in_flight) {
        struct io_uring_cqe *done;
        check(io_uring_wait_cqe(&ring, &done) < 0, "io_uring_wait_cqe failed");
        one_read *r = (one_read *)io_uring_cqe_get_data(done);
        check(done->res < 0, "a read failed");
        /* A short read is an error, never data. (One of more than 2 GiB would have to continue.) */
        check((uint64_t)done->res < r->range.needed, "a file is cut short");
        r->half->in_flight--;
        io_uring_cqe_seen(&ring, done);
    }
}

/* Where an engine computes. Here each part is checked and printed. */
static void compute(const half *h) {
    const one_read *r = h->reads;
    for (int i = 0; i < expert_count; i++)
        for (uint32_t p = 0; p < h->family->parts_per_blob; p++) {
            moepack_part part;
            check(moepack_locate_part(&pack, h->family, experts[i], p, &part, &error),
                  error.message);
            const char *weights = r->bytes + (part.offset - r->range.offset);
            check(moepack_check_part(&pack, &part, weights, &error), error.message);
            printf("layer %" PRIu32 " expert %" PRIu32 " %s: xxh3:%016" PRIx64 "\n",
                   h->family->layer, experts[i], part.kind->name,
                   moepack_xxh3(weights, part.length));
            if (part.apart || p == h->family->parts_per_blob - 1) r++;
        }
}

int main(int argc, char **argv) {
    static half halves[2];
    const moepack_family *layers[4096];
    int layer_count = 0, parts = 0;
    uint64_t room = 0;
    expert_count = argc - 2;
    check(expert_count < 1 || expert_count > MAX_EXPERTS, "usage: double_buffer PACK EXPERT...");
    for (int i = 0; i < expert_count; i++) experts[i] = (uint32_t)atoi(argv[2 + i]);

    /* Once, when the model is loaded: the pack, its layers, files, memory and ring. */
    check(moepack_open(argv[1], &pack, &error), error.message);
    uint32_t files = (uint32_t)pack.files.count;
    fds = (int *)malloc(files * sizeof *fds);
    for (uint32_t i = 0; i < files; i++) fds[i] = open_file(i);
    for (uint32_t layer = 0; layer < pack.layer_count; layer++) {
        const moepack_family *family;
        uint64_t layer_room = 0;
        if (moepack_find_family(&pack, layer, NULL, &family, NULL)) continue; /* a dense layer */
        layers[layer_count++] = family;
        for (int i = 0; i < expert_count; i++) layer_room += room_for(family, experts[i]);
        if (layer_room > room) room = layer_room;
        if ((int)family->parts_per_blob > parts) parts = (int)family->parts_per_blob;
    }
    for (int i = 0; i < 2; i++)
        check(posix_memalign((void **)&halves[i].memory, BLOCK, room), "out of memory");
    check(io_uring_queue_init((unsigned)(2 * expert_count * parts), &ring, 0) < 0,
          "io_uring_queue_init failed");

    /* For each token: the next layer is read while this one is computed. */
    start(&halves[0], layers[0]);
    for (int i = 0; i < layer_count; i++) {
        if (i + 1 < layer_count) start(&halves[(i + 1) % 2], layers[i + 1]);
        finish(&halves[i % 2]);
        compute(&halves[i % 2]);
    }

    io_uring_queue_exit(&ring);
    for (int i = 0; i < 2; i++) free(halves[i].memory);
    for (uint32_t i = 0; i < files; i++) close(fds[i]);
    free(fds);
    moepack_close(&pack);
    return 0;
}
