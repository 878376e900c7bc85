"""SIGKILL at random moments of every command that takes time; nothing may be corrupt, doubled or lost beyond a minute.

    python -m tests.trials.kills --out results/trials/kills.json          # sixty kills, about twenty minutes
    python -m tests.trials.kills --kills 8 --seed 7

Each command of COMMANDS first runs undisturbed on a cache of its own. Then the same command runs on another cache, from
which half of the entries were removed, and is killed: the driver, a worker or both, a random time after its first unit
was leased. After each kill every entry and every file is compared with the undisturbed run's. What a kill cost is the
time in which the killed process had saved nothing. It saves every `--save-seconds` here, as these units are shorter
than the 30 s of a real run (`long_kills.py` has those). At the end every command finishes on the cache that was killed.
"""

import argparse
import contextlib
import csv
import io
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a forked command would wait for threads that its parent has

import numpy as np

import bench.evaluations.removal  # what commands need is imported once, before they are forked
import bench.runner  # noqa: F401
import retrain.resume
from bench import cli
from bench.records import command_line, from_columns, provenance, write_json
from retrain.jobs.unit import JobBatch
from retrain.leases import Holder, Leases
from retrain.resume import resume_folder
from retrain.store import Store

DIGITS = ("--task", "digits", "--device", "cpu", "--set", "digits.num_train=80", "--set", "digits.epochs=1")
TASK = (*DIGITS, "--cache", "{cache}", "--out", "{out}")
INLINE, LOCAL = ("--cluster", "inline"), ("--cluster", "local", "--jobs", "2")
PLAN = ("--alpha", "0.3", "--subsets", "12", "--replicates", "1", "--queries", "10")
METHODS = (  # small batches: many moments to save at
    *("--settings", "default", "--methods", "kfac", "ekfac", "trak", "gradsim", "bif", "--set", "bif.draws=30"),
    *("--set", "ekfac.fit_batch_size=8", "--set", "kfac.fit_batch_size=8", "--set", "trak.batch_size=8"),
)
FEW = ("--settings", "default", "--methods", "kfac", "gradsim")
REMOVAL = ("--queries", "3", "--shares", "0.1", "--replicates", "1")
COMMANDS = {
    "lds inline": ("lds", *TASK, *PLAN, *METHODS, *INLINE),
    "lds local": ("lds", *TASK, *PLAN, *METHODS, *LOCAL),
    "tune": ("tune", *TASK, *PLAN, "--methods", "kfac", "ekfac", "--tries", "3", *INLINE),
    "evaluate removal": ("evaluate", "removal", *TASK, *FEW, *REMOVAL, *INLINE),
    "evaluate mislabel": ("evaluate", "mislabel", *TASK, *FEW, *INLINE),
    "inspect": ("inspect", *DIGITS, *METHODS, "--queries", "10", "--cache", "{scored}", "--out", "{out}"),
    "truth bank": ("truth", "bank", *TASK, *PLAN, *FEW, *INLINE),
    "publish figures": ("publish", "figures", "--results", "{runs}", "--out", "{out}"),
}
VICTIMS = ("worker", "driver", "everybody")  # of a command with workers
# Of records: what a clock or the time of day decides.
MEASURED = (
    *("fit_seconds", "score_seconds", "seconds", "retrain_seconds", "peak_memory_bytes", "run_id", "runs", "command"),
    *("finished", "cpu_seconds"),
)


class Command:
    """`tda-bench WORDS...` in a process and a group of its own, with what it prints in files.

    It is forked from this process: an import of torch takes longer than the work that is killed.
    """

    def __init__(self, words: Sequence[str], folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.words, self.output, self.log = list(words), folder / "output", folder / "log"
        self.began, self.code = time.time(), None if (pid := os.fork()) else -1
        self.pid = pid
        if pid == 0:
            self._run()

    def _run(self) -> None:
        code = 70
        try:
            os.setsid()
            for path, number in ((self.output, 1), (self.log, 2)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            logging.disable(logging.NOTSET)
            sys.argv = ["tda-bench", *self.words]
            code = cli.main(self.words)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, seconds: float = 1800.0) -> int:
        limit = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                raise TimeoutError(f"{' '.join(self.words)}: not over after {seconds:.0f} s")
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def orphans(self, seconds: float = 20.0) -> bool:
        """Whether processes that it started in its own group outlive it; they are ended."""
        limit = time.monotonic() + seconds
        try:
            while time.monotonic() < limit:
                os.killpg(self.pid, 0)
                time.sleep(0.05)
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True


def finish(words: Sequence[str], folder: Path) -> Command:
    """A command that nobody disturbs, when it is over."""
    command = Command(words, folder)
    if code := command.wait(3600):
        raise RuntimeError(f"{' '.join(words)}: exit code {code}\n{command.log.read_text()[-2000:]}")
    return command


class Subject:
    """One command: its undisturbed run, and the cache and folder in which it is killed."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder / name.replace(" ", "-")
        first = folder / next(iter(COMMANDS)).replace(" ", "-")  # others read what it left
        self.read = {"scored": str(first / "calm-cache"), "runs": str(first / "calm-out")}
        self.calm, self.store = Store(self.folder / "calm-cache"), Store(self.folder / "killed-cache")
        self.out = self.folder / "killed-out"
        self.local = "local" in COMMANDS[name]
        self.num_kills = 0
        self.seen: set[tuple[str, str]] = set()  # entries that must stay until they are removed here

    def words(self, store: Store, out: Path) -> list[str]:
        places = {"cache": str(store.root), "out": str(out), **self.read}
        return [word.format(**places) for word in COMMANDS[self.name]]

    def undisturbed(self) -> None:
        began = time.monotonic()
        out = self.folder / "calm-out"
        finish(self.words(self.calm, out), self.folder)
        self.seconds = time.monotonic() - began
        self.entries, self.files = entries_of(self.calm), files_of(out)

    def forget(self, rng: np.random.Generator) -> None:
        """Half of what is there (and was verified) is made again; unfinished work stays."""
        for info in list(self.store.entries()):
            if rng.random() < 0.5:
                self.store.remove_key(info.kind, info.key)
                self.seen.discard((info.kind, info.key))
        shutil.rmtree(self.out, ignore_errors=True)

    def kill(self, rng: np.random.Generator) -> dict[str, Any] | None:
        """What was killed, and what it cost; None where the command was over before its turn."""
        self.forget(rng)
        command = Command(self.words(self.store, self.out), self.folder)
        victim = VICTIMS[self.num_kills % len(VICTIMS)] if self.local else "driver"
        try:
            leases = Leases(self.store.root)
            while self.entries and command.poll() is None and not leases.held():
                time.sleep(0.005)
            moment = time.time() + rng.uniform(0, 0.5) * self.seconds  # half of it is to do
            while time.time() < moment and command.poll() is None:
                time.sleep(0.005)
            held = leases.held()
            workers = {holder.pid for holder in held.values()} - {command.pid}
            if command.poll() is not None or (victim == "worker" and not workers):
                return None
            kill: dict[str, Any] = {"command": self.name, "victim": victim, "units": sorted({kind for kind, _ in held})}
            hit = {name: holder for name, holder in held.items() if victim != "worker" or holder.pid in workers}
            hit = dict(list(hit.items())[:1]) if victim == "worker" else hit
            kill |= lost_by(self.store, list(hit.items())) if hit else {"lost_seconds": self.since_last(command)}
            pids = {"worker": [holder.pid for holder in hit.values()], "driver": [command.pid]}
            for pid in pids.get(victim, [command.pid, *workers]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.num_kills += 1
            # The driver of a killed worker goes on with another.
            if victim == "worker" and (code := command.wait()):
                kill["trouble"] = f"the driver of a killed worker ended with {code}"
            return kill
        finally:
            command.kill()
            if command.orphans():
                raise RuntimeError(f"{self.name}: processes outlive their driver")

    def since_last(self, command: Command) -> float:
        """Seconds since an entry was written, where no unit is held."""
        return round(time.time() - max([command.began, *(info.modified() for info in self.store.entries())]), 2)

    def trouble(self, whole: bool = False) -> list[str]:
        """Every entry and file that is there is the undisturbed run's, and no entry that was there is lost.

        whole: the command is over, so all files are there, and all entries but fits and parts of scores that were kept.
        """
        entries, files = entries_of(self.store), files_of(self.out)
        lost, self.seen = self.seen - set(entries), set(entries)
        found = [f"{name} differs" for name, arrays in entries.items() if arrays != self.entries.get(name)]
        found += [f"file {name} is half, or another" for name, content in files if (name, content) not in self.files]
        found += [f"{name} was there and is lost" for name in lost]
        if whole:
            needed = [name for name in self.entries if name[0] not in ("fit", "part")]
            found += [f"{name} is missing" for name in needed if name not in entries]
            found += ["files are missing"] * (len(files) != len(self.files))
        if (self.store.root / "quarantine").exists():
            found.append("an entry was quarantined")
        for batch in JobBatch.all(self.store):
            events = batch.events(batch.describe().get("run", ""))
            done = Counter(event["key"] for event in events if event["event"] == "done")
            found += [f"unit {key} was done {count} times in a run" for key, count in done.items() if count > 1]
        return [f"{self.name}: {one}" for one in found]


# ---- what is compared ----


def entries_of(store: Store) -> dict[tuple[str, str], dict[str, bytes]]:
    """(kind, key) -> the bytes of every array; each entry's checksums are verified."""
    found = {}
    for info in store.entries():
        entry = store.verified(info.kind, info.key)
        found[info.kind, info.key] = {name: array.tobytes() for name, array in entry.arrays.items()}
    return found


def files_of(folder: Path) -> list[tuple[str, Any]]:
    """(name, content) of what a reader of the folder finds, without what a clock decides; drafts are hidden."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            content: Any = path.read_bytes()
            if path.suffix == ".json":
                content = unmeasured(json.loads(content))
            elif path.suffix == ".csv":
                content = unmeasured(list(csv.DictReader(io.StringIO(content.decode()))))
            found.append((path.name, content))
    return found


def unmeasured(value: Any) -> Any:
    if isinstance(value, dict) and "columns" in value:  # a record's table in its file
        value = from_columns(value, "table", Path())
    if isinstance(value, dict):
        if "num_ties" in value:  # of settings that tie, tune takes the cheapest by this run's clock
            value = {"best": value["best"]}
        return {name: unmeasured(one) for name, one in value.items() if name not in MEASURED}
    return [unmeasured(one) for one in value] if isinstance(value, list) else value


def last_saved(store: Store, kind: str, key: str) -> float:
    """When a unit saved its state the last time; 0 where it never did."""
    newest = 0.0
    with contextlib.suppress(OSError):
        for path in resume_folder(store.root, kind, key).rglob("[!.]*.json"):  # hidden: how far it is, and drafts
            with contextlib.suppress(OSError):
                newest = max(newest, os.lstat(path).st_mtime)
    return newest


def lost_by(store: Store, held: list[tuple[tuple[str, str], Holder]]) -> dict[str, Any]:
    """What a kill at this moment loses: the longest time in which one of these processes has saved nothing.

    A process may hold two units, scores and the fit that they need: what one of them saves is saved for both. Where one
    process does everything, an entry that it wrote since is saved, too.
    """
    now = time.time()
    latest: dict[int, float] = {}
    had_saved = False
    for name, holder in held:
        saved = last_saved(store, *name)
        had_saved |= saved > holder.since
        latest[holder.pid] = max(latest.get(holder.pid, 0.0), holder.since, saved)
    if len(latest) == 1:
        (pid,) = latest
        latest[pid] = max([latest[pid], *(info.modified() for info in store.entries())])
    lost = max((now - time_ for time_ in latest.values()), default=0.0)
    return {"lost_seconds": round(lost, 2), "had_saved": had_saved}


# ---- the trial ----


def save_often(folder: Path, seconds: float) -> None:
    """Commands that are forked from here save as often, and so do workers: they import a patch first."""
    retrain.resume.SAVE_SECONDS = seconds
    patch = folder / "patch"
    patch.mkdir(exist_ok=True)
    (patch / "sitecustomize.py").write_text(f"import retrain.resume\n\nretrain.resume.SAVE_SECONDS = {seconds}\n")
    root = Path(__file__).resolve().parents[2]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(patch), str(root)])


def subjects_of(folder: Path) -> list[Subject]:
    """Each with its undisturbed run. What is read of code and data to make keys is read once, before the forks."""
    with contextlib.redirect_stdout(io.StringIO()):
        cli.main(["lds", *DIGITS, *PLAN, *METHODS, *INLINE, "--dry-run", "--cache", str(folder / "dry-cache")])
    subjects = [Subject(name, folder) for name in COMMANDS]
    for subject in subjects:
        subject.undisturbed()
        print(f"{subject.name}, undisturbed: {subject.seconds:.0f} s", flush=True)
    return subjects


def report(
    doc: str, arguments: argparse.Namespace, began: float, kills: list[dict[str, Any]], trouble: list[str], **more: Any
) -> int:
    """Print what the kills came to, and write it with each of them; the exit code of the trial."""
    most = max((kill["lost_seconds"] for kill in kills), default=0.0)
    good = not trouble and most < 60 and len(kills) >= arguments.kills
    record = {
        "what": doc.split("\n")[0],
        "command": command_line(f"tests.trials.{Path(sys.argv[0]).stem}", sys.argv[1:]),
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - began),
        "good": good,
        "num_kills": len(kills),
        "by_victim": dict(Counter(kill["victim"] for kill in kills)),
        "by_unit": dict(Counter(unit for kill in kills for unit in kill["units"])),
        "num_saved_before": sum(bool(kill.get("had_saved")) for kill in kills),
        "most_seconds_lost": most,
        "trouble": sorted(set(trouble)),
        **more,
    }
    print(json.dumps(record, indent=1))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out, {**record, "kills": kills, **provenance("CPU")})
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-seconds", type=float, default=0.2, help="between two saves of unfinished work")
    parser.add_argument("--folder", help="where caches and figures go, and stay (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="a file for the record")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    rng, began = np.random.default_rng(arguments.seed), time.monotonic()
    kills: list[dict[str, Any]] = []
    trouble: list[str] = []
    num_compared = num_files = 0
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary:
        folder = Path(arguments.folder or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        save_often(folder, arguments.save_seconds)
        subjects = subjects_of(folder)
        for number in range(4 * arguments.kills):
            if len(kills) >= arguments.kills:
                break
            subject = subjects[number % len(subjects)]
            if (kill := subject.kill(rng)) is not None:
                kills.append(kill)
                print(json.dumps(kill), flush=True)
            trouble += subject.trouble()
            num_compared += len(list(subject.store.entries()))
            num_files += len(files_of(subject.out))
        for subject in subjects:
            shutil.rmtree(subject.out, ignore_errors=True)
            finish(subject.words(subject.store, subject.out), subject.folder)
            trouble += subject.trouble(whole=True)
            num_compared += len(subject.entries)
            num_files += len(subject.files)
    trouble += [f"{kill['command']}: {kill['trouble']}" for kill in kills if "trouble" in kill]
    compared = {"num_entries_compared": num_compared, "num_files_compared": num_files}
    known = {"save_seconds": arguments.save_seconds, "by_command": dict(Counter(kill["command"] for kill in kills))}
    return report(str(__doc__), arguments, began, kills, trouble, **known, **compared)


if __name__ == "__main__":
    sys.exit(main())
