"""The Slurm driver and its tasks, on a make-believe Slurm; `tests/slurm` has the same and more on a real one."""

import logging
import os
import signal
import subprocess
import threading

import pytest

from bench import cache as cache_command
from retrain.jobs import JobError, run_units, slurm
from retrain.jobs.unit import JobBatch
from retrain.leases import Leases
from retrain.resume import ResumeState, unfinished_units
from retrain.store import Store
from tests.helpers import fake_slurm
from tests.helpers.job_units import Background, diary, events, unit, units, wait_for
from tests.helpers.problems import refused


@pytest.fixture
def store(tmp_path, monkeypatch):
    for name, value in fake_slurm.install(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm, "QUEUE_SECONDS", 0.1)
    monkeypatch.setattr(slurm, "MAX_POLL_SECONDS", 0.3)
    monkeypatch.setattr(slurm, "GRACE_SECONDS", 0.3)
    yield Store(tmp_path / "cache")
    fake_slurm.scancel(list(fake_slurm.jobs()))


def report_of(background):
    report = background.result(300)
    # The driver is done when the store is full; the last tasks may have yet to say that they are, too.
    wait_for(lambda: slurm.live_jobs() == {})
    return report


def test_a_batch_with_every_mishap(store, log, tmp_path, caplog):
    # Nothing ends before the mishaps are over: each meets a unit in progress, on a slow machine too.
    work = units(40, seconds=0.03, diary=log, hold_after=0, gate=str(tmp_path / "gate"))
    background = Background(work, store, jobs=3, timeout_min=5)
    leases = Leases(store.root)
    holders = lambda: [h for (kind, _), h in leases.held().items() if kind == "numbers"]  # noqa: E731
    wait_for(lambda: sum(diary(log).values()) == 3)
    one, two, three = holders()
    with caplog.at_level(logging.WARNING):
        os.kill(one.pid, signal.SIGKILL)
        subprocess.run(["scancel", two.job], check=True)
        subprocess.run(["scontrol", "requeue", three.job], check=True)
        wait_for(lambda: [event["reason"] for event in events(store, "exit")] == ["stopped by SIGTERM"] * 2)
        (tmp_path / "gate").touch()
        report = report_of(background)
    assert report.complete
    assert report.num_computed == 40
    assert set(diary(log, "end").values()) == {1}
    assert sum(diary(log).values()) == 43
    assert len(events(store, "done")) == 40
    assert {event["reason"] for event in events(store, "exit")} == {"nothing left to do", "stopped by SIGTERM"}


def test_failures_are_counted_across_tasks(store, log):
    work = units(2, diary=log)
    work += [unit(2, "fail", diary=log), unit(3, "die", diary=log), unit(4, "fail_first", diary=log)]
    report = run_units(work, store, cluster="slurm", jobs=2, timeout_min=5)
    assert len(report.done) == 3
    fail, die = (report.failed[store.key("numbers", {"index": index})] for index in (2, 3))
    assert fail.startswith("failed 3 times, the last time with ValueError: unit 2 cannot be done")
    assert "while it had the unit" in die
    assert diary(log) == {0: 1, 1: 1, 2: 3, 3: 3, 4: 3}


@pytest.fixture
def task(store, log, monkeypatch):
    """A function that runs a task in this process and returns how it ended; requeued jobs are listed."""
    requeued = []

    def requeue(command, **_):
        requeued.append(command)
        raise slurm.Stopped(signal.SIGTERM)  # what Slurm does to a job that it takes back

    def run(work, time_limit_s=3600.0, stop=None, when=None, same_failures=0):
        """`stop` is a signal that this process gets while it is at a unit, once `when` is so."""
        by_key = {store.key(unit.kind, unit.config): unit for unit in work}
        batch = JobBatch.of(store, by_key)
        batch.write(by_key, name="", cluster="slurm", run="run1")
        digest = batch.describe()["units_sha256"]
        worker = slurm.ArrayWorker(str(store.root), batch.id, "run1", digest, time_limit_s, 3, same_failures)
        kept = [signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)]
        over, num_begun = threading.Event(), sum(diary(log).values())

        def send():
            while not over.wait(0.01):
                if sum(diary(log).values()) > num_begun and (when is None or when()):
                    os.kill(os.getpid(), stop)
                    return

        sender = threading.Thread(target=send)
        if stop is not None:
            sender.start()
        try:
            return worker()
        except SystemExit as ended:
            return str(ended)
        finally:
            over.set()
            if stop is not None:
                sender.join()  # before its signal would meet nobody who handles it
            for number, handler in zip((signal.SIGUSR2, signal.SIGTERM), kept, strict=True):
                signal.signal(number, handler)

    monkeypatch.setattr(slurm.subprocess, "run", requeue)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return run, requeued


def test_a_task_whose_time_is_up_goes_back_into_the_queue_and_on(store, task, log):
    run, requeued = task
    work = units(8, seconds=0.1, diary=log)
    assert run(work, time_limit_s=0.5) == "back in the queue"
    assert requeued == [["scontrol", "requeue", "7"]]
    assert 1 <= sum(diary(log, "end").values()) < 8
    run(work)
    assert diary(log) == dict.fromkeys(range(8), 1)


def test_signals_give_back_the_unit_in_progress(store, task, log):
    run, requeued = task
    for number, again in ((signal.SIGUSR2, 1), (signal.SIGTERM, 0)):
        requeued.clear()
        ended = run(units(1, seconds=100, diary=log), stop=number)
        assert len(requeued) == again
        assert ended == ("back in the queue" if again else "stopped by SIGTERM; 0 units are kept")
        assert Leases(store.root).held() == {}
    assert not store.has("numbers", {"index": 0})


@pytest.mark.parametrize("saved", [False, True])
def test_a_unit_that_no_task_can_finish_in_time_is_given_up(store, task, log, saved):
    """Also one that saved its work once and stands still since."""
    run, _ = task
    if saved:
        ResumeState.of(store, "numbers", store.key("numbers", {"index": 0})).save("count", {}, {"count": 3})
    for _ in range(3):
        run(units(1, seconds=100, diary=log), time_limit_s=0.3, stop=signal.SIGUSR2)
    assert run(units(1, seconds=100, diary=log)) == 0
    assert diary(log) == {0: 3}
    assert [event["reason"] for event in events(store, "failed")] == ["it takes more than --timeout-min 0.005"] * 3
    assert events(store, "unfinished") == []


def test_a_unit_that_saves_its_work_goes_on_however_many_tasks_it_takes(store, task, log):
    run, requeued = task
    work = [unit(0, "saves", steps=6, per_attempt=1, diary=log)]
    for count in range(1, 6):
        stop = lambda count=count: sum(diary(log, "step").values()) >= count  # noqa: E731
        assert run(work, time_limit_s=0.3, stop=signal.SIGUSR2, when=stop) == "back in the queue"
        assert [event["event"] for event in events(store)[-2:]] == ["unfinished", "exit"]
    assert run(work) == 1
    assert events(store, "failed") == []
    assert len(events(store, "unfinished")) == len(requeued) == 5
    assert all(event["advanced"] for event in events(store, "exit")[:-1])
    assert diary(log, "step") == {0: 6}
    assert unfinished_units(store) == []


def test_a_task_that_its_time_limit_killed_is_no_failure_where_it_saved_its_work(store, log):
    """It did not listen to the warning, so the driver finds out; with one attempt a unit, nothing may be counted."""
    work = [unit(0, "saves", steps=3, per_attempt=1, diary=log)]
    background = Background(work, store, jobs=1, timeout_min=5, max_attempts=1)
    for count in (1, 2):
        wait_for(lambda count=count: sum(diary(log, "step").values()) == count)
        (holder,) = [h for (kind, _), h in Leases(store.root).held().items() if kind == "numbers"]
        wait_for(lambda holder=holder: holder.job in str(slurm.submissions(JobBatch.all(store)[0])))
        fake_slurm.time_out(holder.job)
    assert report_of(background).complete
    assert diary(log) == {0: 3}
    assert [event["event"] for event in events(store) if "key" in event] == ["unfinished", "unfinished", "done"]


def test_tasks_stop_at_a_bug_without_their_driver(store, task, log):
    run, _ = task
    said = run(units(50, "mistake", diary=log), same_failures=3)
    assert said.startswith("stopped, as the first 3 units failed alike")
    assert sum(diary(log).values()) == 3
    (event,) = events(store, "fatal")
    assert event["error"] == "RepeatedFailureError"


def test_nothing_that_tasks_run_lies_in_the_cache_and_its_logs_are_pruned(store):
    assert run_units(units(2), store, cluster="slurm", jobs=1, timeout_min=5).complete
    wait_for(lambda: slurm.live_jobs() == {})
    (batch,) = JobBatch.all(store)
    files = [path for path in store.root.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".jsonl", ".safetensors", ".out", ""}
    assert list((batch.folder / "logs").glob("*.out"))
    assert cache_command.main(["prune", "logs", "--yes", "--cache", str(store.root)]) == 0
    assert not batch.folder.exists()


# -- drivers ----------------------------------------------------------------------------------------------------------
def test_a_driver_that_comes_back_joins_the_jobs_that_run(store, log):
    work = units(30, seconds=0.1, diary=log)
    background = Background(work, store, jobs=2, timeout_min=5)
    # The driver notes what it has submitted after sbatch returns: a quick task may be at work before that.
    wait_for(lambda: sum(diary(log).values()) >= 2 and slurm.submissions(JobBatch.all(store)[0]))
    # A second driver, and one that only collects, submit nothing of their own.
    assert run_units(work, store, cluster="slurm", jobs=2, collect=True).complete
    assert report_of(background).complete
    (batch,) = JobBatch.all(store)
    assert len(slurm.submissions(batch)) == 1
    assert set(diary(log).values()) == {1}
    report = run_units([*work, unit(99)], store, cluster="slurm", collect=True)
    assert report.pending == [store.key("numbers", {"index": 99})]


def test_what_slurm_refuses_and_tasks_that_cannot_start_are_one_line(store, monkeypatch):
    with pytest.raises(JobError, match="invalid partition") as caught:
        run_units(units(1), store, cluster="slurm", slurm={"partition": "nowhere"})
    assert str(caught.value).isprintable()
    with pytest.raises(JobError, match="no Slurm task starts"):
        run_units(units(4), store, cluster="slurm", jobs=3, slurm={"setup": "echo broken; exit 1"})
    refused(lambda: run_units(units(1), store, cluster="slurm", slurm={"array": "0-3"}), "--jobs")
    refused(lambda: run_units([unit(0, "refuse")], store, cluster="slurm", jobs=1), "what was asked for")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(JobError, match="Slurm is not here"):
        run_units(units(1), store, cluster="slurm")


def test_options_reach_sbatch_and_the_number_of_tasks_follows_from_the_seconds_of_the_first_units():
    options = {"partition": "gpu", "mem_per_cpu": "2G", "cpus_per_task": "4", "exclusive": "true", "nice": "5"}
    flags, setup = slurm.sbatch_options("tda", True, 30, options | {"tasks_per_node": 2, "setup": "module load cuda"})
    wanted = "--partition=gpu --mem-per-cpu=2G --cpus-per-task=4 --exclusive --nice=5 --ntasks-per-node=2"
    assert {*wanted.split(), "--time=30", "--gpus-per-node=1", "--requeue", "--signal=USR2@90"} <= set(flags)
    assert setup[-1] == "module load cuda"
    assert slurm.tasks_for(6000, []) == slurm.FIRST_TASKS
    assert slurm.tasks_for(6000, [1.0, 1.2, 0.9]) == 100
    assert slurm.tasks_for(10, [0.1]) == 1
    assert slurm.tasks_for(50, [600.0]) == 500


def test_a_slurm_that_never_answers_is_not_waited_for(store, tmp_path, monkeypatch):
    """Nothing was submitted, so nothing is lost; its own words say why."""
    silent = tmp_path / "silent"
    silent.mkdir()
    (silent / "squeue").write_text("#!/bin/sh\necho 'squeue: error: no controller' >&2\nexit 1\n")
    (silent / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{silent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "FIRST_ANSWER_SECONDS", 0.5)
    with pytest.raises(JobError, match="nothing was submitted: squeue: error: no controller"):
        run_units(units(2), store, cluster="slurm")
