#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "seam.h"

/*
 * What is known of llama.cpp: the functions by which its libraries talk to each other, and the names of tensors.
 *
 * `state_lock` guards the contexts. A context's step is brought by the thread that computes it, without that lock.
 */

enum {
    TYPE_I32 = 26,      /* GGML_TYPE_I32 */
    STATUS_FAILED = -1, /* GGML_STATUS_FAILED */
    MOST_SCALES = 64,   /* bytes of a part that is a number or a few */
    LEAST_DATA = 80,    /* bytes of ggml_tensor before which its `data` does not lie */
};

typedef bool (*eval_callback)(void *tensor, bool ask, void *data);

struct context { /* of llama.cpp, by its scheduler */
    void *scheduler, *data;
    const void *graph; /* that it computes */
    eval_callback callback;
    bool asked; /* the program's own callback wants the tensor */
    bool is_computing, has_failed;
    bool is_of_another; /* its graph has the experts of another model, as of one that drafts */
    bool has_drafted;   /* it uses experts that need not be in memory where all others are */
    uint32_t number;
    int32_t *ids;
    size_t id_room;
    uint64_t last_use;
    struct routers *routers;
};

static pthread_mutex_t state_lock = PTHREAD_MUTEX_INITIALIZER;
static struct context contexts[UNANNOUNCED];
static uint32_t context_count;
static uint64_t use_count;
static bool *is_in_place; /* by layer: its experts are used where they are mapped */
static atomic_bool any_is_in_place;

static const char *(*get_name)(const void *);
static void (*get_bytes)(const void *, void *, size_t, size_t);
static int64_t (*count_elements)(const void *);
static void *(*get_data)(const void *);                      /* NULL: this build has none */
static void *(*get_tensor)(const void *graph, const char *); /* so too */

const char *ggml_name(const void *tensor) { return get_name(tensor); }
void ggml_read(const void *tensor, void *bytes, size_t length) { get_bytes(tensor, bytes, 0, length); }
const void *ggml_place(const void *tensor) { return get_data ? get_data(tensor) : NULL; }

/* ---- what routers select ---- */

/* The layer of the cache that a tensor's name tells, if it is a router's selection; -1: it is none. */
static int layer_of_selection(const void *tensor) {
    static const char prefix[] = "ffn_moe_topk-";
    const char *name = get_name(tensor);
    if (strncmp(name, prefix, sizeof prefix - 1)) return -1;
    char *end;
    long number = strtol(name + sizeof prefix - 1, &end, 10);
    for (uint32_t i = 0; !*end && i < seam.experts.layer_count; i++)
        if (seam.experts.layers[i].number == (uint32_t)number) return (int)i;
    return -1;
}

/* Does a graph compute a layer with another model's experts? Those of the model are where its files are mapped; a layer
 * that was copied elsewhere while it loaded, and a library that does not tell, are taken for the model's. */
static bool is_of_another(const void *graph, uint32_t layer) {
    const struct table_layer *of = (const struct table_layer *)seam_array(seam.table->layers) + layer;
    bool is_known = get_tensor && get_data && is_in_place && is_in_place[layer], is_found = false;
    for (uint32_t p = 0; is_known && p < of->part_count; p++) {
        char name[PART_NAME_LENGTH + 16];
        struct region region;
        snprintf(name, sizeof name, "blk.%u.%s", of->number, of->names[p]);
        const void *tensor = get_tensor(graph, name), *address = tensor ? get_data(tensor) : NULL;
        if (address && (mapping_is_strided_address(address) || regions_find(address, &region))) return false;
        is_found |= address != NULL;
    }
    return is_found;
}

/* The layer of the cache whose experts a tensor of a context selects; -1: it is no selection of the model. */
static int find_selection(struct context *context, const void *tensor) {
    int layer = seam.is_attached ? layer_of_selection(tensor) : -1; /* a forked child reads the files themselves */
    if (layer < 0) return -1;
    if (context->graph) context->is_of_another = is_of_another(context->graph, (uint32_t)layer);
    context->graph = NULL; /* all of it is of one model */
    return context->is_of_another ? -1 : layer;
}

/* Read a selection into context->ids: rows of tokens, with columns of experts. */
static bool read_ids(struct context *context, const void *tensor, uint32_t *rows, uint32_t *columns) {
    const struct tensor_head *head = tensor;
    const int64_t *sizes = head->ne, count = count_elements(tensor);
    if (head->type != TYPE_I32 || sizes[2] != 1 || sizes[3] != 1 || sizes[0] * sizes[1] != count || head->nb[0] != 4)
        seam_end("this llama.cpp lays out its tensors in another way than those that are known");
    *columns = (uint32_t)sizes[0];
    *rows = (uint32_t)sizes[1];
    if (!count) return true;
    /* A row of a view may be longer than what was selected: it is a row of an argsort. */
    size_t length = (*rows - 1) * head->nb[1] + *columns * 4;
    if (length > context->id_room) {
        int32_t *ids = realloc(context->ids, length);
        if (!ids) return false;
        context->ids = ids;
        context->id_room = length;
    }
    get_bytes(tensor, context->ids, 0, length);
    for (size_t row = 1; row < *rows; row++)
        memmove(context->ids + row * *columns, (char *)context->ids + row * head->nb[1], *columns * 4);
    return true;
}

/* Write a selection for whoever reads the ring in moepack; one that has no room is lost, and counted. */
static void write_selection(const struct context *context, uint32_t layer, uint32_t rows, uint32_t columns) {
    struct selection_ring *ring = &seam.rings[context->number];
    uint64_t count = (uint64_t)rows * columns, head = atomic_load(&ring->head);
    if (head + count + 3 - atomic_load(&ring->tail) > RING_WORDS) {
        atomic_fetch_add(&ring->lost_count, 1);
        return;
    }
    uint32_t start[3] = {layer | (rows >= MANY_TOKENS ? SELECTION_PROMPT : 0), rows, columns};
    for (unsigned i = 0; i < 3; i++) ring->words[head++ % RING_WORDS] = start[i];
    for (uint64_t i = 0; i < count; i++) ring->words[head++ % RING_WORDS] = (uint32_t)context->ids[i];
    atomic_store(&ring->head, head);
}

/* Have the experts of a selection resident. */
static bool bring(struct context *context, const void *tensor, uint32_t layer) {
    uint32_t rows, columns;
    struct cache_error error;
    if (!read_ids(context, tensor, &rows, &columns)) return false;
    size_t count = (size_t)rows * columns;
    for (size_t i = 0; i < count; i++) /* another model's, if it has no such expert */
        if (context->ids[i] < 0 || (uint32_t)context->ids[i] >= seam.experts.layers[layer].count) return true;
    if (!count) return true;
    context->has_drafted |= seam.experts.layers[layer].is_rare;
    bool is_copied = any_is_in_place && !is_in_place[layer];
    if (atomic_load(&seam.control->wants_selections))
        write_selection(context, seam.experts.layers[layer].number | (is_copied ? SELECTION_COPIED : 0), rows, columns);
    if (is_copied) return true;
    const struct step *step = &seam.cache.residents.steps[context->number];
    mapping_compare(step); /* all that was computed since the last one was with these */
    if (cache_use(&seam.cache, context->number, layer, context->ids, rows, columns, &error)) {
        seam_report(&error);
        return false;
    }
    mapping_compare(step);
    if (cache_wants_guess(&seam.cache, layer, rows))
        routers_guess(&context->routers, context->number, tensor, layer, rows, columns, context->ids);
    return true;
}

/* Must a step stop at a selection of a layer? Backends fuse no operations across that, and devices wait. So a layer that
 * was copied stops it only for those who want all selections, or where a prompt can be left. */
static bool is_needed(const void *selection, int layer) {
    if (layer < 0) return false;
    if (!any_is_in_place || is_in_place[layer] || atomic_load(&seam.control->wants_selections) & WANTS_ALL) return true;
    return server_is_processing() && ((const struct tensor_head *)selection)->ne[1] >= MANY_TOKENS;
}

static bool on_tensor(void *tensor, bool is_asked, void *data) {
    struct context *context = data;
    int layer = find_selection(context, tensor);
    if (is_asked) {
        context->asked = context->callback && context->callback(tensor, true, context->data);
        return context->asked || is_needed(tensor, layer);
    }
    if (layer >= 0 && !context->has_failed) context->has_failed = server_has_left() || !bring(context, tensor, (uint32_t)layer);
    bool has_failed = context->has_failed && seam.is_attached;
    if (has_failed && !context->is_computing) seam_end("experts could not be brought");
    if (has_failed) return false; /* the graph's status says so as well */
    return context->asked ? context->callback(tensor, false, context->data) : true;
}

/* ---- contexts ---- */

static struct context *find_context(void *scheduler) {
    for (uint32_t i = 0; i < context_count; i++)
        if (contexts[i].scheduler == scheduler) return &contexts[i];
    return NULL;
}

/* Find the context of a scheduler, or take one: a new one, or that which was used least recently. */
static struct context *context_of(void *scheduler) {
    struct context *context = find_context(scheduler);
    if (context) return context;
    if (context_count < UNANNOUNCED) context = &contexts[context_count];
    for (uint32_t i = 0; context_count == UNANNOUNCED && i < UNANNOUNCED; i++) {
        bool is_older = !context || contexts[i].last_use < context->last_use;
        if (!contexts[i].is_computing && is_older) context = &contexts[i];
    }
    if (!context) seam_end("more than %d contexts compute at once", UNANNOUNCED);
    context->scheduler = scheduler;
    routers_forget(&context->routers);
    context->is_computing = context->has_failed = context->is_of_another = context->has_drafted = false;
    context->number = (uint32_t)(context - contexts);
    if (context->number == context_count) atomic_store(&seam.page->context_count, ++context_count);
    return context;
}

static void set_functions(void *caller) {
    if (count_elements) return;
    get_name = (__typeof__(get_name))seam_find("ggml_get_name", caller);
    get_bytes = (__typeof__(get_bytes))seam_find("ggml_backend_tensor_get", caller);
    count_elements = (__typeof__(count_elements))seam_find("ggml_nelements", caller);
    get_data = (__typeof__(get_data))seam_find_optional("ggml_get_data", caller);
    get_tensor = (__typeof__(get_tensor))seam_find_optional("ggml_graph_get_tensor", caller);
}

/* Selections are announced unless all experts stay in memory, and nobody wants to know them. */
static bool is_watching(void) {
    return atomic_load(&seam.control->wants_selections) & WANTS_ALL || !atomic_load(&seam.cache.statistics->holds_all);
}

/* Does a graph compute a prompt? Then its selections are announced all the same, so that it can be left. */
static bool is_prompt(void *graph) {
    char name[32];
    if (!get_tensor) return false;
    snprintf(name, sizeof name, "ffn_moe_topk-%u", seam.experts.layers[0].number);
    const struct tensor_head *selection = get_tensor(graph, name);
    return selection && selection->ne[1] >= MANY_TOKENS;
}

static void set_real_callback(void *scheduler, eval_callback callback, void *data, void *caller) {
    static void (*set_callback)(void *, eval_callback, void *);
    if (!set_callback) set_callback = (__typeof__(set_callback))seam_find("ggml_backend_sched_set_eval_callback", caller);
    set_callback(scheduler, callback, data);
}

EXPORT void ggml_backend_sched_set_eval_callback(void *scheduler, eval_callback callback, void *data) {
    void *caller = __builtin_return_address(0);
    if (!seam.is_attached) {
        set_real_callback(scheduler, callback, data, caller);
        return;
    }
    set_functions(caller);
    pthread_mutex_lock(&state_lock);
    struct context *context = context_of(scheduler);
    context->callback = callback;
    context->data = data;
    context->last_use = ++use_count;
    bool is_watched = context->has_drafted || is_watching();
    set_real_callback(scheduler, is_watched ? on_tensor : callback, is_watched ? context : data, caller);
    pthread_mutex_unlock(&state_lock);
}

/* Where a selection could not be brought the graph was left: it failed, so nobody takes its numbers. When this returns,
 * what it needed of the experts was read: GPUs have it in buffers of their own. */
EXPORT int ggml_backend_sched_graph_compute_async(void *scheduler, void *graph) {
    static int (*compute)(void *, void *);
    void *caller = __builtin_return_address(0);
    FIND(compute, "ggml_backend_sched_graph_compute_async");
    if (!seam.is_attached) return compute(scheduler, graph);
    pthread_mutex_lock(&state_lock);
    struct context *context = find_context(scheduler);
    if (context) {
        context->last_use = ++use_count;
        context->is_computing = true;
        context->graph = graph;
        context->has_failed = false; /* a graph may be used again, without a new callback */
    }
    bool is_unwatched = context && server_is_processing() && !is_watching();
    if (is_unwatched && is_prompt(graph)) set_real_callback(scheduler, on_tensor, context, caller);
    pthread_mutex_unlock(&state_lock);
    int status = compute(scheduler, graph);
    if (!context || !seam.is_attached) return status;
    mapping_compare(&seam.cache.residents.steps[context->number]);
    cache_release(&seam.cache, context->number);
    pthread_mutex_lock(&state_lock);
    context->is_computing = false;
    if (context->has_failed) status = STATUS_FAILED;
    pthread_mutex_unlock(&state_lock);
    return status;
}

/* ---- tensors ---- */

/* Where `data` lies in a tensor: the only pointer there to `address`, before the name; 0: it is not known. */
static size_t data_offset(const void *tensor, const void *address) {
    size_t end = (size_t)(get_name(tensor) - (const char *)tensor), found = 0;
    if (end > 1024) return 0;
    for (size_t offset = LEAST_DATA; offset + sizeof(void *) <= end; offset += sizeof(void *)) {
        const void *value;
        memcpy(&value, (const char *)tensor + offset, sizeof value);
        if (value != address) continue;
        if (found) return 0;
        found = offset;
    }
    return found;
}

/* The layer and part of an expert tensor by its name; false: it is none. */
static bool find_part(const char *name, uint32_t *layer, uint32_t *part) {
    const struct table_layer *layers = seam_array(seam.table->layers);
    unsigned number;
    int length = 0;
    if (sscanf(name, "blk.%u.%n", &number, &length) != 1 || !length) return false;
    for (uint32_t i = 0; i < seam.experts.layer_count; i++)
        for (uint32_t p = 0; layers[i].number == number && p < layers[i].part_count; p++)
            if (!strcmp(layers[i].names[p], name + length)) {
                *layer = i;
                *part = p;
                return true;
            }
    return false;
}

/* Do all experts of a layer have this part at one place of their blobs? */
static bool is_alike(const struct layer *layer, uint32_t part) {
    const struct part *first = part_of(&seam.experts, layer->first, part);
    for (uint32_t e = layer->first; e < layer->first + layer->count; e++) {
        const struct part *one = part_of(&seam.experts, e, part);
        if (one->slot_offset != first->slot_offset || one->length != first->length) return false;
    }
    return true;
}

/* Give an expert tensor its addresses in whole blobs: `data`, and the stride from one expert to the next. What is found
 * otherwise than expected leaves the tensor in the file's region, where it is served as well; so do scales, which are
 * one number an expert: these are brought now. */
static void use_blobs(void *tensor, const void *address, uint32_t layer, uint32_t part, void *caller) {
    size_t (*count_bytes)(const void *) = (size_t (*)(const void *))seam_find_optional("ggml_nbytes", caller);
    struct tensor_head *head = tensor;
    const struct layer *of = &seam.experts.layers[layer];
    const struct part *first = part_of(&seam.experts, of->first, part);
    unsigned axis = head->ne[2] == of->count ? 2 : 1; /* biases have one row an expert */
    size_t offset = data_offset(tensor, address);
    bool is_known = is_alike(of, part) && count_bytes && get_data && offset && get_data(tensor) == address && head->ne[axis] == of->count &&
                    head->ne[3] == 1 && head->nb[axis] == first->length && count_bytes(tensor) == first->length * of->count;
    if (first->length <= MOST_SCALES) faults_bring_range(address, first->length * of->count);
    if (!is_known) return;
    const struct tensor_head before = *head;
    void *blob = mapping_blob(layer) + first->slot_offset;
    memcpy((char *)tensor + offset, &blob, sizeof blob);
    head->nb[axis] = mapping_stride(layer);
    for (unsigned i = axis + 1; i < 4; i++) head->nb[i] = head->nb[i - 1] * (size_t)head->ne[i - 1];
    if (get_data(tensor) == blob && count_bytes(tensor) == mapping_stride(layer) * (of->count - 1) + first->length) return;
    *head = before;
    memcpy((char *)tensor + offset, &address, sizeof address);
}

/* By this libllama takes a tensor into use where it is mapped; others it copies while it loads, as into a GPU's memory.
 * Where that is not seen, experts are brought for each selection. */
EXPORT int ggml_backend_tensor_alloc(void *buffer, void *tensor, void *address) {
    static int (*allocate)(void *, void *, void *);
    struct region region;
    FIND(allocate, "ggml_backend_tensor_alloc");
    int status = allocate(buffer, tensor, address);
    if (status || !seam.is_attached || !regions_find(address, &region)) return status;
    set_functions(__builtin_return_address(0));
    pthread_mutex_lock(&state_lock);
    uint32_t layer, part;
    if (!is_in_place) is_in_place = calloc(seam.experts.layer_count, sizeof *is_in_place);
    if (!is_in_place) seam_end("no memory");
    any_is_in_place = true;
    if (find_part(get_name(tensor), &layer, &part)) {
        is_in_place[layer] = true;
        if (seam.is_strided) use_blobs(tensor, address, layer, part, __builtin_return_address(0));
    }
    pthread_mutex_unlock(&state_lock);
    return status;
}

/* Without its extra buffers the CPU backend does not repack: it would copy what is not there yet. */
EXPORT void *ggml_backend_reg_get_proc_address(void *registry, const char *name) {
    static void *(*get)(void *, const char *);
    bool is_repacking = !strcmp(name, "ggml_backend_dev_get_extra_bufts") && getenv("MOEPACK_TABLE");
    FIND(get, "ggml_backend_reg_get_proc_address");
    return is_repacking ? NULL : get(registry, name);
}
