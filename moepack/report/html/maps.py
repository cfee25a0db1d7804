"""Maps of many cells: indexed PNGs, a pixel for each, with colours that everybody tells apart."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLOUR_COUNT = 64
_EMPTY = COLOUR_COUNT
"""The number of the transparent colour, for cells that stand for nothing."""


def colours() -> tuple[str, ...]:
    """Return the colours of maps, from the least to the most."""
    import matplotlib

    levels = np.linspace(0.05, 1, COLOUR_COUNT)  # the darkest is no black
    rgb = (np.asarray(matplotlib.colormaps["magma"](levels))[:, :3] * 255).round().astype(int)
    return tuple(f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in rgb.tolist())


def map_symbol(name: str, levels: NDArray[Any]) -> str:
    """Return a map as an SVG symbol, to be used in pictures under its name.

    `levels` [rows, columns] are 0 to 1; what is not a number is left empty.
    """
    rows, columns = levels.shape
    uri = base64.b64encode(_png(levels)).decode()
    return (
        f'<symbol id="{name}" viewBox="0 0 {columns} {rows}" preserveAspectRatio="none">'
        f'<image width="{columns}" height="{rows}" href="data:image/png;base64,{uri}"/></symbol>'
    )


def _png(levels: NDArray[Any]) -> bytes:
    from PIL import Image

    steps = np.nan_to_num(np.clip(levels, 0, 1)) * (COLOUR_COUNT - 1)
    numbers = np.where(np.isnan(levels), _EMPTY, np.rint(steps)).astype(np.uint8)
    picture = Image.fromarray(numbers, mode="P")
    picture.putpalette(b"".join(bytes.fromhex(colour[1:]) for colour in colours()) + bytes(3))
    output = io.BytesIO()
    picture.save(output, "PNG", optimize=True, transparency=_EMPTY)
    return output.getvalue()
