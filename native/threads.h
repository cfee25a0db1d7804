/*
 * What all threads of ours have in common: they take no signals, and wait by a clock that nobody sets.
 */
#ifndef THREADS_H
#define THREADS_H

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <time.h>

/* Start a thread that takes no signals: these are the program's own. 0, or an errno. */
static inline int start_thread(pthread_t *thread, void *(*run)(void *), void *data) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, run, data);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

static inline void init_condition(pthread_cond_t *condition) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

/* Nanoseconds of a clock that nobody sets. */
static inline uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

/* The time after that many milliseconds, for pthread_cond_timedwait. */
static inline struct timespec time_in(uint32_t milliseconds) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    uint64_t nanoseconds = (uint64_t)time.tv_nsec + milliseconds * 1000000ull;
    time.tv_sec += (time_t)(nanoseconds / 1000000000);
    time.tv_nsec = (long)(nanoseconds % 1000000000);
    return time;
}

#endif
