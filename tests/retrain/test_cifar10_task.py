"""The CIFAR-10 task on a few hundred synthetic 32x32 images and a narrow network: both protocols, end to end."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from retrain.models import resnet9_training
from retrain.models.resnet9_training import Engine, Recipe, augmentation_plan, batch_bounds, logits_in
from retrain.tasks import cifar10
from retrain.tasks.cifar10 import Cifar10, normalised_images
from tests.helpers.made_up import CIFAR10_ROWS, CIFAR10_WARMUP, cifar10_folder
from tests.helpers.problems import CPU, refused

ROWS, NUM_WARMUP = CIFAR10_ROWS, CIFAR10_WARMUP
NUM_TRAIN = 5 * ROWS - NUM_WARMUP
PROTOCOLS = ("paper", "scratch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return cifar10_folder(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def task(folder):
    return make_task(folder)


@pytest.fixture(scope="module")
def model(task):
    return task.train(np.arange(60), init_seed=0, order_seed=0, device=CPU)


def make_task(folder, **changes):
    sizes = {"widths": (4, 8, 8), "num_warmup": NUM_WARMUP, "warmup_steps": 2, "epochs": 2, "batch_size": 64}
    return Cifar10(**{"data_dir": folder, "check_fingerprint": False, **sizes, **changes})


def same_weights(first, second):
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_warmup_and_training_images_split_the_official_ones(task):
    assert len(task.train_data) == NUM_TRAIN
    assert len(task.query_data) == ROWS
    both = np.concatenate([task.train_indices, task.warmup_indices])
    assert np.array_equal(np.sort(both), np.arange(5 * ROWS))
    expected = normalised_images(task.cifar10.train_images)[task.train_indices[7]]
    assert torch.equal(task.train_data.inputs[7], expected)
    assert task.train_data.targets[7] == task.cifar10.train_labels[task.train_indices[7]]
    assert task.image_shape() == tuple(task.query_data.inputs.shape[1:])
    image = torch.tensor([0, 128, 255], dtype=torch.uint8).reshape(1, 3, 1, 1)
    expected = [(0 - 0.4914) / 0.2470, (128 / 255 - 0.4822) / 0.2435, (1 - 0.4465) / 0.2616]
    assert torch.allclose(normalised_images(image).flatten(), torch.tensor(expected))


def test_config_names_what_matters_and_no_folder(task, folder):
    assert task.name == "cifar10"
    assert task.protocol == "paper"
    assert task.config["data"] == task.cifar10.fingerprint
    assert not {"data_dir", "cache_dir", "capture", "check_fingerprint", "allow_download"} & set(task.config)
    assert make_task(str(folder)).config == task.config
    assert make_task(folder, protocol="scratch").config != task.config
    assert "in place of CIFAR-10" in task.description
    papers = Cifar10()  # its table is the default
    assert (papers.batch_size, papers.learning_rate, papers.momentum, papers.weight_decay) == (1024, 10, 0.85, 0.0153)
    assert (papers.label_smoothing, papers.bias_scaler, papers.warmup_steps, papers.epochs) == (0.2, 64, 100, 8)
    assert papers.num_warmup == 2500


def test_bad_settings_are_refused(folder):
    for change in ({"protocol": "other"}, {"precision": "int4"}, {"epochs": 0}, {"learning_rate": 0.0}):
        with pytest.raises(ValueError):
            make_task(folder, **change)
    refused(lambda: make_task(folder, num_warmup=5 * ROWS).train_data, "set num_warmup lower")
    for indices in ([], [NUM_TRAIN], [-1]):
        with pytest.raises(ValueError, match=f"from 0 to {NUM_TRAIN - 1}"):
            make_task(folder).train(indices, init_seed=0, order_seed=0, device=CPU)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_same_seeds_same_model_whatever_came_before(folder, protocol):
    task = make_task(folder, protocol=protocol)
    indices = np.arange(0, NUM_TRAIN, 2)
    first = task.train(indices, init_seed=1, order_seed=2, device=CPU)
    kept = copy.deepcopy(first)
    for init_seed, order_seed in ((1, 3), (4, 2)):
        assert not same_weights(first, task.train(indices, init_seed=init_seed, order_seed=order_seed, device=CPU))
    for one in (task, make_task(folder, protocol=protocol)):
        assert same_weights(first, one.train(indices, init_seed=1, order_seed=2, device=CPU))
    assert same_weights(first, kept), "it is its own copy"
    assert not first.training


def test_training_never_looks_at_images_outside_the_subset(folder):
    """Labels of the images left out are spoiled; the retrained model must not notice."""
    for protocol in PROTOCOLS:
        task, spoiled = make_task(folder, protocol=protocol), make_task(folder, protocol=protocol)
        indices, outside = np.arange(80), torch.from_numpy(spoiled.train_indices[80:])
        images = spoiled._engine(CPU).data
        images.labels[outside] = (images.labels[outside] + 1) % 10
        images.images[outside] = 0
        expected = task.train(indices, init_seed=0, order_seed=0, device=CPU)
        assert same_weights(expected, spoiled.train(indices, init_seed=0, order_seed=0, device=CPU))


def test_warmup_is_computed_once_a_seed(folder, monkeypatch):
    task, runs, run = make_task(folder), [], Engine.run
    monkeypatch.setattr(Engine, "run", lambda *given, **named: runs.append(len(given[1])) or run(*given, **named))
    for order_seed in range(3):
        task.train(np.arange(40), init_seed=5, order_seed=order_seed, device=CPU)
    assert runs == [50, 40, 40, 40]
    start = task._start(5, task._engine(CPU), warmed=True)
    assert any(momentum.abs().max() > 0 for momentum in start.momenta)


def test_other_readings_of_the_papers_epoch(folder):
    """Each changes retrained models and the key, never the base model; the usual reading keeps the key it had."""
    usual = make_task(folder, batch_size=16)
    indices = np.arange(40)
    trained = usual.train(indices, init_seed=5, order_seed=0, device=CPU)
    for reading in ({"epoch_rate": "falling"}, {"warmup_keeps": "optimizer"}):
        task = make_task(folder, batch_size=16, **reading)
        assert not same_weights(task.train(indices, init_seed=5, order_seed=0, device=CPU), trained)
        assert task.config == {**usual.config, **reading}
        bases = [one.train_base(init_seed=0, order_seed=0, device=CPU) for one in (usual, task)]
        assert same_weights(*bases)
        with pytest.raises(ValueError, match="option of protocol paper"):
            make_task(folder, protocol="scratch", **reading)
        with pytest.raises(ValueError, match="available"):
            make_task(folder, **dict.fromkeys(reading, "other"))
    optimizer = make_task(folder, batch_size=16, warmup_keeps="optimizer")
    primed = optimizer._start(5, optimizer._engine(CPU), warmed=True)
    fresh, warmed = (usual._start(5, usual._engine(CPU), warmed=warmed) for warmed in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(primed.tensors, fresh.tensors, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(primed.momenta, warmed.momenta, strict=True))


def test_base_model_learns_and_is_the_same_under_both_protocols(folder):
    options = {"epochs": 5, "batch_size": 25, "learning_rate": 150.0, "widths": (8, 16, 16)}
    task, scratch = (make_task(folder, protocol=protocol, **options) for protocol in PROTOCOLS)
    model, other = (one.train_base(init_seed=0, order_seed=0, device=CPU) for one in (task, scratch))
    assert same_weights(model, other)
    right = task.logits(model, task.query_data, CPU).argmax(1) == task.query_data.targets
    assert right.float().mean() > 0.4  # chance is 0.1


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("size", [1, 2, 47, 65])
def test_tiny_subsets_stay_finite(folder, protocol, size):
    task = make_task(folder, protocol=protocol)
    model = task.train(np.arange(size), init_seed=0, order_seed=0, device=CPU)
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert task.losses(model, task.query_data, CPU).isfinite().all()


def test_losses_are_plain_cross_entropy_in_eval_mode(task, model, monkeypatch):
    monkeypatch.setattr(Cifar10, "losses_batch_size", 7)
    before = torch.backends.cudnn.deterministic
    losses = task.losses(model.train(), task.query_data, CPU)
    assert torch.backends.cudnn.deterministic == before
    assert losses.shape == (ROWS,)
    assert losses.dtype == torch.float32
    with torch.no_grad():
        logits = model.eval()(task.query_data.inputs)
    expected = F.cross_entropy(logits, task.query_data.targets, reduction="none")
    assert torch.allclose(losses, expected, atol=1e-5)
    assert torch.allclose(losses, task.loss(model, (task.query_data.inputs, task.query_data.targets)), atol=1e-5)
    assert torch.equal(task.losses(model, task.query_data.select([3, 1]), CPU), losses[[3, 1]])


# ---- the engine ----
def test_batches_are_few_equal_and_use_everything():
    assert batch_bounds(47, 1024) == [(0, 47)]
    assert [stop - start for start, stop in batch_bounds(2375, 1024)] == [791, 792, 792]
    for n in (1, 1023, 1025, 2048, 47_500):
        sizes = [stop - start for start, stop in batch_bounds(n, 1024)]
        assert (sum(sizes), len(sizes)) == (n, -(-n // 1024))
        assert max(sizes) - min(sizes) <= 1


def test_schedules_and_decoupled_hyperparameters():
    shares = resnet9_training.triangle(100)
    assert shares.argmax() == 23
    assert np.allclose(shares[:24], np.interp(np.arange(24), [0, 23], [0.2, 1]))
    assert shares[-1] == pytest.approx(0.07 + 0.93 / 77)
    for num_steps in (1, 2, 8, 100):
        assert len(resnet9_training.triangle(num_steps)) == num_steps
        assert (resnet9_training.triangle(num_steps) > 0).all()
    assert np.allclose(resnet9_training.linear_rise(4), [0.25, 0.5, 0.75, 1])
    assert np.array_equal(resnet9_training.constant(3), np.ones(3))
    recipe = Recipe()
    assert recipe.kilostep_scale == pytest.approx(1024 * (1 + 1 / 0.15))
    assert recipe.step_size == pytest.approx(10 / recipe.kilostep_scale)
    assert recipe.step_decay == pytest.approx(0.0153 * 1024 / recipe.kilostep_scale)


def test_pixels_are_shifted_reflected_and_flipped():
    table = resnet9_training.pixel_table(5, 2)
    assert table[:5].tolist() == [[2, 1, 0, 1, 2], [1, 0, 1, 2, 3], [0, 1, 2, 3, 4], [1, 2, 3, 4, 3], [2, 3, 4, 3, 2]]
    image = torch.arange(5.0)
    padded = F.pad(image.flip(0)[None, None], (2, 2), mode="reflect")[0, 0]
    for shift in range(5):
        assert torch.equal(image[table[5 + shift]], padded[shift : shift + 5])


def test_plan_visits_everyone_once_an_epoch_and_alternates_flips():
    indices = np.array([3, 8, 9, 20, 4, 5])
    plan = augmentation_plan(Recipe(), indices, 4, np.random.default_rng(0))
    flips = np.zeros((4, 30), dtype=int)
    for epoch in range(4):
        assert sorted(plan[epoch, 0]) == sorted(indices)
        assert plan[epoch, 1].max() < 5
        flips[epoch, plan[epoch, 0]] = plan[epoch, 2] // 5
    assert (flips[0, indices] + flips[1, indices] == 1).all()
    assert np.array_equal(flips[0], flips[2])
    assert np.array_equal(flips[1], flips[3])


def test_steps_equal_torch_sgd(folder):
    """The engine against torch.optim.SGD with the same two groups, over several steps of changing rate."""
    task = make_task(folder, max_shift=0, flip=False, lookahead_from=0, protocol="scratch")
    indices = np.arange(100)
    trained = task.train(indices, init_seed=3, order_seed=4, device=CPU)

    recipe, model = task._recipe, task.build_model(3).train()
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    rates = {"norm": recipe.step_size * 64, "other": recipe.step_size}
    groups = [
        {"params": [p for n, p in parameters if ("norm" in n) == (kind == "norm")], "lr": lr, "base": lr,
         "weight_decay": recipe.step_decay / lr}
        for kind, lr in rates.items()
    ]  # fmt: skip
    optimizer = torch.optim.SGD(groups, momentum=0.85, nesterov=True)
    rng = np.random.default_rng([cifar10._ORDER_STREAM, 4])
    plan = augmentation_plan(recipe, task.train_indices[indices], 2, rng)
    images, labels = normalised_images(task.cifar10.train_images), task.cifar10.train_labels
    for step, share in enumerate(resnet9_training.triangle(4)):
        for group in optimizer.param_groups:
            group["lr"] = group["base"] * share
        start, stop = batch_bounds(100, 64)[step % 2]
        chosen = torch.from_numpy(plan[step // 2, 0, start:stop])
        loss = F.cross_entropy(model(images[chosen]), labels[chosen], label_smoothing=0.2, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for (name, expected), found in zip(model.state_dict().items(), trained.state_dict().values(), strict=True):
        assert torch.allclose(found, expected, atol=1e-4, rtol=1e-3), name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float16, 0.03), (torch.float32, 0)])
def test_lower_precision_keeps_the_head_and_agrees(task, model, dtype, tolerance):
    images = task.query_data.inputs
    with torch.no_grad():
        expected, found = model(images), logits_in(dtype, model, images.to(dtype))
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def test_lookahead_ends_on_the_slow_weights_of_its_last_update(folder):
    """Five steps, one update: with decay d the result is d * start + (1 - d) * five plain steps."""

    def trained(lookahead_from):
        task = make_task(folder, lookahead_from=lookahead_from, epochs=5, protocol="scratch")
        return task.train(np.arange(30), init_seed=0, order_seed=0, device=CPU)

    plain, ahead, short = trained(0), trained(5), trained(6)
    start = make_task(folder).build_model(0)
    decay = resnet9_training.LOOKAHEAD_DECAY
    for name in ("head.weight", "groups.1.conv1.weight", "groups.2.norm2.running_mean"):
        expected = decay * start.state_dict()[name] + (1 - decay) * plain.state_dict()[name]
        assert torch.allclose(ahead.state_dict()[name], expected, atol=1e-5), name
    assert same_weights(short, plain)


def test_training_goes_on_where_capturing_fails(folder, model, monkeypatch, capsys):
    def refuse(*_, **__):
        raise RuntimeError("capture refused\nand more")

    monkeypatch.setattr(resnet9_training, "CAPTURE_AFTER", 1)
    for name in ("CUDAGraph", "current_stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    task = make_task(folder)
    task._engine(CPU).capturing = True
    assert same_weights(task.train(np.arange(60), init_seed=0, order_seed=0, device=CPU), model)
    assert capsys.readouterr().err == "CUDA graphs are off, training goes on without: capture refused\n"
    assert not task._engine(CPU).capturing


# ---- CUDA ----
@pytest.mark.cuda
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_captured_steps_equal_eager_ones(folder, protocol, monkeypatch):
    monkeypatch.setattr(resnet9_training, "CAPTURE_AFTER", 1)
    device = torch.device("cuda")
    captured = make_task(folder, protocol=protocol, epochs=4)
    eager = make_task(folder, protocol=protocol, epochs=4, capture=False)
    for size in (120, 120, 90):
        seeds = {"init_seed": 0, "order_seed": size, "device": device}
        models = [task.train(np.arange(size), **seeds) for task in (captured, eager)]
        for (name, a), b in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
            assert torch.allclose(a.float(), b.float(), atol=2e-2, rtol=2e-2), name
    assert captured._engine(device).graphs
    assert captured._engine(device).capturing
    assert not eager._engine(device).graphs


@pytest.mark.cuda
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_retraining_side_by_side_gives_the_losses_of_one_by_one(folder, protocol, monkeypatch):
    """In threads, with everything captured: the same bits whoever else trains, and the plain losses up to rounding."""
    monkeypatch.setattr(resnet9_training, "CAPTURE_AFTER", 1)
    device = torch.device("cuda")
    jobs = [(size, seed) for seed in range(6) for size in (120, 90)]

    def losses(task, job):
        return task.retrained_losses(np.arange(job[0]), init_seed=0, order_seed=job[1], device=device)

    alone, beside = (make_task(folder, protocol=protocol, epochs=4) for _ in range(2))
    expected = [losses(alone, job) for job in jobs]
    with ThreadPoolExecutor(beside.trainings_at_once(device)) as pool:
        found = list(pool.map(lambda job: losses(beside, job), jobs))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    for (size, seed), one in zip(jobs[:4], found, strict=False):
        model = alone.train(np.arange(size), init_seed=0, order_seed=seed, device=device)
        assert torch.allclose(one, alone.losses(model, alone.query_data, device), atol=0.05, rtol=0.05)


@pytest.mark.cuda
def test_cuda_repeats_itself_and_agrees_with_the_cpu(folder):
    device = torch.device("cuda")
    task = make_task(folder, precision="float32", protocol="scratch")
    models = [task.train(np.arange(100), init_seed=0, order_seed=0, device=device) for _ in range(2)]
    assert same_weights(*models)
    on_cpu = task.train(np.arange(100), init_seed=0, order_seed=0, device=CPU)
    losses = task.losses(models[0], task.query_data, device)
    assert torch.allclose(losses, task.losses(on_cpu, task.query_data, CPU), atol=0.1)
