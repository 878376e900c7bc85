"""The one validator: what it lets pass, and the line that says where something is wrong."""

import math

import pytest

from retrain.safe_files import SafeFileError
from retrain.schema import ANY, Choice, Flag, Integer, ListOf, Maybe, Number, Text, check, conforms

NUMBER = Maybe(Number())
EVENT = {"event": Choice("done", "failed"), "time": Number(at_least=0), "key?": Text("[0-9a-f]{4}")}
RUN = {"name": Text(at_most=10), "events": [EVENT], "seed": Integer(0, 9), "options": {"*": ANY}, "best?": NUMBER}
GOOD = {"name": "größe", "events": [{"event": "done", "time": 1.5}], "seed": 3, "options": {"a": [1]}, "best": None}


def test_what_is_right_comes_back_unchanged():
    assert check(GOOD, RUN, "run.json") is GOOD
    assert check({"a": 1, "b": 2}, {"a": Integer(), "*": Integer()}, "x")
    assert conforms([], [Text()])
    assert conforms(-(2**63), Integer())
    assert conforms(True, Flag())
    assert conforms(10**100, Number())
    assert conforms({"a": {}}, {"a": {}})


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"name": 3}, "name is 3; expected text of at most 10 characters"),
        ({"name": "x" * 11}, "name is 'xxxxxxxxxxx'; expected text of at most 10"),
        ({"name": "\ud800"}, r"name is '\\ud800'; expected text"),
        ({"seed": 10}, "seed is 10; expected a whole number from 0 to 9"),
        ({"seed": True}, "seed is true; expected a whole number"),
        ({"seed": 3.0}, "seed is 3.0; expected a whole number"),
        ({"seed": 10**400}, "seed is a number of more than 20 digits"),
        ({"events": {}}, "events is a table of 0; expected a list"),
        ({"events": [1]}, r"events\[0\] is 1; expected a table"),
        ({"events": [{"event": "exploded", "time": 1}]}, r"events\[0\].event is 'exploded'; expected one of done"),
        ({"events": [{"event": "done", "time": -1}]}, r"events\[0\].time is -1; expected a number of at least 0"),
        ({"events": [{"event": "done", "time": math.nan}]}, r"events\[0\].time is nan"),
        ({"events": [{"event": "done", "time": math.inf}]}, r"events\[0\].time is inf"),
        ({"events": [{"event": "done", "time": 10**400}]}, r"events\[0\].time is a number of more than 20 digits"),
        ({"events": [{"event": "done"}]}, r"events\[0\] has no field 'time'"),
        ({"events": [{"event": "done", "time": 1, "key": "../x"}]}, r"events\[0\].key is '../x'; expected text like"),
        ({"events": [{"event": "done", "time": 1, "key": "abcd\n"}]}, r"events\[0\].key is 'abcd"),
        ({"options": []}, "options is a list of 0; expected a table"),
        ({"options": {"\ud800": 1}}, "options has a field whose name is not text"),
        ({"best": "x"}, "best is 'x'; expected a number"),
        ({"colour": 1}, "its content has the unknown field 'colour'; known: name, events, seed, options, best"),
        ({"best?": 1}, r"the unknown field 'best\?'"),
        ({"*": 1}, r"the unknown field '\*'"),
        ({"name": None}, "name is null; expected text"),
        ({"seed": "\n\x1b[2J"}, "seed is '"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(change, line):
    with pytest.raises(SafeFileError, match=line) as caught:
        check({**GOOD, **change}, RUN, "run.json")
    assert str(caught.value).startswith("run.json: ")
    assert str(caught.value).isprintable()


def test_where_names_what_was_checked():
    with pytest.raises(SafeFileError, match="line 3 is a list of 0; expected a table"):
        check([], EVENT, "log.jsonl", "line 3")
    with pytest.raises(SafeFileError, match=r"sizes\[1\] is -1"):
        check([1, -1], [Integer(0)], "x", "sizes")
    with pytest.raises(SafeFileError, match="sizes has 0 items; expected a number of at least 1"):
        check([], ListOf(Integer(0), at_least=1), "x", "sizes")
    with pytest.raises(SafeFileError, match="sizes has 3 items; expected a number from 0 to 2"):
        check([1, 2, 3], ListOf(Integer(0), at_most=2), "x", "sizes")
    assert not conforms(1, Choice("1", True))
