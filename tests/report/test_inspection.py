"""What `inspect` says of sources and packs, whatever stands in them."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.errors import RequestError
from moepack.report import inspection, text
from moepack.report.facts import PackFacts, SourceFacts
from moepack.report.json_text import to_json
from tests.support.gguf_builder import moe
from tests.support.models import REAL_MODELS, first_shard, shards_of
from tests.support.pack_draft import Draft

Command = Callable[..., subprocess.CompletedProcess[str]]

NONSENSE: dict[str, dict[str, Any]] = {
    "nothing": {"layout": {}, "hotness": {}},
    "rules that are none": {"layout": {"name": [], "files": 5, "blobs": "hot", "parts": None}},
    "projections that are none": {"layout": {"parts": {"projections": [5], "alignment": -1}}},
    "counts that are none": {"hotness": {"token_count": "many", "selection_count": [5]}},
    "a truth for a number": {"hotness": {"token_count": 1, "selection_count": True}},
    "a digest that is none": {"hotness": {"digest": 5}},
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_in_a_manifest_is_not_known_and_no_mistake(
    name: str, pack_copy: Path, moepack_command: Command
) -> None:
    draft = Draft(pack_copy)
    draft.body |= NONSENSE[name]
    draft.save_manifest()
    for option in ((), ("--json",)):
        run = moepack_command("inspect", pack_copy, *option)
        assert (run.returncode, run.stderr) == (0, "")
    with moepack.open(pack_copy) as pack:
        facts = inspection.describe_pack(pack)
    assert to_json(facts) == json.loads(run.stdout)


def test_what_a_manifest_does_not_say_is_a_dash_for_people_and_null_for_programs(
    pack_copy: Path,
) -> None:
    draft = Draft(pack_copy)
    draft.body |= {"layout": {"name": 5}, "hotness": {"token_count": "many"}}
    draft.body["source"] |= {"architecture": "", "name": None}
    draft.body["source"] |= {"experts_used": {}, "context_length": None}
    draft.save_manifest()
    facts = inspection.inspect(pack_copy)
    assert isinstance(facts, PackFacts)
    lines = str(text.pack(facts)).splitlines()
    assert lines[0].startswith("a model without a name (–), packed by moepack ")
    assert lines[0].endswith(" from 6 shards")
    assert lines[1] == "  layout     –: blobs aligned to 4.0 KiB, weights to 4.0 KiB"
    assert lines[4] == "  used       – a token; context –"
    assert lines[7] == "  hotness    – over an unknown number of tokens"
    assert to_json(facts.layout) == {"name": None, "files": None, "blobs": None, "parts": None}
    assert (facts.source.architecture, facts.source.name, facts.coverage) == (None, None, None)


def test_what_a_file_puts_into_a_name_cannot_move_the_cursor(pack_copy: Path) -> None:
    draft = Draft(pack_copy)
    draft.body["source"]["name"] = "\x1b[2J" + "long" * 1000
    draft.body["tool"] = "a\nb"
    draft.save_manifest()
    facts = inspection.inspect(str(pack_copy))
    assert isinstance(facts, PackFacts)
    first = str(text.pack(facts)).splitlines()[0]
    assert first.isprintable()
    assert len(first) < 400


def test_a_terminal_without_the_letters_of_a_name_gets_it_escaped(
    pack_copy: Path, moepack_command: Command
) -> None:
    draft = Draft(pack_copy)
    draft.body["source"]["name"] = "模型"
    draft.save_manifest()
    run = moepack_command("inspect", pack_copy, env=os.environ | {"PYTHONIOENCODING": "latin-1"})
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(r"\u6a21\u578b (qwen3moe), packed by")


def test_a_source_may_be_named_by_one_path_or_by_all() -> None:
    by_one = inspection.inspect(first_shard("mixtral"))
    assert inspection.inspect(shards_of("mixtral")) == by_one
    assert isinstance(by_one, SourceFacts)
    with pytest.raises(RequestError, match="no source"):
        inspection.inspect([])


def test_metadata_of_another_kind_is_not_known(tmp_path: Path) -> None:
    builder = moe((0,)).put("general.name", "u32", 5)
    builder.put("qwen3moe.expert_used_count", "str", "two")
    facts = inspection.inspect(builder.write(tmp_path / "m.gguf"))
    assert isinstance(facts, SourceFacts)
    assert (facts.name, facts.experts_used, facts.parameters.active) == (None, None, None)
    assert "experts per token     –\n" in str(text.source(facts))


@pytest.mark.parametrize("model", REAL_MODELS)
def test_a_located_blob_has_the_parts_that_the_pack_lists(
    model: str, packs: dict[str, Path]
) -> None:
    with moepack.open(packs[model]) as pack:
        layer = pack.layers[-1]
        facts = inspection.describe_blob(pack, layer, 1)
        blob = pack.locate(layer, 1)
        assert (facts.path, facts.offset, facts.length) == (blob.path, blob.offset, blob.length)
        assert [part.name for part in facts.parts] == [kind.name for kind in pack.parts(layer)]
        for part in facts.parts:
            assert part.offset == (blob.offset or 0) + (part.offset_in_blob or 0)
