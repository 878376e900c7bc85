"""What each method must do and hold, by arithmetic alone: FLOP of a draw and of a fit, bytes of EK-FAC's factors."""

from dataclasses import dataclass

from retrain.models.pythia_suite import Configuration

FIT_BATCH = 32  # sequences EK-FAC takes at once when it is fitted and scored
KEPT_PER_BLOCK = 18  # activations a token and unit of width that autograd keeps of a block; a test counts them
EIGEN_COPIES = 6  # float64 matrices of the widest side while it is decomposed: itself, its eigenvectors, workspace


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
    """A fitting sequence of the second pass: its gradient, of every layer by itself, turned into the eigenbasis."""
    return tokens * 8.0 * configuration.num_token_parameters + configuration.rotation_cost


def least_lambda_flops(configuration: Configuration, tokens: int) -> float:
    """The same numbers in the cheaper order, layer by layer: where there are fewer tokens than units, both sides of the
    gradient are turned before they are multiplied. kronfluence multiplies first.
    """
    turned = 0.0
    for d_in, d_out in configuration.linear_shapes:
        gradient_first = 2.0 * (d_in + 1) * d_out * (d_in + 1 + d_out)
        sides_first = 2.0 * tokens * ((d_in + 1) ** 2 + d_out**2)
        turned += min(gradient_first, sides_first)
    return tokens * 8.0 * configuration.num_token_parameters + turned


def activation_numbers(configuration: Configuration, sequences: int, tokens: int) -> int:
    """What autograd keeps of a forward pass over so many sequences."""
    return sequences * tokens * configuration.hidden * (KEPT_PER_BLOCK * configuration.layers + 1)


def chain_bytes(configuration: Configuration, minibatch: int, tokens: int, bytes_per_number: int = 2) -> int:
    """BIF's floor: the model, the checkpoint and the displacement, and the activations of a minibatch."""
    numbers = 3 * configuration.num_parameters + activation_numbers(configuration, minibatch, tokens)
    return numbers * bytes_per_number


@dataclass(frozen=True)
class Needs:
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
