"""The tests of the room of the same name."""
