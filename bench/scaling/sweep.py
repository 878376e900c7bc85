"""All points of one command, each in a process of its own; what is finished is kept, and what failed is a row.

A point that fails (memory, disk, a signal) is a row with its reason, and the next one is begun; none of them is kept,
so that the same command tries again: the next time may have more memory, or more time. A point of EK-FAC that was cut
short keeps its finished parts and goes on after them.
"""

import hashlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.records import code_commit, code_fingerprint, versions, without_nan
from bench.scaling.ekfac_rows import NO_PROJECTION
from bench.scaling.methods import PRIVATE_FIELDS
from bench.scaling.processes import Processes
from bench.scaling.rows import make_rows
from bench.scaling.show import progress_line
from bench.scaling.specifications import POINT_VERSION, SweepRequest, cost_fingerprint, point_config, specifications
from bench.scaling.stages import finished_parts
from retrain.jobs.run import terminable
from retrain.models.pythia_suite import Configuration
from retrain.store import Store, canonical_json
from retrain.work import Work

LEAST_SECONDS = 5.0  # with less than this left, a point is not begun


def time_share(spec: dict[str, Any]) -> float:
    """A point's part of --total-seconds: starting costs the same for all, measuring grows with the model."""
    return 1.0 + 3.0 * (Configuration(**spec["configuration"]).num_parameters / 1e9) ** 0.5


class Sweep:
    def __init__(
        self,
        requests: list[SweepRequest],
        store: Store,
        *,
        budget_seconds: float,
        total_seconds: float | None,
        force: bool,
    ):
        self.store, self.force = store, force
        self.budget_seconds, self.total_seconds = budget_seconds, total_seconds
        self.specs = [spec for request in requests for spec in specifications(request)]
        self.started = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.points: list[dict[str, Any]] = []
        self.num_kept = 0
        self.peak_flops: float | None = None
        identity = [point_config(spec, self.budget()) for spec in self.specs]
        self.run_id = hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:12]

    def budget(self) -> tuple[float, float | None]:
        return self.budget_seconds, self.total_seconds

    def work(self, spec: dict[str, Any]) -> Work:
        """Where a point that takes several commands keeps its finished parts."""
        return Work.of(self.store, "scaling", self.store.key("scaling", point_config(spec, None)))

    def kept(self, spec: dict[str, Any]) -> dict[str, Any] | None:
        if self.force:
            return None
        for budget in (None, (self.budget_seconds, None), self.budget()):
            entry = self.store.read("scaling", point_config(spec, budget))
            if entry is not None:
                return entry.record["result"]
        return None

    def run(self, after_each: Callable[[], None]) -> None:
        known = [self.kept(spec) for spec in self.specs]
        to_do = [index for index, result in enumerate(known) if result is None]
        self.peak_flops = next((result["peak_flops"] for result in known if result and result.get("peak_flops")), None)
        with terminable(), self.store.scratch() as folder:
            processes = Processes(folder, ahead=self.specs[0]["device"].startswith("cuda"))
            try:
                if to_do:
                    processes.prepare()
                for index, spec in enumerate(self.specs):
                    result = known[index]
                    if result is None:
                        waiting = [later for later in to_do if later >= index]
                        position = f"[{index + 1}/{len(self.specs)}]"
                        print(
                            f"{position} {spec['configuration']['name']} {spec['method']}: measuring ...",
                            file=sys.stderr,
                            flush=True,
                        )
                        result = self.measure(spec, processes, str(folder), waiting)
                        self.peak_flops = self.peak_flops or result.get("peak_flops")
                        result["peak_flops"] = self.peak_flops
                        self.keep(spec, result)
                    else:
                        self.num_kept += 1
                    self.add(spec, result, index)
                    after_each()
            finally:
                processes.close()

    def add(self, spec: dict[str, Any], result: dict[str, Any], index: int) -> None:
        rows = make_rows(spec, result, result.get("peak_flops"))
        said: set[str] = set()
        for row in rows:
            row["run_id"] = self.run_id
            if row["error"] not in said:  # one reason may leave several rows without numbers
                print(progress_line(row, index + 1, len(self.specs)), file=sys.stderr, flush=True)
            said |= {row["error"]} - {None}
        self.rows += rows
        public = {name: value for name, value in spec.items() if name not in PRIVATE_FIELDS}
        self.points.append(
            {
                "model": rows[0]["model"], "method": spec["method"], "spec": public,
                "version": POINT_VERSION, "cost_code": cost_fingerprint(spec["method"]), **result,
            }
        )  # fmt: skip

    def measure(self, spec: dict[str, Any], processes: Processes, folder: str, waiting: list[int]) -> dict[str, Any]:
        budget, total = self.budget()
        limit = 3 * budget + 300
        if total is not None:
            left = total - (time.monotonic() - self.started)
            if left < LEAST_SECONDS:
                return {"rungs": [], "error": f"no time left{self.parts_of(spec)}"}
            share = time_share(spec) / sum(time_share(self.specs[index]) for index in waiting)
            room = left - budget * (len(waiting) - 1)  # what the others leave where each may take all it is allowed
            budget = min(budget, max(left * share, room))
            limit = min(left, 3 * budget + 60)
        work = self.work(spec)
        if self.force:
            work.clear()
        here = {
            "budget_seconds": budget, "scratch": folder, "result": f"{folder}/{len(self.points)}.json",
            "work": str(work.folder), "rehearse": spec["device"].startswith("cuda"),
            "measure_peak": self.peak_flops is None,
        }  # fmt: skip
        result = processes.measure({**spec, **here}, limit, more=len(waiting) > 1)
        result["had_seconds"] = budget
        for ending in ("stopped", "error"):
            if result.get(ending):
                result[ending] += self.parts_of(spec)
        return result

    def parts_of(self, spec: dict[str, Any]) -> str:
        parts = finished_parts(self.work(spec)) if spec["axis"] == "layers" else ""
        return f"; kept, and the same command goes on after it: {parts}" if parts else ""

    def keep(self, spec: dict[str, Any], result: dict[str, Any]) -> None:
        """A point that came to its end with every row it was asked for; one measured whole is good for any budget."""
        rows = make_rows(spec, result, None)
        if any(str(row["error"]).startswith(NO_PROJECTION) for row in rows):
            self.work(spec).clear()  # its parts contradict each other: they are measured anew
        if result.get("error") or result.get("stopped") or any(row["error"] for row in rows):
            return
        config = point_config(spec, self.good_for(result) if any(row["projected"] for row in rows) else None)
        if self.force:
            key = self.store.key("scaling", config)
            for info in [info for info in self.store.entries("scaling") if info.key == key]:
                self.store.remove(info)
        self.store.write("scaling", config, {}, {"result": without_nan(result)})
        self.work(spec).clear()

    def good_for(self, result: dict[str, Any]) -> tuple[float, float | None]:
        """The budget of a projected point: its own, whatever the total, where the total left it all of that."""
        return self.budget_seconds, None if result["had_seconds"] >= self.budget_seconds else self.total_seconds

    def record(self, command: str) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "command": command,
            "budget_seconds": self.budget_seconds,
            "total_seconds": self.total_seconds,
            "versions": versions(),
            "commit": code_commit(),
            "code": code_fingerprint(),
            "cores": os.cpu_count(),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(time.monotonic() - self.started, 1),
            "rows": self.rows,
            "points": self.points,
        }
