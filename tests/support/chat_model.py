"""Models with a template for chats: real ones, with one more thing in their metadata."""

from pathlib import Path

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


def write_chat_model(
    path: Path, template: str = TEMPLATE, model: str = "qwen3moe", suffix: str = ""
) -> Path:
    """Write a model as one file that brings a template with it.

    With a `suffix`, each token of several characters is followed by it.
    """
    readers = [GGUFReader(shard) for shard in shards_of(model)]
    architecture = readers[0].fields["general.architecture"].contents()
    writer = GGUFWriter(path, architecture)
    for key, field in readers[0].fields.items():
        if not key.startswith(("GGUF.", "split.")) and key != "general.architecture":
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            contents = field.contents()
            if suffix and key == "tokenizer.ggml.tokens":
                after = "".join(_BYTES[byte] for byte in suffix.encode())
                is_normal = readers[0].fields["tokenizer.ggml.token_type"].contents()
                contents = [
                    token + after if len(token) > 1 and kind == 1 else token
                    for token, kind in zip(contents, is_normal, strict=True)
                ]
            writer.add_key_value(key, contents, field.types[0], inner)
    writer.add_chat_template(template)
    for tensor in (tensor for reader in readers for tensor in reader.tensors):
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
