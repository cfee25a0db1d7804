"""moepack.h, from C."""
