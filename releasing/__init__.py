"""Releases: what must hold before one, and wheels tried as users install them."""
