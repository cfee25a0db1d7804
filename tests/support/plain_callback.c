/*
 * Loaded before a llama.cpp program that a supervisor's is held against: the same program alone, but for
 * what decides which kernels compute. A callback looks at each choice and does nothing, since
 * backends fuse no operations across what is looked at; and no weights are repacked.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

typedef bool (*eval_callback)(void *tensor, bool ask, void *data);

static const char *(*get_name)(const void *);

static void *find(const char *name, void *caller) {
    void *function = dlsym(RTLD_NEXT, name);
    Dl_info library;
    if (function || !dladdr(caller, &library)) return function;
    void *handle = dlopen(library.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return handle ? dlsym(handle, name) : NULL;
}

static bool look(void *tensor, bool ask, void *data) {
    (void)data;
    return !ask || !strncmp(get_name(tensor), "ffn_moe_topk-", 13);
}

void ggml_backend_sched_set_eval_callback(void *scheduler, eval_callback callback, void *data) {
    void *caller = __builtin_return_address(0);
    void (*set)(void *, eval_callback, void *) = find("ggml_backend_sched_set_eval_callback", caller);
    (void)callback, (void)data;
    get_name = find("ggml_get_name", caller);
    set(scheduler, look, NULL);
}

void *ggml_backend_reg_get_proc_address(void *registry, const char *name) {
    void *(*get)(void *, const char *) = find("ggml_backend_reg_get_proc_address", __builtin_return_address(0));
    return strcmp(name, "ggml_backend_dev_get_extra_bufts") ? get(registry, name) : NULL;
}
