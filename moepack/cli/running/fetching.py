"""Models that are elsewhere, fetched before they run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import moepack
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import complain, is_json, is_quiet, lay_out
from moepack.common.paths import is_remote, path_texts

if TYPE_CHECKING:
    from moepack.packing.fetched import FetchPlan


def require_engine(model: Sequence[str]) -> None:
    """Raise MachineError if extras are missing that running a model takes, before it is fetched."""
    from moepack.common.extras import require

    require("run", *["remote"] * any(map(is_remote, model)))


def fetch(model: Sequence[str]) -> Sequence[str]:
    """Return the paths of a model on this machine; one that is elsewhere is fetched, with a bar."""
    if not any(map(is_remote, model)):
        return model
    from moepack.report import pack_text
    from moepack.report.facts import printable

    def announce(plan: FetchPlan) -> None:
        if not is_quiet() and not is_json():
            lay_out(pack_text.fetching(printable(plan)), err=True)

    with progress(None, "fetching the model") as advance:
        notice = None if is_quiet() else partial(complain, "note")
        path = moepack.fetch_model(model, planned=announce, notice=notice, progress=advance)
    return path_texts(path)
