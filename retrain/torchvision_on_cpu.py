"""Lets `import torchvision` succeed beside a CPU build of torch.

PyPI's torchvision wheel is compiled against CUDA torch. Beside a CPU torch its extension library cannot load, and
`import torchvision` then fails with "operator torchvision::nms does not exist": torchvision registers Python kernels
for operators that the library should have declared. transformers imports torchvision for its image helpers, so the
failure takes GPT-NeoX down too. Declaring the missing operators is enough, because nothing here calls them.

Imported first by `retrain/__init__.py`. Does nothing where the library loads or torchvision is not installed.
"""

import importlib.util
import re
from pathlib import Path

import torch

# The arguments matter to nobody: the operators are declared, never called. All that need it are box suppressors.
ARGUMENTS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_declarations: torch.library.Library | None = None  # the registration lives as long as this object


def declare_missing_operators() -> list[str]:
    """Declares the operators torchvision's library would have; returns their names, empty where it loads."""
    global _declarations
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return []
    folder = Path(spec.submodule_search_locations[0])
    try:
        for library in [*folder.glob("_C*.so"), *folder.glob("_C*.pyd")]:
            torch.ops.load_library(library)
        return []
    except (ImportError, OSError):
        registrations = (folder / "_meta_registrations.py").read_text()
        names = re.findall(r"register_fake\(\"torchvision::(\w+)\"", registrations)
        _declarations = torch.library.Library("torchvision", "FRAGMENT")
        for name in names:
            _declarations.define(name + ARGUMENTS)
        return names


MISSING_OPERATORS = declare_missing_operators()
