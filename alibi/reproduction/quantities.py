"""What a cell of the paper's tables is: a model, trained so and evaluated so, and what of it is printed."""

import dataclasses
import enum

from alibi.reporting import measures
from alibi.reporting.measures import Measure


class Metric(enum.Enum):
    """What is printed, and where it is found: in a row of results, or with the run itself."""

    PERPLEXITY = "perplexity"
    EVALUATION_SPEED = "evaluation speed"  # tokens per second
    TRAINING_SPEED = "training speed"  # tokens per second and device
    MEMORY = "memory"  # bytes of a device, the most during training
    PARAMETERS = "parameters"
    UPDATES = "updates"
    DEVICE_HOURS = "device-hours"  # of training


@dataclasses.dataclass(frozen=True)
class Model:
    """A trained model by what the tables vary; lengths in tokens, at the paper's scale.

    Attributes:
      position: a name from alibi.positions.METHODS.
      train_length: the paper's L.
      updates: the share of the setting's updates that it is trained for.
    """

    position: str
    train_length: int
    updates: float = 1.0


@dataclasses.dataclass(frozen=True)
class Quantity:
    """The number of one cell; lengths in tokens, at the paper's scale.

    Attributes:
      model: what it is a number of.
      metric: which.
      measure: how it is printed.
      eval_length, stride, split: of the evaluation; None: metrics of the training alone,
        windows that don't overlap.
    """

    model: Model
    metric: Metric = Metric.PERPLEXITY
    measure: Measure = measures.PERPLEXITY
    eval_length: int | None = None
    stride: int | None = None
    split: str = "valid"
