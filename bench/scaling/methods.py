"""What the scaling comparison runs: its problem (sequences and queries of equal length) and its methods' forms here.

Only cost is measured, and cost depends on shapes alone: weights and tokens are random.

Any method may be named: a file of `baselines/`, or package.module:Class. Two have their own form here: `ekfac` runs
with kronfluence's extreme memory reduction, part by part, and `trak` draws its projection on the device.
"""

import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from baselines.ekfac import _language_loss, tracked_modules
from baselines.method import Attribution, Method, Problem, batch_size_option, load_method
from baselines.support.memory import free_bytes
from baselines.trak import TRAK
from bench.scaling.suite import FIT_BATCH, Configuration
from retrain.errors import UsageError
from retrain.examples import Batch, Examples, Indices
from retrain.losses import CrossEntropy, Loss
from retrain.models.causal_lm import CausalLM
from retrain.task import Task

TRAINABLE = r"\.(attention|mlp)\."  # every method looks at these alone
SAMPLED = r"\.(attention|mlp)\..*weight$"  # the paper's weight restriction for this comparison
COMPARED = ("bif", "ekfac", "gradsim", "trak")
OWN_FORMS = {"ekfac": "bench.scaling.methods:LowMemoryEKFAC", "trak": "bench.scaling.methods:LargeTRAK"}
TRAK_GRADIENT_BYTES = 8 * 2**30  # traker holds a batch's gradients in float32
PARTITIONS = 4  # kronfluence's own default of extreme_reduce_memory_score_arguments
GRADIENT_SHARE = 0.25  # of the free memory, for the preconditioned query gradients of one pass
FACTORS, SCORES = "factors", "scores"
SKETCH_SLICE = 2**24  # parameters that are signed at once
_SKETCH_STREAM = 37


# ---- the problem ----


@dataclass(frozen=True, kw_only=True, eq=False)
class ScalingTask(Task):
    """Examples that are already there and a model that is never retrained: only the loss is asked of it."""

    loss_function: ClassVar[Loss] = CrossEntropy()
    protocols: ClassVar[tuple[str, ...]] = ("none",)
    eval_batch_size: ClassVar[int] = 64

    train_examples: Examples = field(repr=False)
    query_examples: Examples = field(repr=False)

    @property
    def description(self) -> str:
        return "scaling across the Pythia suite"

    def load_train_data(self) -> Examples:
        return self.train_examples

    def load_query_data(self) -> Examples:
        return self.query_examples

    def build_model(self, seed: int) -> nn.Module:
        raise UsageError("bench.scaling builds its models itself; its task only holds the examples and the loss")

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        raise UsageError("bench.scaling measures cost and never retrains; use bench.lds for retraining experiments")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        language_model: Any = model  # whose own losses need not hold the logits of a whole batch
        return language_model.token_losses(*batch)


def random_sequences(count: int, tokens: int, vocabulary: int, *, seed: int, stream: int) -> Examples:
    """(count, tokens) inputs and next tokens; more of them begin with the same ones."""
    chosen = np.random.default_rng([seed, stream]).integers(0, vocabulary, size=(count, tokens + 1))
    sequences = torch.from_numpy(chosen)
    return Examples(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous())


def build_random(
    configuration: Configuration, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> nn.Module:
    """The architecture with its usual initialisation (normal, 0.02), made on `device` in `dtype`: no detour."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    rotary: Any = {"rotary_pct": configuration.rotary_share}  # transformers 5 turns it into rope_parameters
    made = GPTNeoXConfig(
        vocab_size=configuration.vocabulary, hidden_size=configuration.hidden,
        num_hidden_layers=configuration.layers, num_attention_heads=configuration.heads,
        intermediate_size=configuration.intermediate, max_position_embeddings=configuration.positions,
        use_parallel_residual=configuration.parallel_residual,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=False, **rotary,
    )  # fmt: skip
    made._attn_implementation = "sdpa"
    device = torch.device(device)
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            with device:
                transformer = GPTNeoXForCausalLM(made)
        finally:
            torch.set_default_dtype(before)
    return CausalLM(transformer).eval()


# ---- the methods of a specification ----


def build_method(name: str, options: dict[str, Any]) -> Method:
    return load_method(OWN_FORMS.get(name, name), **options)


def method_options(name: str, configuration: Configuration, *, chains: int, cuda: bool) -> dict[str, Any]:
    """The paper's settings."""
    if name == "bif":
        return {
            "sampler": "sgld", "chains": chains, "step_size": 5e-6, "n_beta": 30.0, "gamma": 300.0, "minibatch": 32,
            "parameters": SAMPLED, "batch_size": 64 if cuda else 16, "displacement": "bfloat16" if cuda else "float32",
            "divergence_limit": 1e9,  # a walk from random weights leads nowhere; its cost is the same
        }  # fmt: skip
    if name == "trak":
        together = TRAK_GRADIENT_BYTES // (4 * configuration.num_tracked_parameters)
        return {"batch_size": max(1, min(8, together))}
    if name == "gradsim":
        return {"batch_size": 8}
    if name == "kfac":
        return {"fit_batch_size": FIT_BATCH, "batch_size": 8, "self_influence": False}
    return {}


def axis_of(name: str, method: Method) -> str:
    """What is repeated, and so linear: draws of a chain, blocks of the model for EK-FAC, else training sequences."""
    if name == "ekfac":
        return "layers"
    return "draws" if hasattr(method, "draws") and hasattr(method, "chains") else "train"


def sized(spec: dict[str, Any], size: dict[str, int]) -> Method:
    """The method of a specification, as large as `size` says."""
    options = dict(spec["options"])
    if spec["axis"] == "draws":
        options["chains"] = size.get("chains", spec["chains"])
        options["draws"] = -(-size["draws"] // options["chains"])
    if spec["fitted"]:
        options["fit_examples"] = size["fit_examples"]
    return build_method(spec["method"], options)


# ---- EK-FAC as the paper's scaling comparison runs it ----


@dataclass(frozen=True, kw_only=True)
class LowMemoryEKFAC(Method):
    """kronfluence with its extreme-memory-reduction arguments.

    The same translation as `baselines/ekfac.py`, with factors and activations in the model's own precision, activations
    offloaded to the host, lambda summed example by example, and scores computed in four partitions of the modules. No
    handicap: the model is used as it is, without a copy, self-influence is not computed, and as many queries are scored
    in one pass over the training sequences as there is room for. The parts of the fit are called one by one, so that
    each has its own seconds and is kept when a later one is cut short; together they are exactly kronfluence's
    `fit_all_factors`, without its default limit of 100,000 fitting sequences.
    """

    damping: float = 1e-8  # kronfluence's own, and the paper's
    fit_examples: int = 0  # factors are fitted on this many training sequences; 0: all
    query_batch_size: int = batch_size_option(FIT_BATCH)

    def fit(self, problem: Problem) -> Any:
        analyzer = self.analyzer(problem)
        count = self.fit_examples or len(problem.train)
        self.fit_covariance(analyzer, problem.train, count)
        self.decompose(analyzer, problem.train, count)
        self.fit_lambda(analyzer, problem.train, count)
        return analyzer

    def analyzer(self, problem: Problem) -> Any:
        from kronfluence.analyzer import Analyzer, prepare_model

        logging.getLogger("kronfluence").setLevel(logging.ERROR)
        model = nn.Sequential(problem.model)
        task = translate(problem.task, tracked_modules(model))
        return Analyzer(
            analysis_name="ekfac", model=prepare_model(model, task), task=task, cpu=problem.device.type == "cpu",
            output_dir=str(problem.scratch), disable_tqdm=True,
        )  # fmt: skip

    # Each part of a fit reads what the one before wrote. All take the data and how many sequences of it are fitted on.

    def fit_covariance(self, analyzer: Any, data: Examples, count: int) -> None:
        analyzer.fit_covariance_matrices(**self._of_pass(data, count), **self._shared(analyzer, count))

    def decompose(self, analyzer: Any, data: Examples, count: int) -> None:
        analyzer.perform_eigendecomposition(**self._shared(analyzer, count))

    def fit_lambda(self, analyzer: Any, data: Examples, count: int) -> None:
        analyzer.fit_lambda_matrices(**self._of_pass(data, count), **self._shared(analyzer, count))

    def _of_pass(self, data: Examples, count: int) -> dict[str, Any]:
        return {"dataset": data, "per_device_batch_size": min(FIT_BATCH, count)}

    def _shared(self, analyzer: Any, count: int) -> dict[str, Any]:
        from kronfluence.utils.common.factor_arguments import extreme_reduce_memory_factor_arguments

        dtype = next(analyzer.model.parameters()).dtype
        arguments = extreme_reduce_memory_factor_arguments(strategy="ekfac", dtype=dtype)
        arguments.covariance_max_examples = arguments.lambda_max_examples = count
        if dtype == torch.float32:
            arguments.amp_dtype = None  # autocast knows only the half precisions
        return {"factors_name": FACTORS, "factor_args": arguments, "overwrite_output_dir": True}

    def score(self, problem: Problem, state: Any) -> Attribution:
        from kronfluence.module.tracked_module import TrackedModule
        from kronfluence.utils.common.score_arguments import extreme_reduce_memory_score_arguments

        dtype = next(problem.model.parameters()).dtype
        modules = [module for module in state.model.modules() if isinstance(module, TrackedModule)]
        arguments = extreme_reduce_memory_score_arguments(
            damping_factor=self.damping, module_partitions=min(PARTITIONS, len(modules)), dtype=dtype
        )
        if dtype == torch.float32:
            arguments.amp_dtype = None
        # As many queries together as leave room: each holds a preconditioned gradient of a partition's weights.
        each = sum(module.original_module.weight.numel() for module in modules) * dtype.itemsize / PARTITIONS
        room = int(GRADIENT_SHARE * free_bytes(problem.device) / each)
        together = max(1, min(len(problem.queries), room))
        batch_size = min(self.query_batch_size, together)
        arguments.query_gradient_accumulation_steps = max(1, together // batch_size)
        state.compute_pairwise_scores(
            scores_name=SCORES, factors_name=FACTORS, score_args=arguments, overwrite_output_dir=True,
            query_dataset=problem.queries, per_device_query_batch_size=batch_size,
            train_dataset=problem.attributed,
            per_device_train_batch_size=min(FIT_BATCH, len(problem.attributed)),
        )  # fmt: skip
        return Attribution(scores=-state.load_pairwise_scores(SCORES)["all_modules"].float())


def translate(task: Task, names: list[str]) -> Any:
    """kronfluence's view of the task: its own loss, and sampled labels for the fit."""
    from kronfluence.task import Task as KronfluenceTask

    class Translation(KronfluenceTask):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            language_model = model[0]  # type: ignore[index]
            if sample:
                return _language_loss(language_model, batch[0], None)
            return task.example_loss(language_model, tuple(batch)).sum()  # type: ignore[arg-type]

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch=batch, model=model)

        def get_influence_tracked_modules(self) -> list[str]:
            return names

    return Translation()


# ---- TRAK for billions of parameters ----


class ShiftedSketch:
    """A projection that is drawn on the device, as traker calls it.

    The suite's own sketch (baselines/support/projectors.py) draws an order of all parameters on the CPU, the same on
    every device; for billions that alone takes minutes, twice. Here runs of `projection` parameters are turned by a
    random shift, signed, and added up: any two parameters of different runs meet in one place with the same chance as
    in any sketch, two of one run never, and nothing as large as the model is kept. Squared norms come out `projection`
    times too large, as with traker's own matrices.
    """

    proj_type = "sketch"

    def __init__(self, dimension: int, projection: int, seed: int, device: torch.device):
        self.grad_dim, self.proj_dim, self.seed, self.device = dimension, projection, seed, device

    def free_memory(self) -> None:
        return None

    def project(self, grads: Tensor, model_id: int) -> Tensor:
        """Drawn again at every call: that takes less time than reading the gradients."""
        seed = int(np.random.SeedSequence([self.seed, model_id, _SKETCH_STREAM]).generate_state(1)[0])
        generator = torch.Generator(self.device).manual_seed(seed)
        width, batch = self.proj_dim, len(grads)
        out = torch.zeros(batch, width, device=self.device)
        places = torch.arange(width, device=self.device)
        for piece in grads.split(max(1, SKETCH_SLICE // width) * width, dim=1):
            runs = -(-piece.shape[1] // width)
            shifts = torch.randint(0, width, (runs, 1), generator=generator, device=self.device)
            signs = torch.randint(0, 2, (runs, width), generator=generator, device=self.device, dtype=torch.int8)
            turned = ((places + shifts) % width).expand(batch, runs, width)
            signed = pad(piece, (0, runs * width - piece.shape[1])).view(batch, runs, width) * (2 * signs - 1)
            out += signed.gather(2, turned).sum(1)
        return out * width**0.5


@dataclass(frozen=True, kw_only=True)
class LargeTRAK(TRAK):
    def make_projector(self, dimension: int, projection: int, problem: Problem) -> Any:
        return ShiftedSketch(dimension, projection, problem.seed, problem.device)
