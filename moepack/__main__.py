"""`python -m moepack`."""

from moepack.cli import main

main()
