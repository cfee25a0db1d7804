"""Small files, sound and broken, for whoever writes a reader: see README.md."""
