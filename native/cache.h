/*
 * The cache of experts: reads what is missing into slots, and waits for it.
 *
 * Any thread may call any function here, except cache_close, which must be the last. One lock guards all of a cache.
 * It is left while a thread waits for the drive, computes digests or makes pages ready. A context is used by one thread
 * at a time.
 *
 * Nothing is allocated after cache_open, and no function of the C library is called that takes a lock of its own: so
 * cache_bring may be called by a signal handler, if its thread is in no function of the cache.
 */
#ifndef CACHE_H
#define CACHE_H

#include <pthread.h>
#include <stdatomic.h>

#include "drive.h"
#include "guesses.h"
#include "pool.h"
#include "prompts.h"
#include "residents.h"

enum { CHECK_NONE, CHECK_FIRST, CHECK_EACH };
enum { PLACES = 2, PATH_LENGTH = 4096 };

#define NO_CONTEXT UINT32_MAX

/* Statistics, in memory that other processes may map. */
struct cache_statistics {
    _Atomic uint64_t hit_count, miss_count; /* lookups, without those of drafts */
    _Atomic uint64_t read_length;           /* bytes, those read ahead in vain included */
    _Atomic uint64_t wait_nanoseconds;      /* in which steps waited for reads */
    _Atomic uint64_t fault_count;           /* uses that nobody announced */
    _Atomic uint64_t resident_length, slots_length, memory;
    _Atomic uint64_t routed_count; /* tokens times layers, but for the last layer */
    _Atomic uint64_t holds_all, is_warming;
    _Atomic uint64_t wasted_length;
    _Atomic uint64_t budget; /* bytes of `memory` that the policy orders: all but the reserve */
    /* Of calls of the model for few tokens: how many, their tokens, the time from the first router to the end, and the
     * bytes of the experts that each used. */
    _Atomic uint64_t decoding_count, decoded_count, decoding_nanoseconds, decoded_length;
    _Atomic uint64_t guessed_count, right_count; /* experts that the next layer's router named, one layer early */
    _Atomic uint64_t ahead_count, ahead_right_count; /* those of them that were missing, and worth a read */
    _Atomic uint64_t control_count, control_right_count; /* guesses of a layer by its own router */
    _Atomic uint64_t guesses_are_off; /* as these were wrong too often */
    _Atomic uint64_t draft_hit_count, draft_miss_count; /* lookups in layers for multi-token prediction */
    _Atomic uint64_t evicted_count;
    _Atomic uint64_t rechecked_count; /* reads held against digests that were right before */
};

/* One of the places where a file's bytes lie; a second drive has a mirror. */
struct place {
    const char *path;
    int direct, cached; /* descriptors, with O_DIRECT and without; -1: there is none */
    bool refuses_direct;
    uint64_t queued_length, busy_length;
    double throughput; /* bytes a nanosecond, 0: unknown */
    uint64_t measured_at, began_at;
};

struct cache_file {
    struct place places[PLACES];
    uint32_t place_count;
};

struct cache_error {
    int code; /* enum cache_code */
    int system_error;
    uint32_t expert, part; /* which could not be read; NO_EXPERT: of the system alone */
    uint32_t place;        /* of its file: 1 is the mirror */
    uint32_t unused;
    uint64_t offset; /* in its file */
    uint64_t found;  /* the digest of what was read */
    char message[512];
};

enum cache_code { CACHE_OK, CACHE_READ_FAILED, CACHE_DIGEST_DIFFERS, CACHE_SYSTEM };

struct call { /* of the model by one context: its steps so far */
    uint64_t started, length; /* of the experts that they used */
    uint32_t rows;
};

struct warm_expert { /* `share` of the tokens used it in earlier runs, in 2^-32 */
    uint32_t expert, share;
};

struct in_flight { /* of one expert */
    uint8_t read_count;
    bool has_failed, is_ahead;
};

struct pending { /* a read, by its tag */
    uint32_t expert, part; /* the first that it is of */
    uint32_t length, needed;
    uint64_t offset;
    char *address;
    uint8_t place;
    bool has_mirror;
    uint32_t next_free;
};

/* What a program has to do with experts that come and go; called with the lock held. */
struct cache_owner {
    void *data;
    void (*map)(void *data, uint32_t expert);
    void (*unmap)(void *data, uint32_t expert);
    void (*tick)(void *data); /* a few times a second, without the lock */
};

struct cache_options {
    uint64_t memory, reserve;
    enum policy policy;
    int check;
    enum drive_kind reads;
    bool is_cached;   /* through the page cache */
    bool is_prepared; /* memory is taken before it is needed */
    bool has_edges;   /* programs use the pages that parts share with others where files have them */
    bool prefetches;  /* for the next layer what its router names, while decoding */
};

struct cache {
    pthread_mutex_t lock;
    pthread_cond_t changed;  /* reads ended, experts released: for steps */
    pthread_cond_t has_work; /* for the thread that reads ahead */
    const struct experts *experts;
    struct cache_options options;
    struct cache_file *files;
    struct cache_owner owner;
    struct residents residents;
    struct prompts prompts;
    struct guesses guesses;
    struct drive *drive;
    struct pool_memory pool;
    struct in_flight *in_flight;
    struct pending *pending;
    uint32_t first_free, pending_count;
    uint32_t beginning_count; /* experts whose reads are about to be queued */
    uint64_t ahead_in_flight; /* bytes */
    bool is_waiting;          /* a thread waits for the drive */
    uint32_t collecting_count; /* threads that have taken a read which has ended */
    uint32_t turn;            /* the context that takes slots, or NO_CONTEXT */
    struct call calls[MAX_CONTEXTS];
    uint32_t *counts;         /* by a layer's experts: tokens of the current step, then these experts; by context */
    uint32_t counts_length;   /* of either */
    struct cache_error error; /* of the last read that failed */
    uint64_t later_count;     /* reads of experts whose digests were right before */
    struct cache_statistics *statistics, own_statistics;
    const struct warm_expert *warm_up; /* to read before the first step */
    uint32_t warm_up_count, warm_up_next;
    uint64_t prepared_lengths[MAX_CLASSES]; /* bytes of each class that have pages, or will have */
    bool has_stepped, is_closing, has_thread;
    atomic_bool is_idle; /* nobody waits for the program: nothing is read ahead */
    pthread_t thread;
};

/* Open a cache; `experts` and `files` stay until it is closed. CACHE_OK or a code, with `error` filled. */
int cache_open(struct cache *cache, const struct experts *experts, struct cache_file *files,
               const struct cache_options *options, struct cache_owner owner, struct cache_statistics *statistics,
               struct cache_error *error);
void cache_close(struct cache *cache);

/* Have `rows` times `columns` routed experts of a layer (its own numbers) resident, until the context's next step or
 * its release. Waits for their reads. */
int cache_use(struct cache *cache, uint32_t context, uint32_t layer, const int32_t *routed, uint32_t rows,
              uint32_t columns, struct cache_error *error);
/* Is a guess worth its time, which experts the layer behind this one will use? */
bool cache_wants_guess(struct cache *cache, uint32_t layer, uint32_t rows);
/* Read ahead what a guess names: experts of the layer behind this one, by rank, `rows` at each; the guess took
 * nanoseconds. */
void cache_guess(struct cache *cache, uint32_t context, uint32_t layer, const uint32_t *experts, uint32_t count,
                 uint32_t rows, uint64_t nanoseconds);
/* Note whether a layer's own router names what was routed. */
void cache_record_control(struct cache *cache, bool is_right);
void cache_release(struct cache *cache, uint32_t context);
/* Have one expert resident that nobody announced, and map it. */
int cache_bring(struct cache *cache, uint32_t expert, struct cache_error *error);
/* Read experts ahead, in this order, as far as there is room; none: stop. */
void cache_read_ahead(struct cache *cache, const uint32_t *experts, uint32_t count);
void cache_resize(struct cache *cache, uint64_t memory);
/* Before the first step, and before the thread is started: experts that are never evicted; those to begin
 * with, the most used first. */
bool cache_pin(struct cache *cache, uint32_t expert);
void cache_warm_up(struct cache *cache, const struct warm_expert *experts, uint32_t count);
/* Start the thread that reads ahead while others compute. */
int cache_start(struct cache *cache);

/* The address of an expert's slot; it is resident. */
char *cache_address(const struct cache *cache, uint32_t expert);

#endif
