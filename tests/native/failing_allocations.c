/*
 * Opens a cache of a pack again and again: failing_allocations PACK READS. The n-th call of those below fails, for each n
 * until a cache was opened without a failure. Each failure must be an error, or be got around; nothing may be left open.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>

#include "../../include/moepack_cache.h"

static int left; /* calls until one fails; 0: none does */

static int fails(int error) {
    if (!left || --left) return 0;
    errno = error;
    return 1;
}

#define WRAP(error, failure, type, name, parameters, arguments) \
    type __real_##name parameters;                              \
    type __wrap_##name parameters;                              \
    type __wrap_##name parameters { return fails(error) ? failure : __real_##name arguments; }

WRAP(ENOMEM, NULL, void *, malloc, (size_t length), (length))
WRAP(ENOMEM, NULL, void *, calloc, (size_t count, size_t length), (count, length))
WRAP(ENFILE, -1, int, memfd_create, (const char *name, unsigned flags), (name, flags))
WRAP(EFBIG, -1, int, ftruncate, (int fd, off_t length), (fd, length))
WRAP(ENOMEM, MAP_FAILED, void *, mmap, (void *at, size_t length, int how, int flags, int fd, off_t from),
     (at, length, how, flags, fd, from))

int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __wrap_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *data) {
    return fails(EAGAIN) ? EAGAIN : __real_pthread_create(thread, attributes, run, data);
}

/* io_uring_setup and io_uring_enter; the latter is called only after opening. */
long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);
long __wrap_syscall(long number, ...) {
    long all[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) all[i] = va_arg(list, long);
    va_end(list);
    return fails(EPERM) ? -1 : __real_syscall(number, all[0], all[1], all[2], all[3], all[4], all[5]);
}

static int count_descriptors(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (readdir(folder)) count++;
    closedir(folder);
    return count;
}

static void require(int is_so, int number, const char *what) {
    if (is_so) return;
    printf("call %d: %s\n", number, what);
    exit(1);
}

/* Use one expert, and compare it with its digests. */
static int works(moepack_cache *cache) {
    const void *addresses[MOEPACK_MOST_PARTS];
    const moepack *pack = moepack_cache_pack(cache);
    const moepack_family *family = moepack_family_at(pack, 0);
    uint32_t context;
    if (moepack_cache_add_context(cache, &context, NULL)) return 0;
    if (moepack_cache_use(cache, context, family->layer, (int32_t[]){1}, 1, 1, addresses, NULL)) return 0;
    if (moepack_cache_use(cache, context + 1, family->layer, (int32_t[]){1}, 1, 1, addresses, NULL) != MOEPACK_ERR_NO_SUCH) return 0;
    for (uint32_t p = 0; p < family->parts_per_blob; p++) {
        moepack_part part;
        if (moepack_locate_part(pack, family, 1, p, &part, NULL)) return 0;
        if (moepack_check_part(pack, &part, addresses[p], NULL)) return 0;
    }
    return 1;
}

int main(int count, char **arguments) {
    if (count < 3) return 2;
    int error_count = 0, around_count = 0, before = count_descriptors();
    moepack_cache_options options = {.memory = 1ull << 30, .reads = atoi(arguments[2])};
    moepack_cache *first;
    if (moepack_cache_open(arguments[1], &options, &first, NULL) && options.reads == MOEPACK_READS_URING) return puts("no io_uring") < 0;
    moepack_cache_close(first);
    for (int number = 1;; number++) {
        moepack_cache *cache = NULL;
        moepack_error error = {0};
        left = number;
        moepack_code code = moepack_cache_open(arguments[1], &options, &cache, &error);
        int has_failed = !left;
        left = 0;
        if (code) {
            require(has_failed && !cache, number, error.message);
            require(error.code == code && error.message[0], number, "an error says nothing");
            require(code != MOEPACK_ERR_SYSTEM || error.system_error, number, "there is no errno");
            error_count++;
        } else {
            require(works(cache), number, "the cache does not work");
            moepack_cache_close(cache);
            around_count += has_failed;
        }
        require(count_descriptors() == before, number, "a descriptor is left, or one too few");
        if (!has_failed) break;
    }
    require(error_count > 100, error_count, "so few failures were errors");
    require((around_count > 0) == (options.reads != MOEPACK_READS_URING), around_count, "threads, or fewer of them, do as well");
    return 0;
}
