"""The dtypes of results under other settings of JAX, in a process that begins with them."""

import jax
import pytest

from tests.hosts import ROOT, run_python

pytestmark = pytest.mark.slow

# Traces alone, since an operation between unlike dtypes fails there.
TRACED = """
import functools

import jax
import jax.numpy as jnp

from alibi import METHODS, attend, make_position
from alibi.attention import AttentionOptions
from alibi.config import make_config
from alibi.generation import generate
from alibi.model.decoder import build_model
from alibi.testing.samples import attend as attended, inputs_of, params_of

OPTIONS = [
    "position=alibi,model.window=4", "position=alibi,model.normalizer=sink,model.attention=blocked",
    "position=rotary,model.logit_scale=ssmax,model.qk_norm=True,model.scan_layers=True",
    "position=alibi,model.logit_scale=ssmax", "position=t5,model.logit_scale=log_n",
    "position=none,model.embedding=adaptive,model.cutoffs=(10,20)", "position=alibi,objective=masked",
    "position=fox,model.attention=blocked", "position=shaw,position_options.values=True",
    "position=alibi,model.dtype=bfloat16", "position=sinusoidal,model.max_position=64",
]
# Of the passes that are written out: of attention, of whole rows, and of products with vectors. JAX
# derives the others, whose gradients have the dtypes of the parameters.
BACKWARD = "alibi_learned", "dape", "stick_breaking", "shaw", "deberta"
tokens = jnp.arange(16, dtype=jnp.int32)[None]
def check(option):
    model = build_model(make_config(f"length=16,model.num_layers=1,model.width=16,model.num_heads=2,{option}"), 40)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    nll = functools.partial(model.apply, method="token_nll")
    of_loss = jax.value_and_grad(lambda params: nll({"params": params}, tokens, tokens).sum())
    loss, gradients = jax.eval_shape(of_loss, params)
    answer = lambda params: generate(model, params, tokens[:, :5], 3)
    # the caches of each kind: a ring of slots, rotated keys, kept sums
    caches = ("alibi,model.window=4", "rotary", "fox", "selective_rope")
    with_cache = option.startswith(tuple(map("position={}".format, caches)))
    new = jax.eval_shape(answer, params) if with_cache else tokens
    found = {leaf.dtype.name for leaf in jax.tree.leaves((params, loss, gradients))}
    assert (found, new.dtype) == ({"float32"}, jnp.int32), (option, found, new.dtype)

def check_attention(name):
    method = make_position(name, num_heads=4, head_dim=8, width=32, train_length=16)
    of_sum = lambda params: attended(method.at_length(40), AttentionOptions(), params, inputs_of(method, 40)).sum()
    of_own = jax.value_and_grad(of_sum) if name in BACKWARD else of_sum
    found = jax.eval_shape(of_own, params_of(method))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"float32"}, (name, found)

def check_backends():
    query = jnp.ones((1, 600, 2, 8), jnp.float32)
    seen = jnp.ones((1, 1, 600, 600), bool)
    for backend, mask in (("reference", seen), ("blocked", seen), ("blocked", None), ("saved", None)):
        of = functools.partial(attend, slopes=jnp.ones(2, jnp.float32), backend=backend, mask=mask)
        found = jax.eval_shape(jax.grad(lambda x: of(x, x, x).sum()), query)
        assert found.dtype == jnp.float32, backend

# Promotion to 64 bits shows in any option, strict promotion where dtypes meet.
STRICT = "blocked", "scan_layers", "log_n", "adaptive", "bfloat16", "max_position"
for strict in (False, True):
    for name in METHODS:
        check_attention(name)
    for option in OPTIONS:
        if not strict or any(part in option for part in STRICT):
            check(option)
    check_backends()
    jax.config.update("jax_enable_x64", False)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
print("all float32")
"""


def test_the_library_computes_in_float32() -> None:
    """With gradients and generation, all methods in 64 bits, as research code often has it. Strict
    promotion refuses whatever would leave float32.
    """
    assert run_python("-c", TRACED, JAX_ENABLE_X64="1").stdout == "all float32\n"


def test_commands_set_them_and_say_so(tmp_path, run_script) -> None:
    words = [f"--config={ROOT}/configs/quickstart.py:position=alibi", f"--workdir={tmp_path}"]
    usual = {"jax_enable_x64": False, "jax_numpy_dtype_promotion": "standard"}
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    try:
        done = run_script(ROOT / "train.py", *words, "--plan", "--device_kind=TPU v5e")
        assert {name: getattr(jax.config, name) for name in usual} == usual
    finally:
        for name, value in usual.items():
            jax.config.update(name, value)
    assert "jax_enable_x64 is set to False: parameters are float32\n" in done.stderr
    assert "jax_numpy_dtype_promotion is set to standard: Optax needs it\n" in done.stderr
