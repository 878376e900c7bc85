"""What really happens when training data is left out: tasks, subsets, training, and the store that keeps it all."""

import sys
from importlib.abc import MetaPathFinder


class _BeforeTorchvision(MetaPathFinder):
    """Prepares the import of torchvision (see `retrain/torchvision_on_cpu.py`) when somebody asks for it.

    Not at once, because that imports torch, which takes two seconds: too long for `python -m bench.cache status`.
    """

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import retrain.torchvision_on_cpu  # noqa: F401


sys.meta_path.insert(0, _BeforeTorchvision())
