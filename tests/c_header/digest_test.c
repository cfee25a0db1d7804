/* Prints the digests that moepack.h computes; test_digest.py compares them with xxhash's.
 *
 *     digest_test LENGTH...   of the first LENGTH bytes of standard input, each at several alignments
 *
 * The first line names the way that long inputs are digested. */
#include <assert.h>

#define MOEPACK_IMPLEMENTATION
#include "moepack.h"

static uint8_t bytes[1 << 22];

static const char *name_way(void) {
#ifdef MOEPACK_USE_XXHASH
    return "xxhash";
#else
    moepack__way *way = moepack__fastest_way();
#ifdef MOEPACK__AVX2
    if (way == moepack__way_avx2) return "avx2";
#endif
#if defined(MOEPACK__SSE2)
    return way == moepack__way_sse2 ? "sse2" : "unknown";
#elif defined(MOEPACK__NEON)
    return way == moepack__way_neon ? "neon" : "unknown";
#else
    return way == moepack__way_plain ? "plain" : "unknown";
#endif
#endif
}

static uint64_t digest_at(size_t start, size_t length) {
    uint64_t digest;
    uint8_t *copy = (uint8_t *)malloc(start + length + !length); /* nothing behind: for sanitizers */
    assert(copy);
    memcpy(copy + start, bytes, length);
    digest = moepack_xxh3(copy + start, length);
    free(copy);
    return digest;
}

int main(int argc, char **argv) {
    size_t most = fread(bytes, 1, sizeof bytes, stdin), start;
    int i;
    printf("%s\n", name_way());
    for (i = 1; i < argc; i++) {
        size_t length = (size_t)strtoul(argv[i], NULL, 10);
        uint64_t digest;
        assert(length <= most);
        digest = digest_at(0, length);
        for (start = 1; start < 32; start *= 2) assert(digest_at(start, length) == digest);
        printf("%016" PRIx64 "\n", digest);
    }
    return 0;
}
