"""`python -m bench.evaluations NAME`, or `tda-bench evaluate NAME`: what methods are worth beside their LDS.

A module of an evaluation has `add_arguments(parser)`, `evaluate(arguments) -> MetricResult` and `show(answers) -> str`.
"""

import sys
import time
from collections.abc import Sequence

from bench.arguments import Parser, check_out, report, run_cli
from bench.records import command_line

EVALUATIONS = {
    "removal": "leave out what a method calls helpful, retrain, and look (--brittleness: until a prediction flips)",
    "mislabel": "find flipped labels by self-influence",
    "calibration": "are scores in units of loss? slope and R2 of predicted against actual losses",
    "leave_one_out": "leave out every example by itself, and retrain",
    "agreement": "how alike methods rank the training examples",
    "limit": "how fast BIF approaches the damped influence function on a regular model",
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    about = "What methods are worth beside their LDS. `NAME --help` lists the arguments of one."
    modules = {name: (f"bench.evaluations.{name}", text) for name, text in EVALUATIONS.items()}
    module, own, arguments = Parser.of_module("python -m bench.evaluations", about, modules, words)
    command = command_line("bench.evaluations", words)

    def work() -> int:
        check_out(arguments.out)
        started = time.perf_counter()
        out = module.evaluate(arguments)
        out.seconds = time.perf_counter() - started
        out.assign_run_id()
        print(module.show(out))
        end, problems = f"\nrun {out.run_id} in {out.seconds:.0f} s", list(out.problems)
        try:
            end += f"; record: {out.save(arguments.out, command)}"
        except OSError as error:  # a full disk must not take with it what a run has found
            problems.append(f"{arguments.out}/{out.run_id} cannot be written: {error.strerror or error}")
        print(end)
        return report(own.prog, out.notes, problems, out.skipped)

    return run_cli(own.prog, work, traceback=getattr(arguments, "traceback", None))


if __name__ == "__main__":
    sys.exit(main())
