"""What is done, running, failed and missing in a batch, who holds what, and when it will be finished.

    python -m bench.status                     every batch of the cache, the latest first
    python -m bench.status 3f2a                one batch (the beginning of its id), with its holders and failures
    python -m bench.status --json              the same for programs

Reads the cache only: it starts nothing, changes nothing, and asks nobody (not even Slurm).
"""

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.arguments import Parser
from bench.tables import duration, table
from retrain.jobs.tracker import MAX_ATTEMPTS
from retrain.jobs.unit import JobBatch
from retrain.leases import Holder, Leases
from retrain.safe_files import one_line
from retrain.store import Store, StoreError, default_cache

# The pace is taken from the latest units: a batch's first ones also load data and compile.
RECENT_UNITS = 50
MAX_HOLDERS = 20


def state_of(batch: JobBatch, held: dict[tuple[str, str], Holder], now: float) -> dict[str, Any]:
    """The counts of a batch, its holders, its failures and the seconds until it is done (None: cannot be said)."""
    content = batch.describe()
    names = batch.unit_names()
    present = batch.store.present(names)
    running = {name: held[name] for name in names if name in held and name not in present}
    trials: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    finished: list[float] = []
    seconds: list[float] = []
    stopped = ""
    for event in batch.events(content.get("run", "")):
        kind, key = event["event"], event.get("key", "")
        if kind in ("failed", "died"):
            trials[key] += 1
            reasons[key] = event.get("reason", "")
        elif kind == "done":
            seconds.append(event.get("seconds", 0.0))
            finished.append(event["time"])
        elif kind == "fatal":
            stopped = event.get("reason", "")
    keys = {name[1] for name in names if name not in present and name not in running}
    # While somebody works, what failed may be tried again; when nobody does, it has failed.
    enough = MAX_ATTEMPTS if running else 1
    failed = {key: reasons[key] for key, count in trials.items() if count >= enough and key in keys}
    num_missing = len(names) - len(present) - len(running) - len(failed)
    return {
        "batch": batch.id,
        "name": one_line(str(content.get("name") or ""), 60),
        "cluster": one_line(str(content.get("cluster") or ""), 20),
        "command": one_line(str(content.get("command") or ""), 400),
        "kinds": dict(Counter(kind for kind, _ in names)),
        "num_units": len(names),
        "num_done": len(present),
        "num_running": len(running),
        "num_failed": len(failed),
        "num_missing": num_missing,
        "seconds_per_unit": statistics.median(seconds) if seconds else None,
        "eta_seconds": remaining(num_missing + len(running), running, seconds, finished, now),
        "workers": sorted({str(holder) for holder in running.values()}),
        "holders": [
            {"kind": kind, "key": key, "host": holder.host, "pid": holder.pid, "job": holder.job, "since": holder.since}
            for (kind, key), holder in sorted(running.items())
        ],
        "failed": dict(sorted(failed.items())),
        "stopped": stopped,
    }


def remaining(
    num_left: int, running: dict[tuple[str, str], Holder], seconds: list[float], finished: list[float], now: float
) -> float | None:
    """Seconds until the rest is done at the pace of the latest units; None when nobody works on it."""
    if num_left == 0:
        return 0.0
    if not running or not seconds:
        return None
    recent = sorted(finished)[-RECENT_UNITS:]
    if len(recent) >= 5 and now > recent[0]:
        return num_left * (now - recent[0]) / len(recent)
    return num_left * statistics.median(seconds) / len(running)


def batches_table(states: list[dict[str, Any]]) -> str:
    header = ["batch", "done", "running", "failed", "missing", "of", "s/unit", "ETA", "where", "what"]
    rows = []
    for state in states:
        counts = [f"{state[name]:,}" for name in ("num_done", "num_running", "num_failed", "num_missing", "num_units")]
        pace = state["seconds_per_unit"]
        complete = state["num_done"] == state["num_units"]
        eta = "done" if complete else duration(state["eta_seconds"])
        seconds = "-" if pace is None else f"{pace:.2f}"
        rows.append([state["batch"], *counts, seconds, eta, state["cluster"], state["name"]])
    return table(header, rows, left=(0, 8, 9))


def details(state: dict[str, Any], now: float) -> str:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in state["kinds"].items())
    lines = [f"command: {state['command']}", *([f"units: {kinds}"] if kinds else [])]
    for held in state["holders"][:MAX_HOLDERS]:
        holder = f"{held['host']} pid {held['pid']}" + (f" (Slurm job {held['job']})" if held["job"] else "")
        age = duration(max(0.0, round(now - held["since"])))
        lines.append(one_line(f"{held['kind']} {held['key']} is held by {holder} for {age}"))
    if len(state["holders"]) > MAX_HOLDERS:
        lines.append(f"and {len(state['holders']) - MAX_HOLDERS:,} more are held")
    if state["stopped"]:
        lines += reason_lines(state["stopped"])
    for key, reason in state["failed"].items():
        lines += reason_lines(f"failed {key}: {reason}")
    if state["num_missing"] and not state["num_running"]:
        lines.append("nobody works on it: run its command again to go on")
    return "\n".join(lines)


def reason_lines(reason: str) -> list[str]:
    """A reason from a log, whoever wrote it: further lines are indented, so that none passes for one of ours."""
    first, *others = (one_line(line) for line in reason.split("\n"))
    return [first, *(f"    {line.strip()}" for line in others)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m bench.status", description=str(__doc__).split("\n")[0], allow_abbrev=False)
    parser.add_argument("batch", nargs="?", help="the beginning of a batch's id (default: all)")
    parser.add_argument("--cache", default=default_cache(), help="where finished work is kept (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    arguments = parser.parse_args(argv)
    now = time.time()
    try:
        store = Store(arguments.cache, create=False)
        found = JobBatch.all(store)
        if arguments.batch:
            found = [batch for batch in found if batch.id.startswith(arguments.batch)]
            if not found:
                raise StoreError(f'no batch begins with "{arguments.batch}" in {store.root}')
        held = Leases(store.root).held()
        states = [state_of(batch, held, now) for batch in found]
    except StoreError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(states, indent=1))
    elif not states:
        print(f"no batch in {store.root}")
    else:
        print(batches_table(states))
        if arguments.batch or len(states) == 1:
            for state in states:
                print(details(state, now))
        elif any(state["num_failed"] for state in states):
            print("why units failed: python -m bench.status BATCH")
    return 0


if __name__ == "__main__":
    sys.exit(main())
