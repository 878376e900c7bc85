"""The job layer: every unit is done once, whatever is killed, and the books are right."""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from bench.arguments import add_cluster_arguments, cluster_options, default_cluster
from retrain.errors import UsageError
from retrain.jobs import JobError, Unit, local, run_units
from retrain.jobs.unit import JobBatch
from retrain.leases import Leases
from retrain.resume import unfinished_units
from retrain.store import Store, StoreError, UnwritableStoreError
from retrain.units import SharedSeconds
from tests.helpers.job_units import diary, unit, units, wait_for

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("cluster", ["inline", "local"])
def test_every_unit_is_done_once_and_found_again(store, log, cluster):
    seen = []
    work = units(12, diary=log)
    progress = lambda *counts: seen.append(counts)  # noqa: E731
    report = run_units(work, store, cluster=cluster, jobs=2, progress=progress, name="a test")
    assert report.complete
    assert report.num_computed == 12
    assert report.done == [store.key("numbers", {"index": index}) for index in range(12)]
    assert seen == [(count, 12) for count in range(13)]
    for index in range(12):
        assert store.read("numbers", {"index": index}).arrays["number"][0] == index
    assert set(diary(log).values()) == {1}
    # The same again: nothing is left to do. One more, and one twice: one is done.
    assert run_units(work, store, cluster=cluster).num_computed == 0
    collected = run_units([*work, unit(12, diary=log)], store, cluster=cluster, collect=True)
    assert (len(collected.done), len(collected.pending), collected.num_computed) == (12, 1, 0)
    assert 12 not in diary(log)
    report = run_units([*work, unit(12, diary=log), unit(12, diary=log)], store, cluster=cluster)
    assert report.num_computed == 1
    assert len(report.done) == 13
    assert set(diary(log).values()) == {1}
    assert Leases(store.root).held() == {}


@pytest.mark.parametrize("cluster", ["inline", "local"])
def test_failures_are_reported_with_their_log_and_stop_nobody(store, log, cluster):
    work = [*units(3, diary=log), unit(3, "fail", diary=log), unit(4, "fail_first", diary=log)]
    work += [unit(5, "forget", diary=log), unit(6, "no_such_function"), unit(7, "leave")]
    report = run_units(work, store, cluster=cluster, jobs=2)
    keys = [store.key("numbers", {"index": index}) for index in range(8)]
    assert report.done == [keys[0], keys[1], keys[2], keys[4]]
    assert set(report.failed) == {keys[3], keys[5], keys[6], keys[7]}
    assert re.match(
        r"failed 3 times, the last time with ValueError: unit 3 cannot be done \(.*tests/helpers/job_units.py:\d+\)\n"
        r"    the traceback is in (.*)$",
        report.failed[keys[3]],
    )
    text = Path(report.failed[keys[3]].split("the traceback is in ")[1]).read_text()
    assert text.count("Traceback (most recent call last)") == 3
    assert 'raise ValueError(f"unit {unit.config' in text
    assert "without writing" in report.failed[keys[5]]
    assert "no_such_function" in report.failed[keys[6]]
    assert "its code called sys.exit(0)" in report.failed[keys[7]]
    assert not report.complete
    assert diary(log) == {0: 1, 1: 1, 2: 1, 3: 3, 4: 3, 5: 3}
    # A failure is never cached: the next run tries again.
    assert run_units([unit(3, diary=log)], store, cluster=cluster).complete


def test_a_worker_that_is_killed_is_replaced_and_its_unit_tried_again(store, log, tmp_path, monkeypatch):
    (tmp_path / "retrain").mkdir()  # of the user's own, where the command is called
    (tmp_path / "retrain" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    work = [*units(4, diary=log), unit(4, "die_first", diary=log), unit(5, "die", diary=log)]
    report = run_units(work, store, cluster="local", jobs=2)
    assert len(report.done) == 5
    ((key, reason),) = report.failed.items()
    assert key == store.key("numbers", {"index": 5})
    assert "killed by SIGKILL" in reason
    assert "a last word before it dies" in reason
    assert diary(log) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 3}
    assert sum(diary(log, "end").values()) == 5


def test_a_unit_that_takes_too_long_is_stopped_and_goes_on_where_it_saved_its_work(store, log):
    work = [unit(0, "work", seconds=100, diary=log), unit(1, diary=log)]
    work += [unit(2, "saves", steps=2, per_attempt=1, diary=log)]
    # The limit is for the quick units too, and these have one attempt: seconds, where they need milliseconds.
    report = run_units(work, store, cluster="local", jobs=2, timeout_min=2 / 60, max_attempts=1)
    assert len(report.done) == 2
    assert "--timeout-min" in report.failed[store.key("numbers", {"index": 0})]
    assert diary(log) == {0: 1, 1: 1, 2: 2}
    assert diary(log, "step") == {2: 2}
    (batch,) = JobBatch.all(store)
    events = [(e["event"], e["key"]) for e in batch.events(batch.describe()["run"]) if e["event"] != "done"]
    assert sorted(events) == [("failed", work[0].key), ("unfinished", work[2].key)]
    assert unfinished_units(store) == []


def test_workers_that_cannot_start_are_one_error(store, monkeypatch):
    monkeypatch.setattr(local, "worker_environment", lambda *_: {"PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"})
    with pytest.raises(JobError, match="no worker process starts"):
        run_units(units(2), store, cluster="local", jobs=1)


def test_workers_have_their_share_of_cores_and_their_own_gpu(store, log, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(local, "cores", lambda: 6)
    work = [unit(index, "environment", device="auto", diary=log, num_workers=2) for index in range(4)]
    run_units(work, store, cluster="local")  # a worker a GPU is the default
    records = [store.read("numbers", {"index": index}).record for index in range(4)]
    assert {record["OMP_NUM_THREADS"] for record in records} == {"3"}
    assert {record["CUDA_VISIBLE_DEVICES"] for record in records} == {"4", "7"}
    assert len({(record["pid"], record["CUDA_VISIBLE_DEVICES"]) for record in records}) == 2


def test_arguments_are_checked(store):
    for arguments, reason in [
        ({"cluster": "cloud"}, "available: inline, local, slurm"),
        ({"jobs": 0}, "--jobs"),
        ({"timeout_min": 0}, "--timeout-min"),
    ]:
        with pytest.raises(UsageError, match=reason):
            run_units(units(1), store, **arguments)
    with pytest.raises(ValueError, match="must read"):
        Unit("numbers", {}, "nothing")


@pytest.mark.parametrize("cluster", ["inline", "local"])
def test_a_usage_error_stops_everything_at_once(store, cluster):
    with pytest.raises(UsageError, match=r"^what was asked for cannot be$"):
        run_units([unit(0, "refuse"), *units(5, seconds=0.2)[1:]], store, cluster=cluster, jobs=1)


def test_units_are_plain_data_and_another_configuration_is_another_unit(store):
    first = Unit("numbers", {"sizes": (1, 2), "n": np.int64(3)}, "tests.helpers.job_units:work", {"x": (1,)})
    assert first == Unit(**json.loads(json.dumps(first.to_json())))
    key, other = first.key, first.with_config(n=np.int64(4))
    assert (first.config["n"], first.key, first.with_config(n=3).key) == (3, key, key)
    assert other.config == {"sizes": [1, 2], "n": 4}
    assert [one.key for one in (first, other)] == [store.key(one.kind, one.config) for one in (first, other)]
    with pytest.raises(StoreError, match=r"payload\.model"):
        Unit("numbers", {}, "tests.helpers.job_units:work", {"model": object()})
    with pytest.raises(StoreError, match=r"config\.n"):
        first.with_config(n=object())


# -- a batch in a process of its own, to be killed -----------------------------------------------------------------
DRIVER = """
import sys, json
sys.path[:0] = [{root!r}]
from tests.helpers.job_units import units
from retrain.jobs import run_units
from retrain.store import Store
print("ready", flush=True)
report = run_units(units({count}, {action!r}, **{payload!r}), Store({cache!r}), cluster={cluster!r}, jobs={jobs})
print(json.dumps([len(report.done), len(report.failed), report.num_computed]), flush=True)
"""


def driver(store, count, cluster, jobs=2, action="work", **payload):
    known = {"root": str(ROOT), "count": count, "action": action, "payload": payload, "cache": str(store.root)}
    text = DRIVER.format(**known, cluster=cluster, jobs=jobs)
    # What runs in a shell's background inherits a SIGINT that is ignored; a terminal's does not.
    text = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{text}"
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def workers_of(store):
    """The worker processes of a store, with or without a driver: their stdout is a log in its folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if os.readlink(path).startswith(f"{store.root}/"):
                found.append(int(path.parts[2]))
    return found


@pytest.mark.parametrize(
    ("cluster", "stop"), [("inline", signal.SIGINT), ("local", signal.SIGINT), ("local", signal.SIGTERM)]
)
def test_stopping_keeps_what_is_finished_and_says_so(store, log, cluster, stop):
    process = driver(store, 500, cluster, seconds=0.02, diary=log, hold_after=100)
    wait_for(lambda: sum(diary(log, "end").values()) >= 5, process)
    process.send_signal(stop)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "the same command goes on from there" in errors
    assert workers_of(store) == [], "a worker outlived its driver"
    kept = len(list(store.entries()))
    assert 5 <= kept < 500
    report = run_units(units(kept + 3, diary=log), store)
    assert report.num_computed <= 3 + 2
    assert set(diary(log, "end").values()) == {1}


def test_workers_end_with_a_killed_driver_whatever_they_do(store, log):
    """One that holds Python's lock cannot notice the end of its pipe."""
    process = driver(store, 2, "local", action="grip", diary=log)
    wait_for(lambda: len(diary(log)) == 2, process)
    assert len(workers_of(store)) == 2
    process.kill()
    process.communicate()
    wait_for(lambda: not workers_of(store))


def test_a_worker_whose_driver_is_gone_already_does_not_begin():
    code = "from retrain.processes import die_with; die_with(1 + __import__('os').getppid()); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")


def test_overlapping_batches_share_the_work(store, log):
    """Two drivers and four workers on the same units: none is done twice."""
    drivers = [driver(store, 60, "local", seconds=0.05, diary=log) for _ in range(2)]
    results = [json.loads(process.communicate(timeout=300)[0]) for process in drivers]
    assert [result[:2] for result in results] == [[60, 0], [60, 0]]
    assert set(diary(log).values()) == {1}
    assert sum(result[2] for result in results) == 60


def test_a_full_disk_is_one_error_and_resumes(tmp_path, log):
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        store = Store(folder / "cache")
        (folder / "ballast").write_bytes(b"x" * 1_000_000)
        work = units(16, "large", diary=log)  # 100 kB each
        for cluster in ("inline", "local"):
            with pytest.raises(UnwritableStoreError, match="no space left") as caught:
                run_units(work, store, cluster=cluster, jobs=2)
            assert str(caught.value).isprintable()
            kept = list(store.entries())
            assert 2 <= len(kept) < 16
            for info in kept:
                store.verified(info.kind, info.key)
        (folder / "ballast").unlink()
        assert run_units(work, store, cluster="local", jobs=2).num_computed == 16 - len(kept)
        assert not (store.root / "quarantine").exists()
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# -- records and flags ------------------------------------------------------------------------------------------------
def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.arguments.default_cluster", default_cluster)  # not the tests' own
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    add_cluster_arguments(parser)
    assert cluster_options(parser.parse_args([]))["cluster"] == ("local" if (os.cpu_count() or 1) > 1 else "inline")
    assert cluster_options(parser.parse_args(["--device", "cuda"]))["cluster"] == "inline"
    options = "--cluster slurm --jobs 4 --slurm partition=gpu --slurm mem-per-cpu=2G --timeout-min 30 --collect"
    found = cluster_options(parser.parse_args(options.split()))
    assert found["slurm"] == {"partition": "gpu", "mem_per_cpu": "2G"}
    assert (found["cluster"], found["jobs"], found["timeout_min"], found["collect"]) == ("slurm", 4, 30.0, True)
    for bad in (["--cluster", "slurm", "--slurm", "gpu"], ["--slurm", "partition=gpu"], ["--jobs", "0"]):
        with pytest.raises(UsageError):
            cluster_options(parser.parse_args(bad))


# ---- units that share one process: done in threads, each once, and the bill for them adds up ----
def test_units_that_may_run_side_by_side_do(store, log):
    """Each of three waits for the other two: one at a time, the run would never end."""
    alone = units(2, diary=log)
    together = [unit(index, "meet", diary=log, at_once=3, meeting=[3, 4, 5]) for index in range(2, 6)]
    together[0].payload["meeting"] = []  # the first one sets everything up, alone
    report = run_units([*together, *alone], store)
    assert report.complete
    assert report.num_computed == 6
    assert diary(log) == dict.fromkeys(range(6), 1)
    assert run_units([*together, *alone], store).num_computed == 0
    # A failure beside others is told, and the others are kept.
    work = [unit(index, "mistake" if index == 13 else "work", diary=log, at_once=4) for index in range(10, 18)]
    assert list(run_units(work, store).failed) == [store.key("numbers", {"index": 13})]
    assert diary(log, "end") == {index: 1 for index in (*range(6), *range(10, 18)) if index != 13}


def test_an_interrupt_lets_what_has_begun_finish(store, log):
    seen = []

    def interrupt(done, _all):
        seen.append(done)
        if done == 3:
            raise KeyboardInterrupt

    work = [unit(index, diary=log, at_once=2, seconds=0.01) for index in range(20)]
    with pytest.raises(KeyboardInterrupt):
        run_units(work, store, progress=interrupt)
    assert diary(log) == diary(log, "end")
    assert 3 <= sum(diary(log).values()) <= 5
    assert not Leases(store.root).held()
    assert run_units(work, store).complete
    assert set(diary(log).values()) == {1}


def test_a_unit_that_another_process_has_is_waited_for(store, log):
    work = [unit(index, diary=log, at_once=2) for index in range(4)]
    lease = Leases(store.root).take("numbers", store.key("numbers", {"index": 2}))
    released = threading.Timer(0.5, lease.__exit__, (None, None, None))
    with lease:
        released.start()
        assert run_units(work, store).complete
    assert set(diary(log).values()) == {1}


def test_shared_seconds_add_up_to_the_time_in_which_anybody_worked():
    now = 0.0
    shared = SharedSeconds(lambda: now)
    with shared.measured() as first:
        now = 4.0
        with shared.measured() as second:
            now = 10.0
        assert second() == pytest.approx(3)  # six seconds, shared by two
        now = 11.0
    assert first() == pytest.approx(4 + 3 + 1)
    now = 50.0
    with shared.measured() as third:
        now = 52.0
    assert third() == pytest.approx(2)
