"""The same work in this process, in local processes, or on Slurm; nothing that is finished is ever lost.

A batch is a list of idempotent `Unit`s. `run_units` does those whose entry the store does not have yet:

    report = run_units(units, store, cluster="local", jobs=4)
    report.failed        # {key: reason; its first line says what, and where in whose code}

- `inline`: one after another in this process (`run.py`).
- `local`: worker processes on this machine (`local.py`), each with its share of the cores, or its own GPUs.
- `slurm`: array tasks through submitit (`slurm.py`).

In all three, a unit is leased before it is worked on (`retrain/leases.py`), so batches may overlap and share the work;
a unit that fails three times is reported and does not stop the others (`tracker.py`); a worker that is killed is
replaced and its unit tried again; Ctrl-C or a kill at any moment keeps every finished unit, and the same command goes
on from there. What an unfinished unit saved (`retrain/resume.py`) is kept, too.
"""

from retrain.jobs.run import CLUSTERS, run_units
from retrain.jobs.tracker import JobError, Report
from retrain.jobs.unit import Unit

__all__ = ["CLUSTERS", "JobError", "Report", "Unit", "run_units"]
