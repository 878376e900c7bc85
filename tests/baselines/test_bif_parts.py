"""Chains are parts: made anywhere, in any order, killed and taken up again, they give an undisturbed run's bits."""

import gc
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from baselines.bif.collect import DIAGNOSED_EXAMPLES
from baselines.bif.engine import Chain, Workbench
from baselines.bif.method import BIF, EXACT_PART
from baselines.bif.saving import Saver
from baselines.bif_cv import BIFControlVariate
from baselines.gradsim import GradSim
from baselines.method import Attribution, Problem, Size
from baselines.support.memory import cgroup_free_bytes, free_bytes
from baselines.support.transfer import PIECE_BYTES, on_device, to_device, to_host
from retrain.examples import Batch, Examples
from retrain.resume import ResumeState
from tests.helpers.planted import Planted, make_problem
from tests.helpers.problems import CPU, problem_of, refused

BASE: dict = {"chains": 3, "draws": 9, "burn_in": 2, "thinning": 2, "minibatch": 10}
BASE |= {"n_beta": 50.0, "gamma": 5.0, "step_size": 0.01}
VARIANTS: dict[str, dict] = {
    "traces": {},
    "sums": {"draws": 80},
    "sghmc": {"sampler": "sghmc"},
    "rmsprop_sgld": {"sampler": "rmsprop_sgld"},
    "difference": {"gradient": "difference", "centring": "chain"},
    "bfloat16": {"displacement": "bfloat16"},
    "control_variate": {"control_variate": True, "shrinkage": True},
    "control_variate, sums": {"draws": 80, "control_variate": True, "shrinkage": True},
    "kronecker": {"localiser": "kronecker", "control_variate": True},
    "in backward": {},
}


def problem_for(folder: Path) -> Problem:
    return problem_of(Planted(num_train=30, num_queries=20), folder, chosen=np.arange(25)[::-1])


@pytest.fixture(params=VARIANTS)
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BIF:
    if request.param == "in backward":
        monkeypatch.setattr("baselines.bif.engine.STEP_IN_BACKWARD_BYTES", 0)
    return BIF(**{**BASE, **VARIANTS[request.param]})


def assert_equal(one: Attribution, other: Attribution) -> None:
    """To the bit."""
    assert torch.equal(one.scores, other.scores)
    assert torch.equal(one.train_scale, other.train_scale)
    assert torch.equal(one.arrays["mean_loss_trace"], other.arrays["mean_loss_trace"])
    assert one.diagnostics == other.diagnostics
    assert one.components.keys() == other.components.keys()


def test_parts_made_apart_give_the_bits_of_one_run(method: BIF, tmp_path: Path) -> None:
    whole = method.score(problem_for(tmp_path), None)
    parts = {}
    for number in reversed(range(method.num_parts())):  # another problem each, and none beside another
        problem = problem_for(tmp_path)
        packed = method.pack_fit(method.fit(problem))
        state = method.fit(problem) if packed is None else method.unpack_fit(problem, packed)
        parts[number] = method.score_part(problem, state, number)
        assert all(value.device.type == "cpu" for value in parts[number].values())
    merged = method.merge(problem_for(tmp_path), None, [parts[number] for number in range(method.num_parts())])
    assert_equal(merged, whole)
    assert whole.diagnostics["streaming"] == (method.draws == 80)


class Killed(Exception):
    pass


class Impatient(ResumeState):
    """Saves every so many draws, and dies after a while: as a kill does, a few draws after the last save."""

    def __init__(self, folder: Path, lives: int, every: int = 1):
        super().__init__(folder)
        self.lives, self.every = lives, every

    def due(self) -> bool:
        self.lives -= 1
        if self.lives == 0:
            raise Killed
        return self.lives % self.every == 1 % self.every


def test_a_killed_chain_goes_on_where_it_was(method: BIF, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, where a finished chain is kept too; then, for some, each chain in its own."""
    monkeypatch.setattr("baselines.bif.saving.SAVE_SECONDS", 0.0)  # finished chains are worth saving too
    monkeypatch.setattr("baselines.bif.saving.SHARE_OF_TIME", 1e9)
    undisturbed = method.score(problem_for(tmp_path), None)
    lives, every = (8, 3) if method.draws < 80 else (60, 25)
    kills = 0

    def attempt(number: int | None) -> Attribution | dict:
        nonlocal kills
        while True:
            work = Impatient(tmp_path / f"work-{number}", lives, every)
            problem = replace(problem_for(tmp_path), work=work)
            try:
                return method.score(problem, None) if number is None else method.score_part(problem, None, number)
            except Killed:
                kills += 1
                assert kills < 100, "it never gets further"

    assert_equal(attempt(None), undisturbed)  # type: ignore[arg-type]
    assert kills >= method.chains, "every chain was hit"
    if method.sampler == "sghmc" or method.shrinkage:
        parts = [attempt(number) for number in range(method.num_parts())]
        assert_equal(method.merge(problem_for(tmp_path), None, parts), undisturbed)  # type: ignore[arg-type]


def test_a_state_of_other_settings_is_not_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baselines.bif.saving.SHARE_OF_TIME", 1e9)
    problem = replace(problem_for(tmp_path), work=Impatient(tmp_path / "work", 6))
    with pytest.raises(Killed):
        BIF(**BASE).score(problem, None)
    assert problem.work.load("chain-0") is not None
    other = BIF(**{**BASE, "gamma": 6.0})
    again = replace(problem, work=Impatient(tmp_path / "work", -1))
    assert_equal(other.score(again, None), other.score(problem_for(tmp_path), None))


def test_saving_takes_a_small_share_of_the_time_and_no_large_state(tmp_path: Path, monkeypatch) -> None:
    """A save that took s seconds is not repeated before ten times that has passed, due or not."""
    with monkeypatch.context() as patch:
        patch.setattr("baselines.bif.saving.LARGEST_STATE_BYTES", 100)
        BIF(**BASE).score(replace(problem_for(tmp_path), work=Impatient(tmp_path / "work", -1)), None)
        assert not (tmp_path / "work").exists()
    now, saves = [0.0], []
    monkeypatch.setattr("baselines.bif.saving.time.monotonic", lambda: now[0])

    class Slow(ResumeState):
        def due(self) -> bool:
            now[0] += 1.0  # a draw's second
            return True

        def save(self, name, arrays, record) -> None:  # type: ignore[no-untyped-def]
            saves.append(now[0])
            now[0] += 2.0

    BIF(**{**BASE, "chains": 1, "draws": 100}).score(replace(problem_for(tmp_path), work=Slow(tmp_path)), None)
    gaps = np.diff(saves)
    assert len(gaps) >= 3
    assert (gaps >= 22).all()


def test_what_a_saved_state_comes_after_is_saved_with_it(tmp_path: Path) -> None:
    """Or it would be made again, and its seconds, which the state's include, charged twice."""
    work = ResumeState(tmp_path / "work")
    saver = Saver(work, {})
    saver.finished("chain-0", {"losses": torch.ones(2)}, seconds=5.0)
    assert saver.load("chain-0") is None, "five seconds are not worth a file"
    work.due = lambda: True  # type: ignore[method-assign]
    saver.progress("chain-1", 3, lambda: {"losses": torch.zeros(2)})
    assert [saver.load(name)[1] for name in ("chain-0", "chain-1")] == [None, 3]


def test_parts_of_different_numbers_are_not_joined(tmp_path: Path) -> None:
    problem = problem_for(tmp_path)
    one, other = BIF(**BASE), BIF(**{**BASE, "n_beta": 60.0})
    parts = [one.score_part(problem, None, 0), other.score_part(problem, None, 1), one.score_part(problem, None, 2)]
    refused(lambda: one.merge(problem, None, parts), "chain 1 ran with", "'n_beta': 60")
    with pytest.raises(ValueError, match="2 parts came; expected 3"):
        one.merge(problem, None, parts[:2])


def test_the_exact_part_is_shown_beside_the_scores(tmp_path: Path) -> None:
    """It is gradsim's answer: what bif_cv adds to it is what its chains sampled."""
    problem = problem_for(tmp_path)
    answer = BIF(**BASE, control_variate=True).score(problem, None)
    exact = answer.components[EXACT_PART]
    gradsim = GradSim().score(problem, None)
    torch.testing.assert_close(exact.scores, gradsim.scores)
    torch.testing.assert_close(exact.normalised(), gradsim.normalised())
    assert answer.diagnostics["sampled_share"] > 0
    assert BIF(**BASE).score(problem, None).components == {}


# ---- memory is known before the work: what the system leaves, cgroups included, and what BIF will hold at once ----

GIB = 2**30
SIZE = Size(num_train=50_000, num_attributed=5000, num_queries=10_000, num_parameters=2_000_000, device=CPU)
NUMBERS: dict = {"draws": 100, "step_size": 1e-5, "n_beta": 200.0, "gamma": 1e4}
FEW = Planted(num_train=50, num_queries=5)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {**MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable: {32 * 2**20} kB\n"}


def test_a_jobs_limit_counts_less_what_is_used_and_cannot_be_reclaimed(tmp_path: Path) -> None:
    """Version 2, as Slurm lays it out: the limit is on the job, two levels above the process."""
    job = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7"
    files = {
        "proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0/user\n",
        f"{job}/memory.max": f"{8 * GIB}\n",
        f"{job}/memory.current": f"{5 * GIB}\n",
        f"{job}/memory.stat": f"anon {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\nslab_reclaimable {GIB}\n",
        f"{job}/step_0/memory.max": "max\n",
        f"{job}/step_0/memory.current": f"{5 * GIB}\n",
    }
    assert cgroup_free_bytes(write(tmp_path, files)) == [6 * GIB]
    assert free_bytes(CPU, tmp_path) == 6 * GIB
    (tmp_path / job / "step_0/memory.max").write_text(f"{4 * GIB}\n")
    assert free_bytes(CPU, tmp_path) == 0, "the tightest counts, and none is negative"


def test_version_1_and_a_container_that_sees_its_own_cgroup_as_the_mount(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/docker/abc/inner\n4:cpu,cpuacct:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"cache 5\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
    }
    assert cgroup_free_bytes(write(tmp_path, files)) == [2 * GIB]
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_free_bytes(tmp_path) == [], "version 1's way of saying that there is no limit"


def test_without_cgroups_or_with_odd_ones_it_is_what_the_system_calls_available(tmp_path: Path) -> None:
    assert free_bytes(CPU, write(tmp_path, {})) == 32 * GIB
    assert cgroup_free_bytes(tmp_path) == []
    assert free_bytes(CPU, tmp_path / "nowhere") > 0
    assert free_bytes(CPU) > 0
    for text in ("", "nonsense", "0::\n", "7:memory\n", "0::/../../etc\n"):
        write(tmp_path, {"proc/self/cgroup": text, "sys/fs/cgroup/memory.max": "lots"})
        assert free_bytes(CPU, tmp_path) == 32 * GIB, text


@pytest.mark.parametrize("method", [BIF, BIFControlVariate])
def test_every_draw_and_every_chain_is_counted(method: type[BIF]) -> None:
    """Streaming: no more scores for more draws, and what a chain is judged by for each of them."""
    size = replace(SIZE, num_parameters=0)
    few, many = (method(**{**NUMBERS, "draws": draws}).memory_bytes(size) for draws in (8000, 16_000))
    copies = 2 if method is BIFControlVariate else 1
    assert many - few == copies * 4 * 8000 * 4 * (DIAGNOSED_EXAMPLES + 1)
    scores = 4 * SIZE.num_attributed * SIZE.num_queries
    assert few > copies * 5 * scores, "merging four chains' sums, all of them read from files"
    on_gpu = replace(size, device=torch.device("cuda"))
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
        scores = 4 * 60 * 40
        from_files = scores + sum(value.nbytes for part in parts for value in part.values())
        size = Size(num_train=60, num_attributed=60, num_queries=40, num_parameters=0, device=CPU)
        planned = method.memory_bytes(size)
        assert held.streaming == (method.draws == 200)
        assert from_files <= planned <= 2.5 * from_files


# ---- A chain's step as one CUDA graph gives the bits of the same step launched kernel by kernel ----

METHOD = BIF(chains=2, draws=20, minibatch=10, n_beta=50.0, gamma=1.0, step_size=0.005)
WAYS = [
    {},
    {"sampler": "rmsprop_sgld", "burn_in": 3},
    {"sampler": "sghmc", "thinning": 2},
    {"control_variate": True},
    {"gradient": "difference"},
    {"minibatch": 1000},  # all of the training set: nothing is drawn
    {"displacement": "bfloat16"},
]


@dataclass(frozen=True, kw_only=True)
class Reading(Planted):
    """Its loss looks at a number on the host, which no capture can."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        losses = super().loss(model, batch)
        return losses * (1.0 if float(losses.detach().sum()) >= 0 else 2.0)


def workbench(method: BIF, task: Planted, device: str, folder: Path) -> Workbench:
    problem = make_problem(task, folder)
    model = problem.model.to(device)
    return Workbench(method, task, model, problem.train.to(device), problem.queries.to(device))


def losses_of(bench: Workbench, number: int) -> Tensor:
    return torch.stack([losses.clone() for losses in bench.draws(3, number)])


@pytest.mark.parametrize("way", WAYS)
def test_a_chain_is_the_same_after_another_on_one_workbench(way: dict, tmp_path: Path) -> None:
    method = replace(METHOD, **way)
    used = workbench(method, FEW, "cpu", tmp_path)
    losses_of(used, 0)
    assert torch.equal(losses_of(used, 1), losses_of(workbench(method, FEW, "cpu", tmp_path), 1))


@pytest.mark.cuda
@pytest.mark.parametrize("way", WAYS)
def test_a_captured_step_gives_the_bits_of_a_plain_one(way: dict, tmp_path: Path, monkeypatch) -> None:
    method = replace(METHOD, **way)
    captured = workbench(method, FEW, "cuda", tmp_path)
    assert captured._whole_step.has_graph
    start = captured.losses().clone()
    monkeypatch.setattr("baselines.bif.passes._capture", lambda *_: None)
    plain = workbench(method, FEW, "cuda", tmp_path)
    assert torch.equal(start, plain.losses()), "capturing leaves the chain at the checkpoint"
    for number in (0, 1):
        assert torch.equal(losses_of(captured, number), losses_of(plain, number))


@pytest.mark.cuda
@pytest.mark.parametrize("way", WAYS)
def test_a_captured_chain_goes_on_from_where_it_was_saved(way: dict, tmp_path: Path) -> None:
    method = replace(METHOD, **way)
    bench = workbench(method, FEW, "cuda", tmp_path)
    whole = losses_of(bench, 1)
    chain = Chain(bench, 3, 1)
    for _ in zip(range(8), chain.draws(), strict=False):
        pass
    state = {name: value.clone() for name, value in chain.state().items()}
    for number in (0, 1):  # what else happens on the workbench meanwhile does not matter
        losses_of(bench, number)
    again = Chain(bench, 3, 1)
    again.restore(state, 8)
    rest = torch.stack([losses.clone() for losses in again.draws() if losses is not None])
    assert torch.equal(rest, whole[-len(rest) :])


@pytest.mark.cuda
def test_a_captured_workbench_is_freed_when_nobody_holds_it(tmp_path: Path) -> None:
    """Gigabytes of examples would wait for the next garbage collection."""
    bench = workbench(METHOD, FEW, "cuda", tmp_path)
    seen = [weakref.ref(bench), weakref.ref(bench.losses), weakref.ref(bench.gradient)]
    gc.disable()
    try:
        del bench
        assert [one() for one in seen] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.cuda
def test_what_cannot_be_captured_runs_without_a_graph(tmp_path: Path) -> None:
    task = Reading(num_train=50, num_queries=5)
    bench = workbench(METHOD, task, "cuda", tmp_path)
    assert not bench._whole_step.has_graph
    expected = losses_of(workbench(METHOD, FEW, "cuda", tmp_path), 1)
    torch.testing.assert_close(losses_of(bench, 1), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("rows", [3, PIECE_BYTES // 1000, PIECE_BYTES // 1000 + 1, PIECE_BYTES // 300 + 7])
def test_copies_in_pieces_are_copies(device: str, rows: int) -> None:
    given = torch.randn(rows, 250, dtype=torch.float64, device=device)
    for tensor in (given, given.T, given.float()):
        assert torch.equal(to_host(tensor), tensor.cpu())
        there = to_device(tensor.cpu(), torch.device(device))
        assert there.device == given.device
        assert torch.equal(there, tensor)
    examples = Examples({"ids": given.cpu(), "mask": given.cpu() > 0}, torch.arange(rows))
    moved = on_device(examples, torch.device(device))
    assert torch.equal(moved.inputs["ids"], given)
    assert moved.targets.device == given.device
