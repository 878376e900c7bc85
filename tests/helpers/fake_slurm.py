"""A Slurm of five little commands: array tasks are processes of this machine. For tests where there is no real one.

Installed under the names sbatch, srun, squeue, scancel and scontrol by `install`; real Slurm is in `tests/slurm`.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol")


def install(folder):
    """Put the commands into a folder and return the environment variables that make them work."""
    bin_folder, state = folder / "bin", folder / "state"
    bin_folder.mkdir()
    state.mkdir()
    for name in COMMANDS:
        script = bin_folder / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {Path(__file__).resolve()} {name} "$@"\n')
        script.chmod(0o755)
    return {"PATH": f"{bin_folder}:{os.environ['PATH']}", "FAKE_SLURM": str(state)}


def state_folder():
    return Path(os.environ["FAKE_SLURM"])


def live_groups():
    """The process groups with a process that has not ended. A job is one: its script may end before its task does."""
    groups = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if state not in ("Z", "X"):
            groups.add(int(group))
    return groups


def jobs():
    return {path.stem: json.loads(path.read_text()) for path in state_folder().glob("*.json")}


def launch(name, script, output, restart):
    given, (array, _, task) = output, name.partition("_")
    names = {"SLURM_JOB_ID": array + (task or ""), "SLURM_RESTART_COUNT": str(restart), "SLURM_NTASKS": "1"}
    if task:
        names |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task}
    for mark, value in {"%A": array, "%a": task, "%%": "%"}.items():
        output = output.replace(mark, value)
    with open(output, "ab") as log:
        process = subprocess.Popen(
            ["bash", script], env={**os.environ, **names}, stdout=log, stderr=log, start_new_session=True
        )
    content = {"pid": process.pid, "script": script, "output": given, "restart": restart}
    draft = state_folder() / f"{name}.draft"
    draft.write_text(json.dumps(content))
    draft.rename(state_folder() / f"{name}.json")


def sbatch(arguments):
    text, options = sys.stdin.read(), dict(word.removeprefix("--").split("=", 1) for word in arguments if "=" in word)
    if options.get("partition") == "nowhere":
        sys.exit("sbatch: error: invalid partition specified: nowhere")
    number = 1 + max([int(name.partition("_")[0]) for name in jobs()], default=0)
    copy = state_folder() / f"{number}.sh"
    copy.write_text(text)
    last = int(re.fullmatch(r"0-(\d+)%\d+", options["array"])[1])
    for task in range(last + 1):
        launch(f"{number}_{task}", str(copy), options["output"], 0)
    print(f"Submitted batch job {number}")


def srun(arguments):
    os.execvp(arguments[1], arguments[1:])  # behind -u


def squeue(_arguments):
    live = live_groups()
    for name, job in jobs().items():
        if job["pid"] in live:
            print(f"{name}|RUNNING")


def end(name, job):
    """End a job's processes and wait for them: SIGKILL only for those that outlive KillWait, 30 s as in Slurm."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job["pid"], number)
        limit = time.monotonic() + 30
        while time.monotonic() < limit:
            if job["pid"] not in live_groups():
                return
            time.sleep(0.02)


def time_out(name):
    """End a job as Slurm does when its time is up and it did not listen to the warning."""
    job = jobs()[name]
    (state_folder() / f"{name}.json").write_text(json.dumps({**job, "ended": "TIMEOUT"}))
    os.killpg(job["pid"], signal.SIGKILL)


def scancel(arguments):
    if any(word.startswith("--state") for word in arguments):
        return
    for name, job in jobs().items():
        if name in arguments or name.partition("_")[0] in arguments:
            end(name, job)


def scontrol(arguments):
    name = arguments[-1]
    job = jobs()[name]
    if arguments[0] == "show":
        print(f"JobId={name} JobState={'RUNNING' if job['pid'] in live_groups() else job.get('ended', 'FAILED')}")
    elif os.fork() == 0:
        # The caller may be the job itself: somebody else has to end it.
        os.setsid()
        end(name, job)
        launch(name, job["script"], job["output"], job["restart"] + 1)
        os._exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2:])
