"""The project's parameters as those of the decoders in benchmarks/torch_peer.py."""

import numpy as np


def fused_state(params, config):
    """Returns the state of `FusedDecoder` with these parameters."""
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
    return _tensors(state)


def paper_state(params, config):
    """Returns the state of `PaperDecoder` with these parameters."""
    adaptive, width = params["adaptive"], config.model.width
    state = {"clusters.weight": np.transpose(adaptive["clusters"])}
    for band in range(len(config.model.cutoffs) + 1):
        own = adaptive[f"band_{band}"]
        state[f"words.{band}.weight"] = own["embedding"]
        state[f"projections.{band}.weight"] = np.transpose(own["kernel"])
    for number in range(config.model.num_layers):
        layer, to = params[f"layers_{number}"], f"layers.{number}"
        for name, one in (
            layer["attention"] | {part: layer[part] for part in ("up", "down")}
        ).items():
            inputs = config.model.feed_forward if name == "down" else width
            kernel = one["kernel"].reshape(inputs, -1)
            state |= _dense(f"{to}.{name}", {"kernel": kernel, "bias": one["bias"].ravel()})
        for name in ("attention_norm", "feed_forward_norm"):
            state |= _norm(f"{to}.{name}", layer[name])
    return _tensors(state)


def _tensors(state):
    import torch

    return {name: torch.tensor(np.asarray(x)) for name, x in state.items()}


def _dense(name, params):
    return {f"{name}.weight": np.transpose(params["kernel"]), f"{name}.bias": params["bias"]}


def _norm(name, params):
    return {f"{name}.weight": params["scale"], f"{name}.bias": params["bias"]}
