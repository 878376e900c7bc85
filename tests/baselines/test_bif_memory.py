"""Memory is known before the work: what the system leaves, cgroups included, and what BIF will hold at once."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baselines.bif.collect import DIAGNOSED_EXAMPLES
from baselines.bif.method import BIF
from baselines.bif_cv import BIFControlVariate
from baselines.method import Size
from baselines.support.memory import cgroup_free_bytes, free_bytes, refuse_if_too_large
from tests.baselines.test_methods import make_problem
from tests.helpers.planted import Planted

CPU, GIB = torch.device("cpu"), 2**30
SIZE = Size(num_train=50_000, num_attributed=5000, num_queries=10_000, num_parameters=2_000_000, device=CPU)
NUMBERS: dict = {"draws": 100, "step_size": 1e-5, "n_beta": 200.0, "gamma": 1e4}


# ---- what there is ----


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable: {32 * 2**20} kB\n"}


def test_without_cgroups_it_is_what_the_system_calls_available(tmp_path: Path) -> None:
    assert free_bytes(CPU, write(tmp_path, MEMINFO)) == 32 * GIB
    assert cgroup_free_bytes(tmp_path) == []
    assert free_bytes(CPU, tmp_path / "nowhere") > 0
    assert free_bytes(CPU) > 0


def test_a_jobs_limit_counts_less_what_is_used_and_cannot_be_reclaimed(tmp_path: Path) -> None:
    """Version 2, as Slurm lays it out: the limit is on the job, two levels above the process."""
    job = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7"
    write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0/user\n",
            f"{job}/memory.max": f"{8 * GIB}\n",
            f"{job}/memory.current": f"{5 * GIB}\n",
            f"{job}/memory.stat": f"anon {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\nslab_reclaimable {GIB}\n",
            f"{job}/step_0/memory.max": "max\n",
            f"{job}/step_0/memory.current": f"{5 * GIB}\n",
        },
    )
    assert cgroup_free_bytes(tmp_path) == [6 * GIB]
    assert free_bytes(CPU, tmp_path) == 6 * GIB
    (tmp_path / job / "step_0/memory.max").write_text(f"{4 * GIB}\n")
    assert free_bytes(CPU, tmp_path) == 0, "the tightest counts, and none is negative"


def test_version_1_and_a_container_that_sees_its_own_cgroup_as_the_mount(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "5:memory:/docker/abc/inner\n4:cpu,cpuacct:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"cache 5\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
        },
    )
    assert cgroup_free_bytes(tmp_path) == [2 * GIB]
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_free_bytes(tmp_path) == [], "version 1's way of saying that there is no limit"


@pytest.mark.parametrize("text", ["", "nonsense", "0::\n", "7:memory\n", "0::/../../etc\n"])
def test_odd_cgroup_files_are_no_limit(tmp_path: Path, text: str) -> None:
    write(tmp_path, {**MEMINFO, "proc/self/cgroup": text, "sys/fs/cgroup/memory.max": "lots"})
    assert free_bytes(CPU, tmp_path) == 32 * GIB


# ---- what is needed ----


def test_what_is_refused_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refuse_if_too_large(BIF(), replace(SIZE, num_attributed=5, num_queries=5, num_parameters=10)) is None
    monkeypatch.setattr("baselines.support.memory.free_bytes", lambda _: GIB)
    said = refuse_if_too_large(BIF(), replace(SIZE, num_attributed=50_000))
    assert said is not None
    assert said.startswith("bif needs 3.0 GiB at once for ")
    assert "50,000 training examples and 10,000 queries, and 1.0 GiB are free on cpu; take fewer queries" in said


@pytest.mark.parametrize("method", [BIF, BIFControlVariate])
def test_every_draw_and_every_chain_is_counted(method: type[BIF]) -> None:
    """Streaming: no more scores for more draws, and what a chain is judged by for each of them."""
    few, many = (
        method(**{**NUMBERS, "draws": draws}).memory_bytes(replace(SIZE, num_parameters=0)) for draws in (8000, 16_000)
    )
    copies = 2 if method is BIFControlVariate else 1
    assert many - few == copies * 4 * 8000 * 4 * (DIAGNOSED_EXAMPLES + 1)
    scores = 4 * SIZE.num_attributed * SIZE.num_queries
    assert few > copies * 5 * scores, "merging four chains' sums, all of them read from files"
    on_gpu = replace(SIZE, num_parameters=0, device=torch.device("cuda"))
    assert method(**{**NUMBERS, "draws": 8000}).memory_bytes(on_gpu) < few, "there they come one at a time"
    assert method(**{**NUMBERS, "draws": 0}).memory_bytes(SIZE) >= method(**NUMBERS).memory_bytes(SIZE)


def test_the_models_copies_are_counted() -> None:
    without = replace(SIZE, num_parameters=0)

    def of_model(**options: object) -> float:
        method = BIF(**{**NUMBERS, **options})  # type: ignore[arg-type]
        return (method.memory_bytes(SIZE) - method.memory_bytes(without)) / SIZE.num_parameters / 4

    assert of_model() == 4  # weights, displacement, and the gradient as it comes and as it is held
    assert of_model(gradient="difference") == 5
    assert of_model(control_variate=True) == 6
    assert of_model(sampler="rmsprop_sgld") == 6
    billions = replace(SIZE, num_parameters=2_800_000_000)
    large = BIF(**NUMBERS, displacement="bfloat16")
    assert large.memory_bytes(billions) - large.memory_bytes(without) == 4 * 2_800_000_000, "each moved by itself"


def test_what_is_planned_is_what_is_held(tmp_path: Path) -> None:
    """The parts of a real run, counted."""
    problem = make_problem(Planted(num_train=60, num_queries=40), tmp_path)
    for options in ({"draws": 8}, {"draws": 200}, {"draws": 8, "control_variate": True}):
        method = BIF(**{**NUMBERS, **options, "minibatch": 60})
        held = method._held(60, 40)
        parts = [method.score_part(problem, None, chain) for chain in range(method.chains)]
        num_bytes = sum(value.numel() * value.element_size() for part in parts for value in part.values())
        scores = 4 * 60 * 40
        from_files = num_bytes + scores
        planned = method.memory_bytes(
            Size(num_train=60, num_attributed=60, num_queries=40, num_parameters=0, device=CPU)
        )
        assert held.streaming == (method.draws == 200)
        assert from_files <= planned <= 2.5 * from_files
