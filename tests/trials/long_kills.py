"""SIGKILL in the middle of long units as shipped: they save every 30 s, and no kill may cost a minute of work.

    python -m tests.trials.long_kills --group bif --out results/trials/long_kills_bif.json       # a quarter of an hour
    python -m tests.trials.long_kills --group rivals --out results/trials/long_kills_rivals.json # as much

`kills.py` kills every command, on units of seconds that it makes save more often. Here nothing is patched: the
commands are `tda-bench lds` as a user types them, on two chains of BIF of some minutes each (two local workers)
and on an EK-FAC fit, an EK-FAC scoring and a TRAK ensemble's features made long by tiny batches (one process). Each
group first runs undisturbed in one process. Then the same command on a cache of its own is killed, driver, worker or
everybody, a random 32 to 75 s after its work began, and run again, until it ends by itself. Of every kill: what was
lost (seconds in which a killed process had saved nothing), how far each chain's saved state was, and whether the next
attempt went on from there and not from the beginning. In the end all arrays are compared to the bit.
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from retrain.leases import Holder, Leases
from retrain.processes import process_alive
from retrain.resume import SAVE_SECONDS, ResumeState, unfinished_units
from retrain.store import Store
from tests.trials.kills import Command, entries_of, finish, lost_by, report, unmeasured

KINDS = ("fit", "part", "scores")
GROUPS: dict[str, dict[str, Any]] = {
    "bif": {
        "methods": ["bif"],
        "settings": ["digits.num_train=300", "digits.epochs=4", "bif.chains=2", "bif.draws=300", "bif.thinning=30"],
        "cluster": ["local", "--jobs", "2"],
        "victims": ("everybody", "driver", "worker"),
    },
    "rivals": {
        "methods": ["ekfac", "trak"],
        "settings": [
            *("digits.num_train=600", "digits.epochs=1", "digits.widths=(64,128,128)"),
            *("ekfac.fit_batch_size=1", "ekfac.query_batch_size=1", "ekfac.train_batch_size=20"),
            *("trak.batch_size=1", "trak.checkpoints=3"),
        ],
        "cluster": ["inline"],
        "victims": ("driver",),
    },
}


class Group:
    def __init__(self, name: str, folder: Path, rng: np.random.Generator):
        self.name, self.rng, self.folder = name, rng, folder
        self.words = GROUPS[name]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.calm, self.store = Store(folder / "calm"), Store(folder / "killed")
        self.kills: list[dict[str, Any]] = []
        self.trouble: list[str] = []
        self.workers: set[int] = set()

    def lds(self, store: Store, cluster: list[str]) -> list[str]:
        return [
            *("lds", "--task", "digits", "--alpha", "0.3", "--subsets", "4", "--replicates", "1", "--queries", "20"),
            *("--methods", *self.words["methods"], "--device", "cpu", "--json", "--settings", "default"),
            *(word for setting in self.words["settings"] for word in ("--set", setting)),
            *("--cache", str(store.root), "--out", str(self.folder / f"{store.root.name}-runs"), "--cluster", *cluster),
        ]

    def undisturbed(self) -> dict[str, float]:
        """{method: seconds of its fit and score}."""
        rows = json.loads(finish(self.lds(self.calm, ["inline"]), self.folder).output.read_bytes())
        self.rows = unmeasured(rows)
        return {row["label"]: round(row["fit_seconds"] + row["score_seconds"], 1) for row in rows}

    def killed_until_it_ends(self) -> None:
        """The same command again and again; each is killed, but the last is over before its turn."""
        while True:
            command = Command(self.lds(self.store, self.words["cluster"]), self.folder)
            try:
                if not self.kill(command):
                    break
            finally:
                command.kill()
                self.bury()
        if code := command.wait():
            raise RuntimeError(f"exit code {code}; see {command.log}")
        if unmeasured(json.loads(command.output.read_bytes())) != self.rows:
            self.trouble.append(f"{self.name}: other rows than the undisturbed run's")

    def kill(self, command: Command) -> bool:
        """Kill a command a while after its work began; false when it ended before."""
        before = self.saved()
        while command.poll() is None and not self.held():
            time.sleep(0.02)
        if not self.sleep(command, self.rng.uniform(SAVE_SECONDS + 2, 75)):
            return False
        held = self.held()
        victims = self.words["victims"]
        victim = victims[len(self.kills) % len(victims)]
        if not held:
            victim = "driver"  # between two units
        hit = list(held.items())[:1] if victim == "worker" else list(held.items())
        after = self.saved()
        self.workers = {holder.pid for holder in held.values()} - {command.pid}
        kill: dict[str, Any] = {"number": len(self.kills), "victim": victim}
        kill |= {"units": sorted(name[0] for name, _ in hit), **lost_by(self.store, hit)}
        kill |= {"saved_before": before, "saved": after, "went_on": went_on(before, after)}
        pids = {"worker": {hit[0][1].pid} if hit else set(), "driver": {command.pid}}
        for pid in pids.get(victim, {command.pid, *self.workers}):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.kills.append(kill)
        print(json.dumps(kill), flush=True)
        self.verify()
        if not kill["went_on"]:
            self.trouble.append(f"kill {kill['number']}: what was saved before was begun anew")
        # The driver of a killed worker goes on with another; it is killed in its turn.
        return victim != "worker" or self.kill(command)

    def bury(self) -> None:
        """Workers die with their driver."""
        limit = time.monotonic() + 20
        while any(process_alive(pid) for pid in self.workers):
            if time.monotonic() > limit:
                self.trouble.append("workers outlive their driver")
                return
            time.sleep(0.05)

    def sleep(self, command: Command, seconds: float) -> bool:
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if command.poll() is not None:
                return False
            time.sleep(0.05)
        return command.poll() is None

    def held(self) -> dict[tuple[str, str], Holder]:
        return {name: holder for name, holder in Leases(self.store.root).held().items() if name[0] in KINDS}

    def saved(self) -> dict[str, int]:
        """{state: how far} of everything saved: draws taken, examples summed up, queries or features there."""
        found = {}
        for item in unfinished_units(self.store):
            work = ResumeState.of(self.store, item.kind, item.key)
            for path in sorted(item.path.glob("[!.]*.json")):
                if (state := work.load(path.stem)) is not None:
                    arrays, record = state
                    far = record.get("taken", record.get("end"))
                    if "next" in record:
                        far = record["stage"] * 10**6 + record["next"]
                    found[f"{item.kind}.{item.key[:8]}/{path.stem}"] = int(
                        len(arrays.get("scores", ())) if far is None else far
                    )
        return found

    def verify(self) -> None:
        """Every entry that is there is sound."""
        entries_of(self.store)
        if (self.store.root / "quarantine").exists():
            self.trouble.append("an entry was quarantined")

    def equal(self) -> dict[str, bool]:
        """By kind, whether every array of the undisturbed run is there to the bit."""
        wanted, found = entries_of(self.calm), entries_of(self.store)
        same: dict[str, bool] = {}
        for name, arrays in wanted.items():
            same[name[0]] = same.get(name[0], True) and found.get(name) == arrays
        return same

    def forget(self) -> None:
        """So that there is more to kill: scores and what they are made of are made again."""
        for kind in (*KINDS, "predictions"):
            for info in list(self.store.entries(kind)):
                self.store.remove_key(info.kind, info.key)


def went_on(before: dict[str, int], after: dict[str, int]) -> bool:
    """Whether no state is behind what an earlier attempt had saved (of a finished unit there is none)."""
    return all(after[name] >= far for name, far in before.items() if name in after)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--kills", type=int, default=6, help="at least so many (default: %(default)s)")
    parser.add_argument("--group", choices=list(GROUPS), required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="where caches go, and stay; an undisturbed run there is used")
    parser.add_argument("--out", type=Path, help="a file for the record")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    rng = np.random.default_rng(arguments.seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="long-kills-") as temporary:
        folder = Path(arguments.folder or temporary)
        group = Group(arguments.group, folder, rng)
        calm = group.undisturbed()
        print(f"{calm} s undisturbed", flush=True)
        group.killed_until_it_ends()
        while len(group.kills) < arguments.kills:
            group.forget()
            group.killed_until_it_ends()
        equal = group.equal()
    trouble = group.trouble + [f"{kind} differs from the undisturbed run's" for kind, same in equal.items() if not same]
    known = {"save_seconds": SAVE_SECONDS, "settings": GROUPS[arguments.group], "seconds_undisturbed": calm}
    mean = round(sum(kill["lost_seconds"] for kill in group.kills) / len(group.kills), 2)
    known |= {"mean_seconds_lost": mean, "equal_to_the_bit": equal}
    return report(str(__doc__), arguments, began, group.kills, trouble, **known)


if __name__ == "__main__":
    sys.exit(main())
