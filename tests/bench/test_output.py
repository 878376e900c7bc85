"""What is measured of a query: functions of its loss, on the retrains' side and on the methods' side alike."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from baselines.method import load_method
from bench import Experiment, run
from bench.experiment import Execution
from retrain.errors import UsageError
from retrain.logistic import LogisticDigits
from retrain.outputs import OUTPUTS, output_of, output_slope
from tests.helpers.problems import problem_of
from tests.helpers.problems import run as answer


def test_outputs_and_slopes_are_those_of_the_probability_and_need_one_label(tmp_path: Path) -> None:
    p = torch.tensor([0.999, 0.6, 0.1, 1e-6], dtype=torch.float64)
    losses = (-p.log()).requires_grad_()
    torch.testing.assert_close(output_of(losses, "margin"), -(p / (1 - p)).log())
    torch.testing.assert_close(output_of(losses, "probability"), -p)
    for output in OUTPUTS:
        (slopes,) = torch.autograd.grad(output_of(losses, output).sum(), losses)
        torch.testing.assert_close(output_slope(losses.detach(), output), slopes)
    extreme = torch.tensor([0.0, 200.0])
    assert all(torch.isfinite(output_of(extreme, output)).all() for output in OUTPUTS)
    with pytest.raises(UsageError, match="one label"):
        run(Experiment(task="tinylm", output="margin"), Execution(cache=str(tmp_path)))
    with pytest.raises(UsageError, match="available: loss, margin, probability"):
        Experiment(output="logit")


def test_ranks_of_single_retrains_do_not_depend_on_the_output(tmp_path: Path) -> None:
    """An increasing function of the loss changes no rank across subsets; what is averaged or taken out, it does."""
    plan = {"subsets": 12, "alpha": (0.5,), "replicates": 1, "task_options": {"num_train": 60, "num_queries": 40}}
    asked = Experiment(task="retrain.logistic:LogisticDigits", methods=("gradsim", "random"), **plan)
    execution = Execution(cache=str(tmp_path), progress=False)
    frames = {output: run(replace(asked, output=output), execution) for output in OUTPUTS}
    lds = {name: result.frame().set_index(["label", "normalised"]) for name, result in frames.items()}
    for output in ("margin", "probability"):
        np.testing.assert_allclose(lds[output]["lds"], lds["loss"]["lds"], atol=1e-6)
        assert not np.allclose(lds[output]["lds_across_queries"], lds["loss"]["lds_across_queries"], atol=1e-3)
        assert f"output {output}" in str(frames[output])
        assert frames[output].config()["output"] == output
    assert len({result.run_id for result in frames.values()}) == 3


def test_a_covariance_with_the_output_is_the_slope_times_that_with_the_loss(tmp_path: Path) -> None:
    """To first order, which few nats of rise leave; and margins curve otherwise than losses."""
    task = LogisticDigits(num_train=60, num_queries=20)
    model = task.train_base(init_seed=0, order_seed=0, device=torch.device("cpu"))
    problem = problem_of(task, tmp_path, model)
    slopes = output_slope(task.losses(model, task.query_data, problem.device), "margin")[:, None]
    near, far = (load_method("bif_gaussian", draws=200, rise=rise) for rise in (1e-7, 1.0))
    for method, close in ((near, True), (far, False)):
        by_loss, by_margin = (answer(method, replace(problem, output=output)).scores for output in ("loss", "margin"))
        error = (by_margin - slopes * by_loss).norm() / by_margin.norm()
        assert (error < 0.02) == close
