"""Failing disks: every entry is an undisturbed run's, or one line refuses it.

    python -m tests.trials.disturbances --out results/trials/disturbances.json          # about ten minutes

A share of all calls on files of the cache fail with EIO, ENOSPC or ESTALE while `tda-bench lds` and `evaluate removal`
run, up to five times each.
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

from bench.records import command_line, provenance, write_json
from tests.helpers.faults import Faults
from tests.trials.kills import Command, Subject, finish, save_often

ERRORS = (errno.EIO, errno.ENOSPC, errno.ESTALE)
SHARES = (0.02, 0.1, 0.5)
ATTEMPTS = 5
SUBJECTS = ("lds inline", "evaluate removal")


def one_line(command: Command) -> str:
    """The last line of a command that gave up; it must be its own words, and no traceback."""
    text = command.log.read_text(errors="replace")
    if "Traceback" in text:
        raise RuntimeError(f"a traceback instead of one line:\n{text[-3000:]}")
    return text.replace("\r", "\n").strip().splitlines()[-1]


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
        save_often(folder, 0.2)
        for subject in [Subject(name, folder) for name in SUBJECTS]:
            subject.undisturbed()
            for number in ERRORS:
                for share in SHARES:
                    keep(with_faults, subject, number, share, rng)
            shutil.rmtree(subject.out, ignore_errors=True)
            finish(subject.words(subject.store, subject.out), subject.folder)
            keep(lambda subject=subject: {"command": subject.name, "at_last": subject.trouble(whole=True)})
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
