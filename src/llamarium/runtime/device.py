"""Which device a model computes on. Torch is imported only if there may be another one than the CPU."""

import os
from pathlib import Path

from llamarium.errors import OptionError, show_value
from llamarium.extras import has_torch, need_torch

_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's, WSL's, AMD's


def choose_device(name: object) -> str:
    """Return the device of that name, as torch spells it; "auto" is a GPU where there is one that PyTorch can use.

    OptionError if there is no such device here, or it holds no numbers; MissingPackageError without PyTorch.
    """
    if isinstance(name, str) and (name == "cpu" or (name == "auto" and not (_may_have_gpu() and has_torch()))):
        return "cpu"
    if isinstance(name, str) and name == "gpu":
        raise OptionError(
            "device is 'gpu'; expected 'cuda' (NVIDIA, AMD), 'mps' (Apple), or 'auto': a GPU if there is one"
        )
    need_torch(f"device {show_value(name)}")
    import torch

    if not isinstance(name, (str, torch.device)):
        raise OptionError(f"device is {show_value(name)}; expected auto, cpu, cuda, cuda:1 or mps")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, ImportError) as error:  # "privateuseone" needs a module that does not exist
        raise OptionError(f"device {show_value(str(name))} cannot be used: {str(error).splitlines()[0]}") from None
    if device.type == "meta":
        raise OptionError("device 'meta' holds no numbers; expected cpu, cuda or mps")
    return str(device)


def _may_have_gpu() -> bool:
    """Whether a driver of a GPU that torch would call cuda is here and not hidden; torch takes seconds to say so."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return os.name == "nt" or any(Path(driver).exists() for driver in _DRIVERS)
