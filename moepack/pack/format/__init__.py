"""The pack's format: records, index and manifest, from bytes to values and back.

It knows every rule of FORMAT.md, and opens no file: it is given bytes, and gives bytes.
"""
