"""Shapes of JSON files: what passes, and the line that says where something is wrong."""

import math
from typing import Annotated, Any

import pytest
from msgspec import Meta, Struct

from retrain.safe_files import SafeFileError, conforms, matching, validate


class Event(Struct):
    event: Annotated[str, matching("done|failed")]
    time: Annotated[float, Meta(ge=0)]
    key: Annotated[str, matching("[0-9a-f]{4}", words="a key")] = ""


class Run(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(max_length=10)]
    events: list[Event]
    seed: Annotated[int, Meta(ge=0)]
    options: dict[str, Any]
    best: float | None = None


GOOD = {"name": "größe", "events": [{"event": "done", "time": 1}], "seed": 10**30, "options": {"a": [1]}, "best": None}


def test_what_is_right_comes_back_unchanged() -> None:
    assert validate(GOOD, Run, "run.json") is GOOD
    assert validate({"event": "done", "time": 1, "more": 2}, Event, "x")["more"] == 2
    assert conforms([], list[Event])
    assert not conforms({}, list[Event])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"name": 3}, "name is 3; expected str"),
        ({"name": "x" * 11}, "name is 'xxxxxxxxxxx'; expected str of length <= 10"),
        ({"seed": -1}, "seed is -1; expected int >= 0"),
        ({"seed": True}, "seed is true; expected int"),
        ({"seed": 3.0}, "seed is 3.0; expected int"),
        ({"seed": "\n\x1b[2J"}, "seed is '"),
        ({"events": {}}, "events is a table of 0; expected array"),
        ({"events": [1]}, r"events\[0\] is 1; expected object"),
        ({"events": [{"event": "exploded", "time": 1}]}, r"events\[0\].event is 'exploded'; expected text like done"),
        ({"events": [{"event": "done", "time": -1}]}, r"events\[0\].time is -1; expected float >= 0"),
        ({"events": [{"event": "done", "time": math.nan}]}, r"events\[0\].time is nan"),
        ({"events": [{"event": "done"}]}, r"events\[0\] is a table of 1; object missing required field time"),
        ({"events": [{"event": "done", "time": 1, "key": "abcd\n"}]}, r"events\[0\].key is 'abcd.*; expected a key"),
        ({"options": []}, "options is a list of 0; expected object"),
        ({"best": "x"}, "best is 'x'; expected float"),
        ({"colour": 1}, "its content is a table of 6; object contains unknown field colour"),
        ({"name": None}, "name is null; expected str"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(change: dict[str, Any], line: str) -> None:
    with pytest.raises(SafeFileError, match=line) as caught:
        validate({**GOOD, **change}, Run, "run.json")
    assert str(caught.value).startswith("run.json: ")
    assert str(caught.value).isprintable()


def test_where_names_what_was_checked() -> None:
    with pytest.raises(SafeFileError, match=r"log.jsonl: line 3 is a list of 0; expected object"):
        validate([], Event, "log.jsonl", "line 3")
    with pytest.raises(SafeFileError, match=r"figures.json: lds.time is -1"):
        validate({"sound": GOOD["events"][0], "lds": {"event": "done", "time": -1}}, dict[str, Event], "figures.json")
