"""Make the conformance traces: small trace files, sound, cut and broken, and their verdicts.

Written after layouts/TRACE.md alone, by none of moepack's code: `python conformance/make_traces.py`
writes traces/, the same bytes each time. Frames are put together by hand, so that no version of
zstd has a say in them.
"""

import json
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

FOLDER = Path(__file__).parent / "traces"
ORIGIN, TOKENS, COUNTS, END = 1, 2, 3, 4
UNKNOWN, PREFILL, DECODE = 0, 1, 2
OPTIONAL = 1
MOST = 1 << 26
"""Of both lengths of a record."""
MOST_COUNT = (1 << 63) - 1
"""Of selections and tokens."""
DEEPEST = 64
"""Objects and lists within each other in an origin, the origin included."""
MOST_IN_A_BLOCK = 1 << 17
"""Of a frame, in bytes, if the window is not less."""
ZSTD = bytes.fromhex("28b52ffd")
HEADER = struct.pack("<8sII", b"MOETRACE", 1, 0)

ORIGIN_BODY: dict[str, Any] = {
    "format": "mer",
    "name": "chat.jsonl",
    "family": "ffn_exps",
    "unknown": [],
    "model": None,
    "token_count": None,
    "expert_counts": None,
    "experts_used": None,
}
KEYS = tuple(ORIGIN_BODY)

Selections = Sequence[tuple[int, int]]


class Token(NamedTuple):
    """A token: its request, its phase, and its selections (layer, expert)."""

    request: int
    phase: int
    selections: Selections


class Record(NamedTuple):
    """A record: its bytes, and the tokens and counts in it."""

    data: bytes
    tokens: Sequence[Token] = ()
    counts: Sequence[tuple[int, int, int]] = ()
    is_origin: bool = False


def frame(payload: bytes) -> bytes:
    """Store bytes in a zstd frame as they are: one segment, its size in four bytes, raw blocks."""
    parts = [payload[at : at + (1 << 17)] for at in range(0, len(payload), 1 << 17)] or [b""]
    blocks = [block(0, len(part), part, is_last=False) for part in parts[:-1]]
    blocks.append(block(0, len(parts[-1]), parts[-1]))
    return ZSTD + b"\xa0" + struct.pack("<I", len(payload)) + b"".join(blocks)


def block(kind: int, size: int, data: bytes, is_last: bool = True) -> bytes:
    """Make a block of a zstd frame: 0 raw, 1 one byte `size` times, 2 compressed."""
    return (is_last | kind << 1 | size << 3).to_bytes(3, "little") + data


def skippable(data: bytes) -> bytes:
    """Make a skippable frame, which readers of other zstd files pass over."""
    return bytes.fromhex("502a4d18") + struct.pack("<I", len(data)) + data


def record(kind: int, payload: bytes, **other: Any) -> bytes:
    """Make a record; `other` replaces its frame, or fields of its header."""
    stored: bytes = other.get("stored", frame(payload))
    head = (
        kind,
        other.get("stored_length", len(stored)),
        other.get("length", len(payload)),
        other.get("flags", 0),
        other.get("digest", xxhash.xxh3_64_intdigest(payload)),
    )
    return struct.pack("<IIIIQ", *head) + stored


def origin_payload(*, without: str = "", **fields: Any) -> bytes:
    """Make the payload of an origin."""
    body = ORIGIN_BODY | fields
    body.pop(without, None)
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def with_key(text: str) -> bytes:
    """Make the payload of an origin with one key more, as it stands in the text."""
    return origin_payload()[:-1] + b"," + text.encode() + b"}"


def tokens_payload(tokens: Sequence[tuple[int, int, Selections]]) -> bytes:
    """Make the payload of a record of tokens."""
    pairs = [pair for _, _, selections in tokens for pair in selections]
    columns = [struct.pack("<2I", len(tokens), len(pairs))]
    columns.append(struct.pack(f"<{len(tokens)}I", *(token[0] for token in tokens)))
    columns.append(struct.pack(f"<{len(tokens)}I", *(len(token[2]) for token in tokens)))
    columns.append(bytes(token[1] for token in tokens))
    for side in (0, 1):
        columns.append(bytes(pair[side] & 255 for pair in pairs))
        columns.append(bytes(pair[side] >> 8 for pair in pairs))
    return b"".join(columns)


def counts_payload(phase: int, rows: Sequence[tuple[int, int, int]]) -> bytes:
    """Make the payload of a record of counts."""
    layers, experts, numbers = zip(*rows, strict=True) if rows else ((), (), ())
    return b"".join(
        (
            struct.pack("<2I", phase, len(rows)),
            struct.pack(f"<{len(rows)}H", *layers),
            struct.pack(f"<{len(rows)}H", *experts),
            struct.pack(f"<{len(rows)}Q", *numbers),
        )
    )


def end_payload(records: Sequence[bytes], token_count: int, selection_count: int) -> bytes:
    """Make the payload of the end of some records."""
    chain = 0
    for one in records:
        chain = xxhash.xxh3_64_intdigest(chain.to_bytes(8, "little") + one[:24])
    return struct.pack("<4Q", len(records), token_count, selection_count, chain)


def origin(**fields: Any) -> Record:
    """Make an origin."""
    return Record(record(ORIGIN, origin_payload(**fields)), is_origin=True)


def tokens(*rows: tuple[int, int, Selections], **other: Any) -> Record:
    """Make a record of tokens."""
    return Record(record(TOKENS, tokens_payload(rows), **other), [Token(*row) for row in rows])


def token(*selections: tuple[int, int]) -> Record:
    """Make a record of one token of request 0."""
    return tokens((0, DECODE, selections))


def counts(phase: int, *rows: tuple[int, int, int]) -> Record:
    """Make a record of counts."""
    return Record(record(COUNTS, counts_payload(phase, rows)), counts=rows)


def raw(kind: int, payload: bytes, rows: Sequence[Token] = (), **other: Any) -> Record:
    """Make a record of a payload as it is, with the tokens `rows`."""
    return Record(record(kind, payload, **other), rows)


def raw_origin(payload: bytes) -> Record:
    """Return an origin of a payload as it is."""
    return Record(record(ORIGIN, payload), is_origin=True)


def nested(depth: int) -> str:
    """Write lists within each other."""
    return "[" * depth + "]" * depth


def end_of(before: Sequence[Record], /, **wrong: int) -> bytes:
    """Make the end of some records, with some of its four numbers replaced."""
    every = [token for one in before for token in one.tokens]
    selection_count = sum(len(token.selections) for token in every)
    numbers = struct.unpack(
        "<4Q", end_payload([one.data for one in before], len(every), selection_count)
    )
    names = ("records", "tokens", "selections", "chain")
    right = dict(zip(names, numbers, strict=True))
    return record(END, struct.pack("<4Q", *(right | wrong).values()))


def file(*records: Record, end: bytes | None = None) -> bytes:
    """Make a file of some records, and an end."""
    body = b"".join(one.data for one in records)
    return HEADER + body + (end_of(records) if end is None else end)


class Case(NamedTuple):
    """A file: its verdict, the fault in words, and the records that may be used."""

    verdict: str
    breaks: str | None
    data: bytes
    records: Sequence[Record] = ()

    def facts(self, name: str) -> dict[str, Any]:
        """Return its entry in verdicts.json."""
        facts: dict[str, Any] = {"file": name, "verdict": self.verdict, "breaks": self.breaks}
        if self.verdict == "broken":
            return facts
        chosen: Counter[tuple[int, int]] = Counter()
        requests, origin_count = set(), 0
        for one in self.records:
            origin_count += one.is_origin
            for token in one.tokens:
                requests.add((origin_count, token.request))
                chosen.update(token.selections)
            for layer, expert, count in one.counts:
                chosen[layer, expert] += count
        every = [token for one in self.records for token in one.tokens]
        return facts | {
            "origins": origin_count,
            "requests": len(requests),
            "tokens": len(every),
            "selections": sum(len(token.selections) for token in every),
            "counted_selections": sum(row[2] for one in self.records for row in one.counts),
            "chosen": [[*pair, count] for pair, count in sorted(chosen.items())],
        }


ONE = token((0, 1), (0, 2), (3, 0))
TWO = tokens((0, PREFILL, [(0, 5), (1, 2)]), (0, DECODE, [(0, 5)]), (1, UNKNOWN, [(1, 4)]))
PLAIN = origin()
UNKNOWN_WORDS = ["requests", "phases", "tokens", "layers", "later tokens"]
SMALL = Token(0, DECODE, [(0, 1)])
KNOWN = {"expert_counts": {"0": 4, "3": 2}, "experts_used": 2}
LIMITS = (
    f"[{-MOST_COUNT - 1},{MOST_COUNT},1.7976931348623157e308,-1.7976931348623157E+308,5e-324,-0,"
    rf'"\ud83d\ude00",{nested(DEEPEST - 2)}]'
)
"""The limits of JSON that readers must accept, as the value of a key of an origin."""
# The payload of TWO as zstd 1.5.7 packs it at level 19: no size in the frame, and a checksum.
PACKED = bytes.fromhex("28b52ffd0468b5000012020384422120bf507c66e57aee1002002e391b2802eb579faa")


def sound_cases() -> dict[str, Case]:
    """Return the files that a reader takes."""
    size_unknown = (
        ZSTD + b"\x00\x00" + block(0, len(tokens_payload([SMALL])), tokens_payload([SMALL]))
    )
    sixteen = [(0, DECODE, [(0, 0)])] * 16
    zeros = tokens_payload(sixteen)
    by_run = ZSTD + b"\xa0" + struct.pack("<I", len(zeros))
    by_run += block(0, 152, zeros[:152], is_last=False)
    small = tokens_payload([SMALL])
    size, whole_block = struct.pack("<I", len(small)), block(0, len(small), small)
    large = struct.pack("<I", MOST_IN_A_BLOCK), block(1, MOST_IN_A_BLOCK, b"\0")
    run_records = {
        "example": [PLAIN, token((3, 258), (3, 7))],
        "smallest": [PLAIN, tokens(SMALL)],
        "phases-and-requests": [PLAIN, TWO],
        "numbers-beyond-a-byte": [PLAIN, tokens((7, DECODE, [(256, 257), (258, 65535)]))],
        "highest-numbers": [
            origin(expert_counts={"65535": 65536}, experts_used=65536),
            tokens((0xFFFFFFFF, DECODE, [(65535, 65535)])),
        ],
        "request-over-two-records": [PLAIN, ONE, tokens(SMALL, (2, DECODE, [(0, 9)]))],
        "two-origins": [PLAIN, TWO, origin(name="b"), ONE],
        "origin-of-nothing": [PLAIN, ONE, origin(name="b")],
        "counts-alone": [
            origin(unknown=["requests", "phases", "tokens"], token_count=MOST_COUNT),
            counts(UNKNOWN, (0, 3, 1), (258, 772, MOST_COUNT - 1)),
        ],
        "counts-beyond-a-double": [
            PLAIN,
            counts(PREFILL, (0, 3, (1 << 53) + 1), (0, 3, 1 << 53)),
            counts(DECODE, (0, 3, 2), (0, 4, (1 << 62) + 1)),
        ],
        "same-expert-counted-twice": [PLAIN, counts(PREFILL, (0, 3, 1), (0, 3, 2))],
        "tokens-and-counts": [PLAIN, counts(PREFILL, (0, 3, 7)), ONE, counts(DECODE, (1, 1, 1))],
        "everything-unknown": [origin(unknown=UNKNOWN_WORDS), ONE],
        "everything-known": [origin(model="Tiny", token_count=1, **KNOWN), ONE],
        "one-number-of-experts": [origin(expert_count=4), ONE],
        "expert-count-of-another-kind": [origin(expert_count="1"), ONE],
        "more-experts-counted-than-used": [
            origin(**KNOWN),
            counts(DECODE, (0, 0, 1), (0, 1, 1), (0, 2, 1)),
        ],
        "name-in-other-letters": [origin(name="Gespräch 会話.log", model="模型"), ONE],
        "other-keys": [origin(recording="xxh3:0123456789abcdef", colour=["red", {"x": 1.5}]), ONE],
        "json-at-its-limits": [raw_origin(with_key(f'"x":{LIMITS}')), ONE],
        "token-count-of-minus-zero": [
            raw_origin(origin_payload(token_count=0).replace(b":0,", b":-0,")),
            ONE,
        ],
        "optional-record": [PLAIN, raw(77, b"of the future", flags=OPTIONAL), ONE],
        "optional-record-of-nothing": [PLAIN, ONE, raw(1 << 31, b"", flags=OPTIONAL)],
        "frame-by-zstd": [
            PLAIN,
            TWO._replace(data=record(TOKENS, tokens_payload(TWO.tokens), stored=PACKED)),
        ],
        "frame-without-size": [PLAIN, tokens(SMALL, stored=size_unknown)],
        "frame-with-dictionary-id-0": [
            PLAIN,
            tokens(SMALL, stored=ZSTD + b"\xa1\0" + size + whole_block),
        ],
        "frame-with-a-window-of-64-mib": [
            PLAIN,
            tokens(SMALL, stored=ZSTD + b"\x00\x80" + whole_block),
        ],
        "frame-with-a-block-of-128-kib": [
            PLAIN,
            raw(
                77, bytes(MOST_IN_A_BLOCK), flags=OPTIONAL, stored=ZSTD + b"\xa0" + b"".join(large)
            ),
            ONE,
        ],
        "frame-with-a-run": [
            PLAIN,
            tokens(*sixteen, stored=by_run + block(1, len(zeros) - 152, b"\0")),
        ],
    }
    return {
        name: Case("sound", None, file(*records), records) for name, records in run_records.items()
    }


def cut_cases() -> dict[str, Case]:
    """Return the files that were cut, or that somebody still writes to."""
    records = [PLAIN, ONE, TWO]
    whole = file(*records)
    places = [len(HEADER)]
    for one in records:
        places.append(places[-1] + len(one.data))
    cuts = {
        "after-the-header": (places[0], "after the header of the file"),
        "within-the-origin": (places[0] + 30, "within the first record"),
        "after-the-origin": (places[1], "after the origin"),
        "within-a-record-header": (places[2] + 23, "within the header of a record"),
        "after-a-record-header": (places[2] + 24, "between the header of a record and its frame"),
        "within-a-frame": (places[3] - 1, "within a frame"),
        "before-the-end": (places[3], "after a record, before the end"),
        "within-the-header-of-the-end": (places[3] + 5, "within the header of the end"),
        "within-the-end": (len(whole) - 1, "within the frame of the end"),
    }
    cases = {
        f"cut-{name}": Case(
            "cut",
            f"it ends {words}",
            whole[:length],
            [one for one, place in zip(records, places[1:], strict=True) if place <= length],
        )
        for name, (length, words) in cuts.items()
    }
    damaged = tokens((1, DECODE, [(0, 1)]), SMALL, (0, 3, [(0, 1), (0, 1)]), digest=1)
    long_origin = raw(ORIGIN, b"", length=(1 << 20) + 1).data[:24]
    within = {
        "a-record-header-of-no-kind": (
            "within the header of a record of no kind",
            raw(0, b"").data[:23],
        ),
        "the-first-bytes-of-a-frame": (
            "after two of the bytes that all frames begin with",
            ONE.data[:26],
        ),
        "the-header-of-a-frame": (
            "within the header of a frame, before the number of its dictionary",
            ONE.data[:24] + ZSTD + b"\xa1",
        ),
        "a-long-origin": ("within an origin that would be longer than 1 MiB", long_origin),
        "a-short-end": ("within an end that would have 24 bytes", record(END, bytes(24))[:-1]),
    }
    return cases | {
        "cut-within-a-damaged-payload": Case(
            "cut",
            "it ends within a record that would be broken, were it whole",
            HEADER + PLAIN.data + ONE.data + damaged.data[:-1],
            [PLAIN, ONE],
        ),
        **{
            f"cut-within-{name}": Case(
                "cut", f"it ends {words}", HEADER + PLAIN.data + data, [PLAIN]
            )
            for name, (words, data) in within.items()
        },
        "cut-within-tokens-before-any-origin": Case(
            "cut", "it ends within tokens before any origin", HEADER + ONE.data[:-1]
        ),
    }


def broken_cases() -> dict[str, Case]:
    """Return the files that a reader refuses, each for one reason."""
    tables = _broken_files() | _broken_frames() | _broken_cuts()
    tables |= _broken_origins() | _broken_pieces() | _broken_ends()
    return {
        f"broken-{name}": Case("broken", breaks, data) for name, (breaks, data) in tables.items()
    }


def _broken_files() -> dict[str, tuple[str, bytes]]:
    sound = file(PLAIN, ONE)
    last = raw(77, b"")
    return {
        "empty": ("nothing is in it", b""),
        "header": ("it is shorter than a header", HEADER[:15]),
        "magic": ("it does not begin with MOETRACE", b"MOETRACK" + sound[8:]),
        "version": ("version 2", sound[:8] + b"\2\0\0\0" + sound[12:]),
        "zeros": (
            "the four bytes after the version are not zero",
            sound[:12] + b"\1" + sound[13:],
        ),
        "after-the-end": ("something follows the end", sound + b"\0"),
        "joined": ("another file follows the end", sound + sound),
        "no-origin": ("tokens before any origin", file(ONE)),
        "optional-first": (
            "an optional record before any origin",
            file(raw(77, b"", flags=OPTIONAL), PLAIN, ONE),
        ),
        "end-alone": ("an end before any origin", file()),
        "unknown-kind": ("a record of kind 77 that is not optional", file(PLAIN, ONE, last)),
        "kind-zero": ("a record of kind 0", file(PLAIN, ONE, raw(0, b""))),
        "known-kind-optional": (
            "tokens with the flag of optional records",
            file(PLAIN, tokens(SMALL, flags=OPTIONAL)),
        ),
        "flags": ("a flag that is none", file(PLAIN, ONE, raw(77, b"", flags=3))),
        "no-selections": ("no selection in the whole file", file(PLAIN)),
    }


def _broken_frames() -> dict[str, tuple[str, bytes]]:
    payload = tokens_payload([SMALL])
    right = frame(payload)
    whole_block = block(0, len(payload), payload)
    wide = ZSTD + b"\x00\x88" + whole_block
    wide_and_stated = ZSTD + b"\x80\x88" + struct.pack("<I", len(payload)) + whole_block
    with_dictionary = ZSTD + b"\xa1" + b"\7" + struct.pack("<I", len(payload)) + whole_block
    reserved = ZSTD + b"\xa8" + struct.pack("<I", len(payload)) + whole_block
    checksum = xxhash.xxh64_intdigest(payload) & 0xFFFFFFFF
    summed = ZSTD + b"\xa4" + struct.pack("<I", len(payload)) + whole_block
    wrong_size = ZSTD + b"\xa0" + struct.pack("<I", len(payload) + 1) + whole_block
    beyond = MOST_IN_A_BLOCK + 1
    long_block = ZSTD + b"\xa0" + struct.pack("<I", beyond) + block(1, beyond, b"\0")
    small_window = ZSTD + b"\x00\x00" + block(1, 1025, b"\0")

    def stored(data: bytes, **other: Any) -> bytes:
        return file(PLAIN, tokens(SMALL, stored=data, **other))

    return {
        "stored-length": ("a stored length above 64 MiB", stored(right, stored_length=MOST + 1)),
        "length": ("a length above 64 MiB", stored(right, length=MOST + 1)),
        "frame": ("no zstd frame", stored(b"\0" + right[1:])),
        "window": ("a frame with a window of 128 MiB", stored(wide)),
        "window-of-a-short-frame": (
            "a frame with a window of 128 MiB, though it states a content size of 21",
            stored(wide_and_stated),
        ),
        "dictionary": ("a frame that needs a dictionary", stored(with_dictionary)),
        "reserved-bit": ("a frame whose header has the reserved bit", stored(reserved)),
        "checksum": (
            "a frame with the checksum of other bytes",
            stored(summed + struct.pack("<I", checksum ^ 1)),
        ),
        "content-size": ("a frame that states a byte more than it holds", stored(wrong_size)),
        "block-too-long": (
            "an optional record with a block of 128 KiB and a byte",
            file(PLAIN, raw(77, bytes(beyond), flags=OPTIONAL, stored=long_block), ONE),
        ),
        "block-beyond-the-window": (
            "an optional record with a block of 1,025 bytes in a window of 1,024",
            file(PLAIN, raw(77, bytes(1025), flags=OPTIONAL, stored=small_window), ONE),
        ),
        "two-frames": ("a second frame after the first", stored(right + frame(b""))),
        "skippable-frame": (
            "a skippable frame in the place of the frame of nothing",
            file(PLAIN, ONE, raw(77, b"", flags=OPTIONAL, stored=skippable(b""))),
        ),
        "skippable-frame-first": (
            "a skippable frame before the frame",
            stored(skippable(b"abc") + right),
        ),
        "skippable-frame-last": (
            "a skippable frame after the frame",
            stored(right + skippable(b"abc")),
        ),
        "after-the-frame": ("a byte after the frame", stored(right + b"\0")),
        "frame-cut": ("a frame that the stored length cuts", stored(right[:-1])),
        "frame-too-short": ("a frame of a byte less", stored(right, length=len(payload) + 1)),
        "frame-too-long": ("a frame of a byte more", stored(right, length=len(payload) - 1)),
        "length-beyond-the-file": (
            "a stored length beyond the file, though the frame has its end",
            stored(right, stored_length=1000),
        ),
        "digest": ("a payload without its digest", stored(right, digest=1)),
        "digest-of-an-optional-record": (
            "an optional record without its digest",
            file(PLAIN, raw(77, b"abc", flags=OPTIONAL, digest=1), ONE),
        ),
    }


def _broken_cuts() -> dict[str, tuple[str, bytes]]:
    """Return files that end within a record, which breaks a rule that binds it all the same."""
    payload = tokens_payload([SMALL])
    size = struct.pack("<I", len(payload))

    before = HEADER + PLAIN.data + ONE.data

    def header(one: Record) -> bytes:
        return before + one.data[:24]

    def within(stored: bytes) -> bytes:
        return before + tokens(SMALL, stored=stored, stored_length=100).data

    stored = frame(payload)
    return {
        "cut-kind": ("a cut record of kind 77 that is not optional", header(raw(77, b""))),
        "cut-known-kind-optional": (
            "cut tokens with the flag of optional records",
            header(tokens(SMALL, flags=OPTIONAL)),
        ),
        "cut-flags": ("a cut record with a flag that is none", header(raw(77, b"", flags=3))),
        "cut-stored-length": (
            "a cut record with a stored length above 64 MiB",
            header(tokens(SMALL, stored_length=MOST + 1)),
        ),
        "cut-length": (
            "a cut record with a length above 64 MiB",
            header(tokens(SMALL, length=MOST + 1)),
        ),
        "cut-frame": ("the beginning of no zstd frame", within(b"\x28\xb5\x2e")),
        "cut-skippable-frame": ("the beginning of a skippable frame", within(skippable(b"")[:5])),
        "cut-window": (
            "a cut frame with a window of 128 MiB",
            within(ZSTD + b"\x00\x88" + bytes(13)),
        ),
        "cut-dictionary": (
            "a cut frame that needs a dictionary",
            within(ZSTD + b"\xa1\7" + size + block(0, len(payload), payload)[:12]),
        ),
        "cut-reserved-bit": (
            "a cut frame whose header has the reserved bit",
            within(ZSTD + b"\xa8" + stored[5:-1]),
        ),
        "cut-content-size": (
            "a cut frame that states another length",
            within(ZSTD + b"\xa0" + struct.pack("<I", len(payload) + 1) + stored[9:-1]),
        ),
        "cut-block": (
            "a block of no kind in a cut frame",
            within(ZSTD + b"\x00\x00" + block(3, 5, bytes(12), is_last=False)),
        ),
        "cut-too-long": (
            "a cut frame that holds more already than the record",
            within(
                ZSTD + b"\x00\x00" + block(1, len(payload) + 1, b"\0", is_last=False) + bytes(8)
            ),
        ),
    }


def _broken_origins() -> dict[str, tuple[str, bytes]]:
    def made(**fields: Any) -> bytes:
        return file(origin(**fields), ONE)

    def as_is(payload: bytes, **other: Any) -> bytes:
        return file(raw(ORIGIN, payload, **other), ONE)

    missing = {
        f"origin-without-{key.replace('_', '-')}": (f"an origin without {key}", made(without=key))
        for key in KEYS
    }

    def with_value(text: str) -> bytes:
        return as_is(with_key(f'"x":{text}'))

    plain = origin_payload()
    size = (1 << 20) + 1
    spaces = [block(1, 1 << 17, b" ", is_last=False)] * 7
    rest = size - len(plain) - 7 * (1 << 17)
    long = ZSTD + b"\xa0" + struct.pack("<I", size) + block(0, len(plain), plain, is_last=False)
    long += b"".join(spaces) + block(1, rest, b" ")
    return missing | {
        "origin-length": (
            "an origin of more than 1 MiB",
            as_is(plain + b" " * (size - len(plain)), stored=long),
        ),
        "origin-encoding": ("an origin that is not UTF-8", as_is(plain[:-1] + b',"\xff":1}')),
        "origin-mark": ("an origin with a byte order mark", as_is(b"\xef\xbb\xbf" + plain)),
        "origin-json": ("an origin that is not JSON", as_is(plain[:-1])),
        "origin-nan": ("an origin with NaN, which JSON lacks", with_value("NaN")),
        "origin-infinity": ("an origin with -Infinity, which JSON lacks", with_value("-Infinity")),
        "origin-high-number": ("an unknown key of 2^63", with_value(str(1 << 63))),
        "origin-low-number": ("an unknown key of -2^63 - 1", with_value(str(-(1 << 63) - 1))),
        "origin-long-number": ("a number of 5,000 digits", with_value("1" + "0" * 4999)),
        "origin-double": ("a number beyond a double", with_value("[1e309]")),
        "origin-negative-double": ("a number below a double", with_value("-1.8e308")),
        "origin-depth": ("65 levels of lists and objects", with_value(nested(DEEPEST))),
        "origin-surrogate-in-a-value": (
            "an unknown key with half of a pair of surrogates in its value",
            with_value(r'["\udc00"]'),
        ),
        "origin-surrogate-in-a-key": (
            "an unknown key with half of a pair of surrogates in its name",
            as_is(with_key(r'"\ud83d":1')),
        ),
        "origin-surrogate-encoded": (
            "half of a pair of surrogates in UTF-8 itself",
            as_is(plain[:-1] + b',"x":"\xed\xa0\x80"}'),
        ),
        "origin-array": ("an origin that is no object", as_is(b"[]")),
        "origin-format": ("a format that is no text", made(format=5)),
        "origin-name": ("a name that is no text", made(name=None)),
        "origin-surrogate": (
            "a name with half of a pair of surrogates",
            as_is(plain.replace(b"chat", b"\\ud800")),
        ),
        "origin-model": ("a model that is no text", made(model=5)),
        "origin-family": ("selections of a family that is none", made(family="ffn_up")),
        "origin-unknown": ("`unknown` is no list", made(unknown="phases")),
        "origin-unknown-word": ("`unknown` has a word that is none", made(unknown=["weather"])),
        "origin-unknown-twice": ("`unknown` has a word twice", made(unknown=["phases"] * 2)),
        "origin-token-count": ("a token count of -1", made(token_count=-1)),
        "origin-token-count-float": ("a token count with a point", made(token_count=1.0)),
        "origin-token-count-exponent": (
            "a token count with an exponent",
            as_is(origin_payload(token_count=10).replace(b":10,", b":1e1,")),
        ),
        "origin-token-count-true": ("a token count that is true", made(token_count=True)),
        "origin-expert-counts": ("`expert_counts` is no object", made(expert_counts=[4])),
        "origin-no-layers": ("`expert_counts` has no layers", made(expert_counts={})),
        "origin-layer": ("layer 65,536", made(expert_counts={"65536": 4})),
        "origin-layer-zeros": ("layer 00", made(expert_counts={"00": 4, "3": 4})),
        "origin-no-experts": ("a layer of 0 experts", made(expert_counts={"0": 4, "3": 0})),
        "origin-many-experts": ("65,537 experts", made(expert_counts={"0": 65537, "3": 4})),
        "origin-experts-used": ("0 experts used", made(experts_used=0)),
    }


def _broken_pieces() -> dict[str, tuple[str, bytes]]:
    def made(kind: int, payload: bytes, *rows: tuple[int, int, Selections]) -> bytes:
        return file(PLAIN, ONE, raw(kind, payload, [Token(*row) for row in rows]))

    counted, later = origin(**KNOWN), (1, DECODE, [(0, 1)])
    return {
        "tokens-head": ("tokens of 7 bytes", made(TOKENS, bytes(7))),
        "tokens-length": (
            "tokens a byte longer than their columns",
            made(TOKENS, tokens_payload([SMALL]) + b"\0", SMALL),
        ),
        "tokens-none": ("tokens without any", made(TOKENS, tokens_payload([]))),
        "tokens-empty": ("a token without selections", file(PLAIN, tokens(SMALL, (0, DECODE, [])))),
        "tokens-sum": (
            "selections of the tokens that do not add up to N",
            made(TOKENS, struct.pack("<4IB", 1, 1, 0, 2, DECODE) + bytes(4), SMALL),
        ),
        "tokens-phase": ("phase 3", file(PLAIN, tokens((0, 3, [(0, 1)])))),
        "requests-fall": ("requests that fall within a record", file(PLAIN, tokens(later, SMALL))),
        "requests-fall-between-records": (
            "requests that fall from one record to the next",
            file(PLAIN, tokens(later), tokens(SMALL)),
        ),
        "layers-fall": (
            "a layer after a higher one of its token",
            file(PLAIN, token((3, 0), (0, 1))),
        ),
        "expert-twice": (
            "an expert twice in one layer of a token",
            file(PLAIN, token((0, 1), (3, 1), (0, 1))),
        ),
        "layer-unknown": ("a layer that expert_counts lacks", file(counted, token((1, 0)))),
        "expert-unknown": ("an expert beyond expert_counts", file(counted, token((3, 2)))),
        "counted-expert-unknown": (
            "a counted expert beyond expert_counts",
            file(counted, counts(DECODE, (0, 4, 1))),
        ),
        "expert-beyond-expert-count": (
            "an expert beyond expert_count",
            file(origin(expert_count=3), token((0, 2), (0, 3))),
        ),
        "expert-beyond-the-lower-count": (
            "an expert beyond expert_count, though not beyond expert_counts",
            file(origin(expert_count=3, **KNOWN), token((0, 2), (0, 3))),
        ),
        "too-many-used": (
            "three experts in a layer of a token, where two are used",
            file(counted, token((0, 1), (0, 2), (0, 3))),
        ),
        "counts-length": (
            "counts a byte shorter than their columns",
            made(COUNTS, counts_payload(DECODE, [(0, 1, 1)])[:-1]),
        ),
        "counts-none": ("counts without any", made(COUNTS, counts_payload(DECODE, []))),
        "counts-phase": ("counts of phase 3", file(PLAIN, counts(3, (0, 1, 1)))),
        "counts-zero": ("a count of 0", file(PLAIN, counts(DECODE, (0, 1, 1), (0, 2, 0)))),
        "counts-large": ("a count of 2^63", file(PLAIN, counts(DECODE, (0, 1, 1 << 63)))),
    }


def _broken_ends() -> dict[str, tuple[str, bytes]]:
    records = [PLAIN, TWO]
    like_one = token((0, 1), (0, 2), (3, 1))
    words = {
        "records": "another number of records",
        "tokens": "another number of tokens",
        "selections": "another number of selections",
        "chain": "another chain",
    }
    ends = {
        f"end-{name}": (f"an end with {what}", file(*records, end=end_of(records, **{name: 9})))
        for name, what in words.items()
    }
    return ends | {
        "end-length": ("an end of 24 bytes", file(*records, end=record(END, bytes(24)))),
        "record-exchanged": (
            "a sound record in the place of another, which the chain tells",
            file(PLAIN, ONE, end=end_of([PLAIN, like_one])),
        ),
    }


def cases() -> dict[str, Case]:
    """Return all files by their names."""
    every = sound_cases() | cut_cases() | broken_cases()
    return {f"{name}.moetrace": case for name, case in every.items()}


def files() -> dict[str, bytes]:
    """Return the bytes of all files in the folder, by name."""
    made = {name: case.data for name, case in cases().items()}
    verdicts = ",\n".join(json.dumps(case.facts(name)) for name, case in cases().items())
    return made | {"verdicts.json": f"[\n{verdicts}\n]\n".encode()}


def make(folder: Path) -> None:
    """Write the folder anew."""
    folder.mkdir(exist_ok=True)
    contents = files()
    for path in folder.iterdir():
        if path.name not in contents:
            path.unlink()
    for name, data in contents.items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    make(FOLDER)
