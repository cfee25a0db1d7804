"""Copies of a real model with other metadata, such as a template for chats."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter

from tests.support.models import shards_of

TEMPLATE = (
    "{%- for message in messages -%}<{{ message.role }}>{{ message.content }}{%- endfor -%}"
    "{%- if messages[0].content == 'refuse' -%}{{ raise_exception('not this') }}{%- endif -%}"
    "{%- if add_generation_prompt -%}<answer>{%- endif -%}"
)

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {byte: chr(byte) for byte in _PRINTABLE}
_BYTES |= {byte: chr(256 + number) for number, byte in enumerate(_OTHERS)}
"""The characters that stand for bytes in a vocabulary of GPT-2's kind."""


def begin_copy(
    path: Path,
    *,
    without: str = "",
    change: Callable[[str, Any], Any] = lambda key, contents: contents,
) -> GGUFWriter:
    """Begin a copy of qwen3moe as one file, without a tensor, and with changed metadata."""
    readers = [GGUFReader(shard) for shard in shards_of("qwen3moe")]
    writer = GGUFWriter(path, "qwen3moe")
    for key, field in readers[0].fields.items():
        if not key.startswith(("GGUF.", "split.")) and key != "general.architecture":
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, change(key, field.contents()), field.types[0], inner)
    for tensor in (tensor for reader in readers for tensor in reader.tensors):
        if tensor.name != without:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    return writer


def finish(writer: GGUFWriter) -> None:
    """Write a copy to its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_chat_model(path: Path, template: str = TEMPLATE, suffix: str = "") -> Path:
    """Write qwen3moe as one file that brings a template with it.

    With a `suffix`, each token of several characters is followed by it.
    """
    fields = GGUFReader(shards_of("qwen3moe")[0]).fields
    types = fields["tokenizer.ggml.token_type"].contents() if suffix else []
    after = "".join(_BYTES[byte] for byte in suffix.encode())

    def change(key: str, contents: Any) -> Any:
        if not suffix or key != "tokenizer.ggml.tokens":
            return contents
        tokens = zip(contents, types, strict=True)
        return [token + after if len(token) > 1 and kind == 1 else token for token, kind in tokens]

    writer = begin_copy(path, change=change)
    writer.add_chat_template(template)
    finish(writer)
    return path
