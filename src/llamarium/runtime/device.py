"""The choice of the device. Torch is imported only if there may be a device other than the CPU."""

import os
from pathlib import Path

from llamarium.errors import OptionError, show_value
from llamarium.extras import has_torch, need_torch

_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's, WSL's, AMD's


def choose_device(name: object) -> str:
    """Return a device in torch's notation; "auto" chooses a GPU if PyTorch can use one.

    Raises:
        OptionError: If the device is unknown or cannot be used.
        MissingPackageError: If it needs PyTorch, which is not installed.
    """
    if isinstance(name, str) and (name == "cpu" or (name == "auto" and not (_may_have_gpu() and has_torch()))):
        return "cpu"
    if isinstance(name, str) and name == "gpu":
        raise OptionError(
            "device is 'gpu'; expected 'cuda' (NVIDIA, AMD), 'mps' (Apple), or 'auto' (a GPU if available)"
        )
    need_torch(f"device {show_value(name)}")
    import torch

    if not isinstance(name, (str, torch.device)):
        raise OptionError(f"device is {show_value(name)}; expected auto, cpu, cuda, cuda:1 or mps")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, ImportError) as error:  # ImportError: "privateuseone" needs a plug-in module
        raise OptionError(f"device {show_value(str(name))} cannot be used: {str(error).splitlines()[0]}") from None
    if device.type == "meta":
        raise OptionError("device 'meta' has no data; expected cpu, cuda or mps")
    return str(device)


def _may_have_gpu() -> bool:
    """Return whether a GPU driver is installed and not hidden; asking torch would take seconds to import it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return os.name == "nt" or any(Path(driver).exists() for driver in _DRIVERS)
