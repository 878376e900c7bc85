"""Data that tests make on the spot: CIFAR-10's files, an image folder with weights, a tiny language model."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from retrain.data.cifar10 import BATCHES, CACHE_FILE, NAMES
from tests.helpers.tiny_language import WORDS, save_bert, save_both, write_text

CIFAR10_ROWS = 40
CIFAR10_WARMUP = 50


def cifar10_folder(folder: Path) -> Path:
    """Images whose class is a colour and a corner, in the file that takes CIFAR-10's place."""
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    colours = generator.integers(0, 256, (10, 3, 1, 1))
    made: dict[str, list[np.ndarray]] = {name: [] for name in NAMES}
    for name in BATCHES:
        labels = generator.integers(0, 10, CIFAR10_ROWS)
        images = generator.normal(128, 40, (CIFAR10_ROWS, 3, 32, 32)) + 0.5 * (colours[labels] - 128)
        for image, label in zip(images, labels, strict=True):
            image[label % 3, 16 * (label % 2) :][:12, :12] += 60
        part = "test" if name == "test_batch" else "train"
        made[f"{part}_images"].append(images.clip(0, 255).astype(np.uint8))
        made[f"{part}_labels"].append(labels.astype(np.uint8))
    save_file({name: np.concatenate(parts) for name, parts in made.items()}, folder / CACHE_FILE)
    return folder


def image_folder(folder: Path) -> Path:
    """train/ and val/ of two classes that differ in brightness, and weights.pth: a GoogLeNet whose features differ."""
    from PIL import Image
    from torchvision.models import googlenet

    generator = np.random.default_rng(0)
    batch = []
    for part, count in (("train", 15), ("val", 8)):
        for brightness, name in ((60, "cat"), (180, "dog")):
            (folder / part / name).mkdir(parents=True)
            for k in range(count):
                pixels = (brightness + 20 * generator.normal(size=(40, 50, 3))).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{k}.png")
                batch.append(torch.from_numpy(pixels).permute(2, 0, 1).float() / 255)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = googlenet(weights=None, init_weights=False, aux_logits=False)
        images = torch.nn.functional.interpolate(torch.stack(batch[::4]), size=(64, 64))
        # Random layers shrink whatever passes; statistics of the images themselves keep their features apart.
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0
        model.train()
        with torch.no_grad():
            model((images - 0.45) / 0.225)
    torch.save(model.state_dict(), folder / "weights.pth")
    return folder


def language_folder(folder: Path) -> Path:
    """tiny-stand-in/ (a model with its tokenizer), train.jsonl and eval.jsonl."""
    save_both(folder / "tiny-stand-in")
    write_text(folder / "train.jsonl", 40)
    write_text(folder / "eval.jsonl", 30, seed=1)
    return folder


def table_file(path: Path, rows: int = 60) -> Path:
    """Three columns of numbers and the label `high` or `low`, which the first one decides."""
    values = np.random.default_rng(0).normal(size=(rows, 3))
    lines = [f"{a:.4f},{b:.4f},{c:.4f},{'high' if a > 0 else 'low'}" for a, b, c in values]
    path.write_text("\n".join(["first,second,third,label", *lines]) + "\n")
    return path


def sentence_file(path: Path, rows: int = 60) -> Path:
    """Sentences whose label is their first word's: even words are 0, odd ones 1."""
    chooser = random.Random(0)
    with open(path, "w") as file:
        for _ in range(rows):
            text = chooser.choices(WORDS, k=chooser.randint(3, 9))
            file.write(json.dumps({"text": " ".join(text), "label": WORDS.index(text[0]) % 2}) + "\n")
    return path


def small_options(name: str, folder: Path, images: Path) -> dict[str, Any]:
    """Options with which a task takes seconds, on data made in `folder` or here already (`images`)."""
    folder.mkdir(parents=True, exist_ok=True)
    if name in ("digits", "smooth_digits"):
        return {"epochs": 1, "num_train": 200, "widths": (4, 6, 6)}
    if name == "tinylm":
        return {"pretraining_steps": 5, "num_train": 40, "num_queries": 20, "length": 12, "hidden": 16}
    if name == "cifar10":
        return {
            "data_dir": str(cifar10_folder(folder)), "check_fingerprint": False, "widths": (4, 8, 8), "epochs": 2,
            "num_warmup": CIFAR10_WARMUP, "warmup_steps": 2, "batch_size": 64,
        }  # fmt: skip
    if name == "googlenet":
        return {"data_dir": str(images), "model": str(images / "weights.pth"), "size": 32, "epochs": 5}
    if name in ("language", "pythia14m", "smollm2", "stories15m"):
        language_folder(folder)
        return {
            "model": str(folder / "tiny-stand-in"), "text": str(folder / "train.jsonl"), "num_train": 32,
            "eval_text": str(folder / "eval.jsonl"), "length": 16, "num_queries": 16, "batch_size": 8,
        }  # fmt: skip
    if name == "table":
        return {"train_file": str(table_file(folder / "table.csv")), "epochs": 3}
    if name == "text_classifier":
        save_bert(folder / "bert")
        return {"model": str(folder / "bert"), "train_file": str(sentence_file(folder / "rows.jsonl")), "epochs": 1}
    return {}
