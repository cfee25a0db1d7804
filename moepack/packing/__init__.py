"""Make a pack: choose a layout, plan where each blob goes, and write it so that nothing is lost.

The plan opens no file; writing follows it and decides nothing.
"""
