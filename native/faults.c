#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "../include/moepack.h"
#include "seam.h"

/*
 * Accesses that nobody announced, to experts of a pack that are not mapped: a layer whose router has another name,
 * weights that are checked or copied while they are loaded. The page is protected, so the access is a SIGSEGV of its
 * own thread, and the handler brings what is missing. That needs no right of any kind, as userfaultfd does, and serves
 * the same accesses: those of the program itself. What the system would read for it (write(2) of such memory) fails
 * with EFAULT; nothing is ever read as zeros.
 *
 * In the strided region the expert is brought. In the file's own region, where experts share pages if their lengths
 * are not of whole ones, a chunk of pages is put together from the parts on it, of files that were compared with their
 * digests. There are few chunks; the oldest is given up for the next.
 *
 * `lock` guards the chunks. The handler runs in a thread that computes: it may hold locks of the program, and none of
 * ours, since nothing of ours reads these addresses.
 */

#ifndef CHUNK_COUNT
#define CHUNK_COUNT 512 /* tests have fewer */
#endif

enum { CHUNK_PAGES = 16, CHUNK_LENGTH = CHUNK_PAGES * PAGE, MOST_REPEATS = 1000 };

struct place_in_image { /* a part, by where it lies in the image */
    uint64_t start, length;
    uint32_t expert, part;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct place_in_image *places;
static size_t place_count;
static bool *is_right; /* by place: its digest was compared */
static char *chunks, *scratch;
static int chunk_file = -1;
static struct {
    char *address;
    uint64_t length;
} taken[CHUNK_COUNT];
static uint32_t next_chunk;
static const char NO_MORE_MAPS[] = "the system maps no more memory (see vm.max_map_count)";
static struct sigaction of_program; /* its own handler */
static __thread const void *last_address __attribute__((tls_model("initial-exec")));
static __thread time_t last_time __attribute__((tls_model("initial-exec")));
static __thread uint32_t repeat_count __attribute__((tls_model("initial-exec")));
static bool may_serve; /* this program may map the model */

/* ---- chunks of the image ---- */

static int compare_places(const void *first, const void *second) {
    const struct place_in_image *a = first, *b = second;
    return a->start < b->start ? -1 : a->start > b->start;
}

static bool list_places(void) {
    const struct table_part *parts = seam_array(seam.table->parts);
    uint64_t longest = 0;
    places = calloc(((size_t)seam.experts.count + 1) * MAX_PARTS, sizeof *places);
    if (!places) return false;
    for (uint32_t e = 0; e < seam.experts.count; e++)
        for (uint32_t p = 0; p < layer_of(&seam.experts, e)->part_count; p++) {
            const struct table_part *part = &parts[(uint64_t)e * MAX_PARTS + p];
            places[place_count++] = (struct place_in_image){part->mapped_offset, part->length, e, p};
            if (part->length > longest) longest = part->length;
        }
    qsort(places, place_count, sizeof *places, compare_places);
    is_right = calloc(place_count + 1, sizeof *is_right);
    scratch = malloc(longest + 1);
    return is_right && scratch;
}

/* The first place that ends behind an offset of the image; `place_count`: there is none. */
static size_t first_behind(uint64_t offset) {
    size_t first = 0, count = place_count;
    while (count) {
        size_t half = count / 2;
        bool is_before = places[first + half].start + places[first + half].length <= offset;
        if (is_before) first += half + 1;
        count = is_before ? count - half - 1 : half;
    }
    return first;
}

/* Read bytes of a part; the whole part, if it was never compared with its digest. */
static void read_piece(size_t number, uint64_t start, uint64_t length, char *to) {
    const struct place_in_image *place = &places[number];
    const struct part *part = part_of(&seam.experts, place->expert, place->part);
    const struct place *file = &seam.files[part->file].places[0];
    bool is_compared = part->has_digest && seam.table->check != CHECK_NONE && !is_right[number];
    int error = is_compared ? read_fully(file->cached, scratch, part->length, part->offset)
                            : read_fully(file->cached, to, length, part->offset + start);
    struct cache_error problem = {CACHE_READ_FAILED, error, place->expert, place->part, 0, 0, part->offset, 0, ""};
    if (error) {
        seam_report(&problem);
        seam_end("%s: offset %llu: %s", file->path, (unsigned long long)(part->offset + start),
                 error == ENODATA ? "the file has become shorter" : strerror(error));
    }
    if (!is_compared) return;
    const struct layer *layer = layer_of(&seam.experts, place->expert);
    problem.found = moepack_xxh3(scratch, (size_t)part->length);
    if (problem.found != part->digest) {
        problem.code = CACHE_DIGEST_DIFFERS;
        seam_report(&problem);
        seam_end("%s: layer %u expert %u part %u does not have its digest", file->path, layer->number, place->expert - layer->first, place->part);
    }
    is_right[number] = true;
    memcpy(to, scratch + start, length);
}

/* Put bytes of the image together from the parts that lie there. */
static void assemble(uint64_t start, uint64_t end, char *to) {
    memset(to, 0, end - start);
    for (size_t i = first_behind(start); i < place_count && places[i].start < end; i++) {
        uint64_t from = places[i].start > start ? places[i].start : start;
        uint64_t part_end = places[i].start + places[i].length, until = part_end < end ? part_end : end;
        if (from < until) read_piece(i, from - places[i].start, until - from, to + (from - start));
    }
}

/* The expert that has a whole page of the image to itself, and is mapped there; NO_EXPERT: others share it, or experts are
 * in the strided region. */
static uint32_t owner_of_page(uint64_t page) {
    if (seam.is_strided) return NO_EXPERT;
    size_t first = first_behind(page);
    bool is_whole = first < place_count && places[first].start <= page && places[first].start + places[first].length >= page + PAGE;
    return is_whole ? places[first].expert : NO_EXPERT;
}

/* Find the pages around one that a chunk may have: not those where experts are mapped. */
static void find_chunk(const struct region *region, uint64_t page, uint64_t *start, uint64_t *end) {
    uint64_t first = (seam.table->experts_offset > region->start ? seam.table->experts_offset : region->start) / PAGE * PAGE;
    uint64_t last = whole_pages(region->end);
    uint64_t chunk = page / CHUNK_LENGTH * CHUNK_LENGTH;
    if (first < chunk) first = chunk;
    if (last > chunk + CHUNK_LENGTH) last = chunk + CHUNK_LENGTH;
    *start = page;
    *end = page + PAGE;
    while (*start > first && owner_of_page(*start - PAGE) == NO_EXPERT) *start -= PAGE;
    while (*end < last && owner_of_page(*end) == NO_EXPERT) *end += PAGE;
}

/* Give up a chunk: what it had is not there any more. Held: the lock. */
static void give_up(uint32_t number) {
    if (!taken[number].address) return;
    if (hide_range(taken[number].address, taken[number].length)) seam_end(NO_MORE_MAPS);
    taken[number].address = NULL;
}

/* Serve the pages around an address of the image's region; return their end. */
static const char *serve_chunk(char *address, const struct region *region) {
    uint64_t start, end;
    find_chunk(region, (region->start + (uint64_t)(address - region->address)) / PAGE * PAGE, &start, &end);
    pthread_mutex_lock(&lock);
    uint32_t number = next_chunk++ % CHUNK_COUNT;
    uint64_t place = (uint64_t)number * CHUNK_LENGTH;
    give_up(number);
    assemble(start, end, chunks + place);
    taken[number].address = region->address + (start - region->start);
    taken[number].length = end - start;
    if (show_range(taken[number].address, end - start, chunk_file, place)) seam_end(NO_MORE_MAPS);
    pthread_mutex_unlock(&lock);
    return region->address + (end - region->start);
}

void faults_forget(const char *from, const char *to) {
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < CHUNK_COUNT; i++)
        if (taken[i].address && from < taken[i].address + taken[i].length && to > taken[i].address) give_up(i);
    pthread_mutex_unlock(&lock);
}

void faults_bring_range(const void *address, uint64_t length) {
    struct region region;
    const char *end = (const char *)address + length;
    for (const char *page = address; page < end && regions_find(page, &region);) page = serve_chunk((char *)(uintptr_t)page, &region);
}

static void bring(uint32_t expert) {
    struct cache_error error;
    if (!cache_bring(&seam.cache, expert, &error)) return;
    seam_report(&error);
    seam_end("%s", error.message);
}

static bool serve(void *address) {
    struct region region;
    if (!seam.table) return false;
    if (mapping_is_strided_address(address)) {
        uint32_t expert = mapping_expert_at(address);
        if (expert != NO_EXPERT) bring(expert);
        return expert != NO_EXPERT;
    }
    if (!regions_find(address, &region)) return false;
    uint64_t offset = region.start + (uint64_t)((char *)address - region.address);
    if (offset / PAGE * PAGE + PAGE <= seam.table->experts_offset) return false;
    uint32_t expert = owner_of_page(offset / PAGE * PAGE);
    if (expert != NO_EXPERT) {
        bring(expert);
    } else {
        serve_chunk(address, &region);
        atomic_fetch_add(&seam.cache.statistics->fault_count, 1);
    }
    return true;
}

/* ---- the signal ---- */

/* Call the program's handler with the signals blocked that it would have without ours. */
static void hand_on(int number, siginfo_t *information, void *context) {
    sigset_t blocked;
    sigorset(&blocked, &((ucontext_t *)context)->uc_sigmask, &of_program.sa_mask);
    sigdelset(&blocked, number);
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &blocked, NULL, sizeof(uint64_t));
    bool is_sent = information->si_code <= 0; /* by a program, as raise(3) does */
    if (is_sent && of_program.sa_handler == SIG_IGN) return;
    if (of_program.sa_flags & SA_SIGINFO && of_program.sa_sigaction) {
        of_program.sa_sigaction(number, information, context);
    } else if (of_program.sa_handler != SIG_DFL && of_program.sa_handler != SIG_IGN) {
        of_program.sa_handler(number);
    } else { /* it happens again, and ends the program */
        struct sigaction none = {.sa_handler = SIG_DFL};
        syscall(SYS_rt_sigaction, number, &none, NULL, sizeof(uint64_t));
        if (is_sent) syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), number);
    }
}

/* A page that is there, and still faults, is written to, or executed: that is the program's own mistake. In a few
 * seconds no page is brought so often. */
static bool is_repeated(const void *address) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    bool is_same = address == last_address && time.tv_sec / 8 == last_time;
    repeat_count = is_same ? repeat_count + 1 : 0;
    last_address = address;
    last_time = time.tv_sec / 8;
    return repeat_count > MOST_REPEATS;
}

static void on_fault(int number, siginfo_t *information, void *context) {
    int error = errno;
    bool is_served = information->si_code > 0 && !is_repeated(information->si_addr) && serve(information->si_addr);
    errno = error;
    if (!is_served) hand_on(number, information, context);
}

static int real_sigaction(int number, const struct sigaction *action, struct sigaction *before) {
    static __typeof__(&sigaction) real;
    FIND(real, "sigaction");
    return real(number, action, before);
}

/* Other handlers wait until a fault is served: they would run while its thread has locks of ours. Not blocked are signals
 * of what a thread does itself: the program's own handler may read experts. */
bool faults_open(void) {
    struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};
    sigfillset(&ours.sa_mask);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) sigdelset(&ours.sa_mask, own[i]);
    chunk_file = memfd_create("moepack-chunks", MFD_CLOEXEC);
    uint64_t length = (uint64_t)CHUNK_COUNT * CHUNK_LENGTH;
    if (chunk_file < 0 || ftruncate(chunk_file, (off_t)length) || !list_places()) return false;
    chunks = real_mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, chunk_file, 0);
    return chunks != MAP_FAILED && !real_sigaction(SIGSEGV, &ours, &of_program);
}

/* The handler stays ours; the program's own gets what is not for us. */
EXPORT int sigaction(int number, const struct sigaction *action, struct sigaction *before) {
    if (number != SIGSEGV || chunk_file < 0 || !seam.table) return real_sigaction(number, action, before);
    if (before) *before = of_program;
    if (action) of_program = *action;
    return 0;
}

EXPORT __sighandler_t signal(int number, __sighandler_t handler) {
    static __typeof__(&signal) real;
    FIND(real, "signal");
    if (number != SIGSEGV || chunk_file < 0 || !seam.table) return real(number, handler);
    __sighandler_t before = of_program.sa_handler;
    of_program = (struct sigaction){.sa_handler = handler};
    return before;
}

/* A thread that blocks the signal would be killed by it, and threads inherit what is blocked before the model is mapped. */
static const sigset_t *unblocked(int how, const sigset_t *set, sigset_t *without) {
    if (!set || how == SIG_UNBLOCK || !may_serve) return set;
    *without = *set;
    sigdelset(without, SIGSEGV);
    return without;
}

EXPORT int pthread_sigmask(int how, const sigset_t *set, sigset_t *before) {
    static __typeof__(&pthread_sigmask) real;
    sigset_t without;
    FIND(real, "pthread_sigmask");
    return real(how, unblocked(how, set, &without), before);
}

EXPORT int sigprocmask(int how, const sigset_t *set, sigset_t *before) {
    static __typeof__(&sigprocmask) real;
    sigset_t without;
    FIND(real, "sigprocmask");
    return real(how, unblocked(how, set, &without), before);
}

__attribute__((constructor)) static void at_start(void) {
    sigset_t fault;
    may_serve = getenv("MOEPACK_TABLE") != NULL;
    if (!may_serve) return;
    sigemptyset(&fault);
    sigaddset(&fault, SIGSEGV);
    sigprocmask(SIG_UNBLOCK, &fault, NULL);
}
