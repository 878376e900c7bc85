"""The Pythia suite's public shapes, and what each method must do and hold there, by arithmetic alone. No torch.

named_configuration("2.8b")                    # hidden 2,560, 32 layers, 2,775,208,960 parameters
named_configuration("folder/with/config.json") # any GPT-NeoX
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from retrain.errors import UsageError
from retrain.safe_files import read_checked

MOST_FITTED = 20_000  # a larger fitting set is never measured, only projected
FIT_BATCH = 32  # sequences EK-FAC takes at once when it is fitted and scored
KEPT_PER_BLOCK = 18  # activations a token and unit of width that autograd keeps of a block; a test counts them
EIGEN_COPIES = 6  # float64 matrices of the widest side while it is decomposed: itself, its eigenvectors, workspace


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The shape of a GPT-NeoX: what its cost depends on."""

    name: str
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int = 50304
    positions: int = 2048
    rotary_share: float = 0.25  # of each head's dimensions
    parallel_residual: bool = True

    @cached_property
    def linear_shapes(self) -> list[tuple[int, int]]:
        """(d_in, d_out) of every attention and MLP layer, all blocks; each has a bias. The output head is not in."""
        attention = [(self.hidden, 3 * self.hidden), (self.hidden, self.hidden)]
        return [*attention, (self.hidden, self.intermediate), (self.intermediate, self.hidden)] * self.layers

    @cached_property
    def num_parameters(self) -> int:
        """Every parameter: input embedding and output head (not tied), blocks, normalisations."""
        linear = sum(d_in * d_out + d_out for d_in, d_out in self.linear_shapes)
        normalisations = (2 * self.layers + 1) * 2 * self.hidden
        return 2 * self.vocabulary * self.hidden + linear + normalisations

    @cached_property
    def num_token_parameters(self) -> int:
        """Parameters that multiply every token: all but the input embedding, which is a look-up."""
        return self.num_parameters - self.vocabulary * self.hidden

    @cached_property
    def num_tracked_parameters(self) -> int:
        """Attention and MLP weights, without biases: what BIF samples and EK-FAC has factors for."""
        return sum(d_in * d_out for d_in, d_out in self.linear_shapes)

    @cached_property
    def eigen_cost(self) -> float:
        """Sum of d_in^3 + d_out^3 over the tracked layers: what EK-FAC's eigendecompositions grow with."""
        return float(sum(d_in**3 + d_out**3 for d_in, d_out in self.linear_shapes))

    @cached_property
    def num_covariances(self) -> int:
        """Numbers in the covariances of both sides of the tracked layers, or in their eigenvectors.

        kronfluence treats a bias as one more input, so the input side has d_in + 1 rows.
        """
        return sum((d_in + 1) ** 2 + d_out**2 for d_in, d_out in self.linear_shapes)

    @cached_property
    def num_lambdas(self) -> int:
        """EK-FAC's corrected eigenvalues: one a weight and bias of the tracked layers."""
        return sum((d_in + 1) * d_out for d_in, d_out in self.linear_shapes)

    def factor_bytes(self, bytes_per_number: int = 2) -> int:
        """What EK-FAC's fit writes: covariances and eigenvectors of both sides, and a lambda for every weight."""
        eigenvalues = sum(d_in + 1 + d_out for d_in, d_out in self.linear_shapes)
        return (2 * self.num_covariances + eigenvalues + self.num_lambdas) * bytes_per_number

    def with_layers(self, layers: int) -> "Configuration":
        """As wide, but only so many blocks deep."""
        return replace(self, layers=layers)


SUITE = {
    configuration.name: configuration
    for configuration in (
        Configuration(name="14m", hidden=128, layers=6, heads=4, intermediate=512),
        Configuration(name="31m", hidden=256, layers=6, heads=8, intermediate=1024),
        Configuration(name="70m", hidden=512, layers=6, heads=8, intermediate=2048),
        Configuration(name="160m", hidden=768, layers=12, heads=12, intermediate=3072),
        Configuration(name="410m", hidden=1024, layers=24, heads=16, intermediate=4096),
        Configuration(name="1b", hidden=2048, layers=16, heads=8, intermediate=8192),
        Configuration(name="1.4b", hidden=2048, layers=24, heads=16, intermediate=8192),
        Configuration(name="2.8b", hidden=2560, layers=32, heads=32, intermediate=10240),
        Configuration(name="6.9b", hidden=4096, layers=32, heads=32, intermediate=16384, vocabulary=50432),
        Configuration(name="12b", hidden=5120, layers=36, heads=40, intermediate=20480, vocabulary=50688),
    )
}


Positive = Annotated[int, msgspec.Meta(ge=1)]


class NeoXConfig(msgspec.Struct):
    """As much of a GPT-NeoX's config.json as its cost depends on."""

    model_type: Literal["gpt_neox"]
    hidden_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    intermediate_size: Positive
    vocab_size: Positive
    max_position_embeddings: Positive
    rotary_pct: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.25
    use_parallel_residual: bool = True
    rope_parameters: dict[str, Any] | None = None


def named_configuration(name: str) -> Configuration:
    """Of a size of the suite, or of a folder with a GPT-NeoX config.json, which anybody may have written."""
    short = name.removeprefix("EleutherAI/").removeprefix("pythia-")
    if short in SUITE:
        return SUITE[short]
    path = Path(name) / "config.json"
    if not path.is_file():
        known = f"one of {', '.join(SUITE)}, or a folder with a GPT-NeoX config.json"
        raise UsageError(f'unknown model "{name}"; expected {known}')
    found = read_checked(path, NeoXConfig, follow_links=True)
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    if hidden % heads:
        raise UsageError(f"{path}: hidden_size {hidden} cannot be split among {heads} heads")
    rope = found.get("rope_parameters") or {}
    return Configuration(
        name=Path(name).resolve().name, hidden=hidden, layers=found["num_hidden_layers"], heads=heads,
        intermediate=found["intermediate_size"], vocabulary=found["vocab_size"],
        positions=found["max_position_embeddings"],
        rotary_share=found.get("rotary_pct", rope.get("partial_rotary_factor", 0.25)),
        parallel_residual=found.get("use_parallel_residual", True),
    )  # fmt: skip


# ---- what methods do and hold ----


@dataclass(frozen=True)
class Setting:
    """What is asked of a method, beside the model."""

    train: int
    queries: int
    tokens: int
    draws: int
    fit_examples: int
    minibatch: int = 32


def draw_flops(token_parameters: float, train: int, queries: int, minibatch: int, tokens: int) -> float:
    """One draw of BIF: a forward pass over every sequence (2 d a token), a gradient of the minibatch (6 d a token)."""
    return token_parameters * tokens * (2.0 * (train + queries) + 6.0 * min(minibatch, train))


def draw_work(shape: Configuration, setting: Setting) -> tuple[float, ...]:
    """What one draw's seconds are made of: all its FLOP; the head's besides, whose products have another shape; the
    logits and the attention's entries, which are written and read. A gradient is three forward passes.
    """
    passes = setting.train + setting.queries + 3.0 * min(setting.minibatch, setting.train)
    flops = draw_flops(shape.num_token_parameters, setting.train, setting.queries, setting.minibatch, setting.tokens)
    logits = passes * setting.tokens * shape.vocabulary
    return flops, 2.0 * logits * shape.hidden, logits, passes * setting.tokens**2 * shape.layers * shape.heads


def covariance_flops(configuration: Configuration, tokens: int) -> float:
    """A fitting sequence of EK-FAC's first pass: its gradient, and outer products of both sides of every layer."""
    return tokens * (6.0 * configuration.num_token_parameters + 2.0 * configuration.num_covariances)


def lambda_flops(configuration: Configuration, tokens: int) -> float:
    """A fitting sequence of the second pass: its gradient, of every layer by itself, turned into the eigenbasis by two
    products a layer."""
    turned = float(sum(2 * (d_in + 1) * d_out * (d_in + 1 + d_out) for d_in, d_out in configuration.linear_shapes))
    return tokens * 8.0 * configuration.num_token_parameters + turned


def least_lambda_flops(configuration: Configuration, tokens: int) -> float:
    """The same numbers in the cheaper order, layer by layer: where there are fewer tokens than units, both sides of the
    gradient are turned before they are multiplied. kronfluence multiplies first.
    """
    turned = sum(
        min(2.0 * (d_in + 1) * d_out * (d_in + 1 + d_out), 2.0 * tokens * ((d_in + 1) ** 2 + d_out**2))
        for d_in, d_out in configuration.linear_shapes
    )
    return tokens * 8.0 * configuration.num_token_parameters + turned


def activation_numbers(configuration: Configuration, sequences: int, tokens: int) -> int:
    """What autograd keeps of a forward pass over so many sequences."""
    return sequences * tokens * configuration.hidden * (KEPT_PER_BLOCK * configuration.layers + 1)


def chain_bytes(configuration: Configuration, minibatch: int, tokens: int, bytes_per_number: int = 2) -> int:
    """BIF's floor: the model, the checkpoint and the displacement, and the activations of a minibatch."""
    numbers = 3 * configuration.num_parameters + activation_numbers(configuration, minibatch, tokens)
    return numbers * bytes_per_number


class Needs(NamedTuple):
    memory_bytes: int
    disk_bytes: int


def ekfac_needs(configuration: Configuration, tokens: int, bytes_per_number: int = 2) -> Needs:
    """What a whole run holds at its largest on the device, and leaves on the disk.

    Lambda's pass holds most: weights, every layer's eigenvectors and lambdas, the activations of a batch, and the
    widest layer's gradient of each of its sequences twice; or, in narrow models, the eigendecomposition.
    """
    numbers = configuration.num_parameters + configuration.num_covariances + configuration.num_lambdas
    numbers += activation_numbers(configuration, FIT_BATCH, tokens)
    numbers += 2 * FIT_BATCH * max((d_in + 1) * d_out for d_in, d_out in configuration.linear_shapes)
    widest = max(max(d_in + 1, d_out) for d_in, d_out in configuration.linear_shapes)
    eigen = configuration.num_parameters * bytes_per_number + EIGEN_COPIES * 8 * widest**2
    return Needs(max(numbers * bytes_per_number, eigen), configuration.factor_bytes(bytes_per_number))
