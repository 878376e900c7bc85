"""The cache: what is done, running, failed and missing; list what it holds, verify every checksum, and prune.

    python -m bench.cache                                  entries and bytes, by kind
    python -m bench.cache status                           every batch of jobs, the latest first; --json for programs
    python -m bench.cache status 3f2a                      one batch (the beginning of its id), its holders and failures
    python -m bench.cache list --kind retrain              every entry, with its configuration
    python -m bench.cache verify                           read everything; damaged entries are quarantined, exit code 1
    python -m bench.cache prune --kind scores --older-than 30       delete (asks first; --yes does not)
    python -m bench.cache prune quarantine                 delete what was quarantined; also: logs of idle batches

Entries are found by what they are, so pruning costs time but never correctness: whatever a command needs again is
computed again. Caches are merged by copying one folder over another.
"""

import argparse
import itertools
import json
import math
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.arguments import Parser, run_cli
from bench.tables import bytes_text, duration, table
from retrain.jobs.tracker import MAX_ATTEMPTS
from retrain.jobs.unit import JobBatch
from retrain.leases import Holder, Leases
from retrain.resume import unfinished_units
from retrain.safe_files import SafeFileError, folder_bytes, one_line, read_json
from retrain.store import (
    ENTRY_FILE,
    QUARANTINE,
    DamagedEntryError,
    EntryInfo,
    PassingStoreError,
    Store,
    StoreError,
    canonical_json,
    default_cache,
)  # fmt: skip

PRUNED = ("all", "quarantine", "logs")
CONFIG_WIDTH = 120  # characters of a configuration in a list
RECENT_UNITS = 50  # the pace is theirs: a batch's first ones also load data and compile
MAX_HOLDERS = 20


def chosen(store: Store, arguments: argparse.Namespace) -> Iterator[EntryInfo]:
    """The entries that --kind and --older-than describe."""
    oldest = math.inf if arguments.older_than is None else time.time() - arguments.older_than * 86400
    return (info for info in store.entries(arguments.kind) if oldest == math.inf or info.modified() <= oldest)


def summary(store: Store, arguments: argparse.Namespace) -> int:
    found: list[tuple[str, list[int], str]] = []  # kind, bytes of each, what they are
    for kind, infos in itertools.groupby(store.entries(), key=lambda info: info.kind):
        found.append((kind, [info.num_bytes() for info in infos], "entries"))
    found.append((QUARANTINE, [folder_bytes(path) for path in (store.root / QUARANTINE).glob("*")], "entries"))
    found.append(("unfinished work", [work.num_bytes() for work in unfinished_units(store)], "folders"))
    found.append(("batch logs", [folder_bytes(batch.folder) for batch in JobBatch.all(store)], "folders"))
    told = [(name, f"{len(sizes):8,} {what}  {bytes_text(sum(sizes)):>10}") for name, sizes, what in found if sizes]
    lines = [f"  {name:20} {text}" for name, text in told]
    print("\n".join([str(store.root), *(lines or ["  empty"])]))
    return 0


def show_list(store: Store, arguments: argparse.Namespace) -> int:
    for info in chosen(store, arguments):
        try:
            content = read_json(info.path / ENTRY_FILE)  # unverified: for display
        except SafeFileError:
            content = {}
        config = content.get("config", {}) if isinstance(content, dict) else {}
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(info.modified()))
        told = one_line(canonical_json(config), CONFIG_WIDTH)
        print(f"{info.kind}  {info.key}  {when}  {bytes_text(info.num_bytes()):>9}  {told}")
    return 0


def verify(store: Store, arguments: argparse.Namespace) -> int:
    num_entries = num_damaged = num_unread = num_bytes = 0
    for info in chosen(store, arguments):
        num_entries += 1
        num_bytes += info.num_bytes()
        try:
            store.verified(info.kind, info.key)
        except DamagedEntryError as error:
            if store.arriving(info):
                num_unread += 1
                print(f"changed just now, perhaps still being copied: {error}", file=sys.stderr)
            else:
                num_damaged += 1
                print(f"damaged: {error}", file=sys.stderr)
                store.quarantine(info, str(error))
        except PassingStoreError as error:
            num_unread += 1
            print(f"not read: {error}", file=sys.stderr)
    unread = f", {num_unread:,} not to be judged now" if num_unread else ""
    print(f"{num_entries:,} entries ({bytes_text(num_bytes)}) read, {num_damaged:,} damaged{unread}")
    return 1 if num_damaged or num_unread else 0


def prune(store: Store, arguments: argparse.Namespace) -> int:
    """Deletes entries, what was quarantined, or the logs of batches that nobody is at; asks before it does."""
    infos: list[EntryInfo] = []
    folders: list[Path] = []
    if arguments.what == "quarantine":
        folders = list((store.root / QUARANTINE).glob("*"))
    elif arguments.what == "logs":
        busy = {holder.batch for holder in Leases(store.root).held().values()}
        folders = [batch.folder for batch in JobBatch.all(store) if batch.id not in busy]
    elif arguments.what or arguments.kind or arguments.older_than is not None:
        infos = list(chosen(store, arguments))
    else:
        raise StoreError(f"say what to delete: --kind, --older-than, or one of {', '.join(PRUNED)}")
    num_bytes = sum(info.num_bytes() for info in infos) + sum(map(folder_bytes, folders))
    kind = f"folders of {arguments.what}" if folders else "entries"
    what = f"{len(infos) + len(folders):,} {kind} ({bytes_text(num_bytes)})"
    if not infos and not folders:
        print("nothing to delete")
    elif arguments.dry_run:
        print(f"would delete {what}")
    elif not arguments.yes and not sys.stdin.isatty():
        raise StoreError(f"would delete {what}: add --yes (or --dry-run)")
    elif arguments.yes or input(f"delete {what}? [y/N] ").strip().lower() in ("y", "yes"):
        print(f"deleting {what}")
        for info in infos:
            store.remove_key(info.kind, info.key)
        for folder in folders:
            shutil.rmtree(folder) if folder.is_dir() and not folder.is_symlink() else folder.unlink()
    return 0


# ---- the status of batches ----


def state_of(batch: JobBatch, held: dict[tuple[str, str], Holder], now: float) -> dict[str, Any]:
    """The counts of a batch, its holders, its failures and the seconds until it is done (None: cannot be said)."""
    content, names = batch.describe(), batch.unit_names()
    present = batch.store.present(names)
    running = {name: held[name] for name in names if name in held and name not in present}
    trials: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    done: list[tuple[float, float]] = []  # when, and the seconds that it took
    stopped = ""
    for event in batch.events(content.get("run", "")):
        kind, key = event["event"], event.get("key", "")
        if kind in ("failed", "died"):
            trials[key] += 1
            reasons[key] = event.get("reason", "")
        elif kind == "done":
            done.append((event["time"], event.get("seconds", 0.0)))
        elif kind == "fatal":
            stopped = event.get("reason", "")
    keys = {name[1] for name in names if name not in present and name not in running}
    # While somebody works, what failed may be tried again; when nobody does, it has failed.
    enough = MAX_ATTEMPTS if running else 1
    failed = {key: reasons[key] for key, count in trials.items() if count >= enough and key in keys}
    num_missing = len(names) - len(present) - len(running) - len(failed)

    # How long the rest takes at the pace of the latest units; nobody knows where nobody works on it.
    num_left, pace = num_missing + len(running), statistics.median(seconds for _, seconds in done) if done else None
    recent = sorted(when for when, _ in done)[-RECENT_UNITS:]
    eta = None if num_left else 0.0
    if num_left and running and pace is not None:
        eta = num_left * pace / len(running)
        if len(recent) >= 5 and now > recent[0]:
            eta = num_left * (now - recent[0]) / len(recent)
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
        "seconds_per_unit": pace,
        "eta_seconds": eta,
        "holders": [
            {"kind": kind, "key": key, "host": holder.host, "pid": holder.pid, "job": holder.job, "since": holder.since}
            for (kind, key), holder in sorted(running.items())
        ],
        "failed": dict(sorted(failed.items())),
        "stopped": stopped,
    }


def details(state: dict[str, Any], now: float) -> str:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in state["kinds"].items())
    lines = [f"command: {state['command']}", *([f"units: {kinds}"] if kinds else [])]
    for held in state["holders"][:MAX_HOLDERS]:
        holder = f"{held['host']} pid {held['pid']}" + (f" (Slurm job {held['job']})" if held["job"] else "")
        age = duration(max(0.0, round(now - held["since"])))
        lines.append(one_line(f"{held['kind']} {held['key']} is held by {holder} for {age}"))
    if len(state["holders"]) > MAX_HOLDERS:
        lines.append(f"and {len(state['holders']) - MAX_HOLDERS:,} more are held")
    reasons = [state["stopped"]] if state["stopped"] else []
    for reason in [*reasons, *(f"failed {key}: {reason}" for key, reason in state["failed"].items())]:
        # From a log, whoever wrote it: further lines are indented, so that none passes for one of ours.
        first, *others = (one_line(line) for line in reason.split("\n"))
        lines += [first, *(f"    {line.strip()}" for line in others)]
    if state["num_missing"] and not state["num_running"]:
        lines.append("nobody works on it: run its command again to go on")
    return "\n".join(lines)


def show_status(store: Store, arguments: argparse.Namespace) -> int:
    """Reads the cache only: it starts nothing, changes no file that is there, and asks nobody (not even Slurm)."""
    now, held = time.time(), Leases(store.root).held()
    found = [batch for batch in JobBatch.all(store) if batch.id.startswith(arguments.batch)]
    if arguments.batch and not found:
        raise StoreError(f'no batch begins with "{arguments.batch}" in {store.root}')
    states = [state_of(batch, held, now) for batch in found]
    if arguments.json:
        print(json.dumps(states, indent=1))
        return 0
    if not states:
        print(f"no batch in {store.root}")
        return 0
    header, rows = ["batch", "done", "running", "failed", "missing", "of", "s/unit", "ETA", "where", "what"], []
    for state in states:
        counts = [f"{state[name]:,}" for name in ("num_done", "num_running", "num_failed", "num_missing", "num_units")]
        pace = "-" if state["seconds_per_unit"] is None else f"{state['seconds_per_unit']:.2f}"
        eta = "done" if state["num_done"] == state["num_units"] else duration(state["eta_seconds"])
        rows.append([state["batch"], *counts, pace, eta, state["cluster"], state["name"]])
    print(table(header, rows, left=(0, 8, 9)))
    if arguments.batch or len(states) == 1:
        for state in states:
            print(details(state, now))
    elif any(state["num_failed"] for state in states):
        print("why units failed: tda-bench cache status BATCH")
    return 0


def days(text: str) -> float:
    """A number that a typing error cannot make mean "everything"."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f'"{text}" is no number of days; expected 0 or more, for example 30')
    return value


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.cache", description=str(__doc__).split("\n")[0])
    common, which = Parser(add_help=False), Parser(add_help=False)
    common.add_argument("--cache", default=default_cache(), help="where finished work is kept (default: %(default)s)")
    which.add_argument("--kind", help="only entries of this kind, e.g. retrain, model, scores")
    which.add_argument("--older-than", type=days, metavar="DAYS", help="only entries written before so many days")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("summary", parents=[common], help="entries and bytes by kind (the default)")
    state = commands.add_parser("status", parents=[common], help="what is done, running, failed and missing")
    state.add_argument("batch", nargs="?", default="", help="the beginning of a batch's id (default: all)")
    state.add_argument("--json", action="store_true", help="print a JSON list")
    commands.add_parser("list", parents=[common, which], help="every entry")
    commands.add_parser("verify", parents=[common, which], help="check every checksum, quarantine what is damaged")
    pruning = commands.add_parser("prune", parents=[common, which], help="delete entries")
    others = "all entries; what was quarantined; logs of batches that nobody is at"
    pruning.add_argument("what", nargs="?", choices=PRUNED, help=others)
    pruning.add_argument("--dry-run", action="store_true", help="only say what would go")
    pruning.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0].startswith("--cache"):
        words.insert(0, "summary")
    arguments = parser.parse_args(words)
    commands = {"summary": summary, "status": show_status, "list": show_list, "verify": verify, "prune": prune}
    return run_cli(parser.prog, lambda: commands[arguments.command](Store(arguments.cache, create=False), arguments))


if __name__ == "__main__":
    sys.exit(main())
