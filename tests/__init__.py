"""The tests of moepack."""
