"""Every rule of manifest.json, broken alone, with the message of readers."""

from typing import Any, NamedTuple

from tests.support.broken_packs import BAD_NAMES

MISSING = object()


class Entry(NamedTuple):
    """A value in the manifest that breaks a rule, and words of the error."""

    name: str
    path: tuple[Any, ...]
    value: Any
    words: str


Keys = dict[tuple[Any, ...], str]

KEYS: Keys = {
    ("tool",): "a text",
    ("source",): "an object",
    ("source", "architecture"): "a text",
    ("source", "shards"): "a list",
    ("source", "shards", 0, "name"): "a text",
    ("source", "shards", 0, "length"): "a whole number",
    ("source", "shards", 0, "header_length"): "a whole number",
    ("source", "shards", 0, "header_sha256"): "a text",
    ("layout",): "an object",
    ("index",): "an object",
    ("index", "name"): "a text",
    ("index", "length"): "a whole number",
    ("index", "digest"): "a text",
    ("files",): "a list",
    ("files", 0, "name"): "a text",
    ("files", 0, "length"): "a whole number",
    ("whole",): "true or false",
}
NULLABLE: Keys = {
    ("hotness",): "an object",
    ("layers",): "a list",
    ("source", "name"): "a text",
    ("source", "shards", 0, "sha256"): "a text",
}
OPTIONAL: Keys = {
    ("source", "context_length"): "a whole number",
    ("source", "experts_used"): "an object",
    ("source", "mtp_layers"): "a list",
}
OTHER_KINDS: dict[str, Any] = {
    "a text": 5,
    "an object": [],
    "a list": "[]",
    "a whole number": 1.0,
    "true or false": 1,
}
WRONG = "wrong kind of value"
NO_DIGESTS = {
    "in capitals": "xxh3:" + "A" * 16,
    "too short": "xxh3:00",
    "with more": "xxh3:" + "0" * 16 + "\n",
    "of another kind": "sha256:00",
}


def written(path: tuple[Any, ...]) -> str:
    """Write the path of a value as messages do."""
    out = ""
    for key in path:
        out += f"[{key}]" if isinstance(key, int) else f".{key}"
    return out[1:]


def entry(name: str, path: tuple[Any, ...], value: Any, problem: str) -> Entry:
    """Return an entry with a message that names the value itself."""
    return Entry(name, path, value, f"{written(path)}: {problem}")


def nested(depth: int) -> list[Any]:
    """Return so many lists, each in the one before it."""
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


SHARD = ("source", "shards", 0)
SHARD_ENTRY = {
    **{"name": "m.gguf", "length": 64, "header_length": 32},
    **{"header_sha256": "0" * 64, "sha256": None},
}
BAD_COUNTS: list[Any] = [None, "2", -1, 1.5, True, {}, ["2"], [-1]]
BAD_ENTRIES = [
    *(
        entry(f"{written(path)} is missing", path, MISSING, "missing")
        for path in (*KEYS, *NULLABLE)
    ),
    *(
        entry(f"{written(path)}: not {kind}", path, OTHER_KINDS[kind], f"{WRONG}, expected {kind}")
        for path, kind in (KEYS | NULLABLE | OPTIONAL).items()
    ),
    *(entry(f"{written(path)} is null", path, None, f"{WRONG}, ") for path in KEYS),
    *(
        entry(f"{written(path)} is true", path, True, f"{WRONG}, ")
        for path in (*KEYS, *NULLABLE, *OPTIONAL)
        if path != ("whole",)
    ),
    entry("another format", ("format",), "gguf", "not a moepack manifest"),
    entry("no format", ("format",), MISSING, "not a moepack manifest"),
    entry("a format of two lines", ("format",), "a\nb", "not a moepack manifest"),
    *(
        entry(f"version {value}", ("format_version",), value, "unknown format version")
        for value in (0, 2, 1.0, True, "1", "1\n2", None)
    ),
    *(
        entry(f"layers of {value}", ("layers",), value, WRONG)
        for value in (["0"], [True], [-1], [0.0], [None], ["x" * 5000])
    ),
    *(
        entry(f"MTP layers of {value}", ("source", "mtp_layers"), value, WRONG)
        for value in (["0"], [-1], [None])
    ),
    *(
        entry(f"experts used: {value}", ("source", "experts_used", "ffn_exps"), value, WRONG)
        for value in BAD_COUNTS
    ),
    *(
        entry(f"a context of {value}", ("source", "context_length"), value, "out of bounds")
        for value in (-1, -(1 << 63))
    ),
    entry("no shards", ("source", "shards"), [], "out of bounds"),
    entry(
        "two shards of one name",
        ("source", "shards"),
        [SHARD_ENTRY, SHARD_ENTRY],
        "two shards have the same name",
    ),
    entry("a shard as text", SHARD, "m.gguf", WRONG),
    *(
        entry(f"a shard named {name!r}", (*SHARD, "name"), name, "not the name of a file")
        for name in ("", ".", "..", "a/b", "/a", "a\0b", "x" * 256, "ä" * 128)
    ),
    *(entry(f"a shard of {n} bytes", (*SHARD, "length"), n, "out of bounds") for n in (-1, 0)),
    *(
        entry(f"a header of {n} bytes", (*SHARD, "header_length"), n, "out of bounds")
        for n in (-1, 0, 1 << 40)
    ),
    *(
        entry(f"a {key} {what}", (*SHARD, key), value, "not a SHA-256")
        for key in ("header_sha256", "sha256")
        for what, value in {
            "in capitals": "A" * 64,
            "too short": "a" * 63,
            "too long": "a" * 65,
            "with a line's end": "a" * 64 + "\n",
            "of nothing": "",
        }.items()
    ),
    entry("a file as text", ("files", 0), "experts-00000.bin", WRONG),
    *(
        entry(f"a file name {what}", ("files", 1, "name"), name, "not a plain file name")
        for what, name in {
            **BAD_NAMES,
            **{"without letters": "", "with NUL": "a\0b"},
            **{"of 256 letters": "x" * 256, "in other letters": "\u00e4"},
        }.items()
    ),
    *(
        entry(f"{written(path)} of {str(n)[:20]}", path, n, "out of bounds")
        for path in (("files", 0, "length"), ("index", "length"))
        for n in (-1, 0)
    ),
    *(
        entry(f"a digest {what}", ("index", "digest"), text, "not a digest")
        for what, text in NO_DIGESTS.items()
    ),
    entry("an index of more than 1 GiB", ("index", "length"), (1 << 30) + 1, "out of bounds"),
    *(
        entry(f"an index named {name!r}", ("index", "name"), name, "not a plain file name")
        for name in ("", "../index.bin", "manifest.json", "a/b", "x" * 256)
    ),
    entry("an index named as a file", ("index", "name"), "Dense.bin", "the name of a data file"),
    *(
        entry(f"an index with a SHA-256 {what}", ("index", "sha256"), value, "not a SHA-256")
        for what, value in {"too short": "a" * 63, "in capitals": "A" * 64}.items()
    ),
    *(
        Entry(name, ("x.example",), value, "not JSON (")
        for name, value in (
            ("a whole number of 64 bits", 1 << 63),
            ("a negative number of 64 bits", -(1 << 63) - 1),
            ("a number of 300 digits", 10**300),
            ("half of a surrogate pair", "\ud800"),
            ("half of a surrogate pair in a key", {"\udc00": 1}),
            ("65 levels", nested(64)),
        )
    ),
    entry("pages as a list", ("index", "pages"), [], f"{WRONG}, expected an object"),
    entry("pages without a length", ("index", "pages", "length"), MISSING, "missing"),
    *(
        entry(f"pages of {n}", ("index", "pages", "length"), n, problem)
        for n, problem in ((4096, "out of bounds"), ("65536", WRONG))
    ),
    entry("pages without digests", ("index", "pages", "digests"), MISSING, "missing"),
    entry("a page too few", ("index", "pages", "digests"), [], "not one for each page"),
    *(
        entry(f"a page's digest {what}", ("index", "pages", "digests"), [text], "not digests")
        for what, text in NO_DIGESTS.items()
    ),
    entry("a page's digest as a number", ("index", "pages", "digests"), [5], "not digests"),
    entry("pages of a length with a point", ("index", "pages", "length"), 65536.0, WRONG),
    Entry("an index of another length", ("index", "length"), 65, "is not as long as the manifest"),
    Entry("an index of another digest", ("index", "digest"), "xxh3:" + "0" * 16, "stored digest"),
    *(
        Entry(name, path, value, "files: index and manifest list other files")
        for name, path, value in (
            ("a file that is missing", ("files", 2), MISSING),
            ("another file length", ("files", 1, "length"), 4096),
            ("another file name", ("files", 1, "name"), "other.bin"),
        )
    ),
]


def change(body: dict[str, Any], entry: Entry) -> None:
    """Change a manifest, and make sure that something changed."""
    *parents, last = entry.path
    holder: Any = body
    for key in parents:
        holder = holder[key]
    is_new = isinstance(holder, dict) and last not in holder
    assert is_new or holder[last] != entry.value or type(holder[last]) is not type(entry.value)
    holder[last] = entry.value
    if entry.value is MISSING:
        del holder[last]
