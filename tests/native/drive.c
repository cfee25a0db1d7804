/*
 * Reads by io_uring and by threads, of a file and of what is none: drive FOLDER. Calls of the system are cut short, broken off
 * and refused. It prints nothing, or what is wrong; "no io_uring" if the system forbids that.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../../native/drive.h"
#include "../../native/threads.h"

enum { COUNT = 6, LENGTH = 5000, FILE_LENGTH = 40000, ROUNDS = 7 };

static char content[FILE_LENGTH], buffers[COUNT][LENGTH];
static int file;
static enum { SOUND, INTERRUPTED, REFUSED, IN_PIECES } system_is;
static uint32_t piece; /* the most bytes of a pread, or reads of a submission, that are IN_PIECES */

#define REQUIRE(condition) \
    if (!(condition)) return printf("line %d: %s\n", __LINE__, #condition), 1

ssize_t __real_pread(int descriptor, void *buffer, size_t length, off_t offset);
ssize_t __wrap_pread(int descriptor, void *buffer, size_t length, off_t offset);
long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);

/* Fail once, or go on failing. */
static bool fails(void) {
    if (system_is != INTERRUPTED && system_is != REFUSED) return false;
    errno = system_is == REFUSED ? EBUSY : EINTR;
    if (system_is == INTERRUPTED) system_is = SOUND;
    return true;
}

ssize_t __wrap_pread(int descriptor, void *buffer, size_t length, off_t offset) {
    if (fails()) return -1;
    return __real_pread(descriptor, buffer, system_is == IN_PIECES && length > piece ? piece : length, offset);
}

long __wrap_syscall(long number, ...) {
    long all[7];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 7; i++) all[i] = va_arg(list, long);
    va_end(list);
    bool is_submission = number == SYS_io_uring_enter && all[1];
    if (is_submission && fails()) return -1;
    if (is_submission && system_is == IN_PIECES) all[1] = piece;
    return __real_syscall(number, all[0], all[1], all[2], all[3], all[4], all[5], all[6]);
}

static uint64_t offset_of(uint32_t number) { return (uint64_t)number * 6400 + 512; }

/* Queue a read of each buffer; collect all of them into `results`, by buffer. */
static int read_all(struct drive *drive, int descriptor, int32_t *results) {
    struct ended ended;
    bool has_ended[COUNT] = {false};
    memset(buffers, 0, sizeof buffers);
    for (uint32_t i = 0; i < COUNT; i++) drive_add(drive, &(struct read){offset_of(i), LENGTH, descriptor, buffers[i], 100 + i});
    drive_submit(drive);
    for (uint32_t count = 0; count < COUNT;) {
        if (!drive_collect(drive, &ended)) {
            uint64_t started = now();
            drive_wait(drive, 20000);
            REQUIRE(now() - started < 10000000000); /* it is woken */
            continue;
        }
        REQUIRE(ended.tag >= 100 && ended.tag < 100 + COUNT && !has_ended[ended.tag - 100]);
        has_ended[ended.tag - 100] = true;
        results[ended.tag - 100] = ended.result;
        count++;
    }
    REQUIRE(!drive_collect(drive, &ended));
    return 0;
}

static bool is_right(uint32_t number, uint32_t length) { return !memcmp(buffers[number], content + offset_of(number), length); }

static int read_whole(struct drive *drive) {
    int32_t results[COUNT];
    for (int round = 0; round < ROUNDS; round++) { /* more than the drive has room for */
        if (read_all(drive, file, results)) return 1;
        for (uint32_t i = 0; i < COUNT; i++) REQUIRE(results[i] == LENGTH && is_right(i, LENGTH));
    }
    return 0;
}

static int read_what_is_not_there(struct drive *drive) {
    int32_t results[COUNT];
    REQUIRE(!ftruncate(file, (off_t)offset_of(4) + 700));
    if (read_all(drive, file, results)) return 1;
    for (uint32_t i = 0; i < COUNT; i++) REQUIRE(results[i] == (i < 4 ? LENGTH : i == 4 ? 700 : 0) && is_right(i, (uint32_t)results[i]));
    REQUIRE(pwrite(file, content, FILE_LENGTH, 0) == FILE_LENGTH);
    if (read_all(drive, -1, results)) return 1;
    for (uint32_t i = 0; i < COUNT; i++) REQUIRE(results[i] == -EBADF);
    return 0;
}

static int wait_for_nothing(struct drive *drive) {
    uint64_t started = now();
    drive_wait(drive, 1030);
    REQUIRE(now() - started > 1020000000);
    return 0;
}

static int meet_a_poor_system(struct drive *drive) {
    int32_t results[COUNT];
    system_is = INTERRUPTED;
    if (read_all(drive, file, results)) return 1;
    for (uint32_t i = 0; i < COUNT; i++) REQUIRE(results[i] == LENGTH && is_right(i, LENGTH));
    REQUIRE(system_is == SOUND);
    system_is = REFUSED;
    if (read_all(drive, file, results)) return 1;
    for (uint32_t i = 0; i < COUNT; i++) REQUIRE(results[i] == -EBUSY);
    system_is = IN_PIECES;
    const struct {
        uint32_t piece;
        int32_t expected[2]; /* of a ring, and of threads */
    } cases[] = {{2, {LENGTH, 2}}, {999, {LENGTH, 999}}, {0, {-EAGAIN, 0}}};
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t expected = cases[i].expected[drive_kind(drive) == DRIVE_THREADS];
        piece = cases[i].piece;
        if (read_all(drive, file, results)) return 1;
        for (uint32_t n = 0; n < COUNT; n++) REQUIRE(results[n] == expected && (expected <= 0 || is_right(n, (uint32_t)expected)));
    }
    system_is = SOUND;
    return 0;
}

/* A drive that is closed waits for its reads: their buffers are whole. */
static int close_busy(enum drive_kind kind) {
    struct drive *drive = drive_open(kind, COUNT);
    memset(buffers, 0, sizeof buffers);
    for (uint32_t i = 0; i < COUNT; i++) drive_add(drive, &(struct read){offset_of(i), LENGTH, file, buffers[i], i});
    drive_submit(drive);
    drive_close(drive);
    for (uint32_t i = 0; i < COUNT; i++) REQUIRE(is_right(i, LENGTH));
    return 0;
}

/* Does the system forbid io_uring, or has it an older one than the drive needs? */
static bool is_forbidden(void) {
    struct io_uring_params parameters = {0};
    int descriptor = (int)__real_syscall(SYS_io_uring_setup, 1, &parameters, 0, 0, 0, 0);
    if (descriptor < 0) return true;
    close(descriptor);
    return !(parameters.features & IORING_FEAT_EXT_ARG);
}

static int read_at_once(void) {
    char *to = buffers[0];
    REQUIRE(!read_fully(file, to, LENGTH, offset_of(0)) && is_right(0, LENGTH));
    REQUIRE(read_fully(file, to, LENGTH, FILE_LENGTH - 1) == ENODATA && to[0] == content[FILE_LENGTH - 1]);
    REQUIRE(read_fully(-1, to, LENGTH, 0) == EBADF);
    memset(to, 0, LENGTH);
    system_is = INTERRUPTED;
    REQUIRE(!read_fully(file, to, LENGTH, offset_of(0)) && is_right(0, LENGTH));
    memset(to, 0, LENGTH);
    system_is = IN_PIECES;
    piece = 999;
    REQUIRE(!read_fully(file, to, LENGTH, offset_of(0)) && is_right(0, LENGTH));
    system_is = SOUND;
    return 0;
}

int main(int argument_count, char **arguments) {
    if (argument_count < 2) return 2;
    alarm(60);
    for (int i = 0; i < FILE_LENGTH; i++) content[i] = (char)(i * 7 + i / 256);
    file = open(arguments[1], O_RDWR | O_TMPFILE, 0600);
    if (write(file, content, FILE_LENGTH) != FILE_LENGTH || read_at_once()) return 1;
    for (enum drive_kind kind = DRIVE_URING; kind <= DRIVE_THREADS; kind++) {
        struct drive *drive = drive_open(kind, COUNT);
        if (!drive && kind == DRIVE_URING && is_forbidden() && puts("no io_uring")) continue;
        REQUIRE(drive && drive_kind(drive) == kind);
        if (read_whole(drive) || read_what_is_not_there(drive) || wait_for_nothing(drive)) return 1;
        if (meet_a_poor_system(drive) || read_whole(drive)) return 1;
        drive_close(drive);
        if (close_busy(kind)) return 1;
    }
    return 0;
}
