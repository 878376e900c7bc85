"""A GoogLeNet and an image folder for the googlenet task, made of CIFAR-10: the task's path on real images, end to end.

    python -m tests.trials.googlenet_cifar --data-dir CIFAR --out DIR --device cuda       # DIR/images, DIR/weights.pth
    python -m bench.lds --task googlenet --data-dir DIR/images --model DIR/weights.pth --set googlenet.size=64

ImageNet's weights need a download; here the network is trained on CIFAR-10's own pictures, scaled up as the task does.
The pictures of the folder (`train/<class>`, `val/<class>`) are left out of that training, so that the last layer, which
the task finetunes, meets pictures that the layers below have not seen.
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrain.data.cifar10 import FINGERPRINT, load_cifar10
from retrain.progress import bar
from retrain.safe_files import whole_file
from retrain.tasks.cifar10 import Cifar10
from retrain.tasks.googlenet import DEVIATION, MEAN

BATCH_SIZE = 256


def scaled(images: Tensor, size: int) -> Tensor:
    """(n, 3, size, size) of (n, 3, 32, 32) bytes, as the task scales: to size * 8 / 7, and the middle cut out."""
    longer = round(size * 8 / 7)
    pixels = F.interpolate(images.float() / 255, size=(longer, longer), mode="bilinear", antialias=True)
    first = (longer - size) // 2
    mean, deviation = (torch.tensor(v, device=images.device).view(1, 3, 1, 1) for v in (MEAN, DEVIATION))
    return (pixels[:, :, first : first + size, first : first + size] - mean) / deviation


def write_folder(folder: Path, images: np.ndarray, labels: np.ndarray, per_class: int, first: int = 0) -> np.ndarray:
    """Of every class its pictures from `first` on; returns which they are."""
    from PIL import Image

    chosen = []
    for label, name in enumerate(Cifar10.class_names):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for place in np.flatnonzero(labels == label)[first : first + per_class]:
            Image.fromarray(images[place].transpose(1, 2, 0)).save(folder / name / f"{place:05d}.png")
            chosen.append(place)
    return np.array(chosen)


def train(images: Tensor, labels: Tensor, size: int, epochs: int, seed: int) -> nn.Module:
    from torchvision.models import googlenet

    torch.manual_seed(seed)
    device = images.device
    network = googlenet(weights=None, aux_logits=False, init_weights=True, num_classes=10).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.05)
    steps = epochs * math.ceil(len(images) / BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.2)
    for _ in bar(range(epochs), desc="googlenet", unit="epoch"):
        for rows in torch.randperm(len(images), device=device).split(BATCH_SIZE):
            pixels = scaled(images[rows], size)
            flips = torch.rand(len(rows), device=device) < 0.5
            pixels = torch.where(flips.view(-1, 1, 1, 1), pixels.flip(3), pixels)
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(network(pixels), labels[rows], label_smoothing=0.1)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval()


@torch.no_grad()
def accuracy(network: nn.Module, images: Tensor, labels: Tensor, size: int) -> float:
    parts = [
        network(scaled(some, size)).argmax(1) == wanted
        for some, wanted in zip(images.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True)
    ]
    return float(torch.cat(parts).float().mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", required=True, help="CIFAR-10's files")
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--per-class", type=int, default=100, help="pictures of a class in train/; half as many in val/"
    )
    parser.add_argument("--no-check", action="store_true", help="take data that is not CIFAR-10's own")
    arguments = parser.parse_args()
    out, device = Path(arguments.out), torch.device(arguments.device)
    data = load_cifar10(arguments.data_dir, expected_fingerprint=None if arguments.no_check else FINGERPRINT)
    images, labels = data.train_images.numpy(), data.train_labels.numpy()
    shown = write_folder(out / "images" / "train", images, labels, arguments.per_class)
    tested = data.test_images.numpy(), data.test_labels.numpy()
    write_folder(out / "images" / "val", *tested, max(1, arguments.per_class // 2))
    kept = torch.ones(len(images), dtype=torch.bool)
    kept[torch.from_numpy(shown)] = False
    network = train(
        data.train_images[kept].to(device), data.train_labels[kept].to(device), arguments.size, arguments.epochs, 0
    )
    right = accuracy(network, data.test_images.to(device), data.test_labels.to(device), arguments.size)
    with whole_file(out / "weights.pth") as file:
        torch.save({name: value.cpu() for name, value in network.state_dict().items()}, file)
    print(f"{kept.sum():,} pictures at {arguments.size} pixels, {arguments.epochs} epochs: {right:.1%} of the test set")
    return 0


if __name__ == "__main__":
    sys.exit(main())
