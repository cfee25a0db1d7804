#define _GNU_SOURCE
/* XXH3 of moepack.h, for the library that programs preload: hidden, so that a program may have another version. */
#define MOEPACK_IMPLEMENTATION
#include "../include/moepack.h"
