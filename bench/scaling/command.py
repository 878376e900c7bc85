"""What does attribution cost as models grow? Seconds, memory and disk of each method across the Pythia suite.

    python -m bench.scaling                                           # the paper's setting; on a CPU a small one
    python -m bench.scaling --models 14m 70m 410m --methods bif ekfac --fit-examples 400 2000 --out results/scaling
    python -m bench.scaling --estimate --model 2.8b --train 400 --queries 18 --draws 2000    # before anything is run
    python -m bench.scaling --check                                   # estimates against what they did not see

The paper's scaling comparison: 400 Pile sequences (`--text`), 18 prompt-completion queries, 150 tokens, bfloat16; BIF
with 4 chains x 500 draws, EK-FAC by kronfluence with its extreme-memory-reduction arguments, fitted on 1,000,000
sequences. The fitting set decides which of them is cheaper, so it is an axis like any other (`--fit-examples`), and
every row, table, estimate and figure says it. Every point is measured in a process of its own (bench/scaling/point.py
says what is counted). A point whose whole run does not fit its budget is measured at smaller sizes and projected; one
that fails is a row with its reason. Finished points are kept, and finished parts of EK-FAC's: interrupt at any time,
and the same command goes on. Where the hub cannot be reached, models have random weights: cost does not depend on the
values, and every row says which it had.
"""

import argparse
import logging
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.records import try_write
from bench.scaling.asked import check_mode, fill_defaults, make_parser, request_of
from bench.scaling.campaign import NEEDS, PARTS, find_part, requests_of
from bench.scaling.earlier import set_aside, settle
from bench.scaling.estimate import RATES, by_device, read_rows
from bench.scaling.plan import about, show_points
from bench.scaling.show import write_table
from bench.scaling.specifications import SweepRequest, specifications
from bench.scaling.sweep import LEAST_SECONDS, Sweep
from bench.scaling.without_running import (
    check_command,
    estimate_command,
    laws_of,
    merge_command,
    rates_of,
    show_results,
    verdict_command,
)
from bench.tables import duration
from retrain.command import check_device, check_out, guarded
from retrain.errors import UsageError
from retrain.store import Store
from retrain.units import choose_device


def list_campaign(base: SweepRequest) -> int:
    """Every part, with the seconds that the package's rates predict for a H200."""
    ((device, estimator),) = list(by_device(read_rows(RATES)).items())[:1]
    totals, num_left_out = dict.fromkeys(NEEDS, 0.0), 0
    for part in PARTS:
        specs = [spec for request in requests_of(part, base) for spec in specifications(request)]
        text, seconds, num_unknown = show_points(specs, estimator, part.budget_seconds)
        for need in NEEDS[NEEDS.index(part.needed_for) :]:
            totals[need] += seconds
        num_left_out += num_unknown
        print(f"{part.name} ({part.needed_for}), {about(seconds, num_unknown)}: {part.decides}\n{text}\n")
    sums = ", ".join(f"{name} {duration(seconds)}" for name, seconds in totals.items())
    besides = f", and {num_left_out} points without a known rate" if num_left_out else ""
    print(f"by the rates of {device}: {sums}{besides}")
    return 0


def sweep_command(arguments: argparse.Namespace, command: str) -> int:
    base = request_of(arguments)
    if arguments.campaign is not None:
        return campaign_command(arguments, base, command)
    if arguments.dry_run:
        return show_plan([base], arguments.budget_seconds, arguments)
    check_device(arguments.device)
    return run_sweep([base], arguments.budget_seconds, arguments.total_seconds, Path(arguments.out), arguments, command)


def campaign_command(arguments: argparse.Namespace, base: SweepRequest, command: str) -> int:
    """Parts in the order they are named, until the total time is over; 1 where one has no numbers at all."""
    if not arguments.campaign:
        return list_campaign(base)
    names = [part.name for part in PARTS] if arguments.campaign == ["all"] else dict.fromkeys(arguments.campaign)
    parts = [find_part(name) for name in names]
    if arguments.dry_run:
        for part in parts:
            print(f"{part.name}: {part.decides}")
            show_plan(requests_of(part, base), part.budget_seconds, arguments)
        return 0
    check_gpu(arguments.device)
    started, codes = time.monotonic(), []
    for part in parts:
        left = arguments.total_seconds and arguments.total_seconds - (time.monotonic() - started)
        if left is not None and left < LEAST_SECONDS:
            print(f"{part.name}: not begun, no time left of --total-seconds", file=sys.stderr)
            codes.append(1)
            continue
        if len(parts) > 1:
            print(f"{part.name}: {part.decides}", file=sys.stderr)
        requests, out = requests_of(part, base), Path(arguments.out) / part.name
        codes.append(run_sweep(requests, part.budget_seconds, left, out, arguments, command))
    if not arguments.json:
        merge = f"python -m bench.scaling --merge {Path(arguments.out) / '*' / 'scaling.json'} --out results/scaling"
        print(f"one table of all parts: {merge}")
    return max(codes)


def check_gpu(device: str) -> None:
    """The campaign takes a GPU minutes and a CPU days: there only where that was said."""
    check_device(device)
    if device == "auto" and choose_device(device).type == "cpu":
        raise UsageError(
            "--campaign measures large models on a GPU, and torch sees none; --dry-run shows the plan, --device cpu "
            "measures here all the same"
        )


def show_plan(requests: Sequence[SweepRequest], budget: float, arguments: argparse.Namespace) -> int:
    ((device, estimator),) = list(rates_of(arguments).items())[:1]
    specs = [spec for request in requests for spec in specifications(request)]
    text, seconds, num_unknown = show_points(specs, estimator, budget)
    here = specs[0]["device_name"]
    other = "" if here == device else f", not of this machine ({here})"
    print(f"{text}\n{about(seconds, num_unknown)}, by the rates of {device}{other}")
    return 0


def run_sweep(
    requests: list[SweepRequest],
    budget: float,
    total: float | None,
    out: Path,
    arguments: argparse.Namespace,
    command: str,
) -> int:
    """Measures, and writes the table after every point."""
    check_out(str(out))
    sweep = Sweep(requests, Store(arguments.cache), budget_seconds=budget, total_seconds=total, force=arguments.force)
    unwritten = [""]
    earlier: list[Path | None] = []

    def replace_table() -> None:
        if not earlier:
            earlier.append(set_aside(out, sweep.run_id))
        write_table(out, sweep.record(command) | laws_of(sweep.rows), sweep.rows)

    def write() -> None:
        unwritten[0] = try_write(replace_table, out)

    try:
        sweep.run(write)
    except SystemExit:  # SIGTERM
        print(f"python -m bench.scaling: ended; {kept_in(arguments.cache)}", file=sys.stderr)
        raise
    finally:
        if earlier and (told := settle(earlier[0], sweep.rows)):
            print(told, file=sys.stderr)
    show_results(sweep.rows, arguments)
    if not arguments.json:
        seconds = time.monotonic() - sweep.started
        where = "" if unwritten[0] else f"; table: {out / 'scaling.csv'}"
        kept = f"{sweep.num_kept} of {len(sweep.specs)} points from the cache"
        print(f"\nrun {sweep.run_id} in {seconds:.0f} s ({kept}){where}")
    if unwritten[0]:
        print(
            f"python -m bench.scaling: {unwritten[0]}; the same command writes it, from {arguments.cache}",
            file=sys.stderr,
        )
        return 1
    return 1 if all(row["error"] for row in sweep.rows) else 0


def kept_in(cache: str) -> str:
    return f"finished points are in {cache}, and the same command goes on"


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    command = shlex.join(["python", "-m", "bench.scaling", *argv])

    def work() -> int:
        check_mode(arguments)
        if arguments.merge:
            return merge_command(arguments, command)
        if arguments.check:
            return check_command(arguments)
        if arguments.verdict is not None:
            return verdict_command(arguments)
        fill_defaults(arguments)
        if arguments.estimate:
            return estimate_command(arguments)
        return sweep_command(arguments, command)

    return guarded(parser.prog, work, interrupted=kept_in(arguments.cache))


if __name__ == "__main__":
    sys.exit(main())
