"""The project's parameters as those of the decoders in benchmarks/torch_peer.py."""

import numpy as np


def fused_state(params, config):
    """Returns the state of `FusedDecoder` with these parameters."""
    import torch

    state = {"embedding.weight": params["embedding"], **_norm("norm", params["final_norm"])}
    width = config.model.width
    for number in range(config.model.num_layers):
        layer, to = params[f"layers_{number}"], f"layers.{number}"
        attention = layer["attention"]
        joint = [attention[name] for name in ("query", "key", "value")]
        kernel = np.concatenate([x["kernel"].reshape(width, width) for x in joint], axis=1)
        bias = np.concatenate([x["bias"].ravel() for x in joint])
        out = attention["out"]
        state |= _dense(f"{to}.query_key_value", {"kernel": kernel, "bias": bias})
        state |= _dense(f"{to}.out", out | {"kernel": out["kernel"].reshape(width, width)})
        state |= _dense(f"{to}.up", layer["up"]) | _dense(f"{to}.down", layer["down"])
        for name in ("attention_norm", "feed_forward_norm"):
            state |= _norm(f"{to}.{name}", layer[name])
    return {name: torch.tensor(np.asarray(x)) for name, x in state.items()}


def _dense(name, params):
    return {f"{name}.weight": np.transpose(params["kernel"]), f"{name}.bias": params["bias"]}


def _norm(name, params):
    return {f"{name}.weight": params["scale"], f"{name}.bias": params["bias"]}
