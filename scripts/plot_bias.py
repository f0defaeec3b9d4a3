"""Draws what each position method adds to the logits of attention: a picture for each head, curves
over distance.

    python scripts/plot_bias.py --methods=all --heads=8 --length=64
    python scripts/plot_bias.py --config=configs/rnope_swa.py --length=64

Writes METHOD.png to --output_dir. With --config, each kind of layer has a figure, such as
layers_0_1_2.png, with its window and the scale of its queries. Parameters are initial. All tokens have
the same random content, so all differences come from positions. The figure shows the logit with the
method minus the logit without it: a bias, or the effect of a rotation. Methods that only change token
embeddings have no figure.
"""

import functools
import pathlib

import clone  # noqa: F401, it sets the path of imports
from absl import flags

from alibi.cli import command_line

_METHODS = flags.DEFINE_list(
    "methods", "all", "names of position methods, or package.module:Class, or all"
)
_CONFIG = command_line.define_config_flag(
    help="a config file with the layers to draw, in place of --methods"
)
_HEADS = flags.DEFINE_integer("heads", 8, "attention heads", lower_bound=1)
_HEAD_DIM = flags.DEFINE_integer("head_dim", 64, "features of a head", lower_bound=2)
_LENGTH = flags.DEFINE_integer("length", 64, "tokens of a sequence", lower_bound=2)
_TRAIN_LENGTH = flags.DEFINE_integer(
    "train_length", 0, "tokens in training; 0 means as many as --length", lower_bound=0
)
_CAUSAL = flags.DEFINE_boolean(
    "causal", True, "a token sees only those before it; with --nocausal it sees both sides"
)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "workdirs/bias", "where the figures go")
command_line.own_flags(__name__)


def added_to_logits(kind, length):
    """Returns `[heads, q, k]`, the scaled logits in a layer of this kind minus those without positions.
    They are NaN beyond its window. Returns None if nothing is added.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from alibi.attention.call import AttentionOptions
    from alibi.attention.dispatch import watched
    from alibi.attention.methods import method_attention_fn
    from alibi.model.positions import bias_scale, init_position, scaled_queries
    from alibi.positions.bias import MASKED

    method = kind.position

    def logits(query, key):
        products = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest")
        return products * query.shape[-1] ** -0.5

    @jax.jit
    def compute():
        of_all, of_layer, of_content = jax.random.split(jax.random.key(0), 3)
        params = {**method.init(of_all), **init_position(method, kind.logit_scale, of_layer)}
        one = jax.random.normal(of_content, (1, 1, method.num_heads, method.head_dim))
        content = jnp.broadcast_to(one, (1, length, *one.shape[2:]))
        positions = jnp.arange(length)
        scale = functools.partial(scaled_queries, kind.logit_scale, method, params)
        attention = method_attention_fn(
            method,
            params,
            content.reshape(1, length, -1),
            query_positions=positions,
            key_positions=positions,
            scale=scale if kind.logit_scale else None,
            bias_scale=bias_scale(kind.logit_scale, method, params),
            options=AttentionOptions(backend="reference"),
        )
        calls = []
        with watched(calls.append):
            attention(content, content, content)
        (call,) = calls
        z, plain = logits(call.query, call.key), logits(content, content)
        if call.bias is None or call.bias.gives_weights:  # weights are no logits
            return (z - plain)[0]
        if not call.bias.reads_rows:
            return (z - plain)[0] + call.bias(positions, positions).reshape(z.shape[1:])
        visible = call.visible()
        seen = jnp.broadcast_to(True if visible is None else visible, z.shape)
        z = call.bias.of_rows(jnp.where(seen, z, MASKED), seen, positions, positions)
        return jnp.where(seen, z - plain, 0.0)[0]

    added, distance = np.asarray(compute()), np.subtract.outer(*[np.arange(length)] * 2)
    if kind.window:
        added = np.where(np.abs(distance) < kind.window, added, np.nan)
    return added if kind.window or np.abs(added).max() > 0 else None


def layers_of(config):
    """Returns each kind of layer in a config with the name of its figure."""
    from alibi.model.decoder import UNKNOWN_VOCABULARY, build_model
    from alibi.positions import method_names

    of_methods = (_METHODS, _HEADS, _HEAD_DIM, _TRAIN_LENGTH, _CAUSAL)
    if useless := [f"--{flag.name}" for flag in of_methods if flag.present]:
        raise ValueError(f"--config says all of {', '.join(useless)}; leave out these, or --config")
    model, names = build_model(config, UNKNOWN_VOCABULARY), method_names(config.position)
    model.check_length(_LENGTH.value)
    pattern, kinds = model.pattern, {}
    for layer in range(config.model.num_layers):
        kinds.setdefault(pattern[layer % len(pattern)], []).append(layer)
    return {
        f"layers_{'_'.join(map(str, layers))}": (names[layers[0] % len(names)], kind)
        for kind, layers in kinds.items()
    }


def main() -> None:
    # Only now, so that a wrong flag is reported at once.
    from alibi.model.positions import LayerKind
    from alibi.positions import METHODS, make_position
    from alibi.reporting.charts import png
    from alibi.reporting.figures import bias_figure

    heads, head_dim = _HEADS.value, _HEAD_DIM.value
    sizes = {"num_heads": heads, "head_dim": head_dim, "width": heads * head_dim}
    sizes["train_length"] = _TRAIN_LENGTH.value or _LENGTH.value
    folder = pathlib.Path(_OUTPUT_DIR.value)
    names = list(METHODS) if _METHODS.value == ["all"] else _METHODS.value
    made = {} if _CONFIG.value is None else layers_of(_CONFIG.value)
    for name in () if made else names:
        try:
            method = make_position(name, **sizes, causal=_CAUSAL.value)
            method.check_length(_LENGTH.value)
            made[name] = name, LayerKind(method)
        except ValueError as error:
            if _METHODS.value != ["all"]:
                raise
            print(f"{name}: not drawn, {error}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, (title, kind) in made.items():
        added = added_to_logits(kind.at_length(_LENGTH.value), _LENGTH.value)
        path = folder / f"{name.replace(':', '.')}.png"
        if added is None:
            print(f"{name}: adds nothing to the logits itself")
        else:
            title += f", window {kind.window}" if kind.window else ""
            title += f", logits by {kind.logit_scale}" if kind.logit_scale else ""
            path.write_bytes(png(bias_figure(title, added, causal=kind.position.causal)))
            print(f"{name}: {path}")


if __name__ == "__main__":
    command_line.run(main)
