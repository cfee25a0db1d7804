"""Models with a template for chats: real ones, with one more thing in their metadata."""

from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter

from tests.support.models import shards_of

TEMPLATE = (
    "{%- for message in messages -%}<{{ message.role }}>{{ message.content }}{%- endfor -%}"
    "{%- if messages[0].content == 'refuse' -%}{{ raise_exception('not this') }}{%- endif -%}"
    "{%- if add_generation_prompt -%}<answer>{%- endif -%}"
)


def write_chat_model(path: Path, template: str = TEMPLATE, model: str = "qwen3moe") -> Path:
    """Write a model as one file that brings a template with it."""
    readers = [GGUFReader(shard) for shard in shards_of(model)]
    architecture = readers[0].fields["general.architecture"].contents()
    writer = GGUFWriter(path, architecture)
    for key, field in readers[0].fields.items():
        if not key.startswith(("GGUF.", "split.")) and key != "general.architecture":
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    writer.add_chat_template(template)
    for tensor in (tensor for reader in readers for tensor in reader.tensors):
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
