/* Reads the experts that a router selected, each in one direct, aligned read. An example to copy.
 *
 *     cc -I"$(moepack include-dir)" routed_experts.c -o routed_experts
 *     ./routed_experts model.moepack LAYER EXPERT...
 *
 * Start here. The reads are one after the other; double_buffer.c has all in flight at once, and
 * expert_cache.cpp keeps experts in memory.
 *
 * With an index over the shards of a GGUF, each part is a read of its own, rounded outwards to
 * blocks of the drive.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* for O_DIRECT */
#endif
#define MOEPACK_IMPLEMENTATION
#include "moepack.h"

enum { BLOCK = 4096, MOST = 64 };

static moepack pack;
static moepack_error error;

typedef struct one_read {
    uint32_t file;
    int fd;
    moepack_range range;
    char *bytes;
} one_read;

static void check(int failed, const char *message) {
    if (failed) fprintf(stderr, "%s\n", message), exit(1);
}

/* Open a data file; without O_DIRECT if the file system refuses it. */
static int open_file(uint32_t file) {
    int fd;
    moepack_code code = moepack_file_fd(&pack, file, O_DIRECT, &fd, &error);
    if (code == MOEPACK_ERR_SYSTEM) code = moepack_file_fd(&pack, file, 0, &fd, &error);
    check(code, error.message);
    return fd;
}

/* Plan a read, with memory for it. Blobs of packs that are aligned to blocks stay as they are. */
static void plan(one_read *r, const int *fds, uint32_t file, uint64_t offset, uint64_t length) {
    r->file = file;
    r->fd = fds[file];
    r->range = moepack_round_range(offset, length, BLOCK);
    check(posix_memalign((void **)&r->bytes, BLOCK, r->range.length), "out of memory");
}

int main(int argc, char **argv) {
    const moepack_family *family;
    int chosen = argc - 3, count = 0;
    check(chosen < 1 || chosen > MOST, "usage: routed_experts PACK LAYER EXPERT...");

    /* Once, when the model is loaded: the pack, its layers, files and buffers. */
    check(moepack_open(argv[1], &pack, &error), error.message);
    uint32_t layer = (uint32_t)atoi(argv[2]), files = (uint32_t)pack.files.count;
    check(moepack_find_family(&pack, layer, NULL, &family, &error), error.message);
    int *fds = (int *)malloc(files * sizeof *fds);
    for (uint32_t i = 0; i < files; i++) fds[i] = open_file(i);
    one_read *reads = (one_read *)malloc(chosen * family->parts_per_blob * sizeof *reads);

    /* For each token: locate the selected experts, and read them. */
    for (int i = 0; i < chosen; i++) {
        uint32_t number = (uint32_t)atoi(argv[3 + i]);
        moepack_blob blob;
        check(moepack_locate_blob(&pack, family, number, &blob, &error), error.message);
        if (!blob.apart) plan(reads + count++, fds, blob.file, blob.offset, blob.length);
        for (uint32_t p = 0; blob.apart && p < family->parts_per_blob; p++) {
            moepack_part part;
            check(moepack_locate_part(&pack, family, number, p, &part, &error), error.message);
            plan(reads + count++, fds, part.file, part.offset, part.length);
        }
    }
    for (one_read *r = reads; r < reads + count; r++)
        check(moepack_read_range(&pack, r->fd, r->file, &r->range, r->bytes, &error),
              error.message);

    /* Use the parts; checking their digests is optional. */
    one_read *r = reads;
    for (int i = 0; i < chosen; i++) {
        uint32_t number = (uint32_t)atoi(argv[3 + i]);
        for (uint32_t p = 0; p < family->parts_per_blob; p++) {
            moepack_part part;
            check(moepack_locate_part(&pack, family, number, p, &part, &error), error.message);
            const char *weights = r->bytes + (part.offset - r->range.offset);
            check(moepack_check_part(&pack, &part, weights, &error), error.message);
            printf("expert %u %s: %s, %llu bytes, %s\n", number, part.kind->name,
                   part.kind->type_name, (unsigned long long)part.length,
                   part.has_digest ? "sound" : "unchecked");
            if (part.apart || p == family->parts_per_blob - 1) free(r++->bytes);
        }
    }
    for (uint32_t i = 0; i < files; i++) close(fds[i]);
    free(reads);
    free(fds);
    moepack_close(&pack);
    return 0;
}
