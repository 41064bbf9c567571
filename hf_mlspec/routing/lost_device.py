"""What if a GPU is lost between a fetch and its use? An error that says so, again for every later call, and no leak.

Behind an error of its own (a fault of memory, a failed assertion of some kernel) a device answers no call of the
process any more: what lay there is gone with it, and neither copies nor events tell anything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch

from ..engines.memory import out_of_memory
from .plane_store import PlaneError


def is_lost(device: torch.device, error: RuntimeError) -> bool:
    """Whether an error of a device is one that it does not recover from: it then fails whatever it is asked."""
    if not isinstance(error, torch.AcceleratorError) or out_of_memory(error):
        return False
    try:
        # Beside a capture of another thread, which has no future on a device with such an error: whoever asks holds
        # locks that captures take.
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def tells_loss(method: Callable) -> Callable:
    """A room's method that raises PlaneError where its ``device`` is lost; ``lost`` keeps what the device said."""

    @wraps(method)
    def told(room, *args, **how):
        try:
            if not room.lost:
                return method(room, *args, **how)
        except RuntimeError as error:
            if not is_lost(room.device, error):
                raise
            room.lost = str(error).partition("\n")[0]
        raise PlaneError(
            f"{room.device}, which holds planes of this model, was lost ({room.lost}): no plane can be read, start a "
            "new process and load the model again"
        )

    return told


def survives_loss(method: Callable) -> Callable:
    """The same of a method that gives back what is gone with the device, which is no error."""
    told = tells_loss(method)

    @wraps(method)
    def done(room, *args, **how):
        try:
            return told(room, *args, **how)
        except PlaneError:
            if not room.lost:
                raise

    return done
