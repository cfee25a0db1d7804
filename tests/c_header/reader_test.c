/* Shows what moepack.h says of packs; test_c_header.py compares it with what Python says.
 *
 *     reader_test check PACK...   open, and use every record
 *     reader_test list PACK...    the same, and read every part and check its digest
 *     reader_test parts PACK      read all experts to separate addresses, and count the reads
 *     reader_test headers PACK... read the headers of the first six shards
 *     reader_test round           round ranges to blocks
 *     reader_test misuse PACK     ask for what there is not
 *     reader_test starve PACK     open it while one system call or allocation after the other fails
 *
 * Exits with 1 where a pack was refused; the last line about a pack says whether it was. */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../support/rank_meanwhile.c"

/* A machine at its worst: calls are interrupted, reads give less than was asked for, and call
 * number `failing` fails. What the header calls is replaced by these. */
static int calls, failing = -1, reads;
static size_t longest_read = 1000;

static int fails(int number) {
    if (calls++ != failing) return 0;
    errno = number;
    return 1;
}

static int interrupts(void) {
    static unsigned turn;
    if (longest_read == SIZE_MAX) return 0; /* a machine at its best */
    errno = EINTR;
    return turn++ % 2 == 0;
}

static void *test_malloc(size_t size) { return fails(ENOMEM) ? NULL : malloc(size); }
static void *test_calloc(size_t n, size_t size) { return fails(ENOMEM) ? NULL : calloc(n, size); }
static int test_fstat(int fd, struct stat *s) { return fails(EIO) ? -1 : fstat(fd, s); }
static int test_fcntl(int fd, int what, int flags) {
    return fails(EBADF) ? -1 : fcntl(fd, what, flags);
}
static int test_open(const char *path, int flags) {
    rank_meanwhile(path);
    return interrupts() || fails(EMFILE) ? -1 : open(path, flags);
}
static void *test_mmap(void *at, size_t length, int access, int flags, int fd, off_t offset) {
    return fails(ENOMEM) ? MAP_FAILED : mmap(at, length, access, flags, fd, offset);
}
static ssize_t test_pread(int fd, void *to, size_t length, off_t offset) {
    reads++;
    return interrupts() ? -1 : pread(fd, to, length < longest_read ? length : longest_read, offset);
}
#ifdef _GNU_SOURCE
static ssize_t test_preadv(int fd, const struct iovec *to, int count, off_t offset) {
    struct iovec some[64];
    size_t left = longest_read;
    int i;
    for (i = 0; i < count && left; i++) {
        some[i] = to[i];
        if (some[i].iov_len > left) some[i].iov_len = left;
        left -= some[i].iov_len;
    }
    reads++;
    return interrupts() ? -1 : preadv(fd, some, i, offset);
}
#endif

#define malloc test_malloc
#define calloc test_calloc
#define fstat(fd, status) test_fstat(fd, status)
#define fcntl test_fcntl
#define open test_open
#define mmap test_mmap
#define pread test_pread
#define preadv test_preadv
#define MOEPACK_IMPLEMENTATION
#include "moepack.h"
#undef malloc
#undef open

typedef struct state {
    moepack pack;
    moepack_error error;
    int *fds; /* NULL where nothing is read */
} state;

/* Read a range into memory that has no byte more, since a sanitizer watches; NULL where it fails. */
static char *read_range(state *s, uint32_t file, moepack_range range, moepack_code *code) {
    char *bytes = (char *)malloc((size_t)range.length + 1);
    assert(bytes);
    *code = moepack_read_range(&s->pack, s->fds[file], file, &range, bytes, &s->error);
    if (!*code) return bytes;
    free(bytes);
    return NULL;
}

static moepack_code read_part(state *s, const moepack_part *part) {
    moepack_range range = moepack_round_range(part->offset, part->length, 512);
    moepack_code code;
    char *bytes = (char *)malloc((size_t)part->length), *rounded;
    assert(bytes);
    code = moepack_read(&s->pack, s->fds[part->file], part->file, part->offset, part->length,
                        bytes, &s->error);
    if (!code) code = moepack_check_part(&s->pack, part, bytes, &s->error);
    if (!code) {
        printf("bytes %016" PRIx64 "\n", moepack_xxh3(bytes, (size_t)part->length));
        rounded = read_range(s, part->file, range, &code);
        assert(rounded && memcmp(rounded + range.lead, bytes, (size_t)part->length) == 0);
        free(rounded);
    }
    free(bytes);
    return code;
}

static void print_digest(int known, uint64_t digest) {
    if (known) printf(" %016" PRIx64, digest);
    else printf(" None");
}

static moepack_code list_part(state *s, const moepack_family *family, uint32_t expert, uint32_t p) {
    const moepack_part_kind *kind = moepack_part_kind_at(&s->pack, family, p);
    moepack_part part;
    moepack_origin origin;
    moepack_code code;
    uint32_t found = UINT32_MAX;
    assert(!moepack_find_part(&s->pack, family, kind->name, &found, NULL) && found == p);
    code = moepack_locate_part(&s->pack, family, expert, p, &part, &s->error);
    if (!code) code = moepack_find_origin(&s->pack, family, expert, p, &origin, &s->error);
    if (code) return code;
    assert(part.kind == kind);
    printf("part %" PRIu32 " %s %" PRIu32 " %s %s %" PRIu32, family->layer, family->name, expert,
           kind->name, kind->type_name, kind->type_id);
    printf(" %" PRIu32 " %" PRIu64, part.file, part.offset);
    if (part.apart) printf(" None");
    else printf(" %" PRIu64, part.offset_in_blob);
    printf(" %" PRIu64, part.length);
    print_digest(part.has_digest, part.digest);
    printf(" %" PRIu32 " %" PRIu64 "\n", origin.shard, origin.offset);
    return s->fds ? read_part(s, &part) : MOEPACK_OK;
}

/* Read by a plan what was read before, as a queue of reads would, and find the same bytes. */
static void follow_plan(state *s, const moepack_family *family, uint32_t expert, uint32_t block,
                        void *const *addresses) {
    moepack_part_read reads[64];
    uint32_t i, p = 0, count = 77;
    assert(!moepack_plan_parts(&s->pack, family, expert, block, addresses, reads, &count, NULL));
    for (i = 0; i < count; i++) {
        const moepack_part_read *r = reads + i;
        moepack_code code;
        char *bytes = read_range(s, r->part.file, r->range, &code);
        assert(bytes && r->range.offset % block == 0 && r->range.length % block == 0);
        while (!addresses[p]) p++;
        assert(r->p == p && r->address == addresses[p]);
        p++;
        if (r->is_direct)
            assert(!r->range.lead && r->range.length == r->part.length &&
                   (uintptr_t)r->address % block == 0);
        assert(memcmp(bytes + r->range.lead, r->address, (size_t)r->part.length) == 0);
        free(bytes);
    }
    while (p < family->parts_per_blob) assert(!addresses[p++]);
}

/* Read all parts but number `left_out` to addresses that start `more` bytes after a page. */
static moepack_code scatter(state *s, const moepack_family *family, uint32_t expert, uint32_t block,
                            size_t more, uint32_t left_out) {
    void *memory[64] = {NULL}, *addresses[64] = {NULL};
    moepack_code code;
    moepack_part part;
    uint32_t p;
    for (p = 0; p < family->parts_per_blob; p++) {
        const size_t length = (size_t)moepack_part_kind_at(&s->pack, family, p)->length;
        if (p == left_out) continue;
        assert(!posix_memalign(memory + p, 4096, length + more));
        addresses[p] = (char *)memory[p] + more;
        memset(addresses[p], 0xA5, length);
    }
    code = moepack_read_parts(&s->pack, s->fds, family, expert, block, addresses, &s->error);
    if (!code) follow_plan(s, family, expert, block, addresses);
    for (p = 0; p < family->parts_per_blob && !code; p++) {
        if (p == left_out) continue;
        assert(!moepack_locate_part(&s->pack, family, expert, p, &part, NULL));
        code = moepack_check_part(&s->pack, &part, addresses[p], &s->error);
        if (!code) { /* the digest may be unknown */
            char *bytes = read_range(s, part.file,
                                     moepack_round_range(part.offset, part.length, 1), &code);
            assert(bytes && memcmp(bytes, addresses[p], (size_t)part.length) == 0);
            free(bytes);
        }
    }
    for (p = 0; p < family->parts_per_blob; p++) free(memory[p]);
    return code;
}

static moepack_code list_blob(state *s, const moepack_family *family, uint32_t expert) {
    moepack_blob blob;
    uint32_t p;
    moepack_code code = moepack_locate_blob(&s->pack, family, expert, &blob, &s->error);
    if (code) return code;
    printf("blob %" PRIu32 " %s %" PRIu32, family->layer, family->name, expert);
    if (blob.apart) printf(" None None");
    else printf(" %" PRIu32 " %" PRIu64, blob.file, blob.offset);
    printf(" %" PRIu64 " %" PRIu32, blob.length, blob.rank);
    if (blob.measured) printf(" %" PRIu64 "\n", blob.hotness);
    else printf(" None\n");
    if (blob.apart) { /* who does not look reads nothing */
        char byte;
        assert(moepack_read(&s->pack, s->fds ? s->fds[blob.file] : -1, blob.file, blob.offset,
                            blob.length, &byte, NULL) == MOEPACK_ERR_BUFFER);
    }
    for (p = 0; p < family->parts_per_blob && !code; p++) code = list_part(s, family, expert, p);
    if (code || !s->fds) return code;
    code = scatter(s, family, expert, 1, expert % 2, UINT32_MAX);
    if (!code) code = scatter(s, family, expert, 4096, expert % 2, UINT32_MAX);
    if (!code) code = scatter(s, family, expert, 64, 0, expert % family->parts_per_blob);
    return code;
}

/* A name behind the family's own part kinds is found only where it is one of its own as well. */
static void check_names(state *s, const moepack_family *family) {
    uint32_t i, p, count = family->parts_per_blob;
    uint64_t behind = (uint64_t)family->first_part_kind + count;
    moepack_code expected = MOEPACK_ERR_NO_SUCH;
    const char *name;
    assert(!moepack_part_kind_at(&s->pack, family, count));
    if (behind == s->pack.part_kinds.count) return;
    name = s->pack.part_kinds.records + behind * s->pack.part_kinds.record_length;
    for (i = 0; i < count; i++)
        if (strcmp(moepack_part_kind_at(&s->pack, family, i)->name, name) == 0)
            expected = MOEPACK_OK;
    assert(moepack_find_part(&s->pack, family, name, &p, NULL) == expected);
}

static moepack_code list_family(state *s, uint32_t number) {
    const moepack_family *family = moepack_family_at(&s->pack, number), *found = NULL;
    uint32_t expert, first = number;
    moepack_code code = MOEPACK_OK;
    assert(!moepack_find_family(&s->pack, family->layer, family->name, &found, NULL));
    assert(found == family);
    check_names(s, family);
    while (first && moepack_family_at(&s->pack, first - 1)->layer == family->layer) first--;
    assert(!moepack_find_family(&s->pack, family->layer, NULL, &found, NULL));
    assert(found == moepack_family_at(&s->pack, first));
    for (expert = 0; expert < family->expert_count && !code; expert++)
        code = list_blob(s, family, expert);
    return code;
}

static moepack_code list_ranks(state *s) {
    uint32_t rank;
    for (rank = 0; rank < s->pack.blobs.count; rank++) {
        const moepack_family *family;
        uint32_t expert;
        moepack_code code = moepack_at_rank(&s->pack, rank, &family, &expert, &s->error);
        if (code) return code;
        printf("rank %" PRIu32 " %" PRIu32 " %s %" PRIu32 "\n", rank, family->layer, family->name,
               expert);
    }
    return MOEPACK_OK;
}

/* Within a budget of most of `tiny`, and of all of any pack; also with too little room. */
static moepack_code list_hottest(state *s, const char *name, uint64_t budget) {
    moepack_hot_expert *list;
    uint32_t i, count = 77, again = 77;
    moepack_code code = moepack_hottest(&s->pack, name, budget, NULL, 0, &count, &s->error);
    assert(!code || count == 77);
    if (code) return code;
    list = (moepack_hot_expert *)malloc(count * sizeof *list + 1);
    assert(list);
    assert(!moepack_hottest(&s->pack, name, budget, list, count / 2, &again, NULL));
    assert(again == count);
    assert(!moepack_hottest(&s->pack, name, budget, list, count, &again, NULL) && again == count);
    for (i = 0; i < count; i++) {
        printf("hot %" PRIu32 " %s %" PRIu32 " %" PRIu32 " %" PRIu64, list[i].family->layer,
               list[i].family->name, list[i].expert, list[i].rank, list[i].length);
        if (list[i].measured) printf(" %" PRIu64 "\n", list[i].hotness);
        else printf(" None\n");
    }
    free(list);
    return MOEPACK_OK;
}

static moepack_code list_tensor(state *s, uint32_t n) {
    moepack_tensor tensor, found;
    moepack_range range;
    char *bytes;
    const char *c;
    moepack_code code = moepack_tensor_at(&s->pack, n, &tensor, &s->error);
    if (code) return code;
    assert(!moepack_find_tensor(&s->pack, tensor.name, &found, NULL));
    assert(found.name == tensor.name);
    printf("tensor ");
    for (c = tensor.name; *c; c++) printf("%02x", (unsigned)(uint8_t)*c);
    printf(" %s %" PRIu32 " %" PRIu32, tensor.type_name, tensor.type_id, tensor.flags);
    printf(" %" PRIu32 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64, tensor.dimension_count,
           tensor.ne[0], tensor.ne[1], tensor.ne[2], tensor.ne[3]);
    printf(" %" PRIu32 " %" PRIu64 " %" PRIu64, tensor.file, tensor.offset, tensor.length);
    print_digest(tensor.has_digest, tensor.digest);
    printf(" %" PRIu32 " %" PRIu64 "\n", tensor.origin.shard, tensor.origin.offset);
    if (!s->fds) return MOEPACK_OK;
    range = moepack_round_range(tensor.offset, tensor.length, 4096);
    bytes = read_range(s, tensor.file, range, &code);
    if (!bytes) return code;
    code = moepack_check_tensor(&s->pack, &tensor, bytes + range.lead, &s->error);
    if (!code)
        printf("bytes %016" PRIx64 "\n", moepack_xxh3(bytes + range.lead, (size_t)tensor.length));
    free(bytes);
    return code;
}

static moepack_code list_tensors(state *s) {
    moepack_code code = moepack_check_tensor_records(&s->pack, &s->error);
    uint32_t n;
    for (n = 0; n < s->pack.tensors.count && !code; n++) code = list_tensor(s, n);
    return code;
}

static moepack_code list_headers(state *s) {
    uint32_t shard;
    for (shard = 0; shard < 6; shard++) {
        moepack_shard_header header;
        char *bytes;
        moepack_code code = moepack_find_header(&s->pack, shard, &header, &s->error);
        if (code == MOEPACK_ERR_NO_SUCH) {
            s->error.code = MOEPACK_OK;
            continue;
        }
        if (code) return code;
        bytes = read_range(s, header.file, moepack_round_range(header.offset, header.length, 1),
                           &code);
        if (!bytes) return code;
        assert(moepack_xxh3(bytes, (size_t)header.length) == header.digest);
        printf("header %" PRIu32 " %" PRIu32 " %" PRIu64 " %" PRIu64 " %016" PRIx64 "\n", shard,
               header.file, header.offset, header.length, header.digest);
        free(bytes);
    }
    return MOEPACK_OK;
}

static moepack_code open_files(state *s) {
    uint32_t i, count = (uint32_t)s->pack.files.count;
    moepack_code code = MOEPACK_OK;
    s->fds = (int *)malloc(count * sizeof *s->fds);
    assert(s->fds);
    for (i = 0; i < count; i++) s->fds[i] = -1;
    for (i = 0; i < count && !code; i++) {
        code = moepack_file_fd(&s->pack, i, 0, s->fds + i, &s->error);
    }
    return code;
}

static void close_files(state *s) {
    uint32_t i;
    for (i = 0; s->fds && i < (uint32_t)s->pack.files.count; i++)
        if (s->fds[i] >= 0) close(s->fds[i]);
    free(s->fds);
}

static moepack_code list_all(state *s) {
    uint32_t i;
    moepack_code code = MOEPACK_OK;
    for (i = 0; !code && i < s->pack.families.count; i++) code = list_family(s, i);
    if (!code) code = list_ranks(s);
    if (!code) code = list_hottest(s, NULL, 40000);
    if (!code) code = list_hottest(s, "ffn_chexps", 40000);
    if (!code) code = list_hottest(s, NULL, UINT64_C(1) << 62);
    return code ? code : list_tensors(s);
}

/* `mode` is "check", "list" or "headers". */
static int list_pack(const char *path, const char *mode) {
    state s;
    moepack_code code;
    memset(&s, 0, sizeof s);
    printf("pack %s\n", path);
    code = moepack_open(path, &s.pack, &s.error);
    assert(!code == !!s.pack.index_name[0]);
    if (!code && strcmp(mode, "check") != 0) code = open_files(&s);
    if (!code) code = strcmp(mode, "headers") == 0 ? list_headers(&s) : list_all(&s);
    close_files(&s);
    assert(code == s.error.code);
    if (code) printf("refused %s %s\n", moepack_code_name(code), s.error.message);
    else printf("sound\n");
    moepack_close(&s.pack); /* also where it could not be opened, and twice */
    moepack_close(&s.pack);
    assert(!s.pack.header && !s.pack.layers && !s.pack.path);
    return code != MOEPACK_OK;
}

static int count_reads(const char *path) {
    state s;
    uint32_t i, expert, before;
    memset(&s, 0, sizeof s);
    assert(!moepack_open(path, &s.pack, NULL) && !open_files(&s));
    longest_read = SIZE_MAX;
    for (i = 0; i < s.pack.families.count; i++) {
        const moepack_family *family = moepack_family_at(&s.pack, i);
        for (expert = 0; expert < family->expert_count; expert++) {
            void *addresses[64];
            uint32_t p;
            for (p = 0; p < family->parts_per_blob; p++)
                assert(!posix_memalign(addresses + p, 4096,
                                       moepack_part_kind_at(&s.pack, family, p)->length));
            before = (uint32_t)reads;
            if (moepack_read_parts(&s.pack, s.fds, family, expert, 1, addresses, &s.error))
                printf("%s %s\n", moepack_code_name(s.error.code), s.error.message);
            else
                printf("%" PRIu32 " %" PRIu32 ": %" PRIu32 "\n", family->layer, expert,
                       (uint32_t)reads - before);
            for (p = 0; p < family->parts_per_blob; p++) free(addresses[p]);
        }
    }
    close_files(&s);
    moepack_close(&s.pack);
    return 0;
}

static void expect(moepack_code code, moepack_code expected, const moepack_error *error) {
    printf("%s %s\n", moepack_code_name(code), error->message);
    assert(code == expected && error->code == expected && error->message[0]);
}

static int misuse(const char *path) {
    const moepack_family *family, *other = NULL;
    moepack pack;
    moepack_error e;
    moepack_blob blob;
    moepack_part part;
    moepack_origin origin;
    moepack_tensor tensor;
    void *addresses[64];
    uint32_t n = 77, files;
    int fd = -1, *fds;
    char text[8] = "", longer[4096];
    assert(moepack_open("/nowhere/at/all", &pack, NULL) == MOEPACK_ERR_NOT_A_PACK);
    assert(!moepack_open(path, &pack, &e));
    files = (uint32_t)pack.files.count;
    family = moepack_family_at(&pack, 0);
    assert(family && !moepack_family_at(&pack, (uint32_t)pack.families.count));
    assert(moepack_file_at(&pack, 0) && !moepack_file_at(&pack, (uint32_t)pack.files.count));
    expect(moepack_find_family(&pack, 4096, NULL, &other, &e), MOEPACK_ERR_NO_SUCH, &e);
    expect(moepack_find_family(&pack, pack.layer_count, NULL, &other, &e), MOEPACK_ERR_NO_SUCH, &e);
    expect(moepack_find_family(&pack, UINT32_MAX, NULL, &other, &e), MOEPACK_ERR_NO_SUCH, &e);
    expect(moepack_find_family(&pack, 0, "ffn", &other, &e), MOEPACK_ERR_NO_SUCH, &e);
    expect(moepack_find_part(&pack, family, "ffn_up_exps", &n, &e), MOEPACK_ERR_NO_SUCH, &e);
    expect(moepack_locate_blob(&pack, family, family->expert_count, &blob, &e),
           MOEPACK_ERR_NO_SUCH, &e);
    expect(moepack_locate_part(&pack, family, UINT32_MAX, 0, &part, &e), MOEPACK_ERR_NO_SUCH, &e);
    expect(moepack_locate_part(&pack, family, 0, family->parts_per_blob, &part, &e),
           MOEPACK_ERR_NO_SUCH, &e);
    expect(moepack_find_origin(&pack, family, family->expert_count, 0, &origin, &e),
           MOEPACK_ERR_NO_SUCH, &e);
    expect(moepack_find_origin(&pack, family, 0, family->parts_per_blob, &origin, &e),
           MOEPACK_ERR_NO_SUCH, &e);
    expect(moepack_at_rank(&pack, (uint32_t)pack.blobs.count, &other, &n, &e),
           MOEPACK_ERR_NO_SUCH, &e);
    expect(moepack_tensor_at(&pack, (uint32_t)pack.tensors.count, &tensor, &e),
           MOEPACK_ERR_NO_SUCH, &e);
    expect(moepack_find_tensor(&pack, "output\nnorm", &tensor, &e), MOEPACK_ERR_NO_SUCH, &e);
    memset(longer, 'x', 256);
    longer[256] = 0;
    expect(moepack_find_tensor(&pack, longer, &tensor, &e), MOEPACK_ERR_NO_SUCH, &e);
    expect(moepack_file_fd(&pack, files, 0, &fd, &e), MOEPACK_ERR_NO_SUCH, &e);
    expect(moepack_file_path(&pack, UINT32_MAX, text, sizeof text, &e), MOEPACK_ERR_NO_SUCH, &e);
    expect(moepack_file_path(&pack, 0, text, sizeof text, &e), MOEPACK_ERR_BUFFER, &e);
    assert(!moepack_file_path(&pack, 0, longer, sizeof longer, &e));
    printf("path %s\n", longer);
    expect(moepack_file_path(&pack, 0, longer, strlen(longer), &e), MOEPACK_ERR_BUFFER, &e);
    expect(moepack_read(&pack, -1, files, 0, 8, text, &e), MOEPACK_ERR_NO_SUCH, &e);
    expect(moepack_read(&pack, -1, 0, 0, 8, text, &e), MOEPACK_ERR_SYSTEM, &e);
    assert(e.system_error == EBADF && !other && n == 77 && fd == -1);
    expect(moepack_read(&pack, -1, 0, UINT64_MAX, 8, text, &e), MOEPACK_ERR_BUFFER, &e);
    expect(moepack_read(&pack, -1, 0, 8, UINT64_MAX, text, &e), MOEPACK_ERR_BUFFER, &e);
    assert(!moepack_read(&pack, -1, 0, 0, 0, text, &e)); /* nothing asked, nothing done */
    for (n = 0; n < 64; n++) addresses[n] = NULL;
    fds = (int *)malloc(files * sizeof *fds);
    assert(fds);
    for (n = 0; n < files; n++) fds[n] = -1;
    assert(!moepack_read_parts(&pack, fds, family, 0, 4096, addresses, &e)); /* the same */
    expect(moepack_read_parts(&pack, fds, family, family->expert_count, 1, addresses, &e),
           MOEPACK_ERR_NO_SUCH, &e);
    addresses[0] = longer;
    expect(moepack_read_parts(&pack, fds, family, 0, 1, addresses, &e), MOEPACK_ERR_SYSTEM, &e);
    expect(moepack_read_parts(&pack, fds, family, 0, 4095, addresses, &e), MOEPACK_ERR_SYSTEM, &e);
    expect(moepack_read_parts(&pack, fds, family, 0, 5000, addresses, &e), MOEPACK_ERR_SYSTEM, &e);
    free(fds);
    n = 77;
    assert(!moepack_hottest(&pack, "no such", UINT64_MAX, NULL, 0, &n, &e) && n == 0);
    assert(!moepack_hottest(&pack, NULL, 0, NULL, 0, &n, &e) && n == 0);
    assert(strcmp(moepack_code_name((moepack_code)10), "unknown") == 0);
    close(0); /* a file may have descriptor 0 */
    assert(!moepack_file_fd(&pack, 0, 0, &fd, &e) && fd == 0);
    assert(!(fcntl(fd, F_GETFL, 0) & O_NONBLOCK) && fcntl(fd, F_GETFD, 0) & FD_CLOEXEC);
    assert(!moepack_file_fd(&pack, 0, O_SYNC | O_APPEND, &fd, &e)); /* stand for O_DIRECT */
    assert(fcntl(fd, F_GETFL, 0) & O_SYNC && fcntl(fd, F_GETFL, 0) & O_APPEND);
    moepack_close(&pack);
    return 0;
}

static void check_range(uint64_t offset, uint64_t length, uint32_t block, uint64_t first,
                        uint64_t end) {
    moepack_range range = moepack_round_range(offset, length, block);
    assert(range.offset == first && range.length == end - first);
    assert(range.lead == offset - first && range.needed == offset + length - first);
}

static int round_ranges(void) {
    check_range(0, 4096, 4096, 0, 4096);
    check_range(4095, 1, 4096, 0, 4096);
    check_range(4095, 2, 4096, 0, 8192);
    check_range(4096, 4097, 4096, 4096, 12288);
    check_range(4097, 0, 4096, 4096, 8192);
    check_range(4096, 0, 4096, 4096, 4096);
    check_range(5, 7, 1, 5, 12);
    check_range(5, 7, 0, 5, 12); /* no block is one of 1 */
    check_range(5, 7, 3, 3, 12);
    check_range((UINT64_C(1) << 63) - 2, 1, 1u << 30, (UINT64_C(1) << 63) - (1u << 30),
                UINT64_C(1) << 63);
    return 0;
}

/* Opening, also where it fails, must leave nothing behind: no descriptor, no mapping. (Memory is
 * for the leak sanitizer.) `lowest` is the descriptor that was free at the start. */
static void check_leaks(int lowest) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[8192];
    while (maps && fgets(line, sizeof line, maps)) assert(!strstr(line, "/index.bin"));
    if (maps) fclose(maps);
    assert(open("/dev/null", O_RDONLY) == lowest);
}

static int starve(const char *path, int lowest) {
    moepack_error error;
    moepack pack;
    for (failing = 0;; failing++) {
        calls = 0;
        if (!moepack_open(path, &pack, &error)) break;
        assert(error.code == MOEPACK_ERR_SYSTEM && error.system_error);
        assert(!pack.header && !pack.path && !pack.layers);
        printf("%s\n", error.message);
        check_leaks(lowest);
        close(lowest);
    }
    moepack_close(&pack);
    return 0;
}

int main(int argc, char **argv) {
    int i, refused = 0, lowest = open("/dev/null", O_RDONLY);
    close(lowest);
    if (argc == 2 && strcmp(argv[1], "round") == 0) return round_ranges();
    if (argc == 3 && strcmp(argv[1], "parts") == 0) return count_reads(argv[2]);
    if (argc == 3 && strcmp(argv[1], "misuse") == 0) return misuse(argv[2]);
    if (argc == 3 && strcmp(argv[1], "starve") == 0) return starve(argv[2], lowest);
    if (argc < 3) return 2;
    for (i = 2; i < argc; i++) refused |= list_pack(argv[i], argv[1]);
    check_leaks(lowest);
    return refused;
}
