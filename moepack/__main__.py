"""`python -m moepack`."""

from moepack.cli.main import main

main()
