/*
 * Loaded before a llama.cpp program (LD_PRELOAD): brings the experts that its routers choose.
 *
 * The program maps its model; libllama sets a callback for each graph. Both calls come by here.
 * Whenever a router has chosen, the choice goes to the pager, a process of its own, and the program
 * waits until the pages of these experts are mapped. What to read, to keep and to evict is the
 * pager's matter alone. No struct of llama.cpp is known here but the first 80 bytes of ggml_tensor
 * (type, ne, nb), and they are held against ggml_nelements.
 *
 * What lies where experts are not resident ("the base") is never zeros:
 * - in a GGUF as it lies: the file itself, as the program would have it without us;
 * - in the image of a pack: nothing that can be read: userfaultfd hands each access to the pager.
 *
 * messages.py in this folder has the same constants and structs.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define ALIAS(name) EXPORT __attribute__((alias(#name)))
#define complain(...) dprintf(2, "moepack: " __VA_ARGS__)
/* Find the real function of a name in the library that calls, once. */
#define FIND(variable, name) \
    if (!variable) variable = (__typeof__(variable))find(name, __builtin_return_address(0))

enum {
    VERSION = 1,
    PAGE = 4096,
    MAX_CONTEXTS = 64,
    MAX_REGIONS = 16384,
    RING_WORDS = 1 << 18,
    MAX_OPS = 2000,
    MANY_ROWS = 64,      /* of tokens: the pager reads ahead, so it is told at once */
    TYPE_I32 = 26,       /* GGML_TYPE_I32 */
    STATUS_FAILED = -1,  /* GGML_STATUS_FAILED */
    STATUS_FOREIGN = 2,  /* of an answer: these are no experts of the model */
    EXIT_CODE = 70,      /* EX_SOFTWARE of sysexits.h: the pager is gone */
};

/* With the layer of a choice: it is waited for; its experts are copies, which need not be brought. */
static const uint32_t AWAITED = 1u << 31, COPIED = 1u << 30;

/* What the pager tells: a message is an array of these. */
enum { OP_MAP, OP_RESIDENT, OP_EVICT, OP_RESTORE, OP_DENSE, OP_WANTED, OP_WATCH, OP_ANSWER, OP_DONE };
struct op {
    uint32_t kind, layer, expert, file;
    uint64_t offset, length, source;
};

/* What the program tells. */
enum { SAY_REGION, SAY_CHOSEN, SAY_HALF_FULL, SAY_DONE, SAY_CONTEXT, SAY_NO_FAULTS, SAY_REQUESTS };
struct said {
    uint32_t kind, index;
    uint64_t sequence, address, length, offset;
};

struct welcome {
    uint32_t version, layer_count, expert_count, file_count;
    uint64_t experts_offset; /* in the image of a pack; 0 where shards are mapped */
    uint64_t process;        /* the pager's */
};

struct file_name { /* a file that programs map */
    uint64_t device, inode;
};

struct ring { /* choices of one context, in shared memory; the pager reads up to `head` */
    _Atomic uint64_t head;
    char apart[56];
    _Atomic uint64_t tail;
    char apart_too[PAGE - 72];
    uint32_t words[RING_WORDS];
};

typedef bool (*eval_callback)(void *tensor, bool ask, void *data);

struct context { /* of llama.cpp, by its scheduler */
    void *scheduler, *data;
    eval_callback callback;
    bool asked;       /* the program's own callback wants the tensor */
    bool is_watched;  /* in this graph, choices are announced */
    bool is_computing, is_foreign, failed;
    uint32_t layer;
    uint8_t *used; /* by expert: chosen in `layer`, and not yet known to be computed */
    int32_t *ids;
    size_t id_room;
    struct ring *ring;
    uint64_t last_use;
};

struct region { /* a part of a file as it is mapped: [start, end) of the file lies at `address` */
    char *address;
    uint64_t start, end;
    uint32_t file;
};

struct request {
    uint64_t sequence;
    bool is_answered;
    int status;
    struct request *next;
};

static pthread_mutex_t state_lock = PTHREAD_MUTEX_INITIALIZER;  /* residents, contexts, requests */
static pthread_mutex_t region_lock = PTHREAD_MUTEX_INITIALIZER; /* regions and their mappings */
static int pager = -1, pool = -1, image = -1, faults = -1;
static struct welcome model;
static struct file_name *files;
static int *descriptors; /* of `files`, for mapping them again; -1: not mapped yet */
static struct ring *rings;
static uint8_t *resident; /* by layer and expert */
static uint8_t *in_place; /* by layer: its experts are used where they are mapped; last: any tensor is */
static struct context contexts[MAX_CONTEXTS];
static struct region regions[MAX_REGIONS];
static unsigned context_count, region_count;
static struct request *requests;
static pthread_cond_t answered = PTHREAD_COND_INITIALIZER;
static uint64_t last_sequence, use_count;
static atomic_bool is_watching = true;

static __typeof__(&mmap) real_mmap;

static void end_program(const char *problem) {
    complain("%s; this program cannot go on\n", problem);
    _exit(EXIT_CODE);
}

/* Find a function as the library that calls has it: programs load theirs locally. */
static void *find(const char *name, void *caller) {
    void *function = dlsym(RTLD_NEXT, name);
    Dl_info library;
    void *handle = function || !dladdr(caller, &library) ? NULL : dlopen(library.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (handle) function = dlsym(handle, name);
    if (!function) end_program("ggml's functions are not found in this program");
    return function;
}

/* A program that moepack started ends with it, even before it has mapped the model. */
__attribute__((constructor)) static void at_start(void) {
    const char *parent = getenv("MOEPACK_PARENT");
    FIND(real_mmap, "mmap");
    if (parent && atoi(parent) == getppid()) prctl(PR_SET_PDEATHSIG, SIGTERM);
}

/* ---- talking to the pager ---- */

static void tell(struct said message, int descriptor) {
    struct iovec part = {&message, sizeof message};
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct msghdr whole = {.msg_iov = &part, .msg_iovlen = 1};
    if (descriptor >= 0) {
        whole.msg_control = control;
        whole.msg_controllen = sizeof control;
        struct cmsghdr *head = CMSG_FIRSTHDR(&whole);
        *head = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(head), &descriptor, sizeof descriptor);
    }
    while (sendmsg(pager, &whole, MSG_NOSIGNAL) < 0)
        if (errno != EINTR) end_program("the pager, which brings the experts, has ended");
}

/* Send a request and wait for its answer; called and left with state_lock held. */
static int ask(struct said message, int descriptor) {
    struct request request = {.sequence = ++last_sequence, .next = requests};
    requests = &request;
    message.sequence = request.sequence;
    tell(message, descriptor);
    while (!request.is_answered) pthread_cond_wait(&answered, &state_lock);
    struct request **link = &requests;
    while (*link != &request) link = &(*link)->next;
    *link = request.next;
    return request.status;
}

static void answer(uint64_t sequence, int status) {
    pthread_mutex_lock(&state_lock);
    for (struct request *one = requests; one; one = one->next)
        if (one->sequence == sequence) *one = (struct request){sequence, true, status, one->next};
    pthread_cond_broadcast(&answered);
    pthread_mutex_unlock(&state_lock);
}

/* ---- pages ---- */

static bool watch_faults(char *address, uint64_t length, uint64_t mode) {
    struct uffdio_register range = {.range = {(uintptr_t)address, length}, .mode = mode};
    return ioctl(faults, UFFDIO_REGISTER, &range) == 0;
}

/* Do something to the pages of a file's range, wherever it is mapped; return 0 or an errno. */
static int each_mapping(const struct op *op, int (*work)(char *, uint64_t, const struct op *, uint64_t)) {
    int error = 0;
    pthread_mutex_lock(&region_lock);
    for (unsigned i = 0; i < region_count && !error; i++) {
        struct region *region = &regions[i];
        uint64_t start = op->offset > region->start ? op->offset : region->start;
        uint64_t end = op->offset + op->length < region->end ? op->offset + op->length : region->end;
        if (region->file == op->file && start < end)
            error = work(region->address + (start - region->start), end - start, op, start - op->offset);
    }
    pthread_mutex_unlock(&region_lock);
    return error;
}

/* Map a range of a file in the place of what is there; return 0 or an errno. */
static int map_over(char *address, uint64_t length, int flags, int descriptor, uint64_t offset) {
    void *mapped = real_mmap(address, length, PROT_READ, MAP_SHARED | MAP_FIXED | flags, descriptor, (off_t)offset);
    return mapped == MAP_FAILED ? errno : 0;
}

/* Where faults are the pager's, pages have to be in the tables; the system's own are faster then. */
static int map_slot(char *address, uint64_t length, const struct op *op, uint64_t behind) {
    int error = map_over(address, length, faults >= 0 ? MAP_POPULATE : 0, pool, op->source + behind);
    if (error || faults < 0) return error;
    return watch_faults(address, length, UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR) ? 0 : errno;
}

/* Have the base there again. In an image the slot stays, but each access is a fault from now on. */
static int restore(char *address, uint64_t length, const struct op *op, uint64_t behind) {
    if (faults >= 0) return madvise(address, length, MADV_DONTNEED) ? errno : 0;
    return map_over(address, length, 0, descriptors[op->file], op->offset + behind);
}

/* Map a file of the pack, which the pager has open as `expert`. */
static int map_dense(char *address, uint64_t length, const struct op *op, uint64_t behind) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)model.process, (int)op->expert);
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return errno;
    int error = map_over(address, length, 0, descriptor, op->source + behind);
    close(descriptor);
    return error;
}

static int want(char *address, uint64_t length, const struct op *op, uint64_t behind) {
    (void)op, (void)behind;
    madvise(address, length, MADV_NORMAL);
    madvise(address, length, MADV_WILLNEED); /* as libllama asks for of the whole file */
    return 0;
}

/* Whether a graph computes with an expert, or may: of one that is not watched nothing is known. */
static bool is_in_use(uint32_t layer, uint32_t expert) {
    for (unsigned i = 0; i < context_count; i++) {
        const struct context *context = &contexts[i];
        if (context->is_computing && !context->is_watched) return true;
        if (context->used[expert] && context->layer == layer) return true;
    }
    return false;
}

static bool set_resident(const struct op *op, bool is_resident) {
    if (op->layer >= model.layer_count || op->expert >= model.expert_count) return false;
    pthread_mutex_lock(&state_lock);
    bool is_free = is_resident || !is_in_use(op->layer, op->expert);
    if (is_free) resident[(size_t)op->layer * model.expert_count + op->expert] = is_resident;
    pthread_mutex_unlock(&state_lock);
    return is_free;
}

/* ---- what the pager tells: done by a thread of our own ---- */

static struct op ops[MAX_OPS];

static void obey(size_t count) {
    struct {
        struct said said;
        uint32_t refused[MAX_OPS];
    } done = {.said = {.kind = SAY_DONE}};
    bool is_refused = false, is_asked = false; /* whether the message is to be acknowledged */
    for (size_t i = 0; i < count; i++) {
        const struct op *op = &ops[i];
        int error = 0;
        switch (op->kind) {
        case OP_EVICT:
            if ((is_refused = !set_resident(op, false))) done.refused[done.said.index++] = (uint32_t)i;
            break;
        case OP_RESTORE: error = is_refused ? 0 : each_mapping(op, restore); break;
        case OP_MAP: error = each_mapping(op, map_slot); break;
        case OP_RESIDENT: set_resident(op, true); break;
        case OP_DENSE: error = each_mapping(op, map_dense); break;
        case OP_WANTED: each_mapping(op, want); break;
        case OP_WATCH: is_watching = op->expert; break;
        case OP_ANSWER: answer(op->source, (int)op->expert); break;
        case OP_DONE: is_asked = true; break;
        }
        if (error) end_program("the system maps no more memory (see vm.max_map_count)");
    }
    size_t length = sizeof done.said + done.said.index * sizeof *done.refused;
    while (is_asked && send(pager, &done, length, MSG_NOSIGNAL) < 0)
        if (errno != EINTR) end_program("the pager, which brings the experts, has ended");
}

static void *serve(void *nothing) {
    (void)nothing;
    for (;;) {
        ssize_t length = recv(pager, ops, sizeof ops, 0);
        if (length < 0 && errno == EINTR) continue;
        if (length <= 0 || length % sizeof *ops) end_program("the pager, which brings the experts, has ended");
        obey((size_t)length / sizeof *ops);
    }
    return NULL;
}

/* For a server that knows: nothing is read ahead for a prompt that nobody waits for. */
EXPORT void moepack_set_request_count(unsigned count) {
    if (pager >= 0) tell((struct said){.kind = SAY_REQUESTS, .index = count}, -1);
}

/* ---- the first time that a file is mapped which may be the model ---- */

static void receive_welcome(void) {
    int received[3] = {-1, -1, -1}; /* files and rings, pool, image */
    char control[CMSG_SPACE(sizeof received)] = {0};
    struct iovec part = {&model, sizeof model};
    struct msghdr whole = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t length;
    while ((length = recvmsg(pager, &whole, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR) continue;
    struct cmsghdr *head = length == sizeof model ? CMSG_FIRSTHDR(&whole) : NULL;
    if (!head || model.version != VERSION) end_program("the pager is of another version, or has ended");
    memcpy(received, CMSG_DATA(head), head->cmsg_len - CMSG_LEN(0));
    pool = received[1];
    image = received[2];
    size_t names_length = ((size_t)model.file_count * sizeof *files + PAGE - 1) / PAGE * PAGE;
    size_t table_length = names_length + MAX_CONTEXTS * sizeof *rings;
    char *table = real_mmap(NULL, table_length, PROT_READ | PROT_WRITE, MAP_SHARED, received[0], 0);
    close(received[0]);
    files = (struct file_name *)table;
    rings = (struct ring *)(table + names_length);
    resident = calloc((size_t)model.layer_count * model.expert_count, 1);
    in_place = calloc((size_t)model.layer_count + 1, 1);
    descriptors = malloc(model.file_count * sizeof *descriptors);
    if (table == MAP_FAILED || !resident || !in_place || !descriptors) end_program("no memory");
    memset(descriptors, -1, model.file_count * sizeof *descriptors);
}

static void before_fork(void) {
    pthread_mutex_lock(&region_lock);
    pthread_mutex_lock(&state_lock);
}

static void after_fork(void) {
    pthread_mutex_unlock(&state_lock);
    pthread_mutex_unlock(&region_lock);
}

/* A child has no thread that obeys: slots would change under it. It gets the files as they are; of
 * an image nothing, and ends where it reads that. */
static void in_child(void) {
    for (unsigned i = 0; i < region_count; i++) {
        struct region *region = &regions[i];
        size_t length = region->end - region->start;
        if (model.experts_offset)
            real_mmap(region->address, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        else
            map_over(region->address, length, 0, descriptors[region->file], region->start);
    }
    region_count = 0;
    is_watching = false;
    close(pager);
    pager = -1;
    after_fork();
}

static void meet_pager(void) {
    const char *name = getenv("MOEPACK_PAGER");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (!name || strlen(name) + 1 >= sizeof address.sun_path) return;
    memcpy(address.sun_path + 1, name, strlen(name)); /* an abstract name: nothing to clean up */
    socklen_t length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
    pager = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (pager < 0 || connect(pager, (struct sockaddr *)&address, length))
        end_program("the pager, which brings the experts, has ended");
    receive_welcome();
    pthread_atfork(before_fork, after_fork, in_child);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the program's own */
    pthread_t thread;
    if (pthread_create(&thread, NULL, serve, NULL)) end_program("no thread");
    pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static int find_file(int descriptor) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct stat found;
    if (descriptor < 0 || fstat(descriptor, &found) || !S_ISREG(found.st_mode)) return -1;
    pthread_once(&once, meet_pager);
    if (pager < 0) return -1;
    for (uint32_t i = 0; i < model.file_count; i++)
        if (files[i].device == found.st_dev && files[i].inode == found.st_ino) return model.experts_offset ? 0 : (int)i;
    return -1;
}

/* By the system call, or by the device where containers forbid the call. */
static void open_faults(void) {
    int flags = O_CLOEXEC | O_NONBLOCK | 1 /* UFFD_USER_MODE_ONLY */;
    faults = (int)syscall(SYS_userfaultfd, flags);
    int error = errno, device = faults < 0 ? open("/dev/userfaultfd", O_RDWR | O_CLOEXEC) : -1;
    if (device >= 0) {
        faults = ioctl(device, 0xAA00 /* USERFAULTFD_IOC_NEW, of Linux 6.1 */, flags);
        close(device);
    }
    if (faults >= 0) error = 0;
    struct uffdio_api api = {.api = UFFD_API, .features = UFFD_FEATURE_MISSING_SHMEM | UFFD_FEATURE_MINOR_SHMEM};
    if (!error && ioctl(faults, UFFDIO_API, &api)) error = errno;
    if (error) {
        tell((struct said){.kind = SAY_NO_FAULTS, .index = (uint32_t)error}, -1); /* which says more */
        end_program("the system refuses userfaultfd");
    }
}

static bool trap_experts(const struct region *region) {
    uint64_t start = model.experts_offset > region->start ? model.experts_offset : region->start;
    uint64_t end = (region->end + PAGE - 1) / PAGE * PAGE;
    if (start >= end) return true;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    char *address = region->address + (start - region->start);
    if (real_mmap(address, end - start, PROT_READ, flags, -1, 0) == MAP_FAILED) return false;
    return watch_faults(address, end - start, UFFDIO_REGISTER_MODE_MISSING);
}

static void *map_model(uint32_t file, size_t length, int descriptor, off_t offset) {
    bool is_image = model.experts_offset != 0;
    void *address = real_mmap(NULL, length, PROT_READ, MAP_SHARED, is_image ? image : descriptor, offset);
    if (address == MAP_FAILED) return address;
    /* What lies around the pages that experts share is not to be read with them: other experts, all of which
     * come otherwise. */
    if (!is_image) madvise(address, length, MADV_RANDOM);
    struct region region = {address, (uint64_t)offset, (uint64_t)offset + length, file};
    pthread_mutex_lock(&region_lock);
    bool is_known = region_count < MAX_REGIONS;
    bool is_first = is_image && faults < 0;
    if (is_first) open_faults();
    if (is_known && is_image) is_known = trap_experts(&region);
    if (is_known && descriptors[file] < 0) is_known = (descriptors[file] = fcntl(descriptor, F_DUPFD_CLOEXEC, 3)) >= 0;
    if (is_known) regions[region_count++] = region;
    pthread_mutex_unlock(&region_lock);
    if (!is_known) end_program("the model cannot be mapped");
    pthread_mutex_lock(&state_lock);
    struct said message = {.kind = SAY_REGION, .index = file, .address = (uintptr_t)address, .length = length, .offset = (uint64_t)offset};
    ask(message, is_first ? faults : -1);
    pthread_mutex_unlock(&state_lock);
    return address;
}

EXPORT void *mmap(void *address, size_t length, int protection, int flags, int descriptor, off_t offset) {
    FIND(real_mmap, "mmap");
    bool may_be = descriptor >= 0 && (flags & MAP_SHARED) && !(protection & PROT_WRITE) && !(flags & MAP_FIXED);
    int file = may_be && getenv("MOEPACK_PAGER") ? find_file(descriptor) : -1;
    if (file >= 0) return map_model((uint32_t)file, length, descriptor, offset);
    return real_mmap(address, length, protection, flags, descriptor, offset);
}

ALIAS(mmap) void *mmap64(void *, size_t, int, int, int, off_t);

/* Forget what is unmapped of the regions: nothing may be mapped there any more. */
EXPORT int munmap(void *start, size_t length) {
    static __typeof__(&munmap) real;
    FIND(real, "munmap");
    if (!region_count) return real(start, length);
    char *from = start, *to = from + (length + PAGE - 1) / PAGE * PAGE;
    pthread_mutex_lock(&region_lock);
    for (unsigned i = 0; i < region_count; i++) {
        struct region old = regions[i];
        char *end = old.address + (old.end - old.start);
        if (from >= end || to <= old.address) continue;
        regions[i] = regions[--region_count];
        if (from > old.address)
            regions[region_count++] = (struct region){old.address, old.start, old.start + (uint64_t)(from - old.address), old.file};
        if (to < end && region_count < MAX_REGIONS)
            regions[region_count++] = (struct region){to, old.start + (uint64_t)(to - old.address), old.end, old.file};
        i = (unsigned)-1; /* once more: it terminates, as what is left does not touch the range */
    }
    int result = real(start, length);
    pthread_mutex_unlock(&region_lock);
    return result;
}

static bool is_model(const char *address) {
    bool is_ours = false;
    pthread_mutex_lock(&region_lock);
    for (unsigned i = 0; i < region_count; i++)
        is_ours |= address >= regions[i].address && address < regions[i].address + (regions[i].end - regions[i].start);
    pthread_mutex_unlock(&region_lock);
    return is_ours;
}

/* libllama asks for all of the file ahead; the pager asks for what is dense. */
EXPORT int posix_madvise(void *address, size_t length, int advice) {
    static __typeof__(&posix_madvise) real;
    FIND(real, "posix_madvise");
    return is_model(address) ? 0 : real(address, length, advice);
}

EXPORT int mlock(const void *address, size_t length) {
    if (!is_model(address)) return (int)syscall(SYS_mlock, address, length);
    static atomic_flag is_said = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&is_said)) complain("--mlock is left out: it would bring all experts into memory\n");
    return 0;
}

/* What has the image's path ends a byte behind the header, so that whoever reads it instead of mapping
 * it, with this library or without, comes to its end and never to zeros. Only its size is told as the
 * header has it, as libllama holds that against where tensors lie. */
static off_t size_for(FILE *file, off_t position) {
    struct stat status;
    if (position < 0 || !getenv("MOEPACK_PAGER")) return position;
    if (fstat(fileno(file), &status) || status.st_size != position) return position;
    if (find_file(fileno(file)) < 0 || !model.experts_offset || fstat(image, &status)) return position;
    return status.st_size;
}

EXPORT off_t ftello(FILE *file) {
    static __typeof__(&ftello) real;
    FIND(real, "ftello");
    return size_for(file, real(file));
}

ALIAS(ftello) off_t ftello64(FILE *);
ALIAS(ftello) long ftell(FILE *);

/* ---- what routers choose ---- */

struct tensor_head { /* of ggml_tensor, in all builds since 2023 */
    uint32_t type, others[3];
    int64_t ne[4];
    size_t nb[4];
};

static const char *(*get_name)(const void *);
static void (*get_bytes)(const void *, void *, size_t, size_t);
static int64_t (*count_elements)(const void *);

static int layer_of(const void *tensor) {
    static const char prefix[] = "ffn_moe_topk-";
    const char *name = get_name(tensor);
    if (strncmp(name, prefix, sizeof prefix - 1)) return -1;
    char *end;
    long layer = strtol(name + sizeof prefix - 1, &end, 10);
    return *end || layer < 0 || layer >= (long)model.layer_count ? -1 : (int)layer;
}

/* Read what was chosen into context->ids; return how many rows there are, and how many in each. */
static bool read_ids(struct context *context, const void *tensor, size_t *rows, size_t *columns) {
    const struct tensor_head *head = tensor;
    const int64_t *sizes = head->ne, count = count_elements(tensor);
    if (head->type != TYPE_I32 || sizes[2] != 1 || sizes[3] != 1 || sizes[0] * sizes[1] != count || head->nb[0] != 4)
        end_program("this llama.cpp lays out its tensors in another way than those that are known");
    *columns = (size_t)sizes[0];
    *rows = (size_t)sizes[1];
    if (!count) return true;
    /* A row of a view may be longer than what was chosen: it is a row of an argsort. */
    size_t length = (*rows - 1) * head->nb[1] + *columns * 4;
    if (length > context->id_room) {
        int32_t *ids = realloc(context->ids, length);
        if (!ids) return false;
        context->ids = ids;
        context->id_room = length;
    }
    get_bytes(tensor, context->ids, 0, length);
    for (size_t row = 1; row < *rows; row++)
        memmove(context->ids + row * *columns, (char *)context->ids + row * head->nb[1], *columns * 4);
    return true;
}

/* Write a choice to the ring, its layer with flags; called with state_lock held. */
static bool write_choice(struct context *context, uint32_t layer, size_t rows, size_t columns) {
    struct ring *ring = context->ring;
    struct said message = {.kind = SAY_HALF_FULL, .index = (uint32_t)(context - contexts)};
    uint64_t count = rows * columns, head = ring->head;
    if (count + 3 > RING_WORDS / 2) return complain("too many tokens at once: give a smaller -ub\n"), false;
    if (head + count + 3 - ring->tail > RING_WORDS) {
        ask(message, -1);
        if (head + count + 3 - ring->tail > RING_WORDS) return false;
    }
    uint32_t start[3] = {layer, (uint32_t)rows, (uint32_t)columns};
    for (unsigned i = 0; i < 3; i++) ring->words[head++ % RING_WORDS] = start[i];
    for (uint64_t i = 0; i < count; i++) ring->words[head++ % RING_WORDS] = (uint32_t)context->ids[i];
    bool was_half = ring->head - ring->tail > RING_WORDS / 2;
    ring->head = head;
    bool is_at_once = rows >= MANY_ROWS && !(layer & (AWAITED | COPIED));
    if (is_at_once || (!was_half && head - ring->tail > RING_WORDS / 2)) tell(message, -1);
    return true;
}

/* Tell the pager what was chosen, and wait until it is there. */
static bool bring(struct context *context, const void *tensor, uint32_t layer) {
    size_t rows, columns;
    if (!read_ids(context, tensor, &rows, &columns)) return false;
    size_t count = rows * columns;
    for (size_t i = 0; i < count; i++) /* another model's, if it has no such expert */
        if (context->ids[i] < 0 || (uint32_t)context->ids[i] >= model.expert_count) return true;
    if (!count) return true;
    const uint8_t *here = resident + (size_t)layer * model.expert_count;
    pthread_mutex_lock(&state_lock);
    context->last_use = ++use_count;
    context->layer = layer;
    memset(context->used, 0, model.expert_count);
    bool all = true, is_copied = in_place[model.layer_count] && !in_place[layer];
    for (size_t i = 0; i < count && !is_copied; i++) {
        context->used[context->ids[i]] = 1;
        all = all && here[context->ids[i]];
    }
    bool is_there = write_choice(context, layer | (all ? 0 : AWAITED) | (is_copied ? COPIED : 0), rows, columns);
    if (is_there && !all) {
        struct said message = {.kind = SAY_CHOSEN, .index = (uint32_t)(context - contexts)};
        int status = ask(message, -1);
        context->is_foreign = status == STATUS_FOREIGN;
        is_there = status == 0;
        for (size_t i = 0; i < count; i++) is_there = is_there && here[context->ids[i]];
    }
    pthread_mutex_unlock(&state_lock);
    return is_there || context->is_foreign;
}

static bool on_tensor(void *tensor, bool is_asked, void *data) {
    struct context *context = data;
    int layer = context->is_foreign ? -1 : layer_of(tensor);
    if (is_asked) {
        context->asked = context->callback && context->callback(tensor, true, context->data);
        return context->asked || layer >= 0;
    }
    if (layer >= 0 && !context->failed) context->failed = !bring(context, tensor, (uint32_t)layer);
    if (context->failed && !context->is_computing) end_program("experts could not be brought");
    if (context->failed) return false; /* the graph's status says so as well */
    return context->asked ? context->callback(tensor, false, context->data) : true;
}

static struct context *find_context(void *scheduler) {
    for (unsigned i = 0; i < context_count; i++)
        if (contexts[i].scheduler == scheduler) return &contexts[i];
    return NULL;
}

/* Find the context of a scheduler, or take one: a new one, or that which was used least recently. */
static struct context *context_of(void *scheduler) {
    struct context *context = find_context(scheduler);
    if (context) return context;
    context = &contexts[context_count < MAX_CONTEXTS ? context_count : 0];
    for (unsigned i = 0; context_count == MAX_CONTEXTS && i < MAX_CONTEXTS; i++)
        if (contexts[i].last_use < context->last_use) context = &contexts[i];
    context->scheduler = scheduler;
    context->last_use = ++use_count;
    context->is_foreign = context->is_computing = false;
    context->ring = &rings[context - contexts];
    if (!context->used) context->used = calloc(model.expert_count, 1);
    if (!context->used) end_program("no memory");
    if (context == &contexts[context_count]) tell((struct said){.kind = SAY_CONTEXT, .index = context_count++}, -1);
    return context;
}

/* Note that a graph begins or has ended; return its context, NULL where none is known. */
static struct context *set_computing(void *scheduler, bool is_computing) {
    pthread_mutex_lock(&state_lock);
    struct context *context = find_context(scheduler);
    if (context) {
        context->is_computing = is_computing;
        if (is_computing) context->failed = false; /* a graph may be used again, without a new callback */
        memset(context->used, 0, model.expert_count);
    }
    pthread_mutex_unlock(&state_lock);
    return context;
}

EXPORT void ggml_backend_sched_set_eval_callback(void *scheduler, eval_callback callback, void *data) {
    static void (*set_callback)(void *, eval_callback, void *);
    FIND(get_name, "ggml_get_name");
    FIND(get_bytes, "ggml_backend_tensor_get");
    FIND(count_elements, "ggml_nelements");
    FIND(set_callback, "ggml_backend_sched_set_eval_callback");
    if (pager < 0) {
        set_callback(scheduler, callback, data);
        return;
    }
    pthread_mutex_lock(&state_lock);
    struct context *context = context_of(scheduler);
    context->callback = callback;
    context->data = data;
    context->is_watched = is_watching && region_count;
    set_callback(scheduler, context->is_watched ? on_tensor : callback, context->is_watched ? context : data);
    pthread_mutex_unlock(&state_lock);
}

/* Where a choice could not be brought the graph was left: it failed, so nobody takes its numbers.
 * When this returns, what it needed of the experts was read: GPUs have it in buffers of their own. */
EXPORT int ggml_backend_sched_graph_compute_async(void *scheduler, void *graph) {
    static int (*compute)(void *, void *);
    FIND(compute, "ggml_backend_sched_graph_compute_async");
    struct context *context = pager < 0 ? NULL : set_computing(scheduler, true);
    int status = compute(scheduler, graph);
    if (context) set_computing(scheduler, false);
    return context && context->failed ? STATUS_FAILED : status;
}

/* By this libllama takes a tensor into use where it is mapped; others it copies while it loads, as
 * into a GPU's memory. Where that is not seen, experts are brought for each choice. */
EXPORT int ggml_backend_tensor_alloc(void *buffer, void *tensor, void *address) {
    static int (*allocate)(void *, void *, void *);
    FIND(get_name, "ggml_get_name");
    FIND(allocate, "ggml_backend_tensor_alloc");
    if (is_model(address)) {
        unsigned layer = model.layer_count;
        if (strstr(get_name(tensor), "exps")) sscanf(get_name(tensor), "blk.%u.", &layer);
        if (layer <= model.layer_count) in_place[layer] = in_place[model.layer_count] = 1;
    }
    return allocate(buffer, tensor, address);
}

/* Without its extra buffers the CPU backend does not repack: it would copy what is not there yet. */
EXPORT void *ggml_backend_reg_get_proc_address(void *registry, const char *name) {
    static void *(*get)(void *, const char *);
    bool is_repacking = !strcmp(name, "ggml_backend_dev_get_extra_bufts") && getenv("MOEPACK_PAGER");
    FIND(get, "ggml_backend_reg_get_proc_address");
    return is_repacking ? NULL : get(registry, name);
}
