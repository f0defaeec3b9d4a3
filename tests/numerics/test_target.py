"""The platform and the number of devices for which programs are traced."""

import jax
import pytest

from alibi.numerics.target import current_target, traced_for


def test_a_default_device_is_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with GPUs, `jax.default_device` of a CPU computes there, on one device."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert current_target() == ("gpu", 8)
    for device in ("cpu", jax.devices("cpu")[1]):
        with jax.default_device(device):
            assert current_target() == ("cpu", 1)
            with traced_for("tpu", 4):
                assert current_target() == ("tpu", 4)
