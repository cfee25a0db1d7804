"""A process that forks while it has readers: the child may not touch them, and harms nobody."""

from collections.abc import Callable
from pathlib import Path

import pytest

from moepack.common.errors import RequestError
from moepack.pack.reading.pack import Pack
from tests.support.children import run_child
from tests.support.models import keys_of, on_disk
from tests.support.reads import in_child

FORKED = "the reader belongs to the process that this one was forked from"


def test_every_call_in_a_child_is_refused(pack: Pack, name: str) -> None:
    keys = keys_of(pack)
    with pack.reader(backend=name, depth=4) as reader:
        list(reader.read_many(keys))
        batch = reader.submit(keys)
        calls: list[Callable[[], object]] = [
            lambda: reader.read(0, 0),
            lambda: reader.read_into(bytearray(1 << 16), 0, 0, "up"),
            lambda: reader.submit(keys),
            lambda: next(reader.read_many(keys)),
            lambda: next(batch.completions()),
            lambda: reader.statistics,
        ]

        def work() -> None:
            for call in calls:
                with pytest.raises(RequestError, match=FORKED) as caught:
                    call()
                assert caught.value.hint == "open the pack again in the child"

        in_child(work)
        for one in batch.completions():
            assert one.view == on_disk(pack.locate(*keys[one.number]))


def test_a_child_that_ends_as_programs_do_leaves_the_parent_alone(
    packs: dict[str, Path], name: str
) -> None:
    code = """
        import os, sys, moepack
        pack = moepack.open(sys.argv[1])
        keys = [(1, n) for n in range(16)]
        reader = pack.reader(backend=sys.argv[2], depth=4)
        expected = [bytes(one.view) for one in reader.read_many(keys)]
        batch = reader.submit(keys)
        child = os.fork()
        if not child:
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        assert [one.view for one in batch.completions(in_order=True)] == expected
        assert [one.view for one in reader.read_many(keys)] == expected
        print("right")
    """
    assert run_child(code, packs["qwen3moe"], name) == "right\n"
