"""Other code's models become work directories, and back."""

from alibi.extras import EXTRAS, needs

needs(__name__, *EXTRAS["train"])
