#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "seam.h"

/*
 * Where files of the model are mapped, and the functions by which programs map, advise and measure them.
 * `lock` guards the regions; a fault takes it in a thread that may be anywhere in the program, so nothing here reads
 * what a region has while it is held.
 */

enum { MAX_REGIONS = 4096 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct region regions[MAX_REGIONS];
static _Atomic uint32_t region_count;
static int *descriptors; /* of shards, for mapping them again */

void regions_lock(void) { pthread_mutex_lock(&lock); }
void regions_unlock(void) { pthread_mutex_unlock(&lock); }

void *real_mmap(void *address, size_t length, int protection, int flags, int descriptor, off_t offset) {
    long mapped = syscall(SYS_mmap, address, length, protection, flags, descriptor, offset);
    return (void *)mapped;
}

int show_range(char *address, uint64_t length, int descriptor, uint64_t offset) {
    void *mapped = real_mmap(address, length, PROT_READ, MAP_SHARED | MAP_FIXED, descriptor, (off_t)offset);
    return mapped == MAP_FAILED ? errno : 0;
}

int hide_range(char *address, uint64_t length) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    return real_mmap(address, length, PROT_NONE, flags, -1, 0) == MAP_FAILED ? errno : 0;
}

static char *end_of(const struct region *region) { return region->address + (region->end - region->start); }

bool regions_find(const void *address, struct region *region) {
    const char *wanted = address;
    bool is_found = false;
    regions_lock();
    for (uint32_t i = 0; i < region_count && !is_found; i++) {
        char *end = regions[i].address + whole_pages(regions[i].end - regions[i].start);
        is_found = wanted >= regions[i].address && wanted < end;
        if (is_found) *region = regions[i];
    }
    regions_unlock();
    return is_found;
}

int regions_each(uint32_t file, uint64_t offset, uint64_t length,
                 int (*work)(void *data, char *address, uint64_t length, uint64_t behind), void *data) {
    int error = 0;
    regions_lock();
    for (uint32_t i = 0; i < region_count && !error; i++) {
        const struct region *region = &regions[i];
        uint64_t start = offset > region->start ? offset : region->start;
        uint64_t end = offset + length < region->end ? offset + length : region->end;
        if (region->file == file && start < end) error = work(data, region->address + (start - region->start), end - start, start - offset);
    }
    regions_unlock();
    return error;
}

/* Shards are mapped as they lie, an image not at all: nothing of it may be read as zeros. Held: the lock. */
void regions_forget_in_child(void) {
    for (uint32_t i = 0; i < region_count; i++) {
        const struct region *region = &regions[i];
        uint64_t length = region->end - region->start;
        int error = seam.is_image ? hide_range(region->address, length)
                                  : show_range(region->address, length, descriptors[region->file], region->start);
        if (error) seam_end("the model cannot be mapped in a forked child");
    }
    region_count = 0;
}

/* ---- mapping ---- */

static int map_dense(void *data, char *address, uint64_t length, uint64_t behind) {
    const struct dense_range *dense = data;
    if (!seam.is_image) { /* as libllama asks for of the whole file */
        uintptr_t start = (uintptr_t)address / PAGE * PAGE;
        madvise((void *)start, (uintptr_t)address + length - start, MADV_NORMAL);
        madvise((void *)start, (uintptr_t)address + length - start, MADV_WILLNEED);
        return 0;
    }
    return show_range(address, length, seam.files[dense->file].places[0].cached, dense->offset + behind);
}

static int map_all_dense(uint32_t file) {
    const struct dense_range *dense = seam_array(seam.table->dense);
    int error = 0;
    for (uint32_t i = 0; i < seam.table->dense_count && !error; i++)
        if (dense[i].mapped_file == file)
            error = regions_each(file, dense[i].mapped_offset, dense[i].length, map_dense, (void *)(uintptr_t)&dense[i]);
    return error;
}

/* Nothing of an image's experts can be read before it is brought. */
static int hide_experts(const struct region *region) {
    uint64_t start = seam.table->experts_offset > region->start ? seam.table->experts_offset : region->start;
    uint64_t end = whole_pages(region->end);
    return start < end ? hide_range(region->address + (start - region->start), end - start) : 0;
}

static int add_region(const struct region *region, int descriptor) {
    regions_lock();
    int error = region_count < MAX_REGIONS ? 0 : ENOMEM;
    if (!error && !descriptors) {
        descriptors = malloc(seam.table->mapped_count * sizeof *descriptors);
        if (descriptors) memset(descriptors, -1, seam.table->mapped_count * sizeof *descriptors);
        error = descriptors ? 0 : ENOMEM;
    }
    if (!error && descriptors[region->file] < 0) descriptors[region->file] = fcntl(descriptor, F_DUPFD_CLOEXEC, 3);
    if (!error && descriptors[region->file] < 0) error = errno;
    if (!error) regions[region_count++] = *region;
    regions_unlock();
    return error;
}

static void *map_model(uint32_t file, size_t length, int descriptor, off_t offset) {
    void *address = real_mmap(NULL, length, PROT_READ, MAP_SHARED, seam.is_image ? seam.image : descriptor, offset);
    if (address == MAP_FAILED) return address;
    /* What lies around the pages that experts share is not to be read with them: other experts, all of which come
     * otherwise. */
    if (!seam.is_image) madvise(address, length, MADV_RANDOM);
    struct region region = {address, (uint64_t)offset, (uint64_t)offset + length, file};
    int error = seam.is_image ? hide_experts(&region) : 0;
    if (!error) error = add_region(&region, descriptor);
    if (!error) error = map_all_dense(file);
    if (error) seam_end("the model cannot be mapped: %s", strerror(error));
    mapping_renew();
    return address;
}

/* Cut a range out of the regions: what is left of one before it, and behind it. Held: the lock. */
static void cut(char *from, char *to) {
    for (uint32_t i = 0; i < region_count; i++) {
        struct region old = regions[i];
        if (from >= end_of(&old) || to <= old.address) continue;
        regions[i] = regions[--region_count];
        if (region_count + 2 > MAX_REGIONS) seam_end("the model is mapped in too many pieces");
        if (from > old.address)
            regions[region_count++] = (struct region){old.address, old.start, old.start + (uint64_t)(from - old.address), old.file};
        if (to < end_of(&old))
            regions[region_count++] = (struct region){to, old.start + (uint64_t)(to - old.address), old.end, old.file};
        i = UINT32_MAX; /* once more: it terminates, as what is left does not touch the range */
    }
}

/* Forget what is unmapped of the regions: nothing may be mapped there any more. */
EXPORT int munmap(void *start, size_t length) {
    if (!region_count) return (int)syscall(SYS_munmap, start, length);
    char *end = (char *)start + whole_pages(length);
    if (seam.is_image) faults_forget(start, end);
    regions_lock();
    int result = (int)syscall(SYS_munmap, start, length);
    if (!result) cut(start, end);
    regions_unlock();
    return result;
}

/* Map something else where a file of the model may be. */
static void *map_over(char *address, size_t length, int protection, int flags, int descriptor, off_t offset) {
    char *end = address + whole_pages(length);
    if (seam.is_image) faults_forget(address, end);
    regions_lock();
    void *mapped = real_mmap(address, length, protection, flags, descriptor, offset);
    if (mapped != MAP_FAILED) cut(address, end);
    regions_unlock();
    return mapped;
}

EXPORT void *mmap(void *address, size_t length, int protection, int flags, int descriptor, off_t offset) {
    bool may_be = (flags & MAP_SHARED) && !(protection & PROT_WRITE) && !(flags & MAP_FIXED);
    int file = may_be ? seam_find_file(descriptor, __builtin_return_address(0)) : -1;
    if (file >= 0) return map_model((uint32_t)file, length, descriptor, offset);
    if (flags & MAP_FIXED && region_count) return map_over(address, length, protection, flags, descriptor, offset);
    return real_mmap(address, length, protection, flags, descriptor, offset);
}

ALIAS(mmap) void *mmap64(void *, size_t, int, int, int, off_t);

/* ---- what programs ask of the whole model ---- */

/* libllama asks for all of the file ahead. */
EXPORT int posix_madvise(void *address, size_t length, int advice) {
    static __typeof__(&posix_madvise) real;
    struct region region;
    FIND(real, "posix_madvise");
    return region_count && regions_find(address, &region) ? 0 : real(address, length, advice);
}

EXPORT int mlock(const void *address, size_t length) {
    static atomic_flag is_said = ATOMIC_FLAG_INIT;
    struct region region;
    if (!region_count || !regions_find(address, &region)) return (int)syscall(SYS_mlock, address, length);
    if (!atomic_flag_test_and_set(&is_said))
        dprintf(2, "moepack: --mlock is left out: it would bring all experts into memory\n");
    return 0;
}

/* What has the image's path ends a byte behind the header, so that whoever reads it instead of mapping it, with this
 * library or without, comes to its end and never to zeros. Only its size is told as the header has it, as libllama holds
 * that against where tensors lie. */
static off_t size_for(FILE *file, off_t position, void *caller) {
    struct stat status;
    if (position < 0 || fstat(fileno(file), &status) || status.st_size != position) return position;
    if (seam_find_file(fileno(file), caller) < 0 || !seam.is_image || fstat(seam.image, &status)) return position;
    return status.st_size;
}

EXPORT off_t ftello(FILE *file) {
    static __typeof__(&ftello) real;
    FIND(real, "ftello");
    return size_for(file, real(file), __builtin_return_address(0));
}

ALIAS(ftello) off_t ftello64(FILE *);
ALIAS(ftello) long ftell(FILE *);
