"""Peak FLOP/s of devices, for the model FLOPs utilization (MFU).

Values are for dense matrix products in FLOP/s: bfloat16 on tensor cores, float32 without TF32, which is PyTorch's
default.

Source: NVIDIA's data sheet of each GPU.
"""

import re
from typing import Literal

import torch

_PEAKS: dict[str, tuple[float, float]] = {  # part of the device name: (bfloat16, float32)
    "H200": (989e12, 67e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "RTX 4090": (165e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
}


def peak_flops(device: torch.device, precision: Literal["float32", "bfloat16"]) -> float | None:
    """Return a device's peak FLOP/s, or None if it is unknown, as for a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if re.search(r"PCIe|NVL", name):  # their clocks differ from the data sheet's main column
        return None
    found = (peaks for known, peaks in _PEAKS.items() if re.search(rf"\b{known}\b", name))
    return next((peaks[precision == "float32"] for peaks in found), None)
