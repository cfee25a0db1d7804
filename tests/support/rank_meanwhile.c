/* A ranking that ends while a program opens a pack: before index.bin is opened, manifest.new replaces
 * the manifest, and index.bin goes. To be included, or preloaded with -DPRELOADED. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void rank_meanwhile(const char *path) {
    const char *name = strrchr(path, '/');
    char current[4096], newer[4096];
    int length = name ? (int)(name - path) : 0;
    if (!name || strcmp(name, "/index.bin") != 0) return;
    snprintf(current, sizeof current, "%.*s/manifest.json", length, path);
    snprintf(newer, sizeof newer, "%.*s/manifest.new", length, path);
    if (rename(newer, current) == 0) unlink(path);
}

#ifdef PRELOADED
#include <fcntl.h>
#include <sys/syscall.h>

int open64(const char *path, int flags, ...) {
    rank_meanwhile(path);
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, 0);
}
#endif
