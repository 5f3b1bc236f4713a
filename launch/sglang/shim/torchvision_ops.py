"""Lets PyPI's torchvision import beside a CPU build of torch.

Its compiled part is linked against CUDA and does not load there, so the operators that its Python part refers to are
missing. Declaring them is enough: a text model never calls one.
"""

import importlib.abc
import sys

_POOL = "SymInt pooled_height, SymInt pooled_width"
_SIZES = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_ROI = "Tensor input, Tensor rois, float spatial_scale"
_GRAD = "Tensor grad, Tensor rois"
_DEFORM = ", ".join(
    ["Tensor input", "Tensor weight", "Tensor offset", "Tensor mask", "Tensor bias"]
    + [f"SymInt {name}_{axis}" for name in ("stride", "pad", "dilation") for axis in ("h", "w")]
    + ["SymInt groups", "SymInt offset_groups", "bool use_mask"]
)
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({_ROI}, {_POOL}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward({_GRAD}, float spatial_scale, {_POOL}, {_SIZES}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool({_ROI}, {_POOL}) -> (Tensor, Tensor)",
    f"_roi_pool_backward({_GRAD}, Tensor argmax, float spatial_scale, {_POOL}, {_SIZES}) -> Tensor",
    f"ps_roi_align({_ROI}, {_POOL}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward({_GRAD}, Tensor channel_mapping, float spatial_scale, {_POOL}, int sampling_ratio, "
    f"{_SIZES}) -> Tensor",
    f"ps_roi_pool({_ROI}, {_POOL}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward({_GRAD}, Tensor channel_mapping, float spatial_scale, {_POOL}, {_SIZES}) -> Tensor",
    f"deform_conv2d({_DEFORM}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {_DEFORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_declared = []  # a library lives as long as somebody holds it


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators when torchvision is imported, and then steps aside."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch
        from torch import library

        if torch.version.cuda is None:
            operators = library.Library("torchvision", "FRAGMENT")
            for schema in _OPERATORS:
                operators.define(schema)
            _declared.append(operators)


def install() -> None:
    sys.meta_path.insert(0, _BeforeTorchvision())
