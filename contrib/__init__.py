"""Converters that need moepack's source tree: they are not part of the package."""
