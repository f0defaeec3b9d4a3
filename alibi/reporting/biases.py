"""The figure of what a position method adds to the logits of attention: a picture of each head, and all by distance."""

import os

import matplotlib
import numpy as np
from jaxtyping import Float

from alibi.reporting.plots import png

INCHES = 1.7  # that a head's picture is wide


def draw_bias(name: str, added: Float[np.ndarray, "heads q k"], path: str | os.PathLike, *, causal: bool) -> None:
    """Writes a PNG file: what is added to the logit of each query (row) and key (column), and that of one query.

    Softmax ignores a number that a whole row shares, so each row counts from the query's own key. Keys that a causal
    mask hides are left white. Each head has colours of its own from its least to its largest number.
    """
    heads, length, _ = added.shape
    hidden = np.broadcast_to(np.triu(np.full((length, length), causal), 1), added.shape)
    shown = np.ma.masked_where(hidden, added - np.diagonal(added, axis1=1, axis2=2)[:, :, None])
    with png(path, (max(8.0, INCHES * heads), 6.5), dots_per_inch=100) as figure:
        axes = figure.subplot_mosaic([[*range(heads)], ["by distance"] * heads], height_ratios=(1, 2.2))
        # Of causal attention the last query, which has all distances; else the middle one, which has both sides.
        query = length - 1 if causal else length // 2
        for head, colour in enumerate(matplotlib.colormaps["viridis"](np.linspace(0, 0.9, heads))):
            axes[head].imshow(shown[head], cmap="magma")
            axes[head].set_title(f"head {head + 1}", fontsize=11, color=colour)
            axes[head].set(xticks=[], yticks=[])
            axes["by distance"].plot(query - np.arange(length), shown[head, query], color=colour)
        axes["by distance"].set_xlabel(f"tokens from the key to query {query}")
        axes["by distance"].set_ylabel("added to the logit")
        axes["by distance"].grid()
        figure.suptitle(name)
