"""A pack that several machines write, each its share of the data files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from moepack.common.paths import AnyPath, PathOrPaths
from moepack.common.phases import Progress
from moepack.packing.pack_model import make_pack
from moepack.packing.plan.layout import DEFAULT, Layout
from moepack.packing.plan.pack_request import PackRequest
from moepack.packing.plan.pack_summary import PackSummary
from moepack.packing.writing import packer
from moepack.packing.writing.packer import DEFAULT_THREADS
from moepack.traces.hotness.model import Hotness


class SharedPack:
    """A pack of several writers; each of them reaches source and target.

    All need the same choices; the arguments are those of `pack_model`. Each writes a part, and
    anyone commits once all are written. Finished files are skipped: whatever was killed is run
    again. The methods raise as `pack_model` does.
    """

    def __init__(
        self,
        source: PathOrPaths,
        target: AnyPath,
        *,
        layout: str | os.PathLike[str] | Layout = DEFAULT,
        hotness: str | os.PathLike[str] | Hotness | None = None,
        layers: str | Iterable[int] | None = None,
        mtp: bool = True,
        experts_only: bool = False,
        alignment: int | None = None,
        sha256: bool = False,
        strong: bool = False,
        dry_run: bool = False,
        threads: int = DEFAULT_THREADS,
        planned: Callable[[PackSummary], None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._target = target
        self._request = PackRequest(source, layout, hotness, layers, mtp, experts_only, alignment)
        self._sha256, self._strong, self._threads = sha256, strong, threads
        self._options: Any = {"dry_run": dry_run, "planned": planned, "progress": progress}

    def write_part(self, part: str | tuple[int, int]) -> PackSummary:
        """Write the share `part` of the data files, such as `3/16` or (3, 16)."""
        return self._make(partial(packer.write_part, part=part), sha256=False)

    def commit(self) -> PackSummary:
        """Make a pack of the parts, once all are written."""
        return self._make(partial(packer.commit, strong=self._strong))

    def _make(self, write: Callable[..., Any], *, sha256: bool | None = None) -> PackSummary:
        return make_pack(
            self._request,
            self._target,
            partial(write, threads=self._threads),
            is_alone=False,
            resume=True,
            sha256=self._sha256 if sha256 is None else sha256,
            strong=self._strong,
            threads=self._threads,
            **self._options,
        )
