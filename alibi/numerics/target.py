"""The platform for which programs are traced."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_TARGET: contextvars.ContextVar[tuple[str, int] | None] = contextvars.ContextVar(
    "target", default=None
)


@contextlib.contextmanager
def traced_for(platform: str, devices: int) -> Iterator[None]:
    """Traces programs inside for this many devices of `platform`. Absent devices can't run them."""
    token = _TARGET.set((platform, devices))
    try:
        yield
    finally:
        _TARGET.reset(token)


def current_target() -> tuple[str, int]:
    """Returns the platform of traced programs, "cpu", "gpu" or "tpu", and the number of devices.

    Defaults to `jax.default_device` alone where it is set, or else to all devices of JAX.
    """
    device = jax.config.values["jax_default_device"]  # a device, a platform's name, or None
    platform = getattr(device, "platform", device) or jax.default_backend()
    platform = platform if platform in ("cpu", "tpu") else "gpu"  # "cuda" and "rocm" are GPUs too
    return _TARGET.get() or (platform, 1 if device else jax.device_count())
