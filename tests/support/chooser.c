/* As much of ggml as the preloaded library knows: graphs of one tensor, in which a router chose. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

struct tensor { /* its first 80 bytes are ggml's */
    uint32_t type, other[3];
    int64_t ne[4];
    size_t nb[4];
    char name[64];
    const int32_t *ids;
};

typedef bool (*callback)(void *tensor, bool ask, void *data);

static struct {
    callback callback;
    void *data;
} schedulers[128];

const char *ggml_get_name(const struct tensor *tensor) {
    return tensor->name;
}

int64_t ggml_nelements(const struct tensor *tensor) {
    return tensor->ne[0] * tensor->ne[1] * tensor->ne[2] * tensor->ne[3];
}

void ggml_backend_tensor_get(const struct tensor *tensor, void *data, size_t offset, size_t length) {
    memcpy(data, (const char *)tensor->ids + offset, length);
}

void ggml_backend_sched_set_eval_callback(void *scheduler, callback callback, void *data) {
    schedulers[(uintptr_t)scheduler].callback = callback;
    schedulers[(uintptr_t)scheduler].data = data;
}

int ggml_backend_sched_graph_compute_async(void *scheduler, void *graph) {
    callback call = schedulers[(uintptr_t)scheduler].callback;
    void *data = schedulers[(uintptr_t)scheduler].data;
    if (call && call(graph, true, data)) call(graph, false, data);
    return 0;
}

/* Compute the graph in a forked child, with the callback that was set for another: as where graphs are used again. */
static int compute_in_child(void *scheduler, struct tensor *graph) {
    pid_t child = fork();
    if (child == 0) _exit(ggml_backend_sched_graph_compute_async(scheduler, graph));
    int status = -1;
    return waitpid(child, &status, 0) == child ? status : -1;
}

/* Compute a graph in which a layer chose `columns` experts in each row; rows are `width` apart. Of a layer from 1000 on, in a
 * forked child. */
int choose(uintptr_t scheduler, int layer, int64_t rows, int64_t columns, size_t width, const int32_t *ids) {
    struct tensor tensor = {.type = 26, .ne = {columns, rows, 1, 1}, .nb = {4, 4 * width, 0, 0}, .ids = ids};
    snprintf(tensor.name, sizeof tensor.name, "ffn_moe_topk-%d", layer % 1000);
    if (layer >= 1000) return compute_in_child((void *)scheduler, &tensor);
    ggml_backend_sched_set_eval_callback((void *)scheduler, NULL, NULL);
    return ggml_backend_sched_graph_compute_async((void *)scheduler, &tensor);
}
