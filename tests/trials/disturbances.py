"""Failing disks, two drivers, data edited mid-run: every entry is an undisturbed run's, or one line refuses it.

    python -m tests.trials.disturbances --out results/trials/disturbances.json          # about ten minutes

Faults: a share of all calls on files of the cache fail with EIO, ENOSPC or ESTALE while `tda-bench lds` and
`evaluate removal` run, up to five times each. Two drivers: the same command twice at once; then one of them is killed.
Edits: a task's data, its first weights or its code change after the third retrain, inline and with local workers.
"""

import argparse
import errno
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.records import command_line, provenance, write_json
from retrain.store import Store
from tests.helpers.faults import Faults
from tests.trials.kills import INLINE, LOCAL, Command, Subject, entries_of, finish, save_often

ERRORS = (errno.EIO, errno.ENOSPC, errno.ESTALE)
SHARES = (0.02, 0.1, 0.5)
ATTEMPTS = 5
SUBJECTS = ("lds inline", "evaluate removal")
TASK = '''"""Regression on a table of the user's, from first weights in a file; each training takes a moment."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from retrain.examples import Examples
from tests.helpers.planted import Planted

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Table(Planted):
    def load_train_data(self):
        rows = np.loadtxt(HERE / "train.csv", delimiter=",", dtype=np.float32)
        return Examples(torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, -1].copy()))

    def build_model(self, seed):
        model = super().build_model(seed)
        model.load_state_dict(torch.load(HERE / "first.pt", weights_only=True))
        return model

    def train(self, *arguments, **options):
        time.sleep(0.5)
        return super().train(*arguments, **options)
'''


def one_line(command: Command) -> str:
    """The last line of a command that gave up; it must be its own words, and no traceback."""
    text = command.log.read_text(errors="replace")
    if "Traceback" in text:
        raise RuntimeError(f"a traceback instead of one line:\n{text[-3000:]}")
    return text.replace("\r", "\n").strip().splitlines()[-1]


# ---- failing disks ----


def with_faults(subject: Subject, number: int, share: float, rng: np.random.Generator) -> dict[str, Any]:
    """The same command again and again while calls fail, until it ends well or ATTEMPTS are over."""
    subject.forget(rng)
    told = subject.folder / "faults.json"
    case: dict[str, Any] = {"command": subject.name, "error": errno.errorcode[number], "share": share}
    case |= {"num_attempts": 0, "num_refused": 0, "num_calls": 0, "num_failed": 0, "said": [], "trouble": []}

    def before() -> None:
        faults = Faults(subject.store.root, number=number, share=share, seed=seed).__enter__()
        leave = os._exit

        def tell(code: int) -> None:
            faults.__exit__()
            told.write_text(json.dumps([faults.count, len(faults.failed)]))
            leave(code)

        os._exit = tell  # type: ignore[assignment]

    for _ in range(ATTEMPTS):
        seed = int(rng.integers(10**6))
        command = Command(subject.words(subject.store, subject.out), subject.folder, before)
        code = command.wait(900)
        num_calls, num_failed = json.loads(told.read_text())
        case["num_attempts"] += 1
        case["num_calls"] += num_calls
        case["num_failed"] += num_failed
        case["trouble"] += subject.trouble()
        if code == 0:
            break
        case["num_refused"] += 1
        said = one_line(command).replace(str(subject.folder), "")[:200]
        case["said"] += [said] if said not in case["said"] else []
    return case


# ---- two drivers ----


def with_two_drivers(subject: Subject, killed: bool, rng: np.random.Generator) -> dict[str, Any]:
    shutil.rmtree(subject.store.root)
    subject.store = Store(subject.store.root)
    shutil.rmtree(subject.out, ignore_errors=True)
    outs = [subject.out, subject.folder / "second-out"]
    drivers = [Command(subject.words(subject.store, out), subject.folder / f"{out.name}-log") for out in outs]
    if killed:
        time.sleep(rng.uniform(0.3, 0.6) * subject.seconds)
        drivers[1].kill()
    codes = [driver.wait() for driver in drivers]
    trouble = subject.trouble(whole=True)
    if codes[0] or (codes[1] and not killed):
        trouble.append(f"drivers ended with {codes}: {one_line(drivers[0])}")
    return {"command": subject.name, "drivers": 2, "killed": int(killed), "trouble": trouble}


# ---- edits ----


def make_task(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "table.py").write_text(TASK)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(60, 5, generator=generator).tolist()
    (folder / "train.csv").write_text("\n".join(",".join(f"{value:.4f}" for value in row) for row in rows))
    torch.save({"weight": torch.randn(1, 4, generator=generator), "bias": torch.zeros(1)}, folder / "first.pt")
    return folder


def edit(folder: Path, what: str) -> None:
    if what == "data":
        (folder / "train.csv").write_text((folder / "train.csv").read_text().replace("-", ""))
    elif what == "weights":
        torch.save({"weight": torch.ones(1, 4).cumsum(1), "bias": torch.zeros(1)}, folder / "first.pt")
    elif what == "code":
        (folder / "table.py").write_text(TASK.replace("rows[:, :-1]", "2 * rows[:, :-1]"))


def with_edit(folder: Path, what: str, cluster: tuple[str, ...], wanted: dict[Any, Any]) -> dict[str, Any]:
    """An edit after the third retrain: what is in the cache is what the unedited task gave, or of another key."""
    place = make_task(folder / f"{what}-{cluster[1]}")
    store = Store(place / "cache")
    command = Command(task_words(place, store, cluster), place)
    while command.poll() is None and len(list(store.entries("retrain"))) < 3:
        time.sleep(0.02)
    edit(place, what)
    code = command.wait(900)
    entries = entries_of(store)
    trouble = [f"{name} differs" for name, arrays in entries.items() if arrays != wanted.get(name)]
    said = one_line(command).replace(str(folder), "")[:200] if code else ""
    if code == 0 and len(entries) != len(wanted):
        trouble.append("it ended well without all entries")
    case = {"edited": what, "cluster": cluster[1], "exit_code": code, "num_entries": len(entries)}
    return {**case, "said": said, "trouble": trouble}


def task_words(place: Path, store: Store, cluster: tuple[str, ...]) -> list[str]:
    return [
        *("lds", "--task", str(place / "table.py"), "--device", "cpu", "--alpha", "0.5", "--subsets", "12"),
        *("--replicates", "1", "--methods", "gradsim", "--cache", str(store.root), "--out", str(place / "out")),
        *cluster,
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="where caches go, and stay (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="a file for the record")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    rng, began = np.random.default_rng(arguments.seed), time.monotonic()
    cases: list[dict[str, Any]] = []

    def keep(make: Callable[..., dict[str, Any]], *of: Any) -> None:
        cases.append(make(*of))
        print(json.dumps(cases[-1]), flush=True)

    with tempfile.TemporaryDirectory(prefix="disturbances-") as temporary:
        folder = Path(arguments.folder or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        calm = make_task(folder / "calm")
        finish(task_words(calm, Store(calm / "cache"), INLINE), calm)
        wanted = entries_of(Store(calm / "cache"))
        for what in ("data", "weights", "code"):
            for cluster in (INLINE, LOCAL):
                keep(with_edit, folder, what, cluster, wanted)
        save_often(folder, 0.2)
        subjects = [Subject(name, folder) for name in SUBJECTS]
        for subject in subjects:
            subject.undisturbed()
            for number in ERRORS:
                for share in SHARES:
                    keep(with_faults, subject, number, share, rng)
            shutil.rmtree(subject.out, ignore_errors=True)
            finish(subject.words(subject.store, subject.out), subject.folder)
            keep(lambda subject=subject: {"command": subject.name, "at_last": subject.trouble(whole=True)})
        for killed in (False, True):
            keep(with_two_drivers, subjects[0], killed, rng)
    trouble = [one for case in cases for one in [*case.get("trouble", ()), *case.get("at_last", ())]]
    faults = [case for case in cases if "error" in case]
    failed: Counter[str] = Counter()
    for case in faults:
        failed[case["error"]] += case["num_failed"]
    record = {
        "what": str(__doc__).split("\n")[0],
        "command": command_line("tests.trials.disturbances", sys.argv[1:]),
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - began),
        "good": not trouble,
        "num_faults": dict(failed),
        "num_runs_with_faults": sum(case["num_attempts"] for case in faults),
        "num_refused_in_one_line": sum(case["num_refused"] for case in faults),
        "trouble": sorted(set(trouble)),
    }
    print(json.dumps(record, indent=1))
    if arguments.out:
        write_json(arguments.out, {**record, "cases": cases, **provenance("CPU")})
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())
