"""Where a model's numbers are worked out: decided here, when it is opened, and nowhere else.

Weights are put there as they are read (:class:`ov_circuits.checkpoint.stores.PlacedStore`), everything that is worked out from
them follows, and frames are in ordinary memory.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from ov_circuits.errors import CircuitsError


def device_of(name: str | torch.device | None) -> torch.device:
    """The device of that name: ``cpu`` (also None), ``cuda``, ``cuda:1``. Of processes under torchrun each has a GPU of its own.

    Raises:
        CircuitsError: there is no such device, torch cannot use it here, or it lacks float64.
    """
    if name is None:
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise CircuitsError(f"there is no device {name!r}: choose cpu, cuda or cuda:1") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "mps":
        raise CircuitsError("spectra are worked out in float64, which Apple's GPUs (mps) do not have: use the CPU")
    module: Any = vars(torch).get(device.type)
    if not hasattr(module, "is_available") or not module.is_available():
        raise CircuitsError(
            f"torch {torch.__version__} finds no {device.type} device on this machine: leave the device out for the CPU, "
            "or install a torch built for your GPU, and its driver"
        )
    if str(device) == device.type:  # without a number
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
    count = module.device_count()
    if device.index >= count:
        raise CircuitsError(
            f"there is no {device}: this machine has {count} such device{'s' * (count != 1)}; "
            "with torchrun, start as many processes as there are"
        )
    module.set_device(device)  # what torch.distributed and transformers take where they are not told
    return device
