"""The kernels of a training step against plain torch: interpreted on the CPU (see test_resnet9), for real on a GPU."""

import copy
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrain.models import resnet9_training
from retrain.models.resnet9 import ResNet9
from retrain.models.resnet9_training import Engine, FusedStep, Recipe, TrainingImages, augmentation_plan
from tests.retrain.test_resnet9 import as_after_training, relative_error, seeded

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [] if INTERPRETED else [pytest.mark.cuda, pytest.mark.skipif(not resnet9_training.HAS_TRITON, reason="")]

# What rounding a result once may cost; the interpreter multiplies bf16 wrongly.
DTYPES = {torch.float32: 1e-6, torch.float16: 1e-3} | ({} if INTERPRETED else {torch.bfloat16: 4e-3})
ROUNDED = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items(), ids=str)
SHAPES = pytest.mark.parametrize(
    ("channels", "height", "width", "pool"),
    [(64, 15, 15, False), (20, 7, 7, True), (64, 31, 31, True), (40, 5, 8, True), (256, 7, 7, True)],
)


@pytest.fixture(autouse=True)
def true_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN otherwise takes ten bits of each factor."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def normed_inputs(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, nn.BatchNorm2d]:
    norm = nn.BatchNorm2d(shape[1], eps=1e-12, momentum=0.4).train()
    as_after_training(norm)
    inputs = 3 + torch.randn(shape, generator=seeded(0))  # far from 0: nothing may cancel
    inputs[0, :, :2, :2] = 4.5  # equal maxima: the first of them gets the gradient
    return inputs.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last), norm.to(DEVICE)


def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a program has several tiles, and rows are joined in several goes."""
    from retrain.models import resnet9_training_kernels

    cut = resnet9_training_kernels.Cut(elements=1024, num_warps=4, most_programs=5)
    monkeypatch.setattr(resnet9_training_kernels, "POOL_CUT", cut)
    monkeypatch.setattr(resnet9_training_kernels, "SUMS_CUT", cut)
    monkeypatch.setattr(resnet9_training_kernels, "ROWS_JOINED", 4)
    monkeypatch.setattr(resnet9_training_kernels, "HEAD_PROGRAMS", 3)
    monkeypatch.setattr(resnet9_training_kernels, "ROWS_SUMMED", 2)


@ROUNDED
@SHAPES
@pytest.mark.parametrize("few", [False, True])
def test_kernels_of_what_follows_a_convolution(monkeypatch, few, channels, height, width, pool, dtype, tolerance):
    from retrain.models.resnet9_training_kernels import trained_pool_norm_gelu

    if few:
        few_programs(monkeypatch)
    inputs, norm = normed_inputs(dtype, (3, channels, height, width))
    exact_norm = copy.deepcopy(norm).double()
    mine = inputs.clone().requires_grad_()
    found = trained_pool_norm_gelu(mine, norm, pool)
    upstream = torch.randn(found.shape, generator=seeded(1)).to(DEVICE, dtype)
    gradient, bias_gradient = torch.autograd.grad(found, [mine, norm.bias], upstream)
    assert bias_gradient.dtype == torch.float32

    inputs = inputs.double().requires_grad_()
    right = F.gelu(exact_norm(F.max_pool2d(inputs, 2) if pool else inputs))
    exact, bias_exact = torch.autograd.grad(right, [inputs, exact_norm.bias], upstream.double())
    assert relative_error(found, right) < 2 * tolerance
    assert relative_error(gradient, exact) < 2 * tolerance
    assert torch.equal(gradient == 0, exact == 0)  # each went to the place of its maximum, and nothing elsewhere
    assert relative_error(bias_gradient, bias_exact) < 1e-5
    assert relative_error(norm.running_mean, exact_norm.running_mean) < 1e-6
    assert relative_error(norm.running_var, exact_norm.running_var) < 1e-5


def test_kernels_of_a_channel_that_is_always_the_same() -> None:
    from retrain.models.resnet9_training_kernels import trained_pool_norm_gelu

    inputs, norm = normed_inputs(torch.float32, (4, 16, 9, 9))
    inputs[:, 3] = 0.3
    found = trained_pool_norm_gelu(inputs, norm, True)
    expected = F.gelu(norm.bias[3]).expand_as(found[:, 3])
    assert torch.allclose(found[:, 3], expected, atol=1e-5)


def images_and_plan(dtype: torch.dtype, batch: int, channels: int = 3, size: int = 12) -> tuple[TrainingImages, Tensor]:
    images = torch.randn(30, channels, size, size, generator=seeded(0))
    data = TrainingImages(images, torch.arange(30) % 10, 2, DEVICE, "float32")
    data.images, data.dtype = data.images.to(dtype), dtype
    plan = augmentation_plan(Recipe(), np.arange(batch) % 30, 1, np.random.default_rng(0))[0]
    return data, torch.from_numpy(plan).to(DEVICE)


@ROUNDED
@pytest.mark.parametrize(("channels", "filters", "kernel"), [(3, 24, 2), (1, 6, 2), (2, 20, 3)])
def test_kernels_of_the_input(channels, filters, kernel, dtype, tolerance) -> None:
    from retrain.models.resnet9_training_kernels import filters_for, whitened_batch

    data, plan = images_and_plan(dtype, 37, channels)
    whiten = nn.Conv2d(channels, filters, kernel).to(DEVICE).requires_grad_(False)
    wider = torch.cat([plan, plan], dim=1)[:, :37]  # as a batch lies in its epoch's plan
    found = whitened_batch(data.images, wider, data.pixel_table, filters_for(whiten, dtype), whiten.bias)
    batch, _ = data.augmented(plan)
    weight = whiten.weight.to(dtype).double()
    right = F.gelu(F.conv2d(batch.double(), weight, whiten.bias.double()))
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert relative_error(found, right) < 2 * tolerance


@ROUNDED
@pytest.mark.parametrize(("channels", "classes"), [(64, 10), (20, 7)])
@pytest.mark.parametrize("few", [False, True])
def test_kernels_of_the_head(monkeypatch, few, channels, classes, dtype, tolerance) -> None:
    from retrain.models.resnet9_training_kernels import head_gradients

    if few:
        few_programs(monkeypatch)
    hidden = torch.randn(11, channels, 3, 3, generator=seeded(0)).to(DEVICE, dtype)
    hidden[0, :, 1:, 1:] = 5.0  # equal maxima
    hidden = hidden.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(classes, channels, generator=seeded(1)).to(DEVICE)
    labels = torch.arange(40, device=DEVICE) % classes
    members = torch.arange(11, device=DEVICE) * 3
    gradient, weight_gradient = head_gradients(hidden, weight, members, labels, 1 / 9, 0.2)

    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = F.max_pool2d(hidden, 3).flatten(1) @ weight.T / 9
    loss = F.cross_entropy(logits, labels[members], label_smoothing=0.2, reduction="sum")
    exact, weight_exact = torch.autograd.grad(loss, [hidden, weight])
    assert torch.equal(gradient == 0, exact == 0)
    assert relative_error(gradient, exact) < 2 * tolerance
    assert relative_error(weight_gradient, weight_exact) < 1e-5


@ROUNDED
def test_kernels_of_the_update(dtype, tolerance) -> None:
    from retrain.models.resnet9_training_kernels import Rates, update_parameters

    shapes = [(5,), (300,), (7, 20, 3, 3), (64, 32, 3, 3), (10, 7)]
    parameters = [torch.randn(shape, generator=seeded(i)).to(DEVICE) for i, shape in enumerate(shapes)]
    momenta = [torch.randn(shape, generator=seeded(9 + i)).to(DEVICE) for i, shape in enumerate(shapes)]
    gradients = [torch.randn(shape, generator=seeded(19 + i)).to(DEVICE) for i, shape in enumerate(shapes)]
    gradients[2:4] = [gradient.to(dtype) for gradient in gradients[2:4]]
    copies = [p.to(dtype) if p.dim() == 4 else p for p in parameters]
    recipe, factor = Recipe(), torch.tensor(0.3, device=DEVICE)
    plain = Engine.__new__(Engine)
    plain.recipe, plain.num_biases = recipe, 2
    plain.parameters, plain.momenta = [p.double() for p in parameters], [m.double() for m in momenta]
    for _ in range(2):
        plain._update([gradient.double() for gradient in gradients], factor.double())
        bias_step = recipe.step_size * recipe.bias_scaler
        rates = [Rates(step, recipe.step_decay / step) for step in (bias_step, recipe.step_size)]
        update_parameters(parameters, momenta, gradients, copies, factor, recipe.momentum, 2, *rates)
    for mine, right in zip([*parameters, *momenta], [*plain.parameters, *plain.momenta], strict=True):
        assert relative_error(mine, right) < 1e-6
    for mine, parameter in zip(copies, parameters, strict=True):
        assert torch.equal(mine, parameter.to(mine.dtype))


def engines(dtype: str, fused: tuple[bool, ...], widths=(8, 20, 16), size: int = 8) -> list[Engine]:
    images = torch.randn(60, 3, size, size, generator=seeded(0))
    data = TrainingImages(images, torch.arange(60) % 10, 2, DEVICE, dtype)
    made = []
    for one in fused:
        model = ResNet9(image_size=size, widths=widths, generator=seeded(1))
        made.append(Engine(model, data, Recipe(batch_size=10 if INTERPRETED else 30), capture=False, fused=one))
        if one and made[-1].fused_step is None:  # on the CPU, or in float32
            made[-1].fused_step = FusedStep(made[-1])
    return made


def train(engine: Engine, num_examples: int, seed: int = 0, **options) -> list[Tensor]:
    engine.run(np.arange(num_examples), 1, resnet9_training.constant, np.random.default_rng(seed), **options)
    return [tensor.detach().clone() for tensor in [*engine.parameters, *engine.momenta, *engine.statistics]]


def test_kernels_of_a_whole_step() -> None:
    """Two steps in float32, where nothing but the order of sums differs."""
    found, right = (train(engine, 19, num_steps=2) for engine in engines("float32", (True, False)))
    for mine, other in zip(found, right, strict=True):
        assert relative_error(mine, other) < 2e-4


@pytest.mark.skipif(INTERPRETED, reason="takes half a minute")
def test_kernels_of_training_with_lookahead() -> None:
    """The slow weights, which no kernel writes, are what the next step starts from; and so is a loaded state."""
    fused, plain = engines("float32", (True, False))
    start = fused.state()
    for _ in range(2):
        found, right = (train(engine, 10, num_steps=6, lookahead=True) for engine in (fused, plain))
        for mine, other in zip(found, right, strict=True):
            assert relative_error(mine, other) < 5e-3
        fused.load(start)
        plain.load(start)


@pytest.mark.skipif(INTERPRETED, reason="in half precision, for real")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("widths", [(64, 256, 256), (24, 40, 16)], ids=str)
@pytest.mark.parametrize("num_examples", [59, 41])
def test_two_steps_of_training_are_the_plain_ones(dtype, widths, num_examples) -> None:
    """Half precision moves a step about as far from the exact one whichever kernels take it."""
    fused, plain = engines(dtype, (True, False), widths, 32)
    assert fused.fused_step is not None
    (exact,) = engines("float32", (False,), widths, 32)
    start = [p.detach().clone() for p in exact.parameters]
    found, again, right, true = (train(engine, num_examples, num_steps=2) for engine in (fused, fused, plain, exact))
    for mine, other, right_one, begin in zip(found, right, true, start, strict=False):
        moved = right_one - begin
        assert relative_error(mine - begin, moved) < 2 * relative_error(other - begin, moved) + 0.05
    assert not all(torch.equal(a, b) for a, b in zip(found, again, strict=True))  # it went on from where it was

    (other,) = engines(dtype, (True,), widths, 32)
    for mine, repeated in zip(found, train(other, num_examples, num_steps=2), strict=True):
        assert torch.equal(mine, repeated)


@pytest.mark.skipif(INTERPRETED, reason="for real")
def test_another_batch_size_compiles_nothing_in_training() -> None:
    from retrain.models import resnet9_training_kernels

    kernels = [kernel for kernel in vars(resnet9_training_kernels).values() if hasattr(kernel, "device_caches")]
    (engine,) = engines("bfloat16", (True,), (24, 40, 16), 32)

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    train(engine, 30, num_steps=1)
    before = compiled()
    assert before > 8
    for number in (1, 16, 17, 59):  # the last in several steps, whose plans and rates begin at odd places
        train(engine, number, num_steps=4)
    assert compiled() == before
