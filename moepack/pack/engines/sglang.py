"""SGLANG-EXPERTPACK-v1: SGLang's experts in one file, which it reads beside a GGUF.

Facts of SGLang 0.5.23 (srt/model_loader/expert_pack/format.py, build.py, validate.py, and the
reader, srt/layers/moe/expert_pack.py); all numbers little-endian:

    header    176 bytes: magic, version, lengths, flags, counts, alignment, three SHA-256
    entries   328 bytes each: layer, expert, role, type, name, places in GGUF and file, SHA-256s
    objects   gate, up and down of an expert without padding, at the same distance from each other

By the name DeepSeek-V4-Flash.expert-pack, whatever the model, SGLang finds the file beside a GGUF.
The manifest beside it names the file, the GGUF and all tensors by absolute paths and SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moepack.common import digest
from moepack.common.escaping import shell_word
from moepack.common.phases import Progress, advancing
from moepack.common.sizes import align, ranges_text
from moepack.pack.engines.contract import (
    MAX_MANIFEST_LENGTH,
    Engine,
    ExportOption,
    ExportPlan,
    LastFile,
    Need,
    Settings,
)
from moepack.pack.engines.expert_tensors import (
    FAMILY,
    ROLES,
    ExpertTensor,
    Layer,
    architecture_note,
    expert_tensors,
    needed_all_layers,
    needed_roles,
    tensors_of,
)
from moepack.pack.engines.one_gguf import (
    Hashes,
    file_sha256,
    gguf_name,
    given_gguf,
    hash_model,
    planned_gguf,
)
from moepack.pack.engines.stock_gguf import ALIGNMENT, LaidTensor, lay_out
from moepack.pack.reading.pack import Pack
from moepack.source import ggml_types
from moepack.storage.extents import Extent, NewFile
from moepack.storage.regular_file import read_back

FILE_NAME = "DeepSeek-V4-Flash.expert-pack"
MANIFEST_NAME = f"{FILE_NAME}.manifest.json"

_MAGIC = b"SGLANG-EXPERTPACK-v1\0\0\0\0"
_HEADER = struct.Struct("<24sIIIIQQQIIII32s32s32s")
_ENTRY = struct.Struct("<HHBBH16s80sQQQQQQ32s32s32s4Q16s16sQQ")
_FLAGS = 3  # bytes as in the GGUF, and gate, up, down of an expert together
_PAGE = 4096
_TYPE, _BLOCK = "MXFP4", 32


def _needs(pack: Pack, settings: Settings) -> Iterator[Need]:
    layers = expert_tensors(pack)
    lacking = list(needed_roles(layers))
    lacking += needed_all_layers(pack)
    yield from lacking
    if lacking:
        return
    if sorted(layers) != list(range(len(layers))):
        yield Need(f"it needs experts in all layers from 0 on: they are in {ranges_text(layers)}")
    types = sorted({tensor.kind.type_name for tensor in tensors_of(layers)})
    if types != [_TYPE]:
        yield Need(f"it needs experts of type {_TYPE}: these are {', '.join(types)}")
    elif len({tensor.length for tensor in tensors_of(layers)}) > 1:
        yield Need("it needs gate, up and down of the same length in all layers")
    if settings["gguf"] is None and not pack.manifest.is_whole:
        problem = "it needs a GGUF beside the experts: the pack has no dense part to make one of"
        yield Need(problem, "name one with `gguf`")
    if len({tensor.expert_count for tensor in tensors_of(layers)}) > 1:
        yield Need("it needs the same number of experts in all layers")
    if pack.manifest.source.experts_used_in(FAMILY, min(layers)) is None:
        yield Need("it needs the number of experts that a token uses: the GGUF does not state it")


def _plan(pack: Pack, target: Path, settings: Settings) -> ExportPlan:
    export = _Export(pack, target, settings)
    notes = list(architecture_note(pack, ENGINE.title, ("deepseek4",)))
    if export.payload_length % _PAGE:
        notes.append("experts are no whole pages: SGLang reads them only with direct_io off")
    return ExportPlan(
        folder=target,
        files=tuple(export.files),
        heads=export.heads,
        last=LastFile(MANIFEST_NAME, export.manifest),
        tensor_count=len(tensors_of(export.layers)),
        alignment=_PAGE,
        command="python -m sglang.launch_server --load-format expert_pack"
        f" --model-path {shell_word(str(export.gguf.path))}",
        notes=tuple(notes),
    )


class _Export:
    """The files of one export; their heads are known when the model has been hashed."""

    def __init__(self, pack: Pack, target: Path, settings: Settings) -> None:
        self.pack = pack
        self.path = target / FILE_NAME
        self.layers: dict[int, Layer] = expert_tensors(pack)
        first = tensors_of(self.layers)[0]
        self.expert_count = first.expert_count
        self.role_length = first.length
        self.payload_length = first.length * len(ROLES)
        self.stride = align(self.payload_length, _PAGE)
        self.object_count = len(self.layers) * self.expert_count
        self.entry_count = self.object_count * len(ROLES)
        self.data_start = align(_HEADER.size + self.entry_count * _ENTRY.size, _PAGE)
        self.length = self.data_start + self.object_count * self.stride
        self.head = b""
        self.config_sha256: str | None = settings.get("config_sha256")
        if settings["config"] is not None:
            self.config_sha256 = file_sha256(Path(settings["config"]), lambda _length: None)
        self.files = [NewFile(FILE_NAME, self.length, self._extents)]
        if settings["gguf"] is None:
            self.gguf = planned_gguf(pack, target)
            self.files.insert(0, self.gguf.file)
        else:
            self.gguf = given_gguf(pack, Path(settings["gguf"]))
        self.tensors = {tensor.name: tensor for tensor in self.gguf.tensors}

    def heads(self, threads: int, progress: Progress | None) -> Sequence[bytes]:
        """Hash the model, and return the head of the file; that of the GGUF if it is written."""
        experts = tensors_of(self.layers)
        self.hashes: Hashes = hash_model(self.pack, experts, self.gguf, threads, progress)
        self.head = b"".join((self._header(), *self._entries()))
        return (*self.gguf.header, self.head)

    def _extents(self) -> Iterator[Extent]:
        head_input = len(self.pack.file_paths) + len(self.gguf.header)
        yield Extent(0, len(self.head), head_input, 0, digest.xxh3(self.head), "head")
        for offset, layer, expert in self._objects():
            for role_id, role in enumerate(ROLES):
                yield self.layers[layer][role].extent(expert, offset + role_id * self.role_length)

    def _objects(self) -> Iterator[tuple[int, int, int]]:
        """Yield the offset of each expert, its layer, and its number."""
        offset = self.data_start
        for layer in self.layers:
            for expert in range(self.expert_count):
                yield offset, layer, expert
                offset += self.stride

    @property
    def _identities(self) -> tuple[str, str, str]:
        """The SHA-256 of model, source and config, as SGLang's own tool names a model."""
        source = self.hashes.gguf
        config = self.config_sha256 or self.hashes.header
        text = f"sglang-deepseek-expert-pack-v1:{source}:{config}"
        return hashlib.sha256(text.encode()).hexdigest(), source, config

    @property
    def top_k(self) -> int:
        """The number of experts that a token uses."""
        used = self.pack.manifest.source.experts_used_in(FAMILY, min(self.layers))
        assert used is not None
        return used

    def _header(self) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            1,
            _HEADER.size,
            _ENTRY.size,
            _FLAGS,
            self.entry_count,
            self.data_start,
            _PAGE,
            len(self.layers),
            self.expert_count,
            self.top_k,
            len(ROLES),
            *map(bytes.fromhex, self._identities),
        )

    def _entries(self) -> Iterator[bytes]:
        model, source, _ = self._identities
        for offset, layer, expert in self._objects():
            seed = f"{model}:{source}:{layer}:{expert}"
            generation = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little") or 1
            for role_id, role in enumerate(ROLES):
                place = offset + role_id * self.role_length
                yield self._entry(self.layers[layer][role], expert, role_id, place, generation)

    def _entry(
        self, tensor: ExpertTensor, expert: int, role_id: int, offset: int, generation: int
    ) -> bytes:
        in_gguf = self.tensors[tensor.name]
        slice_sha256 = self.hashes.slices[tensor.name][expert]
        shape = tensor.kind.shape
        return _ENTRY.pack(
            tensor.family.layer,
            expert,
            role_id,
            len(shape),
            tensor.kind.type_id,
            tensor.kind.type_name.encode(),
            tensor.name.encode(),
            in_gguf.offset,
            in_gguf.length,
            in_gguf.offset + expert * tensor.length,
            tensor.length,
            offset,
            tensor.length,
            bytes.fromhex(self.hashes.tensors[tensor.name]),
            slice_sha256,
            slice_sha256,
            *(*shape, 0, 0, 0, 0)[:4],
            tensor.kind.type_name.encode(),
            b"identity-v1",
            _BLOCK,
            generation,
        )

    def manifest(self, progress: Progress | None) -> bytes:
        """Return the manifest of the finished file, which is read once more for its SHA-256."""
        sha256 = file_sha256(self.path, advancing(progress, self.length))
        model, source, config = self._identities
        routed = {tensor.name for tensor in tensors_of(self.layers)}
        facts = {
            **self._file_facts(sha256),
            "model": {
                "ref": self.pack.manifest.source.name or self.pack.manifest.source.architecture,
                "model_identity_sha256": model,
                "config_sha256": config,
                "num_layers": len(self.layers),
                "num_routed_experts": self.expert_count,
                "top_k": self.top_k,
                "single_gpu": True,
            },
            "source": {
                "path": str(self.gguf.path.resolve()),
                "size": self.gguf.file.length,
                "sha256": source,
                "gguf_data_offset": self.gguf.header_length,
                "gguf_metadata_sha256": self.hashes.header,
                "tensor_count": len(self.tensors),
            },
            "transform": {"id": "identity-v1", "reversible": True},
            "coverage": {
                "layers": list(self.layers),
                "experts_per_layer": self.expert_count,
                "roles": list(ROLES),
                "routed_tensor_count": len(routed),
                "non_routed_tensor_count": len(self.tensors) - len(routed),
            },
            "tensors": [
                self._tensor_facts(tensor, tensor.name in routed)
                for tensor in sorted(self.gguf.tensors)
            ],
        }
        return json.dumps(facts, indent=2, sort_keys=True).encode() + b"\n"

    def _file_facts(self, sha256: str) -> dict[str, Any]:
        payload = self.entry_count * self.role_length
        return {
            "format": "SGLANG-EXPERTPACK-v1",
            "version": 1,
            "complete": True,
            "layout": "triplet_identity",
            "role_order": list(ROLES),
            "alignment": _PAGE,
            "pack_path": str(self.path.resolve()),
            "pack_size": self.length,
            "pack_sha256": sha256,
            "header_bytes": _HEADER.size,
            "index_count": self.entry_count,
            "index_entry_bytes": _ENTRY.size,
            "index_sha256": hashlib.sha256(self.head[_HEADER.size :]).hexdigest(),
            "data_start": self.data_start,
            "object_count": self.object_count,
            "object_payload_bytes": self.payload_length,
            "object_stride": self.stride,
            "role_bytes": self.role_length,
            "payload_bytes": payload,
            "padding_bytes": self.length - self.data_start - payload,
        }

    def _tensor_facts(self, tensor: LaidTensor, is_routed: bool) -> dict[str, Any]:
        name = ggml_types.type_name(tensor.type_id)
        return {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "type": name,
            "type_id": tensor.type_id,
            "source_offset": tensor.offset,
            "source_nbytes": tensor.length,
            "source_payload_sha256": self.hashes.tensors[tensor.name],
            "category": "routed_expert" if is_routed else "non_routed",
            "mapping": "expert_pack_identity" if is_routed else "gguf_direct_identity",
            "scale_storage": "inline_quant_block" if name == _TYPE else "tensor_native",
        }


def _settings_of(pack: Pack, path: Path) -> Settings:
    """Return the GGUF, unless it was written with the experts, and the SHA-256 of the config."""
    *_, config = _HEADER.unpack(read_back(path / FILE_NAME, _HEADER.size)[: _HEADER.size])
    source = json.loads(read_back(path / MANIFEST_NAME, MAX_MANIFEST_LENGTH))["source"]
    gguf = Path(source["path"])
    is_own = gguf.name == gguf_name(pack) and pack.manifest.is_whole
    if is_own and source["size"] == lay_out(pack, ALIGNMENT).length:
        return {"config_sha256": config.hex()}
    return {"config_sha256": config.hex(), "gguf": gguf}


ENGINE = Engine(
    name="sglang",
    title="SGLang",
    summary="Write experts and manifest for SGLang's expert_pack, with the GGUF beside them.",
    reads="SGLANG-EXPERTPACK-v1, and a GGUF",
    writes="one GGUF, one file of experts, its manifest",
    copies="all experts; the GGUF too, unless one is given",
    proof="the same bytes as SGLang's own tool, read by its validator and its store: a test",
    is_folder=True,
    needs=_needs,
    plan=_plan,
    settings_of=_settings_of,
    options=(
        ExportOption("gguf", "file", "GGUF of the model in one file, to read beside the experts."),
        ExportOption("config", "file", "The model's config.json; its SHA-256 is entered."),
    ),
)
