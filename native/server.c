#include <stddef.h>
#include <stdint.h>

#include "seam.h"

/*
 * llama.cpp's own server, of the wheel: what it computes for clients that have left ends at the next layer.
 *
 * The server ends all texts where llama_process throws, and lets their slots be, as if the step had been computed. So here
 * each is cut to what it had before. Known of the server are names of its functions in C++, and that a slot begins with
 * its number. A program without these functions computes its steps to their end.
 *
 * Its loop calls them; moepack_set_request_count any thread.
 */

#define CAN_SPLIT "_ZNK11server_slot9can_splitEv"          /* bool server_slot::can_split() const */
#define KEEP_FIRST "_ZN13server_tokens10keep_firstEm"      /* void server_tokens::keep_first(size_t) */
#define SIZE_UP_TO "_ZNK13server_tokens14size_up_to_posEi" /* size_t server_tokens::size_up_to_pos(int) const */
#define THROW "_ZSt21__throw_runtime_errorPKc"             /* void std::__throw_runtime_error(const char *) */
EXPORT bool slot_can_split(const int *slot) __asm__(CAN_SPLIT);
EXPORT void tokens_keep_first(void *tokens, size_t count) __asm__(KEEP_FIRST);

enum { MAX_SLOTS = 256 /* LLAMA_MAX_SEQ */ };

static struct {
    void *(*memory)(const void *context);
    uint32_t (*slot_count)(const void *context);
    int (*last_position)(void *memory, int slot);
    bool (*remove)(void *memory, int slot, int start, int end);
    void (*keep_first)(void *tokens, size_t count);
    size_t (*size_up_to)(const void *tokens, int position);
    void (*throw)(const char *);
} functions;

static atomic_bool is_counted;    /* requests are, since the first */
static atomic_uint request_count;
static atomic_bool has_left;      /* nobody waits for what is computed now */
static atomic_bool is_processing; /* a step of texts; not of drafts */
static void *text_context;
static int current_slot = -1;
static struct {
    void *tokens; /* NULL: it has begun no text */
    int length;   /* before the step, in positions */
} slots[MAX_SLOTS];
static bool knows_slots;

/* For a server that knows: nothing is read ahead or computed on for a prompt that nobody waits for. */
EXPORT void moepack_set_request_count(unsigned count) {
    if (!seam.is_attached) return;
    atomic_store(&is_counted, true);
    atomic_store(&request_count, count);
    atomic_store(&seam.cache.is_idle, count == 0);
    if (count) return;
    atomic_store(&has_left, true);
    cache_read_ahead(&seam.cache, NULL, 0);
}

/* The tokens that were routed so far: of one that half of the layers have computed, a half. */
EXPORT unsigned moepack_routed_count(void) {
    const struct experts *experts = &seam.experts;
    unsigned layer_count = 0;
    if (!seam.is_attached) return 0;
    while (layer_count + 1 < experts->layer_count && !experts->layers[layer_count + 1].is_rare) layer_count++;
    return (unsigned)(atomic_load(&seam.cache.statistics->routed_count) / (layer_count ? layer_count : 1));
}

bool server_is_processing(void) { return atomic_load(&is_processing); }

bool server_has_left(void) { return atomic_load(&is_processing) && atomic_load(&has_left); }

static bool find_functions(void *caller) {
    if (functions.memory) return true;
    functions.slot_count = (__typeof__(functions.slot_count))seam_find_optional("llama_n_seq_max", caller);
    functions.last_position = (__typeof__(functions.last_position))seam_find_optional("llama_memory_seq_pos_max", caller);
    functions.remove = (__typeof__(functions.remove))seam_find_optional("llama_memory_seq_rm", caller);
    functions.size_up_to = (__typeof__(functions.size_up_to))seam_find_optional(SIZE_UP_TO, caller);
    functions.throw = (__typeof__(functions.throw))seam_find_optional(THROW, caller);
    bool has_all = functions.slot_count && functions.last_position && functions.remove && functions.size_up_to && functions.throw;
    if (has_all) functions.memory = (__typeof__(functions.memory))seam_find_optional("llama_get_memory", caller);
    return functions.memory;
}

/* Note how long texts are before a step; false where it cannot be left. */
static bool note_lengths(void *context, void *caller) {
    if (!seam.is_attached || !is_counted || !knows_slots || !find_functions(caller)) return false;
    if (!text_context) text_context = context; /* no draft is before the first step of a text */
    void *memory = functions.memory(context);
    if (context != text_context || !memory) return false;
    uint32_t count = functions.slot_count(context);
    for (uint32_t i = 0; i < count && i < MAX_SLOTS; i++) slots[i].length = functions.last_position(memory, (int)i) + 1;
    return true;
}

static void cut_texts(void) {
    void *memory = functions.memory(text_context);
    for (int i = 0; i < MAX_SLOTS; i++) {
        if (!slots[i].tokens) continue;
        functions.keep_first(slots[i].tokens, functions.size_up_to(slots[i].tokens, slots[i].length));
        functions.remove(memory, i, slots[i].length, -1);
    }
}

/* Compute a step. Whoever comes while one is computed for those who have left is not served by it. */
EXPORT int llama_process(void *context, int type, void *batch) {
    static int (*process)(void *, int, void *);
    FIND(process, "llama_process");
    current_slot = -1;
    if (!note_lengths(context, __builtin_return_address(0))) return process(context, type, batch);
    atomic_store(&has_left, false);
    if (!request_count) atomic_store(&has_left, true);
    atomic_store(&is_processing, true);
    int status = process(context, type, batch);
    bool was_left = status && server_has_left();
    atomic_store(&is_processing, false);
    if (!was_left) return status;
    cut_texts();
    functions.throw("nobody waits for this text any more");
    return status;
}

/* Called for the slot whose text goes on. */
bool slot_can_split(const int *slot) {
    static bool (*can_split)(const int *);
    FIND(can_split, CAN_SPLIT);
    current_slot = *slot;
    return can_split(slot);
}

/* Called on the tokens of that slot when it begins a text with the first of its last one. */
void tokens_keep_first(void *tokens, size_t count) {
    FIND(functions.keep_first, KEEP_FIRST);
    if (current_slot >= 0 && current_slot < MAX_SLOTS) {
        slots[current_slot].tokens = tokens;
        knows_slots = true;
    }
    functions.keep_first(tokens, count);
}
