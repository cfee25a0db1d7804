/* Reads the experts that a router chose, each in one direct, aligned read. Copy from here.
 *
 *     cc -I include examples/routed_experts.c                        one read after the other
 *     cc -I include examples/routed_experts.c -DUSE_URING -luring    all reads at once
 *     ./a.out model.moepack LAYER EXPERT...
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* for O_DIRECT */
#endif
#define MOEPACK_IMPLEMENTATION
#include "moepack.h"

static moepack pack;
static moepack_error error;

typedef struct expert {
    moepack_blob blob;
    int fd;
    char *bytes;
} expert;

static void check(int failed, const char *message) {
    if (failed) fprintf(stderr, "%s\n", message), exit(1);
}

#ifdef USE_URING
#include <liburing.h>

static void read_all(struct io_uring *ring, expert *experts, int count) {
    struct io_uring_cqe *done;
    for (expert *e = experts; e < experts + count; e++) {
        struct io_uring_sqe *ask = io_uring_get_sqe(ring);
        io_uring_prep_read(ask, e->fd, e->bytes, (unsigned)e->blob.length, e->blob.offset);
        io_uring_sqe_set_data(ask, e);
    }
    check(io_uring_submit(ring) != count, "io_uring_submit failed");
    for (; count; count--) {
        check(io_uring_wait_cqe(ring, &done) < 0, "io_uring_wait_cqe failed");
        expert *e = (expert *)io_uring_cqe_get_data(done);
        check(done->res < 0, "a read failed");
        /* Less than all is an error, never data. */
        check((uint64_t)done->res != e->blob.length, "a file is cut short");
        io_uring_cqe_seen(ring, done);
    }
}
#endif

/* Open a data file; where the file system or the layout does not suit O_DIRECT, without it. */
static int open_file(uint32_t file) {
    int fd, direct = pack.header->blob_alignment % 4096 ? 0 : O_DIRECT;
    moepack_code code = moepack_file_fd(&pack, file, direct, &fd, &error);
    if (code == MOEPACK_ERR_SYSTEM) code = moepack_file_fd(&pack, file, 0, &fd, &error);
    check(code, error.message);
    return fd;
}

int main(int argc, char **argv) {
    enum { MOST = 64 };
    expert experts[MOST], *e;
    const moepack_family *family;
    int count = argc - 3;
    check(count < 1 || count > MOST, "usage: routed_experts PACK LAYER EXPERT...");

    /* Once, when the model is loaded: the pack, its layers, files, buffers and ring. */
    check(moepack_open(argv[1], &pack, &error), error.message);
    uint32_t layer = (uint32_t)atoi(argv[2]);
    check(moepack_find_family(&pack, layer, NULL, &family, &error), error.message);
    int *fds = (int *)malloc(pack.header->file_count * sizeof *fds);
    for (uint32_t i = 0; i < pack.header->file_count; i++) fds[i] = open_file(i);
#ifdef USE_URING
    struct io_uring ring;
    check(io_uring_queue_init(MOST, &ring, 0), "io_uring_queue_init failed");
#endif

    /* For each token: locate what the router chose, and read it. */
    for (e = experts; e < experts + count; e++) {
        uint32_t number = (uint32_t)atoi(argv[3 + (e - experts)]);
        check(moepack_locate_blob(&pack, family, number, &e->blob, &error), error.message);
        e->fd = fds[e->blob.file];
        check(posix_memalign((void **)&e->bytes, 4096, e->blob.length), "out of memory");
    }
#ifdef USE_URING
    read_all(&ring, experts, count);
#else
    for (e = experts; e < experts + count; e++)
        check(moepack_read(&pack, e->fd, e->blob.file, e->blob.offset, e->blob.length, e->bytes,
                           &error), error.message);
#endif

    /* The parts lie in the blob; checking digests is for those who want to. */
    for (e = experts; e < experts + count; e++) {
        uint32_t number = (uint32_t)atoi(argv[3 + (e - experts)]);
        for (uint32_t p = 0; p < family->parts_per_blob; p++) {
            moepack_part part;
            check(moepack_locate_part(&pack, family, number, p, &part, &error), error.message);
            const char *weights = e->bytes + part.offset_in_blob;
            check(moepack_check_part(&pack, &part, weights, &error), error.message);
            printf("expert %u %s: %s, %llu bytes, sound\n", number, part.kind->name,
                   part.kind->type_name, (unsigned long long)part.length);
        }
        free(e->bytes);
    }
    for (uint32_t i = 0; i < pack.header->file_count; i++) close(fds[i]);
    free(fds);
    moepack_close(&pack);
    return 0;
}
