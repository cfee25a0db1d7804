"""The table of a model for the preloaded library: the structs of native/table.h.

It is made once, before a program starts, in a file of memory that programs map.
"""

import os
import struct
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from moepack.common.errors import MirrorWarning, RequestError
from moepack.common.shape import ROUTED_FAMILY, ExpertKey
from moepack.common.sizes import align
from moepack.pack.format.tables import PackedFamily
from moepack.pack.reading.copies import Mirror
from moepack.pack.reading.in_flight import SecondSource
from moepack.pack.reading.locations import PartLocation
from moepack.pack.reading.pack import Pack
from moepack.running.streaming.mapped_model import FamilySpans, MappedModel
from moepack.storage.extents import RangeSet
from moepack.traces.caching.cache import check_policy

_Value = TypeVar("_Value")
_MAX_PARTS = 16
_PAGE = 4096
_VERSION = 3
_HEADER = struct.Struct("<8s14I10Qi3I")
_LAYER = struct.Struct("<4I" + "64s" * _MAX_PARTS)
_PART = struct.Struct("<4Q2I2HI")
_PAIR = struct.Struct("<QQ")
_DENSE = struct.Struct("<3Q2I")

_WARM = struct.Struct("<2I")

POLICIES = {"lrfu": 0, "lru": 1}
"""By name: the number of the order of evictions."""
CHECKS = {"never": 0, "first": 1, "always": 2}
BACKENDS = {
    "auto": (0, False),
    "uring": (1, False),
    "direct": (2, False),
    "buffered": (2, True),
}
"""By name: the kind of reads, and whether they go through the page cache."""


class CacheChoices(NamedTuple):
    """How the library caches: names as in POLICIES, CHECKS and BACKENDS; lengths are bytes.

    `reserve` is kept beside the cache's budget. `warm_up`, which is read while a program loads, has
    the shares of tokens that used each expert in earlier runs, the most used first. With
    `is_prepared` programs take the memory while they load; with `prefetches` they read, while
    decoding, what the next layer's router names.
    """

    policy: str
    check: str
    backend: str
    reserve: int
    pinned: Sequence[ExpertKey] = ()
    warm_up: Mapping[ExpertKey, float] = {}
    is_prepared: bool = False
    prefetches: bool = True


_CONTIGUOUS_TYPES = {16, 17, 18, 19, 21, 22, 23, 29}
"""Of experts that have to follow each other as in a GGUF: IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ3_S,
IQ2_S, IQ4_XS, IQ1_M. Only then llama.cpp multiplies several tokens by them with kernels of their
own, whose results are rounded otherwise (its ggml_cpu_iqp_supports_mul_mat_id)."""


class ExpertTable:
    """The experts of a pack in the order of the library: routed families first, by layer.

    `slot_lengths` are the bytes that each routed expert takes in memory. If it `has_blobs`,
    programs that have only CPUs compute with whole blobs of the pack, else with their parts.
    """

    def __init__(self, pack: Pack, model: MappedModel) -> None:
        self._pack, self._model = pack, model
        mtp = pack.shape.mtp_layers
        families = [one for one in pack.index.families if one.expert_count]
        self._families = sorted(
            families, key=lambda one: (one.name != ROUTED_FAMILY, one.layer in mtp, one.layer)
        )
        self._rare = {
            one for one in self._families if one.name != ROUTED_FAMILY or one.layer in mtp
        }
        self._spans: FamilySpans = model.spans()
        types = {kind.type_id for family in families for kind in family.part_kinds}
        self.has_blobs = bool(model.experts_offset) and types.isdisjoint(_CONTIGUOUS_TYPES)
        self._numbers: dict[ExpertKey, int] = {}
        self.slot_lengths: dict[ExpertKey, int] = {}
        count = 0
        for family in self._families:
            if family.name == ROUTED_FAMILY:
                keys = [ExpertKey(family.layer, one) for one in range(family.expert_count)]
                length = max(self._slot_length(family, key) for key in keys)
                self._numbers.update((key, count + key.expert) for key in keys)
                self.slot_lengths.update(dict.fromkeys(keys, length))
            count += family.expert_count
        self._count = count

    def part_of(self, number: int, part: int) -> PartLocation | None:
        """Return a part of the expert that has a number in the table; None: there is none."""
        first = 0
        for family in self._families:
            if number < first + family.expert_count:
                if part >= len(family.part_kinds):
                    return None
                name = family.part_kinds[part].name
                return self._pack.locate(family.layer, number - first, name, family=family.name)
            first += family.expert_count
        return None

    def _slot_length(self, family: PackedFamily, key: ExpertKey) -> int:
        """Return the bytes of a slot: a blob's, or whole pages around each part."""
        if self.has_blobs:
            return align(self._pack.locate(*key, family=family.name).length, _PAGE)
        spans = self._spans[family.name][key]
        return sum(align(span.offset % _PAGE + span.length, _PAGE) for span in spans)

    def encode(self, choices: CacheChoices) -> bytes:
        """Encode the table. Raises RequestError for unknown names."""
        paths = {path: number for number, path in enumerate(self._pack.file_paths)}
        mirror = None if choices.backend == "buffered" else self._sound_mirror()
        files = mirror.record.files if mirror is not None and mirror.record is not None else {}
        mirrored = {name: RangeSet(file.ranges) for name, file in files.items() if file.ranges}
        pinned = [self._numbers[key] for key in choices.pinned]
        sections = [
            b"".join(map(self._layer, self._families)),
            b"".join(
                part for family in self._families for part in self._parts(family, paths, mirrored)
            ),
            b"",  # files: their paths follow everything else
            b"".join(
                _PAIR.pack(status.st_dev, status.st_ino)
                for status in map(os.fstat, self._model.descriptors)
            ),
            b"".join(
                _DENSE.pack(one.mapped_offset, one.length, one.offset, one.source, one.file)
                for one in self._model.dense()
            ),
            struct.pack(f"<{len(pinned)}I", *pinned),
            b"".join(
                _WARM.pack(self._numbers[key], min(int(share * 2**32), 2**32 - 1))
                for key, share in choices.warm_up.items()
            ),
        ]
        sections[2] = bytes(_PAIR.size * len(paths))
        offsets, end = [], _HEADER.size
        for section in sections:
            offsets.append(end)
            end += align(len(section), 8)
        sections[2], strings = self._files(list(paths), mirror, mirrored, end)
        body = b"".join(section.ljust(align(len(section), 8), b"\0") for section in sections)
        return self._header(choices, sections, offsets) + body + strings

    def _header(
        self, choices: CacheChoices, sections: Sequence[bytes], offsets: Sequence[int]
    ) -> bytes:
        check_policy(choices.policy, list(POLICIES))
        kind, is_cached = _look_up("backend", BACKENDS, choices.backend)
        return _HEADER.pack(
            b"MOEPTABL",
            _VERSION,
            os.getpid(),
            len(self._families),
            self._count,
            len(sections[2]) // _PAIR.size,
            len(sections[3]) // _PAIR.size,
            len(sections[4]) // _DENSE.size,
            len(choices.pinned),
            len(choices.warm_up),
            POLICIES[choices.policy],
            _look_up("check", CHECKS, choices.check),
            kind,
            is_cached,
            choices.is_prepared,
            choices.reserve,
            self._model.length,
            self._model.experts_offset,
            *offsets,
            -1 if self._model.image is None else self._model.image,
            choices.prefetches,
            self.has_blobs,
            0,
        )

    def _layer(self, family: PackedFamily) -> bytes:
        names = [kind.name.encode() for kind in family.part_kinds]
        names += [b""] * (_MAX_PARTS - len(names))
        count = len(family.part_kinds)
        return _LAYER.pack(family.layer, family.expert_count, count, family in self._rare, *names)

    def _parts(
        self, family: PackedFamily, paths: Mapping[Path, int], mirrored: Mapping[str, RangeSet]
    ) -> Iterable[bytes]:
        padding = bytes(_PART.size * (_MAX_PARTS - len(family.part_kinds)))
        for expert in range(family.expert_count):
            for span in self._spans[family.name][ExpertKey(family.layer, expert)]:
                part = self._pack.locate(family.layer, expert, span.part, family=family.name)
                blob_offset = part.offset if part.blob_offset is None else part.blob_offset
                ranges = mirrored.get(part.path.name)
                is_mirrored = ranges is not None and ranges.covers(
                    part.offset, part.offset + part.length
                )
                yield _PART.pack(
                    part.offset,
                    part.length,
                    part.digest or 0,
                    span.offset,
                    paths[part.path],
                    span.file,
                    part.digest is not None,
                    is_mirrored,
                    part.offset - blob_offset,
                )
            yield padding

    def _files(
        self, paths: Sequence[Path], mirror: Mirror | None, mirrored: Container[str], end: int
    ) -> tuple[bytes, bytes]:
        records, strings = b"", b""
        for path in paths:
            offsets = [end + len(strings), 0]
            strings += os.fsencode(os.path.abspath(path)) + b"\0"
            if mirror is not None and path.name in mirrored:
                offsets[1] = end + len(strings)
                strings += os.fsencode(mirror.path / path.name) + b"\0"
            records += _PAIR.pack(*offsets)
        return records, strings

    def _sound_mirror(self) -> Mirror | None:
        mirror = self._pack.mirror
        if mirror is None or mirror.problem is None:
            return mirror
        text = SecondSource(mirror.path, {}).warning(mirror.problem)
        warnings.warn(text, MirrorWarning, stacklevel=2)
        return None


def _look_up(what: str, values: Mapping[str, _Value], name: str) -> _Value:
    if name not in values:
        raise RequestError(f"no such {what}", expected=", ".join(values), found=name)
    return values[name]
