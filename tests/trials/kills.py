"""SIGKILL at random moments of everything that takes time; nothing may be corrupt, doubled or lost beyond a minute.

    python -m tests.trials.kills                                          # fifty kills, about twenty minutes
    python -m tests.trials.kills --kills 5 --seed 7 --out kills.json

`python -m bench.lds` on a small digits (EK-FAC, K-FAC, TRAK, four chains of BIF) and `tda-bench publish figures` first
run undisturbed, in one process. Then the same work, on a cache of its own, is killed in every phase in turn: driver,
worker or both, a random time after the phase's unit was leased, or every other time after it first saved its work.
After each kill every entry is verified against the undisturbed run's to the bit. What a kill cost is the time since the
killed unit was leased or last saved; it saves every `--save-seconds` here, as digits' units are shorter than the 30 s
of a real run (`long_kills.py` has those). At the end everything is finished, and scores, retrains, rows and figures are
compared. The commands are those that a user types, in processes of their own.
"""

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.cli import lds_parser as make_parser
from bench.experiment import execution_of, experiment_of
from bench.records import command_line, provenance, write_json
from bench.runner import Session
from retrain.jobs.unit import JobBatch
from retrain.leases import Holder, Leases
from retrain.resume import resume_folder
from retrain.store import Store

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("ekfac", "kfac", "trak", "bif")
MEASURED = ("fit_seconds", "score_seconds", "peak_memory_bytes", "run_id")
PHASES = {  # name -> (methods that the command asks for, kinds of the units that are killed)
    "retraining": ((), ("retrain",)),
    "BIF chains": (("bif",), ("part", "scores")),
    "EK-FAC fit": (("ekfac",), ("fit",)),
    "EK-FAC score": (("ekfac",), ("scores",)),
    "TRAK": (("trak",), ("fit", "scores")),
    "K-FAC": (("kfac",), ("fit", "scores")),
    "figures": ((), ()),
}
SETTINGS = (  # small batches: many moments to save at
    *("digits.num_train=300", "digits.epochs=4", "bif.chains=4", "bif.draws={draws}"),
    *("ekfac.fit_batch_size=4", "ekfac.query_batch_size=1", "ekfac.train_batch_size=100"),
    *("kfac.fit_batch_size=4", "kfac.batch_size=4", "trak.batch_size=4"),
)
VICTIMS = ("driver", "driver", "worker", "driver", "driver", "everybody")  # a driver alone does the work itself


def lds_words(cache: Path, out: Path, methods: tuple[str, ...], draws: int) -> list[str]:
    settings = [setting.format(draws=draws) for setting in SETTINGS]
    return [
        *("--task", "digits", "--alpha", "0.3", "--subsets", "12", "--replicates", "1", "--queries", "24"),
        *("--methods", *(methods or ("random",)), "--device", "cpu", "--json", "--settings", "default"),
        *(word for setting in settings if setting.split(".")[0] in ("digits", *methods) for word in ("--set", setting)),
        *("--cache", str(cache), "--out", str(out)),
    ]


class Command:
    """`python -m MODULE WORDS...` in a process and a group of its own, with what it prints in a file."""

    def __init__(self, module: str, words: list[str], folder: Path, first_path: Path | None = None):
        self.output, self.log = folder / "output", folder / "commands.log"
        paths = [str(path) for path in (first_path, ROOT) if path is not None]
        with open(self.output, "wb") as output, open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                stdout=output, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.poll()

    def wait(self, seconds: float = 1800.0) -> int:
        return self.process.wait(seconds)

    def kill(self) -> None:
        if self.poll() is None:
            self.process.kill()
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


def finish(module: str, words: list[str], folder: Path, first_path: Path | None = None) -> bytes:
    """What a command prints that nobody disturbs."""
    command = Command(module, words, folder, first_path)
    if code := command.wait(3600):
        raise RuntimeError(f"{module} {' '.join(words)}: exit code {code}; see {command.log}")
    return command.output.read_bytes()


class Trial:
    def __init__(self, folder: Path, seed: int, draws: int, save_seconds: float):
        self.folder, self.draws = folder, draws
        self.rng = np.random.default_rng(seed)
        self.calm, self.store = Store(folder / "calm"), Store(folder / "killed")
        self.runs, self.figures = folder / "runs", folder / "figures"
        # What commands and their workers import first makes them save as often.
        self.patch = folder / "patch"
        self.patch.mkdir()
        patch = f"import retrain.resume\n\nretrain.resume.SAVE_SECONDS = {save_seconds}\n"
        (self.patch / "sitecustomize.py").write_text(patch)
        self.kills: list[dict[str, Any]] = []
        self.num_visits: Counter[str] = Counter()
        self.trouble: list[str] = []
        self.num_verified = 0

    # ---- the commands ----

    def start(self, module: str, *words: str) -> Command:
        return Command(module, list(words), self.folder, self.patch)

    def finish(self, module: str, *words: str) -> bytes:
        return finish(module, list(words), self.folder, self.patch)

    def draw_words(self, out: Path) -> list[str]:
        return ["figures", "--results", str(self.runs), "--out", str(out)]

    def undisturbed(self) -> None:
        words = lds_words(self.calm.root, self.runs, METHODS, self.draws)
        self.rows = rows_of(self.finish("bench.lds", *words, "--cluster", "inline"))
        began = time.monotonic()
        self.finish("bench.publish", *self.draw_words(self.folder / "calm-figures"))
        self.figure_seconds = time.monotonic() - began
        self.wanted = {(info.kind, info.key): self.arrays(self.calm, info) for info in self.calm.entries()}
        self.pictures = files_of(self.folder / "calm-figures")
        self.units = self.units_by_phase(words)

    def units_by_phase(self, words: list[str]) -> dict[str, list[tuple[str, str]]]:
        """(kind, key) of what each phase makes; the undisturbed cache has the base model that keys hold."""
        arguments = make_parser().parse_args(words)
        session = Session(experiment_of(arguments), execution_of(arguments))
        found: dict[str, list[tuple[str, str]]] = {"figures": []}
        retrains = [unit for units in session.retrains().values() for unit in units]
        found["retraining"] = [(unit.kind, self.calm.key(unit.kind, unit.config)) for unit in retrains]
        for phase, (methods, kinds) in PHASES.items():
            for variant in session.active:
                if variant.method.name not in methods:
                    continue
                (block,) = session.blocks
                scorer = session.scorer(variant, *block)
                units = [*scorer.part_units(), scorer.score_unit(session.plans(*block))]
                units += [scorer.fit_unit()] if scorer.keeps_fit else []
                named = [(unit.kind, self.calm.key(unit.kind, unit.config)) for unit in units]
                found[phase] = [name for name in named if name[0] in kinds]
                # Whatever hangs on it goes with it, so that the phase is gone through again.
                plans = [("predictions", scorer.plan_config(plan)) for plan in session.plans(*block)]
                found[f"{phase}, all"] = [
                    *(name for name in named if name[0] in kinds or name[0] == "scores"),
                    *((kind, self.calm.key(kind, config)) for kind, config in plans),
                ]
        return found

    # ---- the kills ----

    def kill_one(self, number: int) -> None:
        phase = list(PHASES)[number % len(PHASES)]
        victim = VICTIMS[number % len(VICTIMS)]  # seven phases: every victim meets every phase
        kill = {"number": number, "phase": phase, "victim": victim if phase != "figures" else "driver"}
        hit = self.kill_figures(kill) if phase == "figures" else self.kill_lds(kill, phase, victim)
        if hit:
            self.kills.append(kill)
            print(json.dumps(kill), flush=True)
        self.verify()

    def kill_lds(self, kill: dict[str, Any], phase: str, victim: str) -> bool:
        methods, _ = PHASES[phase]
        self.forget(phase)
        cluster = ["inline"] if victim == "driver" else ["local", "--jobs", "2"]
        words = lds_words(self.store.root, self.folder / "killed-runs", methods, self.draws)
        process = self.start("bench.lds", *words, "--cluster", *cluster)
        try:
            found = self.wait_for_lease(process, phase)
            if found is None:
                return False
            after_save = phase != "retraining" and self.num_visits[phase] % 4 != 3
            self.num_visits[phase] += 1
            if after_save:
                self.wait_for_save(process, phase)
                time.sleep(self.rng.uniform(0, 1.0))
            else:
                time.sleep(self.rng.uniform(0, 10.0 if phase == "BIF chains" else 0.4))
            held = {name: h for name, h in Leases(self.store.root).held().items() if name in self.units[phase]}
            name, holder = next(iter(held.items()), found)
            hit = [(name, holder)] if victim == "worker" else list(held.items())
            kill |= {"unit": name[0], "still_held": bool(held), **lost_by(self.store, hit if held else [])}
            pids = {"driver": [process.pid], "worker": [holder.pid], "everybody": [holder.pid, process.pid]}
            for pid in pids[victim]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            # The driver of a killed worker goes on with another.
            if victim == "worker" and (code := process.wait()):
                self.trouble.append(f"kill {kill['number']}: the driver ended with {code}")
        finally:
            process.kill()
        return True

    def wait_for_lease(self, process: Command, phase: str) -> Any:
        """(name, holder) of a unit of the phase that somebody works on; None when the command was over before."""
        wanted = set(self.units[phase])
        while process.poll() is None:
            for name, holder in Leases(self.store.root).held().items():
                if name in wanted:
                    return name, holder
            time.sleep(0.005)
        return None

    def wait_for_save(self, process: Command, phase: str) -> None:
        """Until a unit of the phase that somebody works on has saved something since it was leased."""
        wanted = set(self.units[phase])
        while process.poll() is None:
            held = {name: holder for name, holder in Leases(self.store.root).held().items() if name in wanted}
            if not held or any(last_saved(self.store, *name) > holder.since for name, holder in held.items()):
                return
            time.sleep(0.005)

    def forget(self, phase: str) -> None:
        """So that there is always something to kill: a phase that is done (and was verified) is done again."""
        if phase == "retraining":
            gone = [name for name in self.units[phase] if self.rng.random() < 0.4]
        elif all(self.store.has_key(*name) for name in self.units[phase] if name[0] != "part"):
            gone = self.units[f"{phase}, all"]
        else:
            gone = []
        for name in gone:
            self.store.remove_key(*name)

    def kill_figures(self, kill: dict[str, Any]) -> bool:
        if self.figures.exists() and files_of(self.figures) == self.pictures:
            shutil.rmtree(self.figures)
        process = self.start("bench.publish", *self.draw_words(self.figures))
        began = time.time()
        time.sleep(self.figure_seconds * self.rng.uniform(0.0, 1.0))
        over = process.poll() is not None
        process.kill()
        if process.orphans():
            self.trouble.append("processes that draw outlive their driver")
        kill |= {"unit": "figures", "still_held": not over, "lost_seconds": round(time.time() - began, 2)}
        return not over

    # ---- what is left ----

    def arrays(self, store: Store, info: Any) -> dict[str, bytes]:
        entry = store.verified(info.kind, info.key)
        return {name: array.tobytes() for name, array in entry.arrays.items()}

    def verify(self) -> None:
        """Every entry that is there is sound, and what the undisturbed run made."""
        for info in self.store.entries():
            self.num_verified += 1
            found, wanted = self.arrays(self.store, info), self.wanted.get((info.kind, info.key))
            if wanted is not None and found != wanted:
                self.trouble.append(f"{info.kind} {info.key} differs from the undisturbed run's")
            if wanted is None and info.kind not in ("part", "scores", "predictions"):  # of the cheap stand-in `random`
                self.trouble.append(f"{info.kind} {info.key} is none of the undisturbed run's")
        if (self.store.root / "quarantine").exists():
            self.trouble.append("an entry was quarantined")
        for name, content in files_of(self.figures).items():
            if content != self.pictures.get(name):
                self.trouble.append(f"figure {name} is half, or another")
        for batch in JobBatch.all(self.store):
            events = batch.events(batch.describe().get("run", ""))
            done = Counter(event["key"] for event in events if event["event"] == "done")
            self.trouble += [f"unit {key} was done {count} times in a run" for key, count in done.items() if count > 1]

    def end(self) -> dict[str, Any]:
        words = lds_words(self.store.root, self.folder / "killed-runs", METHODS, self.draws)
        rows = rows_of(self.finish("bench.lds", *words, "--cluster", "local", "--jobs", "2"))
        self.finish("bench.publish", *self.draw_words(self.figures))
        self.verify()
        found = {(info.kind, info.key): self.arrays(self.store, info) for info in self.store.entries()}
        drafts = [path for path in self.figures.rglob(".*") if path.is_file()]
        equal = {
            "rows": rows == self.rows,
            **{
                kind: all(found.get(name) == arrays for name, arrays in self.wanted.items() if name[0] == kind)
                for kind in sorted({kind for kind, _ in self.wanted})
            },
            "figures": files_of(self.figures) == self.pictures,
        }
        lost = [kill["lost_seconds"] for kill in self.kills]
        return {
            "num_kills": len(self.kills),
            "by_phase": dict(Counter(kill["phase"] for kill in self.kills)),
            "by_victim": dict(Counter(kill["victim"] for kill in self.kills)),
            "num_saved_before": sum(bool(kill.get("had_saved")) for kill in self.kills),
            "most_seconds_lost": max(lost, default=0.0),
            "equal_to_the_bit": equal,
            "num_entries": dict(Counter(kind for kind, _ in self.wanted)),
            "num_figures": len(self.pictures),
            "num_verified": self.num_verified,
            "num_drafts_left": len(drafts),
            "trouble": sorted(set(self.trouble)),
        }


def rows_of(output: bytes) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in json.loads(output)]


def files_of(folder: Path) -> dict[str, bytes]:
    """What a reader of the folder would find; drafts are hidden."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def last_saved(store: Store, kind: str, key: str) -> float:
    """When a unit saved its state the last time; 0 where it never did."""
    newest = 0.0
    for path in walk(resume_folder(store.root, kind, key)):
        if path.suffix == ".json" and not path.name.startswith("."):  # hidden: how far it is, and drafts
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


def walk(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from folder.rglob("*")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=200, help="of each BIF chain (default: %(default)s)")
    parser.add_argument("--save-seconds", type=float, default=0.2, help="between two saves of unfinished work")
    parser.add_argument("--folder", help="where caches and figures go, and stay (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="a file for the record")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary:
        folder = Path(arguments.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        trial = Trial(folder, arguments.seed, arguments.draws, arguments.save_seconds)
        began = time.monotonic()
        trial.undisturbed()
        print(f"undisturbed: {time.monotonic() - began:.0f} s", flush=True)
        number = 0
        while len(trial.kills) < arguments.kills and number < 4 * arguments.kills:
            trial.kill_one(number)
            number += 1
        found = trial.end()
    good = all(found["equal_to_the_bit"].values()) and not found["trouble"] and found["most_seconds_lost"] < 60
    record = {
        "what": str(__doc__).split("\n")[0],
        "command": command_line("tests.trials.kills", sys.argv[1:]),
        "seed": arguments.seed,
        "save_seconds": arguments.save_seconds,
        "seconds": round(time.monotonic() - began),
        "good": good,
        **found,
        "kills": trial.kills,
        **provenance("CPU"),
    }
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out, record)
    print(json.dumps({name: record[name] for name in ("good", "seconds", *found)}, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
