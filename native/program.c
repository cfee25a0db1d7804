#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "seam.h"
#include "threads.h"

/*
 * The program and moepack: the table, which is mapped when the program first maps a file that may be the model, and the
 * control file, when it is. `attach` runs once; what it fills is only read afterwards, but for the cache.
 */

struct seam seam = {.image = -1, .moepack = -1};

_Noreturn void seam_end(const char *format, ...) {
    char text[600];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    dprintf(2, "moepack: %s; this program cannot go on\n", text);
    _exit(EXIT_CODE);
}

void seam_report(const struct cache_error *error) {
    seam.page->error = *error;
    atomic_fetch_add(&seam.page->error_count, 1);
}

void *seam_find_optional(const char *name, void *caller) {
    void *function = dlsym(RTLD_NEXT, name);
    Dl_info library;
    void *handle = function || !dladdr(caller, &library) ? NULL : dlopen(library.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return handle ? dlsym(handle, name) : function;
}

/* Find a function in the library that calls, or in any: the one that reads a model's header may not know that of devices. */
static void *find_anywhere(const char *name, void *caller) {
    struct link_map *map = NULL;
    void *program = dlopen(NULL, RTLD_LAZY), *function = seam_find_optional(name, caller);
    if (!program || dlinfo(program, RTLD_DI_LINKMAP, &map)) return function;
    for (; map && !function; map = map->l_next) {
        void *handle = *map->l_name ? dlopen(map->l_name, RTLD_LAZY | RTLD_NOLOAD) : NULL;
        function = handle ? dlsym(handle, name) : NULL;
        if (handle) dlclose(handle);
    }
    return function;
}

/* Find a function as the library that calls has it: programs load theirs locally. */
void *seam_find(const char *name, void *caller) {
    void *function = seam_find_optional(name, caller);
    if (!function) seam_end("%s is not found in this program", name);
    return function;
}

/* A program that moepack started ends with it, even before it has mapped the model. */
__attribute__((constructor)) static void at_start(void) {
    const char *parent = getenv("MOEPACK_PARENT");
    if (parent && atoi(parent) == getppid()) prctl(PR_SET_PDEATHSIG, SIGTERM);
}

/* ---- the table ---- */

static int open_shared(const char *variable, int flags) {
    const char *path = getenv(variable);
    int descriptor = path ? open(path, flags | O_CLOEXEC) : -1;
    if (descriptor < 0) seam_end("moepack, which started this program, has ended");
    return descriptor;
}

static void *map_shared(int descriptor, int protection) {
    struct stat status;
    void *start = MAP_FAILED;
    if (!fstat(descriptor, &status)) start = real_mmap(NULL, (size_t)status.st_size, protection, MAP_SHARED, descriptor, 0);
    if (start == MAP_FAILED) seam_end("no memory for the table of experts");
    return start;
}

/* Lay the parts of an expert into a slot: as in its blob; or each as far behind a page's start as where it is mapped, so
 * that its whole pages can be. */
static uint64_t place_parts(const struct table_part *from, struct part *parts, uint32_t count) {
    uint64_t end = 0;
    for (uint32_t p = 0; p < count; p++) {
        uint64_t start = seam.is_strided ? from[p].slot_offset : end + from[p].mapped_offset % PAGE;
        parts[p] = (struct part){from[p].offset, from[p].length, from[p].digest, from[p].file, (uint32_t)start, from[p].has_digest, from[p].has_mirror};
        uint64_t part_end = whole_pages(start + from[p].length);
        if (part_end > end) end = part_end;
    }
    return end;
}

static void read_experts(void) {
    struct experts *experts = &seam.experts;
    const struct table_layer *layers = seam_array(seam.table->layers);
    const struct table_part *parts = seam_array(seam.table->parts);
    experts->is_aligned = seam.is_strided;
    if (!experts_allocate(experts, seam.table->layer_count, seam.table->expert_count))
        seam_end("no memory for the table of experts");
    for (uint32_t i = 0; i < seam.table->layer_count; i++) {
        uint64_t longest = 0;
        for (uint32_t e = 0; e < layers[i].expert_count; e++) {
            uint64_t place = (uint64_t)(experts->count + e) * MAX_PARTS;
            uint64_t length = place_parts(parts + place, experts->parts + place, layers[i].part_count);
            if (length > longest) longest = length;
        }
        struct layer layer = {.number = layers[i].number, .count = layers[i].expert_count,
                              .part_count = layers[i].part_count, .is_rare = layers[i].is_rare != 0};
        if (!experts_add_layer(experts, layer, longest)) seam_end("experts have more than %d lengths", MAX_CLASSES);
    }
}

static void open_place(struct place *place, const char *path) {
    *place = (struct place){.path = path, .direct = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT), .cached = open(path, O_RDONLY | O_CLOEXEC)};
    if (place->cached < 0) seam_end("%s: %s", path, strerror(errno));
}

static void open_files(void) {
    const struct table_file *files = seam_array(seam.table->files);
    seam.files = calloc((size_t)seam.table->file_count + 1, sizeof *seam.files);
    if (!seam.files) seam_end("no memory");
    for (uint32_t i = 0; i < seam.table->file_count; i++) {
        open_place(&seam.files[i].places[0], seam_array(files[i].path));
        if (files[i].mirror) open_place(&seam.files[i].places[1], seam_array(files[i].mirror));
        seam.files[i].place_count = files[i].mirror ? 2 : 1;
    }
}

/* ---- the control file ---- */

/* Each process holds a lock of the byte of the control file that has the number of its page; the system releases it when
 * the process ends, however it ends. */
static struct flock lock_of(uint32_t number, short type) {
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = number, .l_len = 1};
}

static bool is_locked(uint32_t number) {
    struct flock lock = lock_of(number, F_WRLCK);
    return fcntl(seam.control_file, F_GETLK, &lock) || lock.l_type != F_UNLCK;
}

static void take_page(void) {
    for (uint32_t i = 0; i < MAX_PROCESSES; i++) {
        struct process_page *page = &seam.control->processes[i];
        struct flock lock = lock_of(i, F_WRLCK), none = lock_of(i, F_UNLCK);
        if (atomic_load(&page->state) != PROCESS_FREE || fcntl(seam.control_file, F_SETLK, &lock)) continue;
        uint32_t is_free = PROCESS_FREE;
        if (!atomic_compare_exchange_strong(&page->state, &is_free, PROCESS_LIVE)) {
            fcntl(seam.control_file, F_SETLK, &none);
            continue;
        }
        seam.page = page;
        seam.rings = seam.control->rings[i];
        return;
    }
    seam_end("more than %d processes map the model", MAX_PROCESSES);
}

/* All live processes have equal parts of the memory; none has less than a step needs. */
static uint64_t own_share(void) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < MAX_PROCESSES; i++) count += atomic_load(&seam.control->processes[i].state) == PROCESS_LIVE;
    return atomic_load(&seam.control->memory) / (count ? count : 1);
}

/* End with moepack, whose process the descriptor is of. */
static void *wait_for_end(void *nothing) {
    struct pollfd process = {.fd = seam.moepack, .events = POLLIN};
    while (poll(&process, 1, -1) < 0 && errno == EINTR) continue;
    seam_end("moepack, which started this program, has ended");
    return nothing;
}

static bool start_waiting(void) {
    pthread_t thread;
    return !start_thread(&thread, wait_for_end, NULL) && !pthread_detach(thread);
}

/* A few times a second: follow the memory. */
static void tick(void *nothing) {
    (void)nothing;
    bool has_ended = seam.moepack < 0 && kill((pid_t)seam.table->process, 0) && errno == ESRCH;
    if (has_ended) seam_end("moepack, which started this program, has ended");
    for (uint32_t i = 0; i < MAX_PROCESSES; i++) {
        struct process_page *page = &seam.control->processes[i];
        uint32_t live = PROCESS_LIVE;
        if (page != seam.page && atomic_load(&page->state) == PROCESS_LIVE && !is_locked(i))
            atomic_compare_exchange_strong(&page->state, &live, PROCESS_ENDED);
    }
    uint64_t share = own_share();
    if (share != seam.cache.options.memory) cache_resize(&seam.cache, share);
}

/* ---- attaching ---- */

/* Does this program have a device that is no CPU? Then experts stay where files have them, since they may be copied from
 * there; only for CPUs may a tensor have another stride. */
static bool has_only_cpus(void *caller) {
    size_t (*count)(void) = (size_t (*)(void))find_anywhere("ggml_backend_dev_count", caller);
    void *(*get)(size_t) = (void *(*)(size_t))find_anywhere("ggml_backend_dev_get", caller);
    int (*type)(void *) = (int (*)(void *))find_anywhere("ggml_backend_dev_type", caller);
    if (!count || !get || !type) return false;
    for (size_t i = 0; i < count(); i++)
        if (type(get(i)) != 0 /* GGML_BACKEND_DEVICE_TYPE_CPU */) return false;
    return true;
}

static void open_cache(void) {
    const struct table *table = seam.table;
    struct cache_options options = {own_share(), table->reserve, (enum policy)table->policy,
                                    (int)table->check, (enum drive_kind)table->reads, table->is_cached != 0, table->is_prepared != 0,
                                    !seam.is_image, table->prefetches != 0};
    struct cache_owner owner = {NULL, mapping_map, mapping_unmap, tick};
    struct cache_error error;
    if (cache_open(&seam.cache, &seam.experts, seam.files, &options, owner, &seam.page->statistics, &error))
        seam_end("%s", error.message);
    atomic_store(&seam.page->reads, (uint32_t)drive_kind(seam.cache.drive));
    const uint32_t *pinned = seam_array(table->pinned);
    for (uint32_t i = 0; i < table->pinned_count; i++)
        if (!cache_pin(&seam.cache, pinned[i])) seam_end("the pinned experts are larger than the memory for experts");
    cache_warm_up(&seam.cache, seam_array(table->warm_up), table->warm_up_count);
    if (!mapping_open() || (seam.is_image && !faults_open())) seam_end("the model cannot be mapped: %s", strerror(errno));
    if (cache_start(&seam.cache) || (seam.moepack >= 0 && !start_waiting())) seam_end("no thread");
}

static void before_fork(void) {
    pthread_mutex_lock(&seam.cache.lock);
    regions_lock();
}

static void after_fork(void) {
    regions_unlock();
    pthread_mutex_unlock(&seam.cache.lock);
}

/* A child has no thread that reads, and slots would change under it. It gets shards as they are; of an image nothing,
 * and ends where it reads that. */
static void in_child(void) {
    regions_forget_in_child();
    mapping_forget_in_child();
    seam.table = NULL;
    atomic_store(&seam.is_attached, false);
    after_fork();
}

static const struct table *table; /* mapped once; seam.table is NULL before the model is mapped, and in a forked child */
static void *attach_caller;

static void map_table(void) {
    if (!getenv("MOEPACK_TABLE")) return;
    int file = open_shared("MOEPACK_TABLE", O_RDONLY);
    table = map_shared(file, PROT_READ);
    close(file);
    if (memcmp(table->magic, "MOEPTABL", 8) || table->version != TABLE_VERSION) seam_end("moepack is of another version");
}

static void attach(void) {
    if (sysconf(_SC_PAGESIZE) != PAGE) seam_end("the pages of this system are not of 4 KiB: experts cannot be mapped");
    seam.table = table;
    seam.control_file = open_shared("MOEPACK_CONTROL", O_RDWR);
    seam.control = map_shared(seam.control_file, PROT_READ | PROT_WRITE);
    seam.moepack = (int)syscall(SYS_pidfd_open, (pid_t)table->process, 0); /* where it is refused, tick looks */
    seam.is_image = table->experts_offset != 0;
    seam.is_strided = table->has_blobs && has_only_cpus(attach_caller);
    if (seam.is_image) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%u/fd/%d", table->process, table->image);
        seam.image = open(path, O_RDONLY | O_CLOEXEC);
        if (seam.image < 0) seam_end("moepack, which started this program, has ended");
    }
    take_page();
    read_experts();
    open_files();
    open_cache();
    pthread_atfork(before_fork, after_fork, in_child);
    atomic_store(&seam.is_attached, true);
}

/* The number of a mapped file in the table; -1: it is another. */
static int number_of(const struct stat *status) {
    const struct mapped_file *files = (const struct mapped_file *)((const char *)table + table->mapped);
    for (uint32_t i = 0; i < table->mapped_count; i++)
        if (files[i].device == status->st_dev && files[i].inode == status->st_ino) return (int)i;
    return -1;
}

int seam_find_file(int descriptor, void *caller) {
    static pthread_once_t is_mapped = PTHREAD_ONCE_INIT, is_attached = PTHREAD_ONCE_INIT;
    struct stat status;
    if (descriptor < 0 || fstat(descriptor, &status) || !S_ISREG(status.st_mode)) return -1;
    pthread_once(&is_mapped, map_table);
    int number = table ? number_of(&status) : -1;
    if (number < 0) return -1;
    attach_caller = caller;
    pthread_once(&is_attached, attach);
    if (!seam.table) return -1;
    return seam.is_image ? 0 : number;
}
