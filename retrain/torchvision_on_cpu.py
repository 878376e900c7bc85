"""Lets `import torchvision` succeed beside a CPU build of torch.

PyPI's torchvision wheel is compiled against CUDA torch. Beside a CPU torch its extension library cannot load, and
`import torchvision` then fails with "operator torchvision::nms does not exist", because torchvision registers Python
kernels for operators that the library should have defined. transformers imports torchvision for some model files, so
the failure spreads to GPT-NeoX. Declaring the missing operator schemas is enough: nothing here ever calls them.

Imported first by `retrain/__init__.py`. Does nothing where torchvision works, or is not installed.
"""

import importlib.util
import sys

import torch

MISSING_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width) "
    "-> (Tensor, Tensor)",
    "ps_roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio) -> (Tensor, Tensor)",
    "ps_roi_pool(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width) "
    "-> (Tensor, Tensor)",
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, int stride_h, int stride_w, "
    "int pad_h, int pad_w, int dilation_h, int dilation_w, int groups, int offset_groups, bool use_mask) -> Tensor",
)

_library = None  # the registration lives as long as this object


def define_missing_operators() -> bool:
    """Declares torchvision's operators if its own library cannot. Returns whether it had to."""
    global _library
    if _library is not None or importlib.util.find_spec("torchvision") is None:
        return _library is not None
    try:
        import torchvision  # noqa: F401

        return False
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]  # the half-imported package
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in MISSING_SCHEMAS:
        _library.define(schema)
    return True


define_missing_operators()
