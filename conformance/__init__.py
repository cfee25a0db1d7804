"""Small files, sound and broken, for whoever writes a reader: see README.md."""

DIGESTS = {
    "packs": "fb1815114e817f1f7ee8fce532a31466af74bde29616687f2be0ea59623868eb",
    "traces": "5941be684a6b29d2bdae19f95002079ee9df4009307de3cb69ea978097a1132f",
}
"""By folder, as `tests.support.models.digest_of_all` computes it: no file in them ever changes."""
