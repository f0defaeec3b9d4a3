"""Hours from operations, by the speed of a processor."""

import dataclasses

from alibi.model.flops import CPU_FLOPS_PER_SECOND


@dataclasses.dataclass(frozen=True)
class Processor:
    """The speed of devices: a peak, and `utilisation`, the share of the peak in use."""

    flops_per_second: float
    utilisation: float

    def hours(self, flops: float) -> float:
        """Returns the hours that `flops` operations take."""
        return flops / (self.flops_per_second * self.utilisation) / 3600


_CPU_PEAK = 200e9  # two cores of a server CPU, float32
CPU = Processor(_CPU_PEAK, CPU_FLOPS_PER_SECOND / _CPU_PEAK)
