/*
 * A cache over a file and its mirror, in one thread, on a drive that is told what to do: cache FOLDER. Which bytes are read, from
 * which of both, and what becomes of reads that fail or bring wrong bytes. It prints nothing, or what is wrong.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../../include/moepack.h"
#include "../../native/cache.h"
#include "../../native/threads.h"

/*
 * Two parts of an expert lie side by side in the file, with a gap between them, and the third elsewhere. In slots each lies as
 * far behind a page's start as in the file, so that O_DIRECT reads it.
 */
enum { LAYERS = 2, PER_LAYER = 8, COUNT = LAYERS * PER_LAYER, PARTS = 3, FIRST = 3000, GAP = 40, SECOND = 2000, THIRD = 5000 };
enum { PAIR = FIRST + GAP + SECOND, STRIDE = 4 * PAGE, SLOT = 5 * PAGE, LATER_PERIOD = 997 };
enum { PACK_DIRECT, PACK, MIRROR_DIRECT, MIRROR, DESCRIPTORS };

static struct layer layers[LAYERS];
static struct part parts[COUNT * MAX_PARTS];
static uint32_t layers_of[COUNT];
static struct experts experts = {
    .layers = layers, .parts = parts, .layer_of = layers_of, .layer_count = LAYERS, .count = COUNT, .class_count = 1, .class_length = {SLOT}};
static struct cache_file file;
static struct cache cache;
static bool is_open;
static struct cache_error error;
static char content[2 * COUNT * STRIDE];
static int descriptors[DESCRIPTORS];

#define REQUIRE(condition) \
    if (!(condition)) return printf("line %d: %s\n", __LINE__, #condition), 1

/* ---- the drive ---- */

static struct {
    int failures[DESCRIPTORS]; /* errno of each read */
    bool is_wrong[DESCRIPTORS];
    bool is_short[DESCRIPTORS];
} drive;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    uint32_t count;
    uint64_t offset, length; /* of the last one */
} reads[DESCRIPTORS];
static uint64_t advised[4 * PARTS];
static uint32_t advised_count;

ssize_t __real_pread(int descriptor, void *buffer, size_t length, off_t offset);
ssize_t __wrap_pread(int descriptor, void *buffer, size_t length, off_t offset);
int __wrap_posix_fadvise(int descriptor, off_t offset, off_t length, int advice);

int __wrap_posix_fadvise(int descriptor, off_t offset, off_t length, int advice) {
    if (descriptor == descriptors[PACK] && length == 1 && advice == POSIX_FADV_WILLNEED) advised[advised_count++] = (uint64_t)offset;
    return 0;
}

ssize_t __wrap_pread(int descriptor, void *buffer, size_t length, off_t offset) {
    int which = 0;
    while (descriptors[which] != descriptor) which++;
    pthread_mutex_lock(&lock);
    reads[which].count++;
    reads[which].offset = (uint64_t)offset;
    reads[which].length = length;
    pthread_mutex_unlock(&lock);
    if (drive.failures[which]) return errno = drive.failures[which], -1;
    ssize_t count = __real_pread(descriptor, buffer, drive.is_short[which] ? 1001 : length, offset);
    if (drive.is_wrong[which]) ((char *)buffer)[count / 2] ^= 1;
    return count;
}

static uint64_t offset_of(uint32_t expert, uint32_t part) {
    uint64_t pair = (uint64_t)expert * STRIDE + 100;
    return part == 0 ? pair : part == 1 ? pair + FIRST + GAP : (uint64_t)(COUNT + expert) * STRIDE + 7;
}

static void close_cache(void) {
    if (is_open) cache_close(&cache);
    is_open = false;
}

/* The file is the only one; with `has_mirror` it lies at both. O_DIRECT needs no more of a file in memory than of others. */
static void open_cache(uint64_t slots, int check, bool has_mirror) {
    close_cache();
    memset(&drive, 0, sizeof drive);
    memset(reads, 0, sizeof reads);
    file = (struct cache_file){.place_count = has_mirror ? 2 : 1};
    file.places[0] = (struct place){.path = "the pack", .direct = descriptors[PACK_DIRECT], .cached = descriptors[PACK]};
    file.places[1] = (struct place){.direct = -1, .cached = -1};
    if (has_mirror) file.places[1] = (struct place){.path = "the mirror", .direct = descriptors[MIRROR_DIRECT], .cached = descriptors[MIRROR]};
    for (uint32_t e = 0; e < COUNT; e++)
        for (uint32_t p = 0; p < PARTS; p++) parts[e * MAX_PARTS + p].has_mirror = has_mirror;
    struct cache_options options = {.memory = (slots + 1) * SLOT, .reserve = SLOT, .policy = POLICY_LRU, .check = check, .reads = DRIVE_THREADS};
    struct cache_owner owner = {NULL, NULL, NULL, NULL};
    is_open = !cache_open(&cache, &experts, &file, &options, owner, NULL, &error);
    if (!is_open) printf("%s\n", error.message);
}

/* Use an expert of layer 0 in context 0; return the code. */
static int use(int32_t expert) { return cache_use(&cache, 0, 0, &expert, 1, 1, &error); }

static bool is_right(uint32_t expert) {
    for (uint32_t p = 0; p < PARTS; p++) {
        const struct part *part = part_of(&experts, expert, p);
        if (memcmp(cache_address(&cache, expert) + part->slot_offset, content + part->offset, part->length)) return false;
    }
    return true;
}

static uint32_t read_count(void) {
    uint32_t count = 0;
    for (int i = 0; i < DESCRIPTORS; i++) count += reads[i].count;
    return count;
}

/* ---- what is read ---- */

static int read_whole_pages(void) {
    open_cache(4, CHECK_FIRST, false);
    REQUIRE(!use(3) && is_right(3) && reads[PACK_DIRECT].count == 2 && read_count() == 2);
    REQUIRE(reads[PACK_DIRECT].offset % PAGE == 0 && reads[PACK_DIRECT].length == 2 * PAGE);
    REQUIRE(cache.statistics->read_length == 4 * PAGE && cache.statistics->miss_count == 1 && cache.statistics->resident_length == SLOT);
    REQUIRE(!use(3) && read_count() == 2 && cache.statistics->hit_count == 1);
    drive.failures[PACK_DIRECT] = EINVAL; /* refused only now */
    REQUIRE(!use(4) && is_right(4) && reads[PACK_DIRECT].count + reads[PACK].count == 6);
    uint32_t before = reads[PACK_DIRECT].count;
    REQUIRE(!use(5) && is_right(5) && reads[PACK_DIRECT].count == before && reads[PACK].count >= 3);
    REQUIRE(cache.statistics->read_length == 8 * PAGE + PAIR + THIRD); /* as it is, from now on */
    return 0;
}

static int read_as_it_lies(void) {
    open_cache(4, CHECK_FIRST, false);
    parts[2].slot_offset += 512; /* where O_DIRECT does not reach */
    REQUIRE(!use(0) && reads[PACK_DIRECT].count == 1 && reads[PACK].count == 1);
    REQUIRE(reads[PACK].offset == parts[2].offset && reads[PACK].length == THIRD);
    REQUIRE(is_right(0));
    parts[2].slot_offset -= 512;
    drive.is_short[PACK_DIRECT] = true;
    REQUIRE(!use(1) && is_right(1) && reads[PACK_DIRECT].count == 3 && reads[PACK].count == 3);
    return 0;
}

/* Parts are read together where they lie alike in the file and in the slot, and less than a page apart. */
static int read_together(void) {
    struct part *second = &parts[1], before = *second;
    uint64_t offset = offset_of(0, 0) + FIRST;
    const struct {
        uint64_t offset;
        int64_t shift; /* of the slot against the file */
        uint32_t parts, count;
    } cases[] = {{offset, 0, 2, 1}, {offset + PAGE - 1, 0, 2, 1}, {offset + PAGE, 0, 2, 2}, {offset + GAP, 1, 2, 2}, {offset - 1, 0, 2, 2},
                 {offset + GAP, 0, 1, 1}};
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        open_cache(4, CHECK_NONE, false);
        layers[0].part_count = cases[i].parts;
        second->offset = cases[i].offset;
        second->slot_offset = (uint32_t)(100 + second->offset - offset_of(0, 0) + (uint64_t)cases[i].shift);
        REQUIRE(!use(0) && read_count() == cases[i].count);
        REQUIRE(cases[i].parts == 2 || reads[PACK_DIRECT].length == PAGE); /* nothing of a part behind it */
    }
    *second = before;
    layers[0].part_count = PARTS;
    return 0;
}

/* The system is asked for the first and the last page of a part where others share them. */
static int read_edges(void) {
    struct part *third = &parts[5 * MAX_PARTS + 2], before = *third;
    open_cache(4, CHECK_NONE, false);
    REQUIRE(!use(4) && !advised_count);
    cache.options.has_edges = true;
    *third = (struct part){.offset = 8 * PAGE, .length = PAGE, .slot_offset = 3 * PAGE};
    REQUIRE(!use(5) && advised_count == 4);
    for (uint32_t i = 0; i < 4; i++) {
        const struct part *part = part_of(&experts, 5, i / 2);
        REQUIRE(advised[i] == (i % 2 ? part->offset + part->length - 1 : part->offset));
    }
    *third = before;
    return 0;
}

/* ---- reads that fail ---- */

/* An error that is of no expert. */
static int fail_to_open(void) {
    struct rlimit before, none;
    getrlimit(RLIMIT_NOFILE, &before);
    none = (struct rlimit){0, before.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
    close_cache();
    int code = cache_open(&cache, &experts, &file, &(struct cache_options){.memory = SLOT}, (struct cache_owner){NULL}, NULL, &error);
    setrlimit(RLIMIT_NOFILE, &before);
    REQUIRE(code == CACHE_SYSTEM && error.code == code && error.system_error == EMFILE && error.expert == NO_EXPERT);
    REQUIRE(strstr(error.message, "no memory for experts: ") && strstr(error.message, strerror(EMFILE)));
    return 0;
}

static int fail_to_read(void) {
    open_cache(4, CHECK_FIRST, false);
    drive.failures[PACK_DIRECT] = drive.failures[PACK] = EIO;
    REQUIRE(use(3) == CACHE_READ_FAILED && error.system_error == EIO && error.expert == 3 && error.place == 0 && !error.found);
    REQUIRE((error.part == 0 && error.offset == offset_of(3, 0)) || (error.part == 2 && error.offset == offset_of(3, 2)));
    REQUIRE(strstr(error.message, "the pack: offset ") && strstr(error.message, strerror(EIO)));
    REQUIRE(!cache.statistics->resident_length && cache.statistics->evicted_count == 1);
    memset(&drive, 0, sizeof drive);
    REQUIRE(!use(3) && is_right(3));
    drive.is_short[PACK_DIRECT] = true;
    REQUIRE(!ftruncate(descriptors[PACK], (off_t)offset_of(15, 2) + 100));
    int32_t last = 7;
    REQUIRE(cache_use(&cache, 0, 1, &last, 1, 1, &error) == CACHE_READ_FAILED && error.system_error == ENODATA);
    REQUIRE(error.expert == 15 && error.part == 2 && error.offset == offset_of(15, 2) && strstr(error.message, "shorter"));
    return pwrite(descriptors[PACK], content, sizeof content, 0) != (ssize_t)sizeof content;
}

static int find_wrong_bytes(void) {
    char digests[64];
    open_cache(2, CHECK_FIRST, false);
    drive.is_wrong[PACK_DIRECT] = true;
    REQUIRE(use(2) == CACHE_DIGEST_DIFFERS && !error.system_error && error.expert == 2 && error.place == 0);
    REQUIRE(error.offset == offset_of(2, error.part) && strstr(error.message, "the pack: layer 0 expert 2 part "));
    snprintf(digests, sizeof digests, "xxh3:%016" PRIx64 ", found xxh3:%016" PRIx64, part_of(&experts, 2, error.part)->digest, error.found);
    REQUIRE(strstr(error.message, digests));
    drive.is_wrong[PACK_DIRECT] = false;
    REQUIRE(!use(2) && is_right(2));
    for (int32_t e = 3; e < 7; e++) REQUIRE(!use(e));
    drive.is_wrong[PACK_DIRECT] = true;
    REQUIRE(!use(2) && !is_right(2)); /* it was right once */
    open_cache(2, CHECK_NONE, false);
    drive.is_wrong[PACK_DIRECT] = true;
    REQUIRE(!use(2) && !is_right(2));
    return 0;
}

/* One later read in many is held against digests that were right before; of experts that have some. */
static int check_later(void) {
    static const uint32_t with_digest[] = {1, 0, 2, 1}; /* the part of each second expert that has one */
    open_cache(2, CHECK_FIRST, false);
    for (uint32_t e = 0; e < PER_LAYER; e++)
        for (uint32_t p = 0; p < PARTS; p++) parts[e * MAX_PARTS + p].has_digest = e % 2 && p == with_digest[e / 2];
    for (int32_t i = 0; i < 8 + 2 * (LATER_PERIOD - 1); i++) REQUIRE(!use(i % 8));
    REQUIRE(cache.statistics->rechecked_count == 0);
    drive.is_wrong[PACK_DIRECT] = true;
    int codes[] = {use(0), use(1)};
    REQUIRE(cache.statistics->rechecked_count == 1 && !codes[0] && codes[1] == CACHE_DIGEST_DIFFERS);
    for (uint32_t e = 0; e < PER_LAYER; e++)
        for (uint32_t p = 0; p < PARTS; p++) parts[e * MAX_PARTS + p].has_digest = true;
    open_cache(2, CHECK_EACH, false);
    for (int32_t i = 0; i < 9; i++) REQUIRE(!use(i % 8));
    drive.is_wrong[PACK_DIRECT] = true;
    REQUIRE(use(1) == CACHE_DIGEST_DIFFERS && !cache.statistics->rechecked_count);
    return 0;
}

/* ---- a mirror ---- */

/* That is read which will be done first: by what is queued, and by how fast it was in the last second. */
static int choose_a_place(void) {
    enum { LENGTH = FIRST, FRESH = 900, OLD = 1100 };
    const struct {
        double throughputs[2];
        uint64_t queued[2];
        uint64_t ages[2]; /* milliseconds */
        int expected;
    } cases[] = {
        {{1, 1}, {0, 0}, {0, FRESH}, 0}, {{1, 1.1}, {0, 0}, {FRESH, 0}, 1}, {{1.1, 1}, {0, 0}, {0, 0}, 0},
        {{1, 1}, {1, 0}, {0, 0}, 1}, {{3, 1}, {LENGTH, 0}, {0, 0}, 0}, {{3, 1}, {3 * LENGTH, 0}, {0, 0}, 1}, {{1, 3}, {0, 3 * LENGTH}, {0, 0}, 0},
        {{0, 9}, {0, 0}, {0, 0}, 0}, {{9, 0}, {0, 0}, {0, 0}, 1}, {{9, 9}, {0, 0}, {0, OLD}, 1}, {{1, 9}, {0, 0}, {OLD, 0}, 0}, /* is tried */
        {{0.005, 0}, {0, 1}, {0, 0}, 0}, {{0.0005, 0}, {0, 1}, {0, 0}, 1}, {{0, 0}, {2, 1}, {0, 0}, 1}, /* is being tried */
    };
    layers[0].part_count = 1;
    open_cache(8, CHECK_NONE, true);
    for (int32_t i = 0; i < (int32_t)(sizeof cases / sizeof *cases); i++) {
        memset(reads, 0, sizeof reads);
        for (int n = 0; n < 2; n++) {
            struct place *place = &file.places[n];
            place->throughput = cases[i].throughputs[n];
            place->queued_length = cases[i].queued[n];
            place->measured_at = now() - cases[i].ages[n] * 1000000;
            place->busy_length = 77;
        }
        cache_resize(&cache, 0); /* nothing stays */
        cache_release(&cache, 0);
        REQUIRE(!use(i % PER_LAYER) && reads[cases[i].expected ? MIRROR_DIRECT : PACK_DIRECT].count == 1 && read_count() == 1);
        const struct place *place = &file.places[cases[i].expected];
        REQUIRE(place->busy_length == (cases[i].queued[cases[i].expected] ? 77 : 0) + PAGE);
        REQUIRE(place->queued_length == cases[i].queued[cases[i].expected]);
        REQUIRE(place->throughput == (double)place->busy_length / (double)(place->measured_at - place->began_at));
    }
    layers[0].part_count = PARTS;
    return 0;
}

static int read_both(void) {
    open_cache(8, CHECK_FIRST, true);
    for (int32_t e = 0; e < 8; e++) REQUIRE(!use(e) && is_right((uint32_t)e));
    REQUIRE(reads[PACK_DIRECT].count && reads[MIRROR_DIRECT].count && read_count() == 16);
    REQUIRE(file.places[0].throughput > 0 && file.places[1].throughput > 0 && !file.places[0].queued_length && !file.places[1].queued_length);
    return 0;
}

/* A mirror that fails, or has wrong bytes, is not read any more; the pack is. */
static int leave_a_bad_mirror(void) {
    open_cache(8, CHECK_FIRST, true);
    drive.failures[MIRROR_DIRECT] = drive.failures[MIRROR] = EIO;
    for (int32_t e = 0; e < 4; e++) REQUIRE(!use(e) && is_right((uint32_t)e));
    REQUIRE(file.place_count == 1 && reads[MIRROR_DIRECT].count == 1 && reads[MIRROR].count == 1);
    open_cache(8, CHECK_FIRST, true);
    drive.is_wrong[MIRROR_DIRECT] = true;
    for (int32_t e = 0; e < 4; e++) REQUIRE(!use(e) && is_right((uint32_t)e));
    REQUIRE(file.place_count == 1 && reads[MIRROR_DIRECT].count <= 2 && !reads[MIRROR].count && reads[PACK].count == PARTS);
    return 0;
}

/* The mirror has what the pack has lost, and the pack is read on. */
static int read_the_mirror_alone(void) {
    open_cache(8, CHECK_FIRST, true);
    drive.failures[PACK_DIRECT] = drive.failures[PACK] = EIO;
    for (int32_t e = 0; e < 4; e++) REQUIRE(!use(e) && is_right((uint32_t)e));
    REQUIRE(file.place_count == 2 && reads[MIRROR].count);
    drive.failures[MIRROR_DIRECT] = drive.failures[MIRROR] = ENXIO;
    REQUIRE(use(5) == CACHE_READ_FAILED && error.expert == 5 && error.place <= 1);
    REQUIRE(strstr(error.message, error.place ? "the mirror: " : "the pack: "));
    open_cache(8, CHECK_FIRST, true);
    drive.is_wrong[PACK_DIRECT] = drive.is_wrong[PACK] = drive.is_wrong[MIRROR_DIRECT] = true;
    REQUIRE(use(6) == CACHE_DIGEST_DIFFERS && error.place == 0 && file.place_count == 2);
    return 0;
}

/* ---- what is counted ---- */

static int count_calls(void) {
    int32_t two[] = {0, 1}, many[MANY_TOKENS] = {0};
    open_cache(8, CHECK_FIRST, false);
    struct cache_statistics *statistics = cache.statistics;
    REQUIRE(!cache_use(&cache, 0, 0, two, 2, 1, &error) && !cache_use(&cache, 0, 1, two, 1, 1, &error) && !statistics->decoding_count);
    REQUIRE(statistics->routed_count == 2); /* not for the last layer */
    cache_release(&cache, 0);
    REQUIRE(statistics->decoding_count == 1 && statistics->decoded_count == 2 && statistics->decoded_length == 3 * SLOT);
    REQUIRE(statistics->decoding_nanoseconds > 0 && statistics->decoding_nanoseconds < 60000000000);
    cache_release(&cache, 0); /* no call since */
    REQUIRE(!cache_use(&cache, 0, 0, many, MANY_TOKENS, 1, &error));
    cache_release(&cache, 0);
    REQUIRE(statistics->decoding_count == 1 && statistics->hit_count == 1 && statistics->miss_count == 3 && !statistics->fault_count);
    REQUIRE(!cache_use(&cache, 0, 0, many, MANY_TOKENS - 1, 1, &error));
    cache_release(&cache, 0);
    REQUIRE(statistics->decoding_count == 2 && statistics->decoded_count == 2 + MANY_TOKENS - 1);
    REQUIRE(!cache_bring(&cache, 15, &error) && is_right(15) && statistics->fault_count == 1);
    REQUIRE(!cache_use(&cache, 0, 0, two, 1, 0, &error) && statistics->hit_count == 2); /* no experts at all */
    REQUIRE(statistics->wait_nanoseconds > 0 && statistics->wait_nanoseconds < 60000000000);
    REQUIRE(statistics->memory == 9 * SLOT && statistics->budget == 8 * SLOT && statistics->slots_length == statistics->resident_length);
    cache_resize(&cache, 4 * SLOT);
    REQUIRE(statistics->memory == 4 * SLOT && statistics->budget == 3 * SLOT && statistics->evicted_count == 1 && !statistics->holds_all);
    cache_resize(&cache, 17 * SLOT);
    for (int32_t e = 0; e < 16; e++) REQUIRE(!cache_use(&cache, 0, (uint32_t)e / 8, (int32_t[]){e % 8}, 1, 1, &error));
    REQUIRE(statistics->holds_all);
    return 0;
}

/* Of layers for drafts nothing is counted but their lookups. */
static int count_drafts(void) {
    int32_t one = 3;
    layers[1].is_rare = true;
    open_cache(8, CHECK_FIRST, false);
    const struct cache_statistics *statistics = cache.statistics;
    for (int i = 0; i < 3; i++) REQUIRE(!cache_use(&cache, 0, 1, &one, 1, 1, &error));
    REQUIRE(!use(0) && statistics->draft_miss_count == 1 && statistics->draft_hit_count == 2);
    REQUIRE(statistics->miss_count == 1 && !statistics->hit_count && !statistics->routed_count); /* the first is the last layer */
    cache_release(&cache, 0);
    REQUIRE(statistics->decoding_count == 1 && statistics->decoded_length == SLOT);
    layers[1].is_rare = false;
    return 0;
}

static void make_model(const char *folder) {
    const char *names[] = {"pack", "mirror"};
    char path[PATH_LENGTH];
    for (uint64_t i = 0; i < sizeof content; i++) content[i] = (char)(i * 11 + i / 256 * 3 + i / 65536);
    for (uint32_t i = 0; i < LAYERS; i++) layers[i] = (struct layer){i, i * PER_LAYER, PER_LAYER, PARTS, 0, false};
    for (uint32_t e = 0; e < COUNT; e++) {
        const uint64_t lengths[PARTS] = {FIRST, SECOND, THIRD};
        const uint32_t starts[PARTS] = {100, 100 + FIRST + GAP, 3 * PAGE + 7};
        layers_of[e] = e / PER_LAYER;
        for (uint32_t p = 0; p < PARTS; p++) {
            uint64_t offset = offset_of(e, p);
            parts[e * MAX_PARTS + p] = (struct part){offset, lengths[p], moepack_xxh3(content + offset, lengths[p]), 0, starts[p], true, false};
        }
    }
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        descriptors[2 * i] = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
        descriptors[2 * i + 1] = open(path, O_RDWR);
        if (write(descriptors[2 * i], content, sizeof content) != (ssize_t)sizeof content) printf("%s is not written\n", path);
    }
}

int main(int argument_count, char **arguments) {
    if (argument_count < 2) return 2;
    alarm(100);
    make_model(arguments[1]);
    int (*const stories[])(void) = {read_whole_pages, read_as_it_lies, read_together, read_edges, fail_to_open, fail_to_read, find_wrong_bytes,
        check_later, choose_a_place, read_both, leave_a_bad_mirror, read_the_mirror_alone, count_calls, count_drafts};
    for (unsigned i = 0; i < sizeof stories / sizeof *stories; i++) {
        if (stories[i]()) return 1;
        close_cache();
    }
    return 0;
}
