"""Copies of finished packs: on a second drive, and from a store, whole or in part."""
