/*
 * Reads of files into memory, many at a time, by io_uring or by threads.
 *
 * drive_add, drive_submit and drive_collect are called with the lock of the cache held. drive_wait is called without it,
 * by one thread at a time. A read that ends says how many bytes it brought, or an errno below 0.
 */
#ifndef DRIVE_H
#define DRIVE_H

#include <stdbool.h>
#include <stdint.h>

enum drive_kind { DRIVE_AUTO, DRIVE_URING, DRIVE_THREADS };

struct read {
    uint64_t offset;
    uint32_t length; /* one read is below 2 GiB */
    int descriptor;
    void *address;
    uint32_t tag; /* of the caller's */
};

struct ended {
    uint32_t tag;
    int32_t result;
};

struct drive;

/* NULL with errno if the system forbids the kind, or has no memory. `capacity` reads may be in flight at once. */
struct drive *drive_open(enum drive_kind kind, uint32_t capacity);
/* Waits for all reads in flight. */
void drive_close(struct drive *drive);
enum drive_kind drive_kind(const struct drive *drive);

/* Queue a read; there are never more than `capacity` between this and its end. */
void drive_add(struct drive *drive, const struct read *read);
/* Begin all queued reads. Those that the system refuses end with its errno. */
void drive_submit(struct drive *drive);
/* Take a read that has ended; false if none has. */
bool drive_collect(struct drive *drive, struct ended *ended);
/* Wait until any read has ended, for `milliseconds` at most. */
void drive_wait(struct drive *drive, uint32_t milliseconds);

/* Read bytes now, in this thread; 0, or an errno, ENODATA if the file is shorter. By any thread, with or without a lock. */
int read_fully(int descriptor, char *to, uint64_t length, uint64_t offset);

#endif
