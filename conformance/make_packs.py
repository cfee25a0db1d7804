"""Make the conformance packs: small packs, sound and broken, and their verdicts.

`python -m conformance.make_packs` writes packs/, the same bytes each time. moepack packs the sound
ones; where everything lies, and what its digest is, is found out here by a reader of fifty lines
that was written after layouts/FORMAT.md, and by the bytes of the models themselves. The broken ones
are a sound one with one rule broken, and all digests made right again.
"""

import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from conformance import variants
from conformance.variants import (
    BLOBS,
    DENSE,
    OPENING,
    USE,
    VERIFICATION,
    Broken,
    Changes,
    broken,
    changed,
    edited,
    flipped,
    removed,
)
from moepack.pack.format import records
from moepack.packing.pack_model import pack_model
from moepack.packing.plan.layout import Layout, load
from moepack.packing.shard_index import index_model
from tests.support.broken_manifests import BAD_ENTRIES, Entry, change
from tests.support.broken_packs import INDEX_RULES, SHARD_RULES, VERIFIERS_RULES
from tests.support.gguf_builder import F32, GgufBuilder, moe, split, write_shards
from tests.support.models import hotness_of
from tests.support.pack_draft import (
    COUNTS,
    Draft,
    Piece,
    later,
    lengthened,
    name_of,
    sealed,
    strong_digests,
)

FOLDER = Path(__file__).parent / "packs"
ORDER = [verdict["pack"] for verdict in json.loads((FOLDER / "verdicts.json").read_text())]
"""The packs that are there; new ones come after them."""
TOOL = "conformance"
STAGES = {
    **dict.fromkeys(("header", "section", "file", "family", "kind", "cross"), (OPENING, None)),
    "record": (USE, "experts"),
    "slice": (USE, "origins"),
    "dense": (USE, "dense"),
}
"""By group of rules: the verdict, and the request that is refused."""


class Sound(NamedTuple):
    """A sound pack: the shards that it was made from, and how."""

    shards: list[GgufBuilder]
    make: Callable[[list[Path], Path], object]
    about: str


def tiny(layers: tuple[int, ...] = (0, 1), experts: int = 2) -> GgufBuilder:
    """Build a model of 32 bytes a slice."""
    return moe(layers, experts, ne=(4, 2), type_id=F32, block=(1, 4))


def with_small_parts() -> GgufBuilder:
    """Build a model with biases, scales, a fused projection and chunk experts."""
    builder = moe((), 4, architecture="grovemoe", ne=(4, 2), block_count=1)
    builder.put("grovemoe.experts_per_group", "u32", 2)
    for name, family, count in (("ffn_gate_up_exps", 4, 4), ("ffn_down_exps", 2, 4)):
        builder.tensor(f"blk.0.{name}.weight", (4, family, count), F32, 16)
        builder.tensor(f"blk.0.{name}.bias", (family, count), F32, 4 * family)
        builder.tensor(f"blk.0.{name}.scale", (count,), F32, 4 * count)
    for name in ("ffn_gate_chexps", "ffn_up_chexps", "ffn_down_chexps"):
        builder.tensor(f"blk.0.{name}.weight", (4, 2, 2), F32, 16)
    return builder


def with_a_tensor_each() -> GgufBuilder:
    """Build a model as Mixtral's files were before April 2024."""
    builder = moe((), 2, architecture="llama", ne=(4, 2), block_count=2)
    for layer in range(2):
        for name in ("gate", "down", "up"):
            for expert in range(2):
                builder.tensor(f"blk.{layer}.ffn_{name}.{expert}.weight", (4, 2), F32, 16)
    return builder


def with_an_unknown_type() -> GgufBuilder:
    """Build a model of a type unknown to all tables; the gap proves its length."""
    return moe((0,), 32, ne=(4, 2), type_id=7777, block=(1, 4), block_count=1)


def packed(
    layout: str = "layers",
    *,
    alignment: int | None = 64,
    counts: dict[tuple[int, int], int] | None = None,
    **options: Any,
) -> Callable[[list[Path], Path], None]:
    """Return a function that packs the shards in a layout."""

    def make(shards: list[Path], target: Path) -> None:
        chosen: Layout = load(layout)
        if alignment is not None:
            chosen = chosen.with_alignment(alignment)
        hotness = None if counts is None else hotness_of(counts)
        pack_model(shards, target, layout=chosen, hotness=hotness, **options)

    return make


def indexed(**options: Any) -> Callable[[list[Path], Path], None]:
    """Return a function that lays an index over copies of the shards, not links."""

    def make(shards: list[Path], target: Path) -> None:
        index_model(shards, target, hotness=hotness_of(COUNTS), **options)
        for link in target.glob("*.gguf"):
            data = link.read_bytes()
            link.unlink()
            link.write_bytes(data)

    return make


def grown(shards: list[Path], target: Path) -> None:
    """Pack as a later version may: more in every record, and sections of its own."""
    packed(counts=COUNTS)(shards, target)
    draft = Draft(target)
    first, others = draft.pieces()[:3], draft.pieces()[3:]
    pieces = [
        lengthened(piece, b"\xff" * (4 if name_of(piece) == "ranks" else 24))
        for piece in (*first, *reversed(others))
    ]
    pieces.insert(3, Piece(b"org.example.news", b"unknown" * 3, 7, 0))
    pieces.append(Piece(b"later", b"", 16, 0))
    draft.rebuild(pieces, header_more=b"\xee" * 72, section_more=b"\xdd" * 8)
    for holder in (draft.body, draft.body["source"], draft.body["index"], draft.body["files"][0]):
        holder["org.example.later"] = {"number": -1.5, "list": [None, True]}
    draft.save()


def dirty_padding() -> GgufBuilder:
    """Build a model with a byte after a tensor that is not zero."""
    builder = tiny()
    norm = next(spec for spec in builder.tensors if spec.name == "blk.0.attn_norm.weight")
    norm.data += bytes(15) + b"\x01"
    return builder


def strong(shards: list[Path], target: Path) -> None:
    """Pack with all digests that are known once more as SHA-256."""
    packed(counts=COUNTS, sha256=True)(shards, target)
    draft = Draft(target)
    strong_digests()(draft)
    draft.save()
    draft.body["index"]["sha256"] = hashlib.sha256(draft.index).hexdigest()
    draft.save_manifest()


def of_both_kinds(shards: list[Path], target: Path) -> None:
    """Pack layer 1, and let the experts of layer 0 lie apart in the shard as it is."""
    packed(counts=COUNTS)(shards, target)
    draft = Draft(target)
    pieces = {piece.name.rstrip(b"\0").decode(): piece for piece in draft.pieces()}
    number = draft.sections["files"].record_count
    shutil.copy(shards[0], target / "shard.gguf")
    length = shards[0].stat().st_size
    files = pieces["files"]
    new = records.FILE.pack(*records.FileRecord(b"shard.gguf", length, records.SHARD_FILE, 0))
    pieces["files"] = files._replace(data=files.data + new)
    draft.body["files"].append({"name": "shard.gguf", "length": length})
    draft.rebuild(list(pieces.values()))
    for expert in range(2):
        draft.set("blob", expert, offset=0, length=0)
        for part in range(3):
            kind = draft.get("part_kind", part)
            place = kind.shard_offset + expert * kind.stride
            draft.set("part", 3 * expert + part, offset=place, file=number)
    (target / BLOBS).write_bytes(bytes((target / BLOBS).stat().st_size))
    draft.save()


def renamed_index(shards: list[Path], target: Path) -> None:
    """Pack with an index that has another name than a new pack's."""
    packed(counts=COUNTS)(shards, target)
    draft = Draft(target)
    (target / INDEX).rename(target / "ranking-2.bin")
    draft.body["index"]["name"] = "ranking-2.bin"
    draft.save_manifest()


def with_a_long_name() -> GgufBuilder:
    """Build a model with a tensor name of 200 letters."""
    return tiny((0,)).tensor("n" * 200, (4,), F32, 16)


def sparse_manifest(shards: list[Path], target: Path) -> None:
    """Pack with a manifest that lacks all that may be missing."""
    packed()(shards, target)
    draft = Draft(target)
    for key in ("experts_used", "context_length", "mtp_layers"):
        del draft.body["source"][key]
    del draft.body["index"]["pages"]
    draft.save_manifest()


ONE_LAYER = {key: count for key, count in COUNTS.items() if key[0] == 0}
SOUND = {
    "layers": Sound(
        [tiny((0,))], packed(alignment=None, counts=ONE_LAYER), "the default layout, 4 KiB"
    ),
    "hot-first": Sound([tiny()], packed("hot-first", counts=COUNTS), "the layout hot-first"),
    "natural": Sound([tiny()], packed("natural", counts=COUNTS), "the layout natural"),
    "not-measured": Sound([tiny()], packed(), "without hotness"),
    "half-measured": Sound(
        [tiny()], packed(counts={(1, 1): 3}), "with hotness of one layer of two"
    ),
    "experts-only": Sound([tiny()], packed(experts_only=True), "without the dense part"),
    "chosen-layers": Sound([tiny()], packed(layers=[1]), "one layer of two"),
    "alignment-16KiB": Sound(
        [tiny((0,), 1).put("qwen3moe.expert_used_count", "u32", 1)],
        packed(alignment=1 << 14, experts_only=True),
        "weights and blobs at multiples of 16 KiB",
    ),
    "shards": Sound(split(tiny(), 4), packed(counts=COUNTS, sha256=True), "of three shards"),
    "padding": Sound([dirty_padding()], packed(), "padding in the shard that is not zero"),
    "small-parts": Sound([with_small_parts()], packed(), "biases, scales and chunk experts"),
    "a-tensor-an-expert": Sound([with_a_tensor_each()], packed(), "slices at places of their own"),
    "unknown-type": Sound([with_an_unknown_type()], packed(), "a type that no table has"),
    "over-shards": Sound(split(tiny(), 4), indexed(), "an index over shards, without digests"),
    "over-shards-with-digests": Sound(
        [with_a_tensor_each()], indexed(digests=True), "an index over a shard, with digests"
    ),
    "grown": Sound([tiny()], grown, "longer records, unknown sections and keys"),
    "strong": Sound([tiny()], strong, "SHA-256 of everything, the index and the shard among it"),
    "both-kinds": Sound([tiny()], of_both_kinds, "one layer packed, one in the shard as it is"),
    "index-by-another-name": Sound([tiny()], renamed_index, "an index with another name"),
    "long-name": Sound([with_a_long_name()], packed(), "a tensor with a name of 200 bytes"),
    "sparse-manifest": Sound([tiny()], sparse_manifest, "a manifest without what may be missing"),
    "manifest-at-its-limits": Sound(
        [tiny()],
        changed(packed(), variants.manifest_at_its_limits, in_index=False),
        "a manifest with numbers that mean nothing, nulls, and a signature",
    ),
    "tensors-alone": Sound(
        [tiny()],
        changed(packed(), variants.without_section("shard_bytes")),
        "dense tensors without headers",
    ),
    "headers-alone": Sound(
        [tiny()],
        changed(packed(), variants.without_section("tensors")),
        "headers without dense tensors",
    ),
    "without-digests": Sound(
        [tiny()],
        changed(packed(), variants.without_digests),
        "a data file without digests of what lies in it",
    ),
    "a-tensor-of-nothing": Sound(
        [tiny().tensor("nothing", (0, 4), F32, 0)], packed(), "a dense tensor without elements"
    ),
}


# A reader after layouts/FORMAT.md, for what is expected.


class Told:
    """A decoded index, without any checks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        named = json.loads((path / "manifest.json").read_text())["index"]["name"]
        self.data = (path / named).read_bytes()
        start, _, count, length = struct.unpack_from("<IQII", self.data, 12)
        self.sections = {}
        for number in range(count):
            name, *place = struct.unpack_from("<24sQQI", self.data, start + number * length)
            self.sections[text(name)] = place

    def records(self, name: str, form: str) -> list[tuple[Any, ...]]:
        """Return the records of a section; none where it is missing."""
        offset, count, length = self.sections.get(name, (0, 0, 0))
        return [struct.unpack_from(form, self.data, offset + n * length) for n in range(count)]

    def experts(self) -> Iterator[dict[str, Any]]:
        """Yield the records of each expert."""
        files = self.records("files", "<256sQII")
        kinds = self.records("part_kinds", "<64sIIIIQQQ24sIIQQ")
        blobs = self.records("blobs", "<QQQII")
        parts = self.records("parts", "<QQQII")
        slices = self.records("slices", "<QQ")
        for layer, experts, each, flags, blob, kind, part, name in self.records(
            "families", "<IIIIIIQ32s"
        ):
            for expert in range(experts):
                _, length, hotness, rank, _ = blobs[blob + expert]
                entries = []
                for number in range(each):
                    about = kinds[kind + number]
                    offset, _, digest, file, _ = parts[part + expert * each + number]
                    shard, first, start, stride = about[9:]
                    origin = (shard, start + expert * stride)
                    if about[2] & 2:
                        origin = slices[first + expert]
                    part_digest = None if files[file][3] & 1 else digest
                    place = (text(files[file][0]), offset)
                    entries.append((about, place, part_digest, origin))
                yield {
                    "layer": layer, "family": text(name), "expert": expert, "rank": rank,
                    "hotness": hotness if flags & 1 else None, "blob_length": length,
                    "parts": entries,
                }  # fmt: skip


def text(field: bytes) -> str:
    """Read a name that is padded with zeros."""
    return field.rstrip(b"\0").decode()


def xxh3(data: bytes) -> str:
    """Write the digest of some bytes."""
    return f"xxh3:{xxhash.xxh3_64_intdigest(data):016x}"


def facts(path: Path, shards: list[Path]) -> dict[str, Any]:
    """Say where everything lies, once it was found there; digests are of the models' own bytes."""
    index = Told(path)
    source = [shard.read_bytes() for shard in shards]
    files = [text(name) for name, *_ in index.records("files", "<256sQII")]
    experts = []
    for expert in index.experts():
        parts = []
        for about, (file, offset), digest, (shard, start) in expert["parts"]:
            data = source[shard][start : start + about[7]]
            assert (path / file).read_bytes()[offset : offset + len(data)] == data
            assert digest is None or f"xxh3:{digest:016x}" == xxh3(data)
            parts.append([text(about[0]), file, offset, len(data), xxh3(data), digest is not None])
        experts.append(expert | {"parts": parts})
    dense = []
    for tensor in index.records("tensors", "<256s24sIIIIQQQQQQQQIIQ"):
        name, file, length, offset = (tensor[at] for at in (0, 5, 10, 11))
        data = source[tensor[14]][tensor[16] : tensor[16] + length]
        assert (path / files[file]).read_bytes()[offset : offset + length] == data
        dense.append([text(name), files[file], offset, length, xxh3(data)])
    body = json.loads((path / "manifest.json").read_text())
    names = [entry["name"] for entry in body["source"]["shards"]]
    shards_as_restored = [
        [name, len(data), hashlib.sha256(data).hexdigest()]
        for name, data in zip(names, source, strict=True)
    ]
    return {
        "experts": experts,
        "dense": dense,
        "shards": shards_as_restored if body["whole"] else None,
    }


# Broken packs.


def write_broken(broken: Broken, base: Path, folder: Path) -> dict[str, Any]:
    """Write a pack with one rule broken; return its verdict."""
    path = folder / broken.name
    shutil.copytree(base, path)
    draft = Draft(path, compact=True)
    index, body = bytes(draft.index), json.dumps(draft.body)
    before = contents(path)
    broken.breaks(draft)
    if draft.index != index:
        draft.save()
    elif json.dumps(draft.body) != body:
        draft.save_manifest()
    return {
        "pack": broken.name,
        "verdict": broken.verdict,
        "asked_for": broken.asked_for,
        "needs_manifest": broken.name.startswith("broken-cross-")
        or (MANIFEST in os.listdir(path) and contents(path) == before),
        "about": broken.about,
    }


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of the files of a pack, but for those of its manifest."""
    return {
        file.name: file.read_bytes()
        for file in path.iterdir()
        if file.is_file() and file.name != MANIFEST
    }


@later
def text_of(draft: Draft, change: Callable[[str], str]) -> None:
    """Change the text of the manifest, and make its digest right."""
    path = draft.path / "manifest.json"
    before = path.read_text()
    text = change(before[: before.rindex(",\n")] + "\n}")
    assert text not in before
    path.write_bytes(sealed(text))


@later
def made_a_folder(draft: Draft, name: str) -> None:
    """Put a folder in the place of a file, with a file in it."""
    (draft.path / name).unlink()
    (draft.path / name).mkdir()
    (draft.path / name / "a-file").touch()


MANIFEST, INDEX = "manifest.json", "index.bin"
TEXTS: Changes = {
    "key-twice": (text_of(lambda t: t.replace("{", '{"tool": "t", ', 1)), "a key twice"),
    "nan": (
        text_of(lambda t: t.replace("{", '{"x": NaN, ', 1)),
        "NaN, in a key that is unknown",
    ),
    "huge": (text_of(lambda t: t.replace("{", '{"x": 1e999, ', 1)), "a number beyond a double"),
    "digits": (text_of(lambda t: t.replace("{", '{"x": %s, ' % ("9" * 400), 1)), "400 digits"),
    "list": (text_of(lambda t: f"[{t}\n]".replace("}\n]", "\n}]")), "no JSON"),
    "mark": (text_of(lambda t: "\ufeff" + t), "a byte order mark"),
}
FILES: Changes = {
    "no-manifest": (removed(MANIFEST), "no manifest.json: no pack"),
    "manifest": (edited(MANIFEST, flipped(30)), "a flipped bit"),
    "manifest-cut": (edited(MANIFEST, lambda d: d.pop()), "a byte short"),
    "no-index": (removed(INDEX), "no index.bin"),
    "index": (edited(INDEX, flipped(2500)), "a flipped bit in a record"),
    "trailer": (edited(INDEX, flipped(-1)), "a flipped bit in the trailer"),
    "index-cut": (edited(INDEX, lambda d: d.pop()), "a byte short"),
    "index-long": (edited(INDEX, lambda d: d.append(0)), "a byte long"),
}
EXPERTS: Changes = {
    "no-blobs": (removed(BLOBS), "a data file that is missing"),
    "folder": (made_a_folder(BLOBS), "a folder in place of a data file"),
    "blobs-cut": (
        edited(BLOBS, lambda d: d.__delitem__(slice(64, None))),
        "a data file that was cut",
    ),
    "part": (edited(BLOBS, flipped(5)), "a flipped bit in a part"),
}
UNSEEN: Changes = {
    "padding": (edited(BLOBS, flipped(50)), "padding that is not zero"),
    "blobs-long": (
        edited(BLOBS, lambda d: d.extend(bytes(64))),
        "a data file that is longer than stated",
    ),
}
TENSOR: Changes = {"tensor": (edited(DENSE, flipped(-60)), "a flipped bit in a tensor")}
HEADER: Changes = {"header": (edited(DENSE, flipped(9)), "a flipped bit in a header")}


ALSO = {
    *("source.shards[0].sha256 is missing", "version 1.0", "version True", "no shards"),
    *("a header of 1099511627776 bytes", "a shard of 0 bytes", "pages of 4096"),
    *("an index named '../index.bin'", "an index of more than 1 GiB", "pages without digests"),
    *("experts used: None", "blobs nowhere", "bytes after a name", "a name twice, loud"),
    *("a name in the index alone", "whole without a dense part"),
}
"""Rules that break in the same words as others, and have a pack all the same."""


def all_broken() -> Iterator[Broken]:
    """Yield a broken pack for every rule that has a message of its own."""
    yield from broken("text", OPENING, None, TEXTS)
    yield from broken("file", OPENING, None, FILES)
    yield from broken("file", USE, "experts", EXPERTS)
    yield from broken("file", USE, "dense", TENSOR)
    yield from broken("file", USE, "restoring", HEADER)
    yield from broken("file", VERIFICATION, None, UNSEEN)
    problems: set[object] = set()
    for entry in BAD_ENTRIES:
        problem = entry.words.partition(": ")[2] or entry.words
        if problem not in problems or entry.name in ALSO:
            problems.add(problem)
            yield Broken(
                f"broken-manifest-{slug(entry.name)}", manifest_of(entry), OPENING, None, entry.name
            )
    names: set[str] = set()  # of sections, families, parts and types, which are one rule
    for group, rules in INDEX_RULES.items():
        problems = set()
        for rule in rules:
            is_known_name = "name" in rule.problem and rule.problem in names and group != "file"
            if is_known_name and rule.name not in ALSO:
                continue
            names.add(rule.problem)
            is_of_shard_bytes = rule.place.startswith("shard_bytes")  # in the same words as tensors
            key = (is_of_shard_bytes, rule.problem)
            if key not in problems or rule.name in ALSO:
                problems.add(key)
                name = f"broken-{group}-{slug(rule.name)}"
                verdict, asked_for = STAGES[group]
                if group == "dense" and is_of_shard_bytes:
                    asked_for = "restoring"
                yield Broken(name, rule.breaks, verdict, asked_for, f"{rule.name}: {rule.problem}")
    problems = set()
    for rule in SHARD_RULES:
        if rule.problem not in problems:
            problems.add(rule.problem)
            name = f"broken-restoring-{slug(rule.name)}"
            yield Broken(name, rule.breaks, USE, "restoring", f"{rule.name}: {rule.problem}")
    yield from broken("restoring", USE, "restoring", OTHER_SHA256)
    for rule in VERIFIERS_RULES:
        if rule.name != "a part's digest":  # a reader compares it as well
            name = f"broken-unseen-{slug(rule.name)}"
            yield Broken(name, rule.breaks, VERIFICATION, None, rule.name)


@later
def manifest_of(draft: Draft, entry: Entry) -> None:
    """Change the manifest."""
    change(draft.body, entry)


def sha256_of_shard(key: str) -> Callable[[Draft], None]:
    """State another SHA-256 of a shard or of its header."""
    return lambda draft: draft.body["source"]["shards"][0].update({key: "0" * 64})


OTHER_SHA256: Changes = {
    f"{what}-sha256": (
        sha256_of_shard(key),
        f"the SHA-256 of a {what} in the manifest: not that of the {what} in the pack",
    )
    for what, key in {"header": "header_sha256", "shard": "sha256"}.items()
}


def slug(name: str) -> str:
    """Make the name of a folder of some words."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:48]


# The folder.


def make(target: Path) -> None:
    """Write all packs and their verdicts into an empty folder; those of new packs come last."""
    verdicts = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, sound in SOUND.items():
            shards = write_model(sound.shards, Path(scratch) / name)
            sound.make(shards, target / name)
            draft = Draft(target / name)
            draft.body["tool"] = TOOL
            draft.save_manifest()
            entry = {"pack": name, "verdict": "sound", "about": sound.about}
            verdicts.append(entry | {"whole": draft.body["whole"]} | facts(target / name, shards))
        model = write_model([tiny()], Path(scratch) / "base model")
        base = Path(scratch) / "base"
        packed(counts=COUNTS)(model, base)
        draft = Draft(base, compact=True)
        draft.body |= {"tool": TOOL, "layout": {}, "hotness": {}}
        draft.save_manifest()
        verdicts += [write_broken(one, base, target) for one in all_broken()]
        for name, verdict, asked_for, changes in variants.VARIANTS:
            for one in broken(name, verdict, asked_for, changes):
                verdicts.append(write_broken(one, target / name, target))
    verdicts.sort(key=lambda verdict: (*ORDER, verdict["pack"]).index(verdict["pack"]))
    lines = ",\n".join(json.dumps(verdict) for verdict in verdicts)
    (target / "verdicts.json").write_text(f"[\n{lines}\n]\n")


def write_model(shards: list[GgufBuilder], folder: Path) -> list[Path]:
    """Write the shards of a model."""
    folder.mkdir()
    if len(shards) == 1:
        return [shards[0].write(folder / "m.gguf")]
    return write_shards(shards, folder, "m")


def main() -> None:
    """Write the folder anew."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    make(FOLDER)


if __name__ == "__main__":
    main()
