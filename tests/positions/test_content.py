"""Methods that read content, as attention, against formulas in float64."""

import numpy as np
import pytest

from tests.attention.calls import check_layer
from tests.positions.test_biases import (
    HEAD_DIM,
    HEADS,
    LENGTH,
    D,
    deberta,
    make,
    params_of,
    shaw,
    tokens,
)


def pope(given):
    """The logits of the paper, times sqrt(head_dim); a key's angle is delta ahead."""
    magnitudes = [np.log1p(np.exp(given[side])) for side in ("query", "key")]
    theta = 100.0 ** (-np.arange(HEAD_DIM) / HEAD_DIM)
    angles = -D[None, :, :, None] * theta + given["delta"][:, None, None]
    return np.einsum("bihc,bjhc,hijc->bhij", *magnitudes, np.cos(angles))


def selective_rope(given):
    """Pair p is features p and p + head_dim / 2, as complex numbers; 3 taps, the last on the token
    itself. Options are told by their parameters, but for SiLU, which the cases with a gate have.
    """
    half, taps = HEAD_DIM // 2, 3
    x = given["x"].reshape(2, LENGTH, HEADS, -1)
    x = x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6)
    flat = x.reshape(2, LENGTH, -1)
    if "full" in given:  # each head's matrix, with columns of the length g_h
        matrices = np.moveaxis(given["full"], 1, 0)
        lengths = np.sqrt((matrices**2).sum(axis=1, keepdims=True))
        unit = given["gain"][:, None, None] * matrices / lengths
        projected = np.stack([x[:, :, head] @ unit[head] for head in range(HEADS)], axis=2)
    else:
        projected = np.einsum("blr,rhp->blhp", flat @ given["down"], given["up"])
    steps = np.zeros_like(projected)
    for token, tap in np.ndindex(LENGTH, taps):
        if (earlier := token - (taps - 1 - tap)) >= 0:
            steps[:, token] += given["taps"][tap] * projected[:, earlier]
    if "gate" in given:
        steps = steps / (1 + np.exp(-steps))
        gates = 1 / (1 + np.exp(-(flat @ given["gate"] + given["gate_bias"])))
        steps = steps * gates[..., None]
    turn = np.exp(1j * steps.cumsum(axis=1) * 50.0 ** (-np.arange(half) / half))
    turned = []
    for side in ("query", "key"):
        pairs = (given[side][..., :half] + 1j * given[side][..., half:]) * turn
        features = np.concatenate([pairs.real, pairs.imag], axis=-1)
        if f"{side}_norm" in given:
            squares = (features**2).mean(axis=-1, keepdims=True)
            features = features / np.sqrt(squares + 1e-5) * given[f"{side}_norm"]
        turned.append(features)
    return np.einsum("bihp,bjhp->bhij", *turned)


def repo(given):
    """As complex numbers; all of the position comes from the input."""
    hidden = given["x"] @ given["gate"]
    chosen = hidden / (1 + np.exp(-hidden)) * (given["x"] @ given["content"])
    angles = (chosen @ given["place"])[..., None] * 50.0 ** (
        -np.arange(HEAD_DIM // 2) * 2 / HEAD_DIM
    )
    query, key = (
        (given[side][..., : HEAD_DIM // 2] + 1j * given[side][..., HEAD_DIM // 2 :])
        * np.exp(1j * angles)
        for side in ("query", "key")
    )
    return np.einsum("bihp,bjhp->bhij", query, key.conj()).real


def dots(given, parts=1):
    """The products of queries and keys, divided as logits with `parts` parts."""
    return np.einsum("bihd,bjhd->bhij", given["query"], given["key"]) / np.sqrt(parts * HEAD_DIM)


BOTH = {"causal": False}
SHAW, DEBERTA = {"max_distance": 3, "values": True}, {"max_distance": 4}
SELECTIVE = {"base": 50.0, "taps": 3, "rank": 5}
# of their language models, and the norm
AS_AUTHORS = {"rank": 0, "silu": True, "gate": True, "norm_after": True}
CASES = [
    ("shaw", SHAW, lambda given: dots(given) + shaw(given)),
    ("shaw", SHAW | BOTH, lambda given: dots(given) + shaw(given)),
    ("deberta", DEBERTA, lambda given: dots(given, 3) + deberta(given)),
    ("deberta", DEBERTA | BOTH, lambda given: dots(given, 3) + deberta(given)),
    ("pope", {"base": 100.0}, lambda given: pope(given) / np.sqrt(HEAD_DIM)),
    ("repo", {"base": 50.0, "rank": 5}, lambda given: repo(given) / np.sqrt(HEAD_DIM)),
    ("selective_rope", SELECTIVE, lambda given: selective_rope(given) / np.sqrt(HEAD_DIM)),
    *(
        (
            "selective_rope",
            SELECTIVE | options,
            lambda given: selective_rope(given) / np.sqrt(HEAD_DIM),
        )
        for options in ({"rank": 0}, {"silu": True, "gate": True}, {"norm_after": True}, AS_AUTHORS)
    ),
]


@pytest.mark.parametrize(("name", "options", "logits"), CASES)
def test_attention_and_its_gradients_are_those_of_the_formula(name, options, logits) -> None:
    """Shaw's vectors also stand with the values; DeBERTa divides all of a logit by sqrt(3 head_dim)."""
    method, sides = make(name, **options), tokens()
    params = params_of(method)

    def formula(given):
        weights = np.exp(np.where((D >= 0) | (not method.causal), logits(given), -np.inf))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        out = np.einsum("bhij,bjhd->bihd", weights, given["value"])
        if "value_vectors" in given:
            vectors = given["value_vectors"][np.clip(-D, -3, 3) + 3]
            out += np.einsum("bhij,ijd->bihd", weights, vectors)
        return out

    moved = check_layer(method, params | sides, formula, atol=3e-6)
    assert moved >= {*params, "query", "key", "value"}
