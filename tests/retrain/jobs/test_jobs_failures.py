"""Failures are told whole: where, in whose code, with a log; and a bug stops a batch at once."""

import re
from pathlib import Path

import pytest

from retrain.jobs import JobError, Unit, run_units
from retrain.jobs.tracker import RepeatedFailureError
from tests.helpers.job_units import diary, mistake, unit, units


@pytest.mark.parametrize("cluster", ["inline", "local"])
def test_a_bug_stops_the_batch_with_one_message(store, log, cluster):
    with pytest.raises(RepeatedFailureError) as caught:
        run_units(units(100, "mistake", diary=log), store, cluster=cluster, jobs=2)
    message = str(caught.value)
    place = f"tests/helpers/job_units.py:{mistake.__code__.co_firstlineno + 3}"
    assert message.startswith("stopped, as the first 3 units failed alike and none was done: IndexError: list index")
    assert f"{place})" in message.splitlines()[0]
    path = re.search(r"the traceback is in (\S+)", message)[1]
    assert "in mistake" in Path(path).read_text()
    # Three units, and with two workers one that was under way; none of them twice.
    assert 3 <= len(diary(log)) <= 4
    assert set(diary(log).values()) == {1}


@pytest.mark.parametrize("cluster", ["inline", "local"])
def test_the_whole_traceback_is_printed_once_where_it_is_asked_for(store, capsys, cluster):
    work = [unit(0, "mistake"), *units(3)[1:]]
    report = run_units(work, store, cluster=cluster, jobs=1)
    assert "Traceback" not in capsys.readouterr().err
    key = store.key("numbers", {"index": 0})
    assert "in mistake" in report.tracebacks[key], "kept for whoever wants to show it"
    assert "in mistake" in str(report.traceback_of(key))
    report = run_units(work, store, cluster=cluster, jobs=1, traceback=True)
    assert len(report.failed) == 1
    assert capsys.readouterr().err.count("Traceback (most recent call last)") == 1
    with pytest.raises(JobError):
        run_units(units(9, "mistake")[3:], store, cluster=cluster, jobs=1, traceback=True, same_failures=3)
    said = capsys.readouterr().err
    assert said.count("Traceback (most recent call last)") <= 1, "one message, also of a bug that stops everything"


def test_many_odd_units_stop_nobody_once_one_of_their_kind_is_done(store, log):
    work = [unit(0, diary=log), *units(6, "mistake", diary=log)[1:]]
    report = run_units(work, store)
    assert len(report.done) == 1
    assert diary(log) == {0: 1, **dict.fromkeys(range(1, 6), 3)}
    # It was done before: the same holds for the rest.
    assert len(run_units(work, store).failed) == 5
    # A unit of another kind says nothing about this one.
    other = Unit("others", {"index": 1}, "tests.helpers.job_units:work")
    with pytest.raises(RepeatedFailureError):
        run_units([other, *units(9, "mistake")[1:]], store)
    assert len(run_units(units(9, "mistake")[6:], store, same_failures=0).failed) == 3


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [("my_work", 'store.key("Not A Kind", {})', "StoreError: "), ("my_slip", "return (", "SyntaxError: ")],
)
def test_the_line_is_the_plugins_and_not_ours(store, tmp_path, monkeypatch, name, line, said):
    """Somebody's function passes ours what it cannot take, or is no Python: the mistake is in theirs."""
    path = tmp_path / f"{name}.py"
    path.write_text(f"def work(store, unit):\n    {line}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    report = run_units([Unit("numbers", {"index": 0}, f"{name}:work")], store, max_attempts=1)
    (reason,) = report.failed.values()
    assert reason.splitlines()[0].startswith(said)
    assert f"({path}:2)" in reason.splitlines()[0]
