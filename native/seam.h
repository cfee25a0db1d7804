/*
 * The seam: loaded before a llama.cpp program (LD_PRELOAD), it brings the experts that routers select.
 *
 * The program maps its model; libllama sets a callback for each graph. Both calls come by here. Whenever a router has
 * selected, the cache in this process reads what is missing, and maps it where the program expects it. No struct of
 * llama.cpp is known here but the first 80 bytes of ggml_tensor, and they are held against its own functions; and where
 * a tensor's sources lie, which is held against what routers select.
 *
 * What lies where experts are not resident ("the base") is never zeros:
 * - in a GGUF as it lies: the file itself, as the program would have it without us;
 * - in the image of a pack: nothing that can be read: an access is a fault, which brings the expert.
 *
 * Locks, in this order: state (contexts), the cache's, regions. A fault takes the cache's and that of regions, or that of
 * chunks, which has none behind it, in a thread that computes and has none; other signals wait until it is served.
 */
#ifndef SEAM_H
#define SEAM_H

#include <sys/types.h>

#include "table.h"

#define EXPORT __attribute__((visibility("default")))
#define ALIAS(name) EXPORT __attribute__((alias(#name)))
/* Find the real function of a name in the library that calls, once. */
#define FIND(variable, name) \
    if (!variable) variable = (__typeof__(variable))seam_find(name, __builtin_return_address(0))

enum { EXIT_CODE = 70 /* EX_SOFTWARE of sysexits.h */ };

struct seam {
    const struct table *table; /* NULL: this program has not mapped the model */
    atomic_bool is_attached;   /* all else is there as well */
    struct control *control;
    int control_file; /* open as long as the process lives, with a lock */
    struct process_page *page;
    struct selection_ring *rings;
    struct experts experts;
    struct cache cache;
    struct cache_file *files;
    bool is_image, is_strided; /* a pack; whole blobs by another stride of tensors */
    int image;                 /* a descriptor, -1 for shards */
    int moepack;               /* a descriptor of its process */
};

extern struct seam seam;

/* An array of the table, by its offset there. */
static inline const void *seam_array(uint64_t offset) { return (const char *)seam.table + offset; }

/* program.c: end the program with a sentence */
_Noreturn void seam_end(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Tell moepack of an error. */
void seam_report(const struct cache_error *error);
/* Find a function of the library that calls. */
void *seam_find(const char *name, void *caller);
void *seam_find_optional(const char *name, void *caller);
/* The mapped file that a descriptor is of; -1: none. Attaches at the first. */
int seam_find_file(int descriptor, void *caller);

/* regions.c: where files of the model are mapped */
struct region { /* a part of a file as it is mapped: [start, end) of the file lies at `address` */
    char *address;
    uint64_t start, end;
    uint32_t file;
};
void regions_lock(void);
void regions_unlock(void);
void regions_forget_in_child(void);
/* Find the region of an address; false: no file of the model lies there. */
bool regions_find(const void *address, struct region *region);
/* Call for each mapped piece of a file's range; the first errno ends it. */
int regions_each(uint32_t file, uint64_t offset, uint64_t length,
                 int (*work)(void *data, char *address, uint64_t length, uint64_t behind), void *data);
/* Map a range of a file for reading in the place of what is there; or nothing that can be read. 0, or an errno. */
int show_range(char *address, uint64_t length, int descriptor, uint64_t offset);
int hide_range(char *address, uint64_t length);
void *real_mmap(void *address, size_t length, int protection, int flags, int descriptor, off_t offset);

/* mapping.c: experts at the addresses of programs; called with the lock of the cache held */
bool mapping_open(void);
void mapping_map(void *data, uint32_t expert);
void mapping_unmap(void *data, uint32_t expert);
/* Forget what is mapped, since a file was mapped anew. */
void mapping_renew(void);
/* The expert whose blob lies at an address of the strided region; NO_EXPERT: none. */
uint32_t mapping_expert_at(const void *address);
/* For tests, which compile with COMPARES: end the program where a step's experts are not as their files have them. By the
 * thread that computes the step, without the lock. */
#ifdef COMPARES
void mapping_compare(const struct step *step);
#else
static inline void mapping_compare(const struct step *step) { (void)step; }
#endif
bool mapping_is_strided_address(const void *address);
char *mapping_blob(uint32_t layer);
uint64_t mapping_stride(uint32_t layer);
void mapping_forget_in_child(void);

/* ggml.c: tensors of llama.cpp, once a program has a context */
struct tensor_head { /* of ggml_tensor, in all builds since 2023 */
    uint32_t type, others[3];
    int64_t ne[4];
    size_t nb[4];
};
const char *ggml_name(const void *tensor);
void ggml_read(const void *tensor, void *bytes, size_t length);
/* Where its data lie, in the memory of a device; NULL: that is not known. */
const void *ggml_place(const void *tensor);

/* routers.c: reading ahead for the next layer, once the experts of a selection are there; `routers` are a context's */
struct routers;
void routers_guess(struct routers **routers, uint32_t context, const void *selection, uint32_t layer, uint32_t rows,
                   uint32_t columns, const int32_t *ids);
void routers_forget(struct routers **routers);

/* server.c: does llama.cpp's own server compute a step of texts, which can be left; and does nobody wait for it? */
bool server_is_processing(void);
bool server_has_left(void);

/* faults.c: accesses that nobody announced */
bool faults_open(void);
/* Have bytes of the image there before they are used. */
void faults_bring_range(const void *address, uint64_t length);
/* Call before addresses are unmapped: whatever is mapped there next is left alone. */
void faults_forget(const char *from, const char *to);

#endif
