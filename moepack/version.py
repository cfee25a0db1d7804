"""The version of moepack."""

__version__ = "0.1.0"
