"""Names in a pack: of its files, and of the parts that a blob consists of."""

import re

JOURNAL_NAME = "pack.journal"
"""The packer's journal: a directory that has it and no manifest is a pack that is not whole."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z", re.ASCII)
_RESERVED_NAMES = {"index.bin", "manifest.json", "manifest.json.tmp", JOURNAL_NAME}


def is_plain_name(name: str) -> bool:
    """Return whether `name` may name a data file: letters, digits and `._-`, and no name in use."""
    return bool(_FILE_NAME.match(name)) and name.lower() not in _RESERVED_NAMES


def projection(part: str) -> str:
    """Return the projection of a part: `up` for `ffn_up_exps.weight` and `ffn_up_exps.bias`."""
    stem = part.partition(".")[0]
    return stem.removeprefix("ffn_").removesuffix("_exps").removesuffix("_chexps")


def short_name(part: str) -> str:
    """Return what a part is called for short: `up`, but `up.bias` for what is no weight."""
    suffix = part.partition(".")[2]
    return projection(part) if suffix == "weight" else f"{projection(part)}.{suffix}"
