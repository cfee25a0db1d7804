#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "seam.h"
#include "threads.h"

/*
 * Routers: asked with the input of one layer's, the next layer's names the experts that it will likely select. Where both
 * inputs are a norm times weights, the weights of one are exchanged for those of the other.
 *
 * A layer's router is found from its selection, back through the graph, by the names of its tensors. It is kept when its
 * layer is computed for the first time, so guesses begin with a context's second step. A context's routers are used by
 * the thread that computes it. A wrong guess costs a read, never an answer.
 */

enum {
    TYPE_F32 = 0,       /* GGML_TYPE_F32 */
    NAME_OFFSET = 256,  /* of ggml_tensor, in builds whose sources lie at SOURCES_OFFSET */
    SOURCES_OFFSET = 152,
    MOST_STEPS = 16,    /* from a selection back to the product of the router's weights */
    CONTROL_PERIOD = 64,
    PREFIX_LENGTH = 24,
    LANES = 4,
};

static const float LEAST_NORM = 1e-6f; /* that is divided by */

typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

struct router {
    const void *tensor;        /* of the weights */
    const float *weights;      /* [count][width], where the program has them, or `copy` */
    float *copy, *norm;        /* [width], by which its input is multiplied; NULL: that is not known */
    float *bias;               /* of logits or, with `is_sigmoid`, of probabilities; NULL: there is none */
    uint32_t width, count;
    bool is_sigmoid;
    uint32_t use_count;
};

struct routers {
    struct router *of; /* by layer */
    float *input, *scores;
    size_t input_room;
    uint32_t most; /* experts of a layer */
};

struct found { /* in the graph of one step */
    const void *weights, *input, *norm, *bias, *selection_bias;
};

static const void *source(const void *tensor, unsigned number) {
    const void *found;
    memcpy(&found, (const char *)tensor + SOURCES_OFFSET + number * sizeof found, sizeof found);
    return found;
}

/* The name of a layer's tensor behind `prefix`, or an empty one. */
static const char *part_name(const void *tensor, const char *prefix) {
    size_t length = strlen(prefix);
    return tensor && !strncmp(ggml_name(tensor), prefix, length) ? ggml_name(tensor) + length : "";
}

/* Go back from a selection to its router. */
static bool find(const void *selection, uint32_t layer, struct found *found) {
    char prefix[PREFIX_LENGTH];
    const void *tensor = selection;
    *found = (struct found){0};
    if (ggml_name(selection) - (const char *)selection != NAME_OFFSET) return false;
    snprintf(prefix, sizeof prefix, "blk.%u.", layer);
    for (int i = 0; i < MOST_STEPS && tensor; i++) {
        const void *first = source(tensor, 0), *second = source(tensor, 1);
        if (!strcmp(part_name(first, prefix), "ffn_gate_inp.weight")) {
            const void *norm = second ? source(second, 1) : NULL;
            found->weights = first;
            found->input = second;
            found->norm = strstr(part_name(norm, prefix), "norm") ? norm : NULL;
            return second != NULL;
        }
        if (!strcmp(part_name(second, prefix), "ffn_gate_inp.bias")) found->bias = second;
        if (!strcmp(part_name(second, prefix), "exp_probs_b.bias")) found->selection_bias = second;
        tensor = first;
    }
    return false;
}

/* Is a tensor a whole matrix of floats, of so many columns and rows? */
static bool is_matrix(const void *tensor, uint64_t columns, uint64_t rows) {
    const struct tensor_head *head = tensor;
    return head->type == TYPE_F32 && head->nb[0] == sizeof(float) && head->nb[1] == columns * sizeof(float) &&
           head->ne[0] == (int64_t)columns && head->ne[1] == (int64_t)rows && head->ne[2] == 1 && head->ne[3] == 1;
}

static float *copy_of(const void *tensor, uint64_t count) {
    float *copy = malloc(count * sizeof *copy);
    if (copy) ggml_read(tensor, copy, count * sizeof *copy);
    return copy;
}

/* Keep a layer's router. Where the program has mapped its weights they are used there; else, as on a GPU, copied. */
static void keep(struct router *router, const struct found *found, uint32_t count) {
    const struct tensor_head *head = found->weights;
    struct region region;
    uint64_t width = (uint64_t)head->ne[0];
    if (!is_matrix(found->weights, width, count) || !width) return;
    const void *bias = found->selection_bias ? found->selection_bias : found->bias;
    if (bias && !is_matrix(bias, count, 1)) return;
    const float *place = ggml_place(found->weights);
    if (!place || !regions_find(place, &region)) place = router->copy = copy_of(found->weights, width * count);
    if (bias) router->bias = copy_of(bias, count);
    if (found->norm && is_matrix(found->norm, width, 1)) router->norm = copy_of(found->norm, width);
    router->tensor = found->weights;
    router->width = (uint32_t)width;
    router->count = count;
    router->is_sigmoid = found->selection_bias != NULL;
    router->weights = bias && !router->bias ? NULL : place;
}

static bool is_there(const struct router *router) {
    struct region region;
    return router->weights && (router->copy || regions_find(router->weights, &region)); /* the model may be gone */
}

static float product(const float *a, const float *b, uint32_t width) {
    lanes sums[4] = {0};
    uint32_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES)
        for (unsigned j = 0; j < 4; j++) sums[j] += *(const lanes *)(a + i + j * LANES) * *(const lanes *)(b + i + j * LANES);
    lanes sum = sums[0] + sums[1] + sums[2] + sums[3];
    float total = 0;
    for (unsigned j = 0; j < LANES; j++) total += sum[j];
    for (; i < width; i++) total += a[i] * b[i];
    return total;
}

/* Write the best experts of each row, by rank: `rows` at each. */
static void rank(struct routers *routers, const struct router *router, const float *input, uint32_t rows, uint32_t ranks,
                 uint32_t *ranked) {
    for (uint32_t e = 0; e < router->count; e++)
        for (uint32_t row = 0; row < rows; row++) {
            float score = product(router->weights + (uint64_t)e * router->width, input + (uint64_t)row * router->width, router->width);
            if (router->is_sigmoid) score = 1 / (1 + expf(-score));
            routers->scores[(uint64_t)row * routers->most + e] = score + (router->bias ? router->bias[e] : 0);
        }
    for (uint32_t row = 0; row < rows; row++) {
        float *scores = routers->scores + (uint64_t)row * routers->most;
        for (uint32_t r = 0; r < ranks; r++) {
            uint32_t best = 0;
            for (uint32_t e = 1; e < router->count; e++)
                if (scores[e] > scores[best]) best = e;
            scores[best] = -INFINITY;
            ranked[r * rows + row] = best;
        }
    }
}

/* Hold a router against what was selected. */
static void check(struct routers *routers, const struct router *router, uint32_t rows, uint32_t columns, const int32_t *ids) {
    uint32_t ranked[MAX_GUESSED], found_count = 0;
    rank(routers, router, routers->input, rows, columns, ranked);
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t i = 0; i < columns; i++)
            for (uint32_t j = 0; j < columns; j++) found_count += ids[row * columns + i] == (int32_t)ranked[j * rows + row];
    cache_record_control(&seam.cache, found_count == rows * columns);
}

/* Make the input of one layer's router that of another's. */
static void exchange_norms(float *input, const struct router *own, const struct router *next, uint32_t rows) {
    if (!own->norm || !next->norm) return;
    for (uint32_t i = 0; i < own->width; i++) {
        float ratio = fabsf(own->norm[i]) > LEAST_NORM ? next->norm[i] / own->norm[i] : 1;
        for (uint32_t row = 0; row < rows; row++) input[(uint64_t)row * own->width + i] *= ratio;
    }
}

static bool read_input(struct routers *routers, const void *tensor, uint64_t width, uint32_t rows) {
    if (!is_matrix(tensor, width, rows)) return false;
    size_t length = width * rows * sizeof(float);
    if (length > routers->input_room) {
        float *input = realloc(routers->input, length);
        if (!input) return false;
        routers->input = input;
        routers->input_room = length;
    }
    ggml_read(tensor, routers->input, length);
    return true;
}

static struct routers *make(void) {
    struct routers *routers = calloc(1, sizeof *routers);
    if (!routers) return NULL;
    routers->most = most_in_layer(&seam.experts);
    routers->of = calloc(seam.experts.layer_count, sizeof *routers->of);
    routers->scores = calloc((size_t)routers->most * MOST_GUESSED_TOKENS, sizeof *routers->scores);
    if (routers->of && routers->scores) return routers;
    free(routers->of);
    free(routers->scores);
    free(routers);
    return NULL;
}

void routers_guess(struct routers **kept, uint32_t context, const void *selection, uint32_t layer, uint32_t rows,
                   uint32_t columns, const int32_t *ids) {
    const struct layer *layers = seam.experts.layers;
    struct found found;
    if (columns > MAX_RANKS || !find(selection, layers[layer].number, &found)) {
        cache_record_control(&seam.cache, false);
        return;
    }
    bool is_of_another = *kept && (*kept)->of[layer].tensor && (*kept)->of[layer].tensor != found.weights;
    if (is_of_another) routers_forget(kept); /* a model where another was before */
    if (!*kept) *kept = make();
    struct routers *routers = *kept;
    if (!routers) return;
    struct router *own = &routers->of[layer], *next = &routers->of[layer + 1];
    uint64_t began = now();
    if (!own->weights) keep(own, &found, layers[layer].count);
    if (!own->weights || !read_input(routers, found.input, own->width, rows)) return;
    if (own->use_count++ % CONTROL_PERIOD == 0 && is_there(own)) check(routers, own, rows, columns, ids);
    if (next->width != own->width || !is_there(next)) return;
    uint32_t ranked[MAX_GUESSED], ranks = columns < next->count ? columns : next->count;
    exchange_norms(routers->input, own, next, rows);
    rank(routers, next, routers->input, rows, ranks, ranked);
    cache_guess(&seam.cache, context, layer, ranked, ranks * rows, rows, now() - began);
}

void routers_forget(struct routers **kept) {
    struct routers *routers = *kept;
    if (!routers) return;
    for (uint32_t i = 0; i < seam.experts.layer_count; i++) {
        free(routers->of[i].copy);
        free(routers->of[i].norm);
        free(routers->of[i].bias);
    }
    free(routers->of);
    free(routers->input);
    free(routers->scores);
    free(routers);
    *kept = NULL;
}
