/*
 * Loaded before the seam: its reads by threads, through pread, go wrong as the file in FAULTY_READS says, which is read
 * anew for each: MODE ARGUMENT START END, for reads that touch bytes from START to END of a file. Modes: "errno" fails
 * with ARGUMENT, "short" ends ARGUMENT bytes early, "slow" takes ARGUMENT milliseconds, "astray" reads ARGUMENT bytes
 * further on.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

ssize_t pread(int descriptor, void *buffer, size_t length, off_t offset) {
    ssize_t (*real)(int, void *, size_t, off_t) = (ssize_t(*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    const char *path = getenv("FAULTY_READS");
    char mode[16] = "";
    long argument = 0, start = 0, end = 0;
    FILE *file = path ? fopen(path, "r") : NULL;
    if (file) {
        if (fscanf(file, "%15s %ld %ld %ld", mode, &argument, &start, &end) != 4) *mode = 0;
        fclose(file);
    }
    if (offset >= end || offset + (off_t)length <= start) *mode = 0;
    if (!strcmp(mode, "errno")) return errno = (int)argument, -1;
    if (!strcmp(mode, "slow")) usleep((useconds_t)argument * 1000);
    if (!strcmp(mode, "astray")) offset += argument;
    if (!strcmp(mode, "short") && (size_t)argument < length) length -= (size_t)argument;
    return real(descriptor, buffer, length, offset);
}

ssize_t pread64(int descriptor, void *buffer, size_t length, off_t offset) { return pread(descriptor, buffer, length, offset); }
