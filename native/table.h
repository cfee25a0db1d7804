/*
 * What moepack (Python) and the seam share: the table of a model, written once before the program starts, and the
 * control file, which both write while it runs. running/streaming/table.py has the same structs.
 *
 * Offsets in the table count from its start; all others count from the start of the file that is named beside them.
 */
#ifndef TABLE_H
#define TABLE_H

#include "cache.h"

enum {
    TABLE_VERSION = 3,
    PART_NAME_LENGTH = 64,
    MAX_PROCESSES = 32,
    RING_WORDS = 1 << 18,
};

struct table {
    char magic[8]; /* "MOEPTABL" */
    uint32_t version, process; /* of moepack */
    uint32_t layer_count, expert_count, file_count, mapped_count, dense_count;
    uint32_t pinned_count, warm_up_count;
    uint32_t policy, check, reads, is_cached, is_prepared;
    uint64_t reserve;
    uint64_t image_length, experts_offset; /* of a pack; 0 where shards are mapped */
    uint64_t layers, parts, files, mapped, dense, pinned, warm_up; /* arrays */
    int32_t image;                                                 /* a descriptor of moepack's process */
    uint32_t prefetches; /* for the next layer, while decoding */
    uint32_t has_blobs;  /* experts may lie apart, by another stride of their tensors */
    uint32_t unused;
};

struct table_layer {
    uint32_t number, expert_count, part_count, is_rare;
    char names[MAX_PARTS][PART_NAME_LENGTH]; /* "ffn_up_exps.weight" */
};

struct table_part { /* of each expert, MAX_PARTS */
    uint64_t offset, length, digest;
    uint64_t mapped_offset; /* where programs map it, in a file of `mapped` */
    uint32_t file, mapped_file;
    uint16_t has_digest, has_mirror;
    uint32_t slot_offset; /* in a blob; 0 where parts lie apart */
};

struct table_file { /* offsets of paths, which end with a zero byte; 0: there is no mirror */
    uint64_t path, mirror;
};

struct mapped_file { /* that programs map: shards, or the file with a pack's path */
    uint64_t device, inode;
};

struct dense_range { /* of an image: to map from a file; of a shard: to read ahead */
    uint64_t mapped_offset, length, offset;
    uint32_t file, mapped_file;
};

/* The selections of one context: the program writes, and waits for nobody: what nobody reads in time is lost, and
 * counted. A selection is three words (layer with flags, rows, columns), and the experts row by row. */
struct selection_ring {
    _Atomic uint64_t head, tail, lost_count;
    char rest[PAGE - 24];
    uint32_t words[RING_WORDS];
};

/* Of `wants_selections`: write them to the rings; announce them though all experts stay in memory. */
enum { WANTS_SELECTIONS = 1, WANTS_ALL = 2 };

enum { PROCESS_FREE, PROCESS_LIVE, PROCESS_ENDED };

struct process_page { /* of one process that maps the model */
    _Atomic uint32_t state, reads; /* `reads`: enum drive_kind */
    struct cache_statistics statistics;
    _Atomic uint32_t context_count, error_count;
    struct cache_error error; /* the last one */
    char rest[3 * PAGE - 16 - sizeof(struct cache_statistics) - sizeof(struct cache_error)];
};

struct control {
    _Atomic uint64_t memory; /* bytes for experts, of all processes together */
    _Atomic uint32_t wants_selections;
    char rest[PAGE - 12];
    struct process_page processes[MAX_PROCESSES];
    struct selection_ring rings[MAX_PROCESSES][MAX_CONTEXTS];
};

/* With a layer: its experts are copies, which need not be brought; the step is one of a prompt, of MANY_TOKENS or more. */
static const uint32_t SELECTION_COPIED = 1u << 30, SELECTION_PROMPT = 1u << 29;

#endif
