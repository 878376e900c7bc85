"""bench.scaling's problem and its methods: shapes, what runs take by arithmetic, known scores."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from baselines.ekfac import EKFAC
from baselines.method import Problem
from bench.measure import Cost
from bench.scaling import point as points
from bench.scaling import suite
from bench.scaling.methods import TRAINABLE, LowMemoryEKFAC, ScalingTask, build_random
from bench.scaling.point import Point
from bench.scaling.suite import SUITE, Configuration, draw_flops, ekfac_needs, named_configuration
from retrain.errors import UsageError
from retrain.examples import Examples
from retrain.safe_files import SafeFileError
from tests.helpers.scaling_laws import specification

KNOWN = {
    "14m": 14_067_712, "70m": 70_426_624, "160m": 162_322_944, "410m": 405_334_016, "1b": 1_011_781_632,
    "1.4b": 1_414_647_808, "2.8b": 2_775_208_960, "6.9b": 6_857_302_016, "12b": 11_846_072_320,
}  # fmt: skip
SMALL = Configuration(name="t", hidden=16, layers=1, heads=2, intermediate=32, vocabulary=64)


def test_parameter_counts_are_the_published_ones_and_those_of_a_built_model() -> None:
    assert {name: SUITE[name].num_parameters for name in KNOWN} == KNOWN
    configuration = Configuration(name="t", hidden=32, layers=2, heads=2, intermediate=64, vocabulary=96)
    model = build_random(configuration, dtype=torch.float32)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert sum(math.prod(shape) for shape in shapes.values()) == configuration.num_parameters
    embedding = next(shape for name, shape in shapes.items() if "embed_in" in name)
    assert configuration.num_parameters - math.prod(embedding) == configuration.num_token_parameters
    weights = [shape for name, shape in shapes.items() if ".layers." in name and len(shape) == 2]
    assert sorted(weights) == sorted((d_out, d_in) for d_in, d_out in configuration.linear_shapes)
    again = build_random(configuration, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_a_configuration_that_no_model_has_is_named_by_its_entry(tmp_path: Path) -> None:
    content = {
        "model_type": "gpt_neox", "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
        "intermediate_size": 512, "vocab_size": 50304, "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert named_configuration(str(tmp_path)).num_parameters == SUITE["14m"].num_parameters
    for wrong, said in (({"num_hidden_layers": 0}, "num_hidden_layers is 0"), ({"num_attention_heads": 7}, "7 heads")):
        (tmp_path / "config.json").write_text(json.dumps(content | wrong))
        with pytest.raises((UsageError, SafeFileError), match=said):
            named_configuration(str(tmp_path))


def test_the_floor_of_a_draw_and_what_a_fitting_sequence_takes() -> None:
    """150 tokens cost so much since turning a gradient, by the eigenvectors of every layer, outweighs making it."""
    # 2 d per token of 418 sequences and 6 d per token of 32, 150 tokens each
    assert draw_flops(1e9, 400, 18, 32, 150) == 1e9 * 150 * (2 * 418 + 6 * 32)
    assert draw_flops(1e9, 10, 18, 32, 150) == 1e9 * 150 * (2 * 28 + 6 * 10)  # no minibatch beyond the training set
    made = 150 * 8.0 * SUITE["2.8b"].num_token_parameters
    assert suite.lambda_flops(SUITE["2.8b"], 150) / made > 10
    # Sides before their product: 2 T (d_in^2 + d_out^2), where there are few tokens; with many, as kronfluence has it.
    assert suite.least_lambda_flops(SUITE["2.8b"], 150) / made < 3
    assert suite.least_lambda_flops(SUITE["14m"], 2048) == pytest.approx(suite.lambda_flops(SUITE["14m"], 2048))


def activation_bytes(configuration: Configuration, sequences: int, tokens: int, dtype: torch.dtype) -> int:
    """What a forward pass keeps for its backward pass, up to the last hidden states: counted on torch's meta device,
    every storage once, without parameters and attention matrices, which no fused attention keeps."""
    meta = torch.device("meta")
    model: Any = build_random(configuration, dtype=dtype, device=meta)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(TRAINABLE, name) is not None)
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}  # the storages themselves, so that none is freed and its place taken by another

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and tuple(tensor.shape[-2:]) != (tokens, tokens):
            kept[storage._cdata] = storage
        return tensor

    inputs = torch.zeros(sequences, tokens, dtype=torch.long, device=meta)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        keep(model.transformer.gpt_neox(inputs).last_hidden_state)
    return sum(storage.nbytes() for storage in kept.values())


def test_activations_are_counted_and_what_ekfac_of_the_largest_models_holds() -> None:
    one, two, three = (activation_bytes(SUITE["14m"].with_layers(k), 2, 10, torch.bfloat16) for k in (1, 2, 3))
    assert three - two == two - one > 2 * 10 * SUITE["14m"].hidden * 2, "every block keeps as much, its input at least"
    assert activation_bytes(SUITE["14m"].with_layers(1), 4, 10, torch.bfloat16) == pytest.approx(2 * one, rel=0.01)
    arithmetic = 2 * suite.activation_numbers(SUITE["14m"].with_layers(3), 2, 10)
    assert arithmetic == pytest.approx(three, rel=0.02)
    assert suite.chain_bytes(SUITE["14m"], 2, 10) > 6 * SUITE["14m"].num_parameters
    # Measured on a H200: two blocks of the width of 1.4b peak at 4.37 GB. The paper: 41 GiB of factors at 2.8 B.
    assert SUITE["2.8b"].factor_bytes(2) / 2**30 == pytest.approx(41, abs=0.5)  # sec:appendix-scaling
    assert ekfac_needs(SUITE["1.4b"].with_layers(2), 150).memory_bytes == pytest.approx(4.37e9, rel=0.05)
    needs = ekfac_needs(SUITE["12b"], 150)
    assert needs.disk_bytes > 180 * 2**30
    assert needs.memory_bytes > 140 * 2**30


def problem_of(scratch: Path, train: Examples, queries: Examples) -> Problem:
    scratch.mkdir()
    model = build_random(SMALL, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".attention." in name or ".mlp." in name)
    return Problem(
        task=ScalingTask(train_examples=train, query_examples=queries), model=model, train=train,
        attributed_indices=np.arange(len(train)), queries=queries, seed=0, device=torch.device("cpu"), scratch=scratch,
    )  # fmt: skip


def test_fitting_sequences_begin_with_those_that_are_scored(tmp_path: Path) -> None:
    """However many there are; sets that are only projected are not made."""
    sets = ([4], [4, 20, 10**9])
    small, large = (Point(specification("ekfac", scratch=str(tmp_path), fit_sets=sizes), 0.0) for sizes in sets)
    small.load_data()
    large.load_data()
    assert (len(small.fit_data), len(large.fit_data)) == (8, 20)
    assert torch.equal(large.train.inputs, small.fit_data.inputs)


def test_peaks_of_the_fit_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU every stage starts its own peak: the larger of the two is the run's."""
    peaks = {"fit": 900, "score": 300}
    stage = [""]

    def fake(work: Any, *_: Any) -> tuple[Any, Cost]:
        return work(), Cost(seconds=1.0, peak_memory_bytes=1)

    method = SimpleNamespace(fit=lambda problem: stage.append("fit"), score=lambda *_: stage.append("score"))
    monkeypatch.setattr(points, "metered", fake)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[stage[-1]])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * peaks[stage[-1]])
    problem = SimpleNamespace(
        device=torch.device("cuda"), model=torch.nn.Linear(2, 2), seed=0, task=SimpleNamespace(cpu_threads=0),
        scratch="nowhere",
    )  # fmt: skip
    _, cost = points.measured_run(method, problem)  # type: ignore[arg-type]
    assert (cost["peak_memory_bytes"], cost["peak_reserved_bytes"]) == (900, 1800)


def test_low_memory_ekfac_gives_the_scores_of_plain_ekfac(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(64, (6, 9), generator=torch.Generator().manual_seed(0))
    sequences = Examples(tokens[:, :-1], tokens[:, 1:])
    labels = torch.randint(64, (6 * 8,), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("baselines.ekfac.sample_tokens", lambda *_: labels)  # both are fitted on the same
    found = []
    plain = EKFAC(self_influence=False, fit_batch_size=6, damping=1e-8)
    for number, method in enumerate((plain, LowMemoryEKFAC(query_batch_size=1))):
        problem = problem_of(scratch / str(number), sequences, sequences.select([0, 1, 2]))
        torch.manual_seed(0)
        found.append(method.score(problem, method.fit(problem)).scores)
    assert found[0].shape == (3, 6), "three queries of one each are joined in one pass over the sequences"
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4 * float(found[0].abs().max()))
