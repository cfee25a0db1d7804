"""The version of moepack."""

__version__ = "0.1.0"
TOOL = f"moepack {__version__}"
"""The program that made a pack, as the manifest names it."""
