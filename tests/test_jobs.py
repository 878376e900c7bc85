"""The job layer: every unit is done once, whatever is killed, and the books are right."""

import argparse
import contextlib
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from retrain.command import add_cluster_arguments, cluster_options
from retrain.errors import UsageError
from retrain.jobs import JobError, Unit, local, run_units
from retrain.jobs import claims as claims_module
from retrain.jobs.campaign import Campaign
from retrain.jobs.claims import Claims, Holder
from retrain.processes import host_name, process_started
from retrain.store import Store, StoreError, UnwritableStoreError
from tests.job_units import diary, unit, units

ROOT = Path(__file__).parent.parent


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "cache")


@pytest.fixture
def log(tmp_path):
    return str(tmp_path / "diary")


def numbers(store, count):
    return [float(store.read("numbers", {"index": index}).arrays["number"][0]) for index in range(count)]


@pytest.mark.parametrize("cluster", ["inline", "local"])
def test_every_unit_is_done_once_and_found_again(store, log, cluster):
    seen = []
    work = units(12, diary=log)
    report = run_units(
        work, store, cluster=cluster, jobs=2, progress=lambda *counts: seen.append(counts), name="a test"
    )
    assert report.complete
    assert report.num_computed == 12
    assert report.done == [store.key("numbers", {"index": index}) for index in range(12)]
    assert seen == [(count, 12) for count in range(13)]
    assert numbers(store, 12) == list(range(12))
    assert set(diary(log).values()) == {1}
    # The same again: nothing is left to do. One more, and one twice: one is done.
    assert run_units(work, store, cluster=cluster).num_computed == 0
    report = run_units([*work, unit(12, diary=log), unit(12, diary=log)], store, cluster=cluster)
    assert report.num_computed == 1
    assert len(report.done) == 13
    assert set(diary(log).values()) == {1}
    assert Claims(store.root).held() == {}


@pytest.mark.parametrize("cluster", ["inline", "local"])
def test_failures_are_reported_with_their_log_and_stop_nobody(store, log, cluster):
    work = [*units(3, diary=log), unit(3, "fail", diary=log), unit(4, "fail_first", diary=log)]
    work += [unit(5, "forget", diary=log), Unit("numbers", {"index": 6}, "tests.job_units:no_such_function")]
    report = run_units(work, store, cluster=cluster, jobs=2)
    keys = [store.key("numbers", {"index": index}) for index in range(7)]
    assert report.done == [keys[0], keys[1], keys[2], keys[4]]
    assert set(report.failed) == {keys[3], keys[5], keys[6]}
    assert report.failed[keys[3]].startswith("failed 3 times, the last time with ValueError: unit 3 cannot be done")
    assert "job_units.py" in report.failed[keys[3]]
    assert "without writing" in report.failed[keys[5]]
    assert "no_such_function" in report.failed[keys[6]]
    assert not report.complete
    assert diary(log) == {0: 1, 1: 1, 2: 1, 3: 3, 4: 3, 5: 3}
    # A failure is never cached: the next run tries again.
    assert run_units([unit(3, diary=log)], store, cluster=cluster).complete


def test_a_worker_that_is_killed_is_replaced_and_its_unit_tried_again(store, log):
    work = [*units(4, diary=log), unit(4, "die_first", diary=log), unit(5, "die", diary=log)]
    report = run_units(work, store, cluster="local", jobs=2)
    assert len(report.done) == 5
    ((key, reason),) = report.failed.items()
    assert key == store.key("numbers", {"index": 5})
    assert "killed by SIGKILL" in reason
    assert "a last word before it dies" in reason
    assert diary(log) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 3}
    assert sum(diary(log, "end").values()) == 5


def test_a_unit_that_takes_too_long_is_stopped(store, log):
    work = [unit(0, "work", seconds=100, diary=log), *units(3, diary=log)[1:]]
    # The limit is for the quick units too, and these have one attempt: seconds, where they need milliseconds.
    report = run_units(work, store, cluster="local", jobs=2, timeout_min=4 / 60, max_attempts=1)
    assert len(report.done) == 2
    assert "--timeout-min" in next(iter(report.failed.values()))


def test_workers_that_cannot_start_are_one_error(store, monkeypatch):
    monkeypatch.setattr(local, "worker_environment", lambda *_: {"PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"})
    with pytest.raises(JobError, match="no worker process starts"):
        run_units(units(2), store, cluster="local", jobs=1)


def test_workers_have_their_share_of_cores_and_their_own_gpu(store, log, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(local, "cores", lambda: 6)
    work = units(4, "environment", diary=log, num_workers=2)
    run_units(work, store, cluster="local", jobs=2, gpus_per_job=1)
    records = [store.read("numbers", {"index": index}).record for index in range(4)]
    assert {record["OMP_NUM_THREADS"] for record in records} == {"3"}
    assert {record["CUDA_VISIBLE_DEVICES"] for record in records} == {"4", "7"}
    assert len({(record["pid"], record["CUDA_VISIBLE_DEVICES"]) for record in records}) == 2
    # Where units name a device, a GPU each is the default; on the CPU nothing is pinned.
    more = {"device": "auto", "diary": f"{log}2", "num_workers": 2}
    work = [unit(index, "environment", **more) for index in range(10, 14)]
    run_units(work, store, cluster="local")
    records = [store.read("numbers", {"index": index}).record for index in range(10, 14)]
    assert {record["CUDA_VISIBLE_DEVICES"] for record in records} == {"4", "7"}
    with pytest.raises(UsageError, match="more GPUs than this machine has"):
        run_units(units(5), store, cluster="local", gpus_per_job=3)


def test_arguments_are_checked(store):
    for arguments, reason in [
        ({"cluster": "cloud"}, "available: inline, local, slurm"),
        ({"jobs": 0}, "--jobs"),
        ({"gpus_per_job": -1}, "--gpus-per-job"),
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


def test_collect_starts_nothing(store, log):
    run_units(units(2), store)
    report = run_units(units(5, diary=log), store, cluster="local", collect=True)
    assert len(report.done) == 2
    assert len(report.pending) == 3
    assert not Path(log).exists()


def test_units_are_plain_data():
    first = Unit("numbers", {"sizes": (1, 2), "n": np.int64(3)}, "tests.job_units:work", {"x": (1,)})
    assert first == Unit.from_json(json.loads(json.dumps(first.to_json())))
    with pytest.raises(StoreError, match=r"payload\.model"):
        Unit("numbers", {}, "tests.job_units:work", {"model": object()})


# -- a campaign in a process of its own, to be killed -----------------------------------------------------------------

DRIVER = """
import sys, json
sys.path[:0] = [{root!r}]
from tests.job_units import units
from retrain.jobs import run_units
from retrain.store import Store
print("ready", flush=True)
report = run_units(units({count}, {action!r}, **{payload!r}), Store({cache!r}), cluster={cluster!r}, jobs={jobs})
print(json.dumps([len(report.done), len(report.failed), report.num_computed]), flush=True)
"""


def driver(store, count, cluster, jobs=2, action="work", **payload):
    text = DRIVER.format(
        root=str(ROOT),
        count=count,
        action=action,
        payload=payload,
        cache=str(store.root),
        cluster=cluster,
        jobs=jobs,
    )
    # What runs in a shell's background inherits a SIGINT that is ignored; a terminal's does not.
    text = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{text}"
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def wait_for(condition, process=None, seconds=120.0):
    """Wait until something is so; not for ever, and not when the `process` that it depends on is gone."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        assert process is None or process.poll() is None, f"the driver is gone: {process.stderr.read()}"
        time.sleep(0.01)


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


def test_workers_end_with_a_killed_driver(store, log):
    process = driver(store, 500, "local", seconds=0.05, diary=log, hold_after=2)
    # Both are in the middle of a unit that they will not come to the end of.
    wait_for(lambda: sum(diary(log).values()) - 2 == sum(diary(log, "end").values()) >= 2, process)
    assert len(workers_of(store)) == 2
    process.kill()
    process.communicate()
    wait_for(lambda: not workers_of(store))
    assert 2 <= len(list(store.entries())) <= 3


def test_overlapping_campaigns_share_the_work(store, log):
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


# -- claims -----------------------------------------------------------------------------------------------------------


def test_a_claim_is_exclusive_until_released(store):
    claims = Claims(store.root, "c" * 12)
    claim = claims.take("numbers", "a" * 20)
    assert claims.take("numbers", "a" * 20) is None
    assert claims.holder("numbers", "a" * 20).pid == os.getpid()
    assert list(claims.held()) == [("numbers", "a" * 20)]
    claim.release()
    assert claims.holder("numbers", "a" * 20) is None
    with claims.take("numbers", "a" * 20) as again:
        assert again.previous is None
    assert claims.held() == {}


def planted(claims, age=0.0, **values):
    path = claims.path("numbers", "b" * 20)
    path.parent.mkdir(exist_ok=True)
    alive = os.getppid()  # this process knows what it holds itself
    holder = {**vars(Holder.this_process()), "pid": alive, "started": process_started(alive), **values}
    path.write_text(json.dumps(holder))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_stale_claims_are_taken_over(store, monkeypatch):
    claims = Claims(store.root)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    key = "b" * 20
    for stale, values in [
        (False, {}),
        (True, {"pid": dead.pid}),
        (True, {"started": 1}),  # the same process id, another process
        (False, {"age": 10_000}),  # alive on this host, however long it takes
        (False, {"host": "elsewhere"}),
        (True, {"host": "elsewhere", "age": 10_000}),
        (False, {"host": "elsewhere", "age": 60}),
    ]:
        planted(claims, **values)
        claim = claims.take("numbers", key)
        assert (claim is not None) == stale, values
        if claim:
            assert claim.previous is not None
            claim.release()
    # A requeued Slurm job knows that its earlier self is gone; another job does not.
    planted(claims, host="elsewhere", job="7_1", restart=0)
    assert claims.take("numbers", key) is None
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    claims.take("numbers", key).release()


def test_strange_claim_files_are_held_until_old(store):
    claims = Claims(store.root)
    for text in ("", "[]", "{}", '{"pid": "x"}', "\0" * 100):
        path = planted(claims)
        path.write_text(text)
        assert claims.take("numbers", "b" * 20) is None
        os.utime(path, (1, 1))
        claims.take("numbers", "b" * 20).release()


def test_claims_are_renewed_while_held(store, monkeypatch):
    monkeypatch.setattr(claims_module, "RENEW_SECONDS", 0.02)
    claim = Claims(store.root).take("numbers", "c" * 20)
    os.utime(claim.path, (1, 1))
    wait_for(lambda: claim.path.stat().st_mtime > 1e9)
    claim.release()


def test_one_of_many_threads_takes_over(store):
    claims = Claims(store.root)

    def take(taken):
        taken.append(claims.take("numbers", "b" * 20))

    for _ in range(30):
        planted(claims, started=1)
        taken = []
        threads = [threading.Thread(target=take, args=(taken,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [claim for claim in taken if claim]
        winner.release()


def test_claims_without_hard_links(store, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(claims_module.os, "link", refuse)
    test_a_claim_is_exclusive_until_released(store)
    test_stale_claims_are_taken_over(store, monkeypatch)


def test_what_killed_processes_left_is_cleaned(store):
    claims = Claims(store.root)
    run_units(units(2), store)
    keys = [store.key("numbers", {"index": index}) for index in (0, 1, 2)]
    planted(claims, started=1).rename(claims.path("numbers", keys[0]))  # dead, and its unit done: goes
    planted(claims, started=1).rename(claims.path("numbers", keys[2]))  # dead, its unit not done: to be taken over
    mine = claims.take("numbers", keys[1])  # alive: stays
    (claims.folder / ".draft").write_text("")
    os.utime(claims.folder / ".draft", (1, 1))
    (claims.folder / ".fresh").write_text("")
    claims.clean(store)
    assert set(os.listdir(claims.folder)) == {f"numbers.{keys[1]}", f"numbers.{keys[2]}", ".fresh", ".lock"}
    mine.release()


def test_the_host_name_is_fit_for_a_file():
    assert "/" not in host_name()
    assert "." not in host_name()


# -- records and flags ------------------------------------------------------------------------------------------------


def test_a_campaign_can_be_read_back(store, log, caplog):
    work = [*units(3, diary=log), unit(3, "fail")]
    with caplog.at_level(logging.WARNING):
        report = run_units(work, store, name="three numbers")
    assert "failed 3 times" in caplog.text
    (campaign,) = Campaign.all(store)
    assert campaign.id == report.campaign
    content = campaign.describe()
    assert content["name"] == "three numbers"
    assert content["num_units"] == 4
    assert list(campaign.units(content["units_sha256"]).values()) == work
    events = [event["event"] for event in campaign.events(content["run"])]
    assert events == ["done"] * 3 + ["failed"] * 3
    (path,) = campaign.folder.glob("units-*.jsonl")
    with open(path, "a") as file:
        file.write("{")
    assert len(campaign.unit_names()) == 4
    with pytest.raises(ValueError, match="has changed"):
        campaign.units(content["units_sha256"])


def test_flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    add_cluster_arguments(parser)
    assert cluster_options(parser.parse_args([]))["cluster"] == ("local" if (os.cpu_count() or 1) > 1 else "inline")
    assert cluster_options(parser.parse_args(["--device", "cuda"]))["cluster"] == "inline"
    options = "--cluster slurm --jobs 4 --slurm partition=gpu --slurm mem-per-cpu=2G --timeout-min 30 --collect"
    assert cluster_options(parser.parse_args(options.split())) == {
        "cluster": "slurm",
        "jobs": 4,
        "gpus_per_job": None,
        "slurm": {"partition": "gpu", "mem_per_cpu": "2G"},
        "timeout_min": 30.0,
        "collect": True,
    }
    for bad in (["--cluster", "slurm", "--slurm", "gpu"], ["--slurm", "partition=gpu"], ["--jobs", "0"]):
        with pytest.raises(UsageError):
            cluster_options(parser.parse_args(bad))
