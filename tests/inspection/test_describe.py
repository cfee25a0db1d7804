"""The facts of sources and packs, with sense and nonsense in them."""

import os
from pathlib import Path
from typing import Any

import pytest

from moepack.inspection import describe
from moepack.inspection.describe import PackFacts, SourceFacts
from moepack.report import model_text
from moepack.report.facts import to_json
from tests.support.gguf_builder import moe
from tests.support.pack_draft import Draft
from tests.support.warm_command import Run


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layout", {"name": [], "files": 5, "blobs": "hot", "parts": None}),
        ("hotness", {}),
        ("hotness", {"token_count": "many", "selection_count": True, "blob_count": -4}),
    ],
)
def test_nonsense_in_a_manifest_is_shown_as_it_is_and_no_mistake(
    key: str, value: dict[str, Any], pack_copy: Path
) -> None:
    draft = Draft(pack_copy)
    draft.body[key] = value
    draft.save_manifest()
    pack = describe.inspect(pack_copy)
    assert isinstance(pack, PackFacts)
    assert to_json(getattr(pack, key)) == value
    assert str(model_text.pack(pack))


def test_what_a_manifest_does_not_say_is_a_dash_for_people_and_null_for_programs(
    pack_copy: Path,
) -> None:
    draft = Draft(pack_copy)
    draft.body |= {"layout": {"name": 5}, "hotness": {"token_count": "many"}}
    draft.body["source"] |= {"architecture": "", "name": None}
    draft.body["source"] |= {"experts_used": {}, "context_length": None}
    draft.save_manifest()
    facts = describe.inspect(pack_copy)
    assert isinstance(facts, PackFacts)
    lines = str(model_text.pack(facts)).splitlines()
    assert lines[0].startswith("a model without a name (–), packed by moepack ")
    assert lines[0].endswith(" from 6 shards")
    assert lines[1] == "  layout     –: blobs aligned to 4.0 KiB, weights to 4.0 KiB"
    assert lines[4] == "  used       – a token; context –"
    assert lines[7] == "  hotness    – over an unknown number of tokens"
    assert (facts.source.name, facts.coverage) == (None, None)


def test_what_a_file_puts_into_a_name_cannot_move_the_cursor(pack_copy: Path) -> None:
    draft = Draft(pack_copy)
    draft.body["source"]["name"] = "\x1b[2J" + "long" * 1000
    draft.body["tool"] = "a\nb"
    draft.save_manifest()
    facts = describe.inspect(str(pack_copy))
    assert isinstance(facts, PackFacts)
    first = str(model_text.pack(facts)).splitlines()[0]
    assert first.isprintable()
    assert len(first) < 400


def test_a_terminal_without_the_letters_of_a_name_gets_it_escaped(
    pack_copy: Path, cli: Run
) -> None:
    draft = Draft(pack_copy)
    draft.body["source"]["name"] = "模型"
    draft.save_manifest()
    run = cli("inspect", pack_copy, env=os.environ | {"PYTHONIOENCODING": "latin-1"})
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(r"\u6a21\u578b (qwen3moe), packed by")


def test_metadata_of_another_kind_is_not_known(tmp_path: Path) -> None:
    builder = moe((0,)).put("general.name", "u32", 5)
    builder.put("qwen3moe.expert_used_count", "str", "two")
    facts = describe.inspect(builder.write(tmp_path / "m.gguf"))
    assert isinstance(facts, SourceFacts)
    assert (facts.name, facts.experts_used, facts.parameters.active) == (None, None, None)
    assert "experts per token     –\n" in str(model_text.source(facts))
