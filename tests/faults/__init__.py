"""Faults while moepack works: drives that fail, signals, kills, full disks."""
