"""What other engines read: one module for each of their formats.

An emitter takes an open pack and writes files that the engine knows; what a format cannot express
is refused by name. How the bytes are copied is storage's, how a pack is read is reading's.
"""
