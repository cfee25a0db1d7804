"""`ExpertCache`, and the cache of `moepack_cache.h` under it, give a pack's bytes, or an error."""

import itertools
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import moepack
from conformance import make_packs
from moepack import ExpertCache, MachineError, MoepackError, PackError, RequestError
from moepack.packing.pack_model import pack_model
from moepack.packing.shard_index import index_model
from moepack.running.programs.library import native_folder
from tests.support.c_compiler import HEADER, compiled
from tests.support.children import in_threads, run_child, wait_until
from tests.support.gguf_builder import F32, add_experts, moe
from tests.support.models import REAL_MODELS, first_shard, flip, keys_of, on_disk
from tests.support.needs import needs_library
from tests.support.reads import in_child

pytestmark = needs_library

POLICIES = ("lrfu", "lru")
PACKS = sorted(path for path in make_packs.FOLDER.iterdir() if path.is_dir())
BACKENDS = ("uring", "direct", "buffered")


@pytest.fixture(scope="session")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Give an index over the shards of each real model, with digests."""
    folder = tmp_path_factory.mktemp("indexes")
    for model in REAL_MODELS:
        index_model(first_shard(model), folder / model, digests=True)
    return {model: folder / model for model in REAL_MODELS}


@pytest.fixture
def cache(packs: dict[str, Path]) -> Iterator[ExpertCache]:
    """Open a cache that has room for the whole model."""
    with ExpertCache(packs["qwen3moe"], "1GiB") as opened:
        yield opened


def least_memory(path: Path, experts_used: int | None = None) -> int:
    with pytest.raises(RequestError, match="too little memory") as refused:
        ExpertCache(path, 0, experts_used=experts_used)
    found = re.search(r"expected (\d+) bytes", str(refused.value))
    assert found is not None
    return int(found[1])


def is_right(cache: ExpertCache, layer: int, experts: list[int], **options: int) -> None:
    got = cache.use(layer, experts, **options)
    assert len(got) == len(experts)
    for expert, parts in zip(experts, got, strict=True):
        assert list(parts) == [kind.name for kind in cache.pack.parts(layer)]
        for name, view in parts.items():
            assert view == on_disk(cache.pack.locate(layer, expert, name))


def read_all(path: Path) -> None:
    with moepack.open(path) as pack, pack.reader() as reader:
        for layer, expert in keys_of(pack):
            reader.read(layer, expert)


def use_all(cache: ExpertCache, seed: int) -> None:
    """Use steps of every layer, at random, and all experts of some."""
    chance = random.Random(seed)
    for layer in list(cache.pack.layers) * 3:
        everyone = range(cache.pack.expert_count(layer))
        is_right(cache, layer, chance.sample(everyone, min(4, len(everyone))))
    last = cache.pack.layers[-1]
    is_right(cache, last, list(range(cache.pack.expert_count(last))))


@pytest.mark.parametrize("model", REAL_MODELS)
@pytest.mark.parametrize("kind", ["pack", "index"])
def test_the_bytes_are_those_of_the_pack(
    model: str, kind: str, packs: dict[str, Path], indexes: dict[str, Path]
) -> None:
    path = (packs if kind == "pack" else indexes)[model]
    memory = least_memory(path)
    seeds = itertools.count()
    for policy in POLICIES:
        with ExpertCache(path, memory, policy=policy, check="always") as cache:
            use_all(cache, next(seeds))
    for backend in BACKENDS:
        try:
            cache = ExpertCache(path, memory, backend=backend, check="never")
        except MachineError:
            assert backend == "uring"  # a container forbids it
            continue
        with cache:
            use_all(cache, next(seeds))


@pytest.mark.parametrize("path", PACKS, ids=lambda path: path.name)
def test_packs_of_every_kind_give_what_a_reader_gives(path: Path) -> None:
    try:
        cache = ExpertCache(path, "1GiB", check="always")
    except MoepackError:
        with pytest.raises(MoepackError):
            read_all(path)
        return
    with cache, cache.pack.reader() as reader:
        for layer, expert in keys_of(cache.pack):
            names = [part.name for part in cache.pack.parts(layer)]
            try:
                expected = [bytes(reader.read(layer, expert, name)) for name in names]
            except MoepackError:
                with pytest.raises(MoepackError):
                    cache.use(layer, [expert])
            else:
                assert list(cache.use(layer, [expert])[0].values()) == expected


def test_prompts_are_steps_of_many_tokens(packs: dict[str, Path]) -> None:
    path = packs["qwen3moe"]
    with ExpertCache(path, least_memory(path)) as cache:
        for layer in cache.pack.layers:
            experts = [n % cache.pack.expert_count(layer) for n in range(256)]
            is_right(cache, layer, experts, tokens=128)
        with pytest.raises(RequestError, match="tokens: 256 experts are not as many for each"):
            cache.use(0, experts, tokens=100)
        assert cache.use(0, []) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "mru"}, "no such policy: expected lrfu or lru, found mru"),
        ({"check": "each"}, "no such check, expected first, always, never, found 'each'"),
        ({"backend": "mmap"}, "no such backend"),
        ({"memory": "lots"}, "memory: not a size"),
        ({"memory": 4096}, "too little memory: expected 180224 bytes, found 4096"),
    ],
)
def test_impossible_arguments_are_refused(
    arguments: dict[str, str], message: str, packs: dict[str, Path]
) -> None:
    with pytest.raises(RequestError, match=message):
        ExpertCache(packs["qwen3moe"], **({"memory": "1GiB", "experts_used": 2} | arguments))  # type: ignore[arg-type]


def test_what_is_not_there_is_refused_and_the_cache_goes_on(cache: ExpertCache) -> None:
    count = cache.pack.expert_count(0)
    cases = (99, 0, "layer 99"), (0, count, f"no expert {count}"), (0, -1, "no expert -1")
    for layer, expert, message in cases:
        for call in (cache.use, cache.prefetch):
            with pytest.raises(RequestError, match=message):
                call(layer, [0, expert])
    with pytest.raises(RequestError, match="too little memory"):
        cache.resize(1)
    is_right(cache, 0, [1])


def test_experts_of_too_many_lengths_are_refused(tmp_path: Path) -> None:
    builder = moe((0,), 2, ne=(64, 16), type_id=F32, block=(1, 4), block_count=65)
    for layer in range(1, 65):
        add_experts(builder, layer, 2, (64, 16 * (layer + 1)), F32, (1, 4))
    pack_model(builder.write(tmp_path / "m.gguf"), tmp_path / "pack")
    with pytest.raises(MoepackError, match="layer 64: experts of more than 64 lengths"):
        ExpertCache(tmp_path / "pack", "1GiB")


def test_a_gguf_and_what_is_no_pack_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="a GGUF, not a pack") as refused:
        ExpertCache(first_shard("qwen3moe"), "1GiB")
    assert "moepack index" in str(refused.value.hint)
    with pytest.raises(PackError):
        ExpertCache(tmp_path, "1GiB")


@pytest.mark.parametrize("backend", ["auto", "direct", "buffered"])
def test_a_damaged_part_is_an_error_whenever_it_is_read(pack_copy: Path, backend: str) -> None:
    with moepack.open(pack_copy) as pack:
        part = pack.locate(0, 1, "up")
    flip(Path(part.path), part.offset + 5)
    with ExpertCache(pack_copy, "1GiB", backend=backend) as cache:
        for _ in range(2):
            with pytest.raises(
                PackError, match=r"layer 0 expert 1 part 1: expected xxh3:\w+, found"
            ):
                cache.use(0, [0, 1])
            is_right(cache, 0, [0, 2])
        flip(Path(part.path), part.offset + 5)
        is_right(cache, 0, [0, 1])
    flip(Path(part.path), part.offset + 5)
    with ExpertCache(pack_copy, "1GiB", backend=backend, check="never") as cache:
        is_right(cache, 0, [0, 1])


def test_an_expert_is_checked_the_first_time_or_always(pack_copy: Path) -> None:
    memory = least_memory(pack_copy, 1)
    with moepack.open(pack_copy) as pack:
        part, others = pack.locate(0, 1, "up"), list(range(2, pack.expert_count(0)))
    for check in ("first", "always"):
        options = {"check": check, "backend": "buffered", "experts_used": 1}
        with ExpertCache(pack_copy, memory, **options) as cache:  # type: ignore[arg-type]
            is_right(cache, 0, [1])
            flip(Path(part.path), part.offset)
            for other in others:  # it is evicted
                cache.use(0, [other])
            if check == "always":
                with pytest.raises(PackError, match="layer 0 expert 1 part 1"):
                    cache.use(0, [1])
            else:
                is_right(cache, 0, [1])
            flip(Path(part.path), part.offset)


def test_a_missing_file_and_a_short_one_are_errors(pack_copy: Path) -> None:
    with moepack.open(pack_copy) as pack:
        blob = pack.locate(0, 1)
    assert blob.path is not None
    assert blob.offset is not None
    with ExpertCache(pack_copy, "1GiB") as cache:
        os.truncate(blob.path, blob.offset + 100)
        with pytest.raises(PackError, match="the file has become shorter"):
            cache.use(0, [1])
    Path(blob.path).unlink()
    with pytest.raises(PackError, match="the file is missing"):
        ExpertCache(pack_copy, "1GiB")


# contexts, threads and processes


def test_threads_use_contexts_of_their_own(packs: dict[str, Path]) -> None:
    path = packs["qwen3moe"]
    with ExpertCache(path, least_memory(path, 2), experts_used=2, check="always") as cache:
        layers, seconds = cache.pack.layers, []

        def work(number: int) -> None:
            chance = random.Random(number)
            with cache.context() as context:
                for _ in range(150):
                    layer = chance.choice(layers)
                    experts = chance.sample(range(cache.pack.expert_count(layer)), 2)
                    started = time.monotonic()
                    got = context.use(layer, experts)
                    seconds.append(time.monotonic() - started)
                    for expert, parts in zip(experts, got, strict=True):
                        for name, view in parts.items():
                            assert view == on_disk(cache.pack.locate(layer, expert, name))
                    cache.prefetch(layer, experts[::-1])
                    context.release()

        in_threads(4, work)
        assert cache.usage.hit_count + cache.usage.miss_count == 4 * 150 * 2
        # A thread looks again after 0.25 s: it must not have to.
        assert sum(one > 0.2 for one in seconds) < 5


def test_contexts_keep_their_experts_and_are_given_back(cache: ExpertCache) -> None:
    contexts = [cache.context() for _ in range(62)]
    views = [context.use(0, [n % 8])[0] for n, context in enumerate(contexts)]
    for n, parts in enumerate(views):
        assert parts["ffn_up_exps.weight"] == on_disk(cache.pack.locate(0, n % 8, "up"))
    with pytest.raises(RequestError, match="all 63 contexts are taken"):
        cache.context()
    contexts[7].close()
    contexts[7].close()
    with pytest.raises(RequestError, match="the context is closed"):
        contexts[7].use(0, [1])
    with cache.context() as context:
        context.use(0, [1])


def test_a_closed_cache_refuses_and_its_views_stay(cache: ExpertCache) -> None:
    context = cache.context()
    assert len(memory_files()) == 1
    views = cache.use(0, [3])[0]
    expected = {name: bytes(view) for name, view in views.items()}
    path = cache.pack.locate(0, 3).path
    cache.close()
    cache.close()
    context.close()
    for call in (lambda: cache.use(0, [3]), lambda: context.use(0, [3]), lambda: cache.usage):
        with pytest.raises(RequestError, match="the cache is closed"):
            call()
    assert path is not None
    assert views == expected
    with pytest.raises(TypeError, match="read-only"):
        views["ffn_up_exps.weight"][0] = 1
    assert memory_files()
    del views
    assert not memory_files()


def test_a_cache_is_of_its_process(cache: ExpertCache) -> None:
    def work() -> None:
        with pytest.raises(RequestError, match="belongs to the process that opened it"):
            cache.use(0, [1])
        cache.close()

    in_child(work)
    is_right(cache, 0, [1])


# memory


def memory_files() -> list[int]:
    """Return the bytes that each cache of this process takes."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if "moepack-experts" in os.readlink(f"/proc/self/fd/{descriptor}"):
                found.append(os.fstat(int(descriptor)).st_blocks * 512)
        except OSError:  # that of the folder itself
            continue
    return found


def test_memory_is_given_back_when_less_is_set(packs: dict[str, Path]) -> None:
    path = packs["qwen3moe"]
    least = least_memory(path, 2)
    with ExpertCache(path, "32MiB", experts_used=2) as cache:
        context = cache.context()
        for layer in cache.pack.layers:
            context.use(layer, range(cache.pack.expert_count(layer)))
        (before,) = memory_files()
        total = cache.usage.resident_length
        cache.resize(least)
        assert least < cache.usage.resident_length < total  # the last step is in use
        assert cache.usage.memory == least
        context.release()
        assert memory_files()[0] <= least < before
        for layer in cache.pack.layers:
            is_right(cache, layer, [0, 1])
        cache.resize("100%")
        for layer in cache.pack.layers:
            is_right(cache, layer, list(range(cache.pack.expert_count(layer))))


def test_endless_memory_is_all_that_is_needed(packs: dict[str, Path]) -> None:
    with ExpertCache(packs["qwen3moe"], (1 << 64) - 1) as cache:
        for _ in range(2):
            for layer in cache.pack.layers:
                experts = list(range(cache.pack.expert_count(layer))) * 64
                is_right(cache, layer, experts, tokens=64)
        usage = cache.usage
        assert usage.hit_count == usage.miss_count
        assert usage.read_length == usage.resident_length


def test_what_is_prefetched_is_not_read_again(cache: ExpertCache) -> None:
    is_right(cache, 1, [0])
    one = cache.usage.resident_length
    cache.prefetch(1, [5, 2, 5])
    wait_until(lambda: cache.usage.resident_length == 3 * one)
    cache.prefetch(1, [2, 5, 4])  # a better guess
    wait_until(lambda: cache.usage.resident_length == 4 * one)
    before = cache.usage
    assert before.read_length == 4 * one
    assert before.wasted_length == 0
    is_right(cache, 1, [5, 4])
    usage = cache.usage
    assert usage.read_length == before.read_length
    assert usage.miss_count == 3
    assert usage.wasted_length == one  # expert 2
    is_right(cache, 1, [5, 4])
    assert cache.usage.hit_count == 2


# a machine that refuses


@pytest.mark.parametrize(("backend", "works"), [("auto", True), ("direct", True), ("uring", False)])
def test_a_container_may_forbid_io_uring(packs: dict[str, Path], backend: str, works: bool) -> None:
    printed = run_child(
        """
        import errno, sys
        import moepack
        from tests.support import seccomp
        seccomp.forbid(seccomp.IO_URING_SETUP, errno.EPERM)
        try:
            with moepack.ExpertCache(sys.argv[1], "1GiB", backend=sys.argv[2]) as cache:
                print(len(cache.use(0, [1])))
        except moepack.MachineError as error:
            print(error)
        """,
        packs["qwen3moe"],
        backend,
    )
    expected = "1\n" if works else "the system begins no reads: Operation not permitted\n"
    assert printed.endswith(expected)


def test_a_file_system_may_refuse_direct_reads(packs: dict[str, Path]) -> None:
    printed = run_child(
        """
        import sys
        import moepack
        from tests.support import seccomp
        seccomp.forbid_direct()
        with moepack.ExpertCache(sys.argv[1], "1GiB", check="always") as cache:
            print(len(cache.use(0, [1, 2])))
        """,
        packs["qwen3moe"],
    )
    assert printed == "2\n"


# the header


@pytest.mark.parametrize(
    ("compiler", "language", "standard"),
    [("cc", "c", "c99"), ("cc", "c", "c17"), ("c++", "c++", "c++17"), ("clang", "c", "c99")],
)
def test_the_header_compiles_alone(
    compiler: str, language: str, standard: str, tmp_path: Path
) -> None:
    header = HEADER.with_name("moepack_cache.h")
    options = ("-x", language, f"-std={standard}", "-c", header, "-o", tmp_path / "header.gch")
    run = compiled(compiler, *options)
    assert (run.returncode, run.stderr) == (0, "")
    alone = tmp_path / f"alone.{language}"
    alone.write_text('#include "moepack_cache.h"\n')
    run = compiled(compiler, f"-std={standard}", "-x", language, "-c", alone, "-o", tmp_path / "o")
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.long
def test_the_command_in_the_header_compiles_the_library(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no cc here")
    text = HEADER.with_name("moepack_cache.h").read_text().replace("\n *", "\n")
    (command,) = re.findall(r"cd native && (cc .*?-lpthread)", text, re.DOTALL)
    command = command.replace("libmoepack_cache.so", str(tmp_path / "libmoepack_cache.so"))
    subprocess.run(["sh", "-c", command], cwd=native_folder(), check=True)
    symbols = subprocess.check_output(["nm", "-D", tmp_path / "libmoepack_cache.so"], text=True)
    defined = set(re.findall(r" T (\w+)", symbols))
    text = HEADER.with_name("moepack_cache.h").read_text()
    assert set(re.findall(r"\b(moepack_cache_\w+)\(", text)) <= defined
    assert all(name.startswith("moepack_") for name in defined)
