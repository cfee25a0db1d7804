/* Loaded before the seam: hides the function by which routers' selections are seen, as in a program that is linked
 * otherwise. */
#define _GNU_SOURCE
#include <dlfcn.h>

void ggml_backend_sched_set_eval_callback(void *scheduler, void *callback, void *data) {
    Dl_info library;
    void *handle = dladdr(__builtin_return_address(0), &library) ? dlopen(library.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : 0;
    void (*set)(void *, void *, void *) =
        (void (*)(void *, void *, void *))dlsym(handle, "ggml_backend_sched_set_eval_callback");
    set(scheduler, callback, data);
}
