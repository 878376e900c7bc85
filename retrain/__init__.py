"""What really happens when training data is left out: tasks, subsets, training, and the store that keeps it all."""

import importlib.util
import re
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

_declarations: list = []  # a registration of operators lives as long as its object


def declare_missing_operators() -> list[str]:
    """Lets `import torchvision` succeed beside a CPU build of torch; returns the operators that were declared.

    PyPI's wheel is compiled against CUDA torch: beside another its extension library does not load, and torchvision
    stops at the operators that the library should have declared. transformers imports it, so GPT-NeoX would stop, too.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return []
    import torch

    folder = Path(spec.submodule_search_locations[0])
    try:
        for library in [*folder.glob("_C*.so"), *folder.glob("_C*.pyd")]:
            torch.ops.load_library(library)
        return []
    except (ImportError, OSError):
        registrations = (folder / "_meta_registrations.py").read_text()
        names = re.findall(r"register_fake\(\"torchvision::(\w+)\"", registrations)
        _declarations.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in names:  # nothing here calls them, so their arguments matter to nobody: they suppress boxes
            _declarations[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return names


class _BeforeTorchvision(MetaPathFinder):
    """Declares them when torchvision is asked for: at once would import torch, too long for `bench.cache status`."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare_missing_operators()


sys.meta_path.insert(0, _BeforeTorchvision())
