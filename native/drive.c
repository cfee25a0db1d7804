#define _GNU_SOURCE
#include "drive.h"

#include <errno.h>
#include <linux/io_uring.h>
#include <linux/time_types.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "threads.h"

/*
 * The ring of io_uring is used by plain system calls: of liburing nothing but a few lines would be needed.
 * Where it is forbidden, as in Docker, threads read.
 *
 * `lock` guards the queue and the ended reads of the threads. A ring has no lock: its submission side is used under the
 * lock of the cache, and so is its completion side; who waits only enters the kernel.
 */

enum { THREAD_COUNT = 8 };

struct ring {
    int descriptor;
    uint32_t *sq_head, *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    void *memory;
    size_t memory_length, sqes_length;
    uint32_t queued, refused_count;
    struct ended *refused;
};

struct pool {
    pthread_t threads[THREAD_COUNT];
    uint32_t thread_count;
    pthread_mutex_t lock;
    pthread_cond_t is_queued, has_ended;
    struct read *queue; /* a circle of `capacity` */
    struct ended *ended;
    uint32_t first, queued_count, ended_count;
    bool is_closing;
};

struct drive {
    enum drive_kind kind;
    uint32_t capacity, in_flight;
    struct ring ring;
    struct pool pool;
};

/* ---- io_uring ---- */

static uint32_t load(const uint32_t *value) { return atomic_load_explicit((const _Atomic uint32_t *)value, memory_order_acquire); }
static void store(uint32_t *value, uint32_t new) { atomic_store_explicit((_Atomic uint32_t *)value, new, memory_order_release); }

static bool map_ring(struct ring *ring, const struct io_uring_params *parameters) {
    size_t sq_length = parameters->sq_off.array + parameters->sq_entries * sizeof(uint32_t);
    size_t cq_length = parameters->cq_off.cqes + parameters->cq_entries * sizeof(struct io_uring_cqe);
    ring->memory_length = sq_length > cq_length ? sq_length : cq_length;
    ring->sqes_length = parameters->sq_entries * sizeof(struct io_uring_sqe);
    int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
    ring->memory = mmap(NULL, ring->memory_length, protection, flags, ring->descriptor, IORING_OFF_SQ_RING);
    if (ring->memory == MAP_FAILED) return false;
    ring->sqes = mmap(NULL, ring->sqes_length, protection, flags, ring->descriptor, IORING_OFF_SQES);
    if (ring->sqes == MAP_FAILED) {
        munmap(ring->memory, ring->memory_length);
        return false;
    }
    char *base = ring->memory;
    ring->sq_head = (uint32_t *)(base + parameters->sq_off.head);
    ring->sq_tail = (uint32_t *)(base + parameters->sq_off.tail);
    ring->sq_mask = (uint32_t *)(base + parameters->sq_off.ring_mask);
    ring->sq_array = (uint32_t *)(base + parameters->sq_off.array);
    ring->cq_head = (uint32_t *)(base + parameters->cq_off.head);
    ring->cq_tail = (uint32_t *)(base + parameters->cq_off.tail);
    ring->cq_mask = (uint32_t *)(base + parameters->cq_off.ring_mask);
    ring->cqes = (struct io_uring_cqe *)(base + parameters->cq_off.cqes);
    return true;
}

static bool open_ring(struct ring *ring, uint32_t capacity) {
    struct io_uring_params parameters = {0};
    ring->refused = calloc(capacity, sizeof *ring->refused);
    if (!ring->refused) return false;
    ring->descriptor = (int)syscall(SYS_io_uring_setup, capacity, &parameters);
    if (ring->descriptor < 0) {
        free(ring->refused);
        return false;
    }
    /* Both are there since Linux 5.11. */
    bool is_known = parameters.features & IORING_FEAT_SINGLE_MMAP && parameters.features & IORING_FEAT_EXT_ARG;
    if (is_known && map_ring(ring, &parameters)) return true;
    int error = is_known ? errno : ENOSYS;
    close(ring->descriptor);
    free(ring->refused);
    errno = error;
    return false;
}

static void close_ring(struct ring *ring) {
    munmap(ring->sqes, ring->sqes_length);
    munmap(ring->memory, ring->memory_length);
    close(ring->descriptor);
    free(ring->refused);
}

static void ring_add(struct ring *ring, const struct read *read) {
    uint32_t tail = *ring->sq_tail, index = tail & *ring->sq_mask;
    ring->sqes[index] = (struct io_uring_sqe){
        .opcode = IORING_OP_READ,
        .fd = read->descriptor,
        .off = read->offset,
        .addr = (uintptr_t)read->address,
        .len = read->length,
        .user_data = read->tag,
    };
    ring->sq_array[index] = index;
    store(ring->sq_tail, tail + 1);
    ring->queued++;
}

/* Take back the reads that the system refuses to begin: they end with its errno. */
static void ring_refuse(struct ring *ring, int error) {
    uint32_t tail = *ring->sq_tail - ring->queued;
    store(ring->sq_tail, tail);
    for (; ring->queued; ring->queued--, tail++)
        ring->refused[ring->refused_count++] = (struct ended){(uint32_t)ring->sqes[tail & *ring->sq_mask].user_data, -error};
}

static void ring_submit(struct ring *ring) {
    while (ring->queued) {
        long count = syscall(SYS_io_uring_enter, ring->descriptor, ring->queued, 0, 0, NULL, 0);
        if (count > 0)
            ring->queued -= (uint32_t)count;
        else if (!count || errno != EINTR) /* also for want of memory: nobody waits for that under a lock */
            ring_refuse(ring, count ? errno : EAGAIN);
    }
}

static bool ring_collect(struct ring *ring, struct ended *ended) {
    uint32_t head = *ring->cq_head;
    if (ring->refused_count) {
        *ended = ring->refused[--ring->refused_count];
        return true;
    }
    if (head == load(ring->cq_tail)) return false;
    const struct io_uring_cqe *cqe = &ring->cqes[head & *ring->cq_mask];
    *ended = (struct ended){(uint32_t)cqe->user_data, cqe->res};
    store(ring->cq_head, head + 1);
    return true;
}

static void ring_wait(struct ring *ring, uint32_t milliseconds) {
    if (load(ring->cq_head) != load(ring->cq_tail)) return;
    struct __kernel_timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000LL};
    struct io_uring_getevents_arg argument = {.ts = (uintptr_t)&time};
    syscall(SYS_io_uring_enter, ring->descriptor, 0, 1, IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &argument, sizeof argument);
}

/* ---- threads ---- */

/* Once, as a ring does: it may bring less than the file has. */
static int32_t read_now(const struct read *read) {
    ssize_t count;
    do count = pread(read->descriptor, read->address, read->length, (off_t)read->offset);
    while (count < 0 && errno == EINTR);
    return count < 0 ? -errno : (int32_t)count;
}

static void *read_all(void *data) {
    struct drive *drive = data;
    struct pool *pool = &drive->pool;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->queued_count && !pool->is_closing) pthread_cond_wait(&pool->is_queued, &pool->lock);
        if (!pool->queued_count) break;
        struct read read = pool->queue[pool->first];
        pool->first = (pool->first + 1) % drive->capacity;
        pool->queued_count--;
        pthread_mutex_unlock(&pool->lock);
        int32_t result = read_now(&read);
        pthread_mutex_lock(&pool->lock);
        pool->ended[pool->ended_count++] = (struct ended){read.tag, result};
        pthread_cond_signal(&pool->has_ended);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static void close_pool(struct pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->is_closing = true;
    pthread_cond_broadcast(&pool->is_queued);
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < pool->thread_count; i++) pthread_join(pool->threads[i], NULL);
    free(pool->queue);
    free(pool->ended);
}

static bool open_pool(struct drive *drive) {
    struct pool *pool = &drive->pool;
    pthread_mutex_init(&pool->lock, NULL);
    init_condition(&pool->is_queued);
    init_condition(&pool->has_ended);
    pool->queue = calloc(drive->capacity, sizeof *pool->queue);
    pool->ended = calloc(drive->capacity, sizeof *pool->ended);
    int error = pool->queue && pool->ended ? 0 : ENOMEM;
    while (!error && pool->thread_count < THREAD_COUNT) {
        error = start_thread(&pool->threads[pool->thread_count], read_all, drive);
        pool->thread_count += !error;
    }
    if (pool->thread_count) return true; /* fewer will do */
    close_pool(pool);
    errno = error;
    return false;
}

static void pool_add(struct drive *drive, const struct read *read) {
    struct pool *pool = &drive->pool;
    pthread_mutex_lock(&pool->lock);
    pool->queue[(pool->first + pool->queued_count++) % drive->capacity] = *read;
    pthread_cond_signal(&pool->is_queued);
    pthread_mutex_unlock(&pool->lock);
}

static bool pool_collect(struct pool *pool, struct ended *ended) {
    pthread_mutex_lock(&pool->lock);
    bool has_any = pool->ended_count > 0;
    if (has_any) {
        *ended = pool->ended[0];
        memmove(pool->ended, pool->ended + 1, --pool->ended_count * sizeof *ended);
    }
    pthread_mutex_unlock(&pool->lock);
    return has_any;
}

static void pool_wait(struct pool *pool, uint32_t milliseconds) {
    struct timespec until = time_in(milliseconds);
    pthread_mutex_lock(&pool->lock);
    while (!pool->ended_count && !pthread_cond_timedwait(&pool->has_ended, &pool->lock, &until)) continue;
    pthread_mutex_unlock(&pool->lock);
}

/* ---- both ---- */

int read_fully(int descriptor, char *to, uint64_t length, uint64_t offset) {
    while (length) {
        ssize_t count = pread(descriptor, to, length, (off_t)offset);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return count ? errno : ENODATA;
        to += count;
        offset += (uint64_t)count;
        length -= (uint64_t)count;
    }
    return 0;
}

struct drive *drive_open(enum drive_kind kind, uint32_t capacity) {
    struct drive *drive = calloc(1, sizeof *drive);
    if (!drive) return NULL;
    drive->capacity = capacity;
    if (kind != DRIVE_THREADS && open_ring(&drive->ring, capacity))
        drive->kind = DRIVE_URING;
    else if (kind != DRIVE_URING && open_pool(drive))
        drive->kind = DRIVE_THREADS;
    if (drive->kind != DRIVE_AUTO) return drive;
    int error = errno;
    free(drive);
    errno = error;
    return NULL;
}

enum drive_kind drive_kind(const struct drive *drive) { return drive->kind; }

void drive_add(struct drive *drive, const struct read *read) {
    drive->in_flight++;
    if (drive->kind == DRIVE_URING)
        ring_add(&drive->ring, read);
    else
        pool_add(drive, read);
}

void drive_submit(struct drive *drive) {
    if (drive->kind == DRIVE_URING) ring_submit(&drive->ring);
}

bool drive_collect(struct drive *drive, struct ended *ended) {
    bool is_ring = drive->kind == DRIVE_URING, has_any = is_ring ? ring_collect(&drive->ring, ended) : pool_collect(&drive->pool, ended);
    drive->in_flight -= has_any;
    return has_any;
}

void drive_wait(struct drive *drive, uint32_t milliseconds) {
    if (drive->kind == DRIVE_URING)
        ring_wait(&drive->ring, milliseconds);
    else
        pool_wait(&drive->pool, milliseconds);
}

void drive_close(struct drive *drive) {
    struct ended ended;
    while (drive->in_flight)
        if (!drive_collect(drive, &ended)) drive_wait(drive, 1000);
    if (drive->kind == DRIVE_URING)
        close_ring(&drive->ring);
    else
        close_pool(&drive->pool);
    free(drive);
}
