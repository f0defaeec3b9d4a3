"""The dtypes of results under other settings of JAX, in a process of its own."""

import os
import subprocess
import sys

import pytest

from tests.hosts import ROOT

pytestmark = pytest.mark.slow

SETTINGS = {"JAX_ENABLE_X64": "1", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
# One for each place where a position enters; the others differ in numbers, which strict promotion
# doesn't see and 64 bits do.
SEAMS = (
    "alibi",
    "t5",
    "fire",
    "shaw",
    "deberta",
    "fox",
    "rotary",
    "selective_rope",
    "sinusoidal",
    "asentmax",
    "cope",
    "dape",
)
# Traces alone, since an operation between unlike dtypes fails there.
TRACED = """
import functools, sys

import jax
import jax.numpy as jnp

from alibi import METHODS, attend
from alibi.config import make_config
from alibi.generation import generate
from alibi.model.decoder import build_model

OPTIONS = [
    "position=alibi,model.window=4", "position=alibi,model.normalizer=sink,model.attention=blocked",
    "position=rotary,model.logit_scale=ssmax,model.qk_norm=True,model.scan_layers=True",
    "position=alibi,model.logit_scale=ssmax", "position=t5,model.logit_scale=log_n",
    "position=none,model.embedding=adaptive,model.cutoffs=(10,20)", "position=alibi,objective=masked",
    "position=fox,model.attention=blocked", "position=shaw,position_options.values=True",
    "position=alibi,model.dtype=bfloat16", "position=sinusoidal,model.max_position=64",
]
tokens = jnp.arange(16, dtype=jnp.int32)[None]
for option in [f"position={name}" for name in sys.argv[1:] or METHODS] + OPTIONS:
    model = build_model(make_config(f"length=16,model.num_layers=1,model.width=16,model.num_heads=2,{option}"), 40)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    nll = functools.partial(model.apply, method="token_nll")
    of_loss = jax.value_and_grad(lambda params: nll({"params": params}, tokens, tokens).sum())
    loss, gradients = jax.eval_shape(of_loss, params)
    answer = lambda params: generate(model, params, tokens[:, :5], 3)
    # the methods with a cache of their own kind: none, rotated keys, kept sums, a ring of slots
    caches = ("alibi", "rotary", "fox", "selective_rope", "alibi,model.window=4")
    new = jax.eval_shape(answer, params) if option in map("position={}".format, caches) else tokens
    found = {leaf.dtype.name for leaf in jax.tree.leaves((params, loss, gradients))}
    assert (found, new.dtype) == ({"float32"}, jnp.int32), (option, found, new.dtype)
query = jnp.ones((1, 600, 2, 8), jnp.float32)
seen = jnp.ones((1, 1, 600, 600), bool)
for backend, mask in (("reference", seen), ("blocked", seen), ("blocked", None), ("saved", None)):
    of = functools.partial(attend, slopes=jnp.ones(2, jnp.float32), backend=backend, mask=mask)
    found = jax.eval_shape(jax.grad(lambda x: of(x, x, x).sum()), query)
    assert found.dtype == jnp.float32, backend
print("all float32")
"""


@pytest.mark.parametrize("name", SETTINGS)
def test_the_library_computes_in_float32(name: str) -> None:
    """With gradients and generation, all methods in 64 bits, as research code often has it. Strict
    promotion refuses whatever would leave float32.
    """
    done = subprocess.run(
        [sys.executable, "-c", TRACED, *(() if name == "JAX_ENABLE_X64" else SEAMS)],
        env=os.environ | {name: SETTINGS[name]},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "all float32\n", done.stderr


def test_commands_set_them_and_say_so(tmp_path) -> None:
    words = ["--config=configs/quickstart.py:position=alibi", f"--workdir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "train.py", *words, "--plan", "--device_kind=TPU v5e"],
        env=os.environ | SETTINGS,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "jax_enable_x64 is set to False: parameters are float32\n" in done.stderr
    assert "jax_numpy_dtype_promotion is set to standard: Optax needs it\n" in done.stderr
