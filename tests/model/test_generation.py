"""The key-value cache: a prompt in any pieces, then token by token, is the whole sequence."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.data.tokenizers import ByteTokenizer
from alibi.generation import Sampling, decode, generate, new_cache, read, stream, unrolled
from alibi.model.decoder import build_model
from alibi.model.layers import stacked
from tests.model import made
from tests.model.made import VOCABULARY
from tests.refusals import assert_refused


def make(tiny_config, position: str, **overrides: object):
    model, variables = made.make(tiny_config, position, **overrides)
    return model, dict(variables["params"])


def read_in_pieces(model, params, tokens, pieces, slots=16, **sizes):
    """Returns all tokens' logits, read in pieces with these sizes, and the cache."""
    cache, logits = new_cache(model, tokens.shape[0], slots, **sizes), []
    for piece in np.split(tokens[:, : sum(pieces)], np.cumsum(pieces)[:-1], axis=1):
        new, cache = read(model, params, cache, piece, fresh=not logits)
        logits.append(np.asarray(new))
    return np.concatenate(logits, axis=1), cache


@pytest.mark.parametrize(
    ("position", "keys"),
    [
        ("rotary", {"max_position": 256}),
        ("rotary", {"max_position": 64, "layer_draws": True, "test_draws": 5, "num_layers": 2}),
        ("fox", {"logit_scale": "ssmax"}),
    ],
)
def test_a_prompt_in_pieces_then_single_tokens_equal_the_whole_sequence(
    tiny_config, position: str, keys: dict
) -> None:
    """Plain methods and padding are in `check_position_method`."""
    model, params = make(
        tiny_config, position, **{f"model__{key}": value for key, value in keys.items()}
    )
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 16))
    whole = jax.jit(model.apply)({"params": params}, tokens)
    got, _ = read_in_pieces(model, params, tokens, [7, 5, 1, 1, 1, 1])
    np.testing.assert_allclose(got, whole, atol=2e-5)


def test_what_does_not_fit_is_an_error_or_no_number(tiny_config) -> None:
    model, params = make(tiny_config, "alibi")
    tokens = np.zeros((1, 9), np.int32)
    assert_refused("9 tokens.* 8 slots", read_in_pieces, model, params, tokens, [9], slots=8)
    assert_refused(
        "8 slots.* 16 tokens", read_in_pieces, model, params, tokens, [1], slots=8, total=16
    )
    logits, _ = read_in_pieces(model, params, tokens, [8, 1], slots=8)
    assert np.isfinite(logits[:, :8]).all()
    assert np.isnan(logits[:, 8:]).all(), "the run goes on, so what is wrong must not look right"
    _, cache = read(model, params, new_cache(model, 1, 8), tokens[:, :2])
    logits, _ = read(model, params, cache, tokens[:, 2:4], fresh=True)
    assert np.isnan(logits).all(), "a cache with tokens is not fresh"


def test_the_likeliest_tokens_are_those_of_the_full_forward(tiny_config) -> None:
    """At each step. Two prompts, 9 tokens and 3 after padding, in chunks of 4."""
    model, params = make(tiny_config, "rotary_ntk")
    # Of weak layers the tied embedding would repeat each token.
    params |= {
        name: jax.tree.map(lambda x: 8 * x, of)
        for name, of in params.items()
        if name.startswith("layers")
    }
    prompt = np.random.default_rng(3).integers(0, VOCABULARY, (2, 9))
    positions = np.stack([np.arange(9), np.arange(9) - 6])
    new = np.asarray(generate(model, params, prompt, 12, chunk=4, positions=positions))
    forward = jax.jit(lambda tokens: model.apply({"params": params}, tokens))
    for row, padding in ((0, 0), (1, 6)):
        tokens = np.concatenate([prompt[row, padding:], new[row]])
        # Filled up behind, since rotary_ntk goes by the length, which is 21 of both.
        logits = np.asarray(forward(np.pad(tokens, (0, padding))[None]))[0]
        first = 9 - padding - 1
        np.testing.assert_array_equal(logits[first : first + 12].argmax(axis=-1), new[row])
    assert len(set(new[0])) > 2, "or the test would be of one token again and again"


def test_with_a_total_prompts_of_all_lengths_share_their_programs(tiny_config, caplog) -> None:
    """And have the same answers, also where padding goes through a window's ring of slots, which has
    as many as the window and what is read at a time need.
    """
    model, params = make(tiny_config, "alibi", model__window=4)
    two = np.zeros((2, 2), np.int32)

    def with_two_slots():
        few = model.init(jax.random.key(0), two, decode=True, total=16, chunk=4)["cache"]
        return model.apply({"params": params, "cache": few}, two, decode=True, mutable=["cache"])

    assert_refused("2 slots .* 4; .* 5 slots", jax.eval_shape, with_two_slots)
    params |= {
        name: jax.tree.map(lambda x: 8 * x, of)
        for name, of in params.items()
        if name.startswith("layers")
    }
    compiled = []
    for length in (7, 2):
        prompt = np.random.default_rng(length).integers(0, VOCABULARY, (2, length))
        alone = np.asarray(generate(model, params, prompt, 5, chunk=3))
        caplog.clear()
        with jax.log_compiles():
            np.testing.assert_array_equal(
                generate(model, params, prompt, 5, chunk=3, total=16), alone
            )
        messages = "\n".join(caplog.messages)
        compiled.append(set(re.findall(r"Finished XLA compilation of (\S+)", messages)))
    assert {"jit(read)", "jit(decode)"} <= compiled[0]
    assert compiled[1] == set()


def test_layers_as_a_loop_generate_one_by_one(tiny_config) -> None:
    """No token may copy each layer's parameters out of their stack. test_texts.py generates by it."""
    model, params = make(tiny_config, "fox", model__num_layers=2)
    scanned, stack = made.changed(model, scan_layers=True), stacked(params)
    assert_refused("decode=True", new_cache, scanned, 1, 8)
    one_by_one, restored = unrolled(scanned, stack)
    assert one_by_one == model
    jax.tree.map(np.testing.assert_array_equal, restored, params)


def test_what_would_be_another_draw_or_no_end_is_refused(tiny_config) -> None:
    model, params = make(tiny_config, "alibi")
    draw = functools.partial(generate, model, params, [[1, 2], [3, 4]], sample=Sampling())
    for seed in (2**32, -1, 1.5, 2**80, "1", True, None, 2**32 - 1):  # the last: of two sequences
        assert_refused("seed=.* 0 to 4294967295", draw, 1, seed=seed)
    assert_refused(
        "seed=4294967296", lambda: next(stream(model, params, [[1], [2]], 1, seeds=[0, 2**32]))
    )
    for seed in (np.int64(2**32 - 2), jnp.uint32(2**32 - 2)):
        np.testing.assert_array_equal(draw(1, seed=seed), draw(1, seed=2**32 - 2))
    for count, message in (
        (10**30, "2,147,483,647; use fewer"),
        (10**9, "2 x 1,000,000,002 tokens .* fewer new tokens"),
    ):
        assert_refused(message, draw, count)


@pytest.mark.parametrize("limits", [{"temperature": 5e-39}, {"top_p": 1e-38}])
def test_the_least_numbers_leave_the_likeliest_token(limits) -> None:
    """With quotients and probabilities that float32 doesn't have."""
    logits = jnp.tile(jnp.array([5.0, 4.0, 6.0, 5.9]), (64, 1))
    keys = jax.vmap(jax.random.key)(jnp.arange(64, dtype=jnp.uint32))
    np.testing.assert_array_equal(Sampling(**limits)(logits, keys), 2)


def test_tokens_are_drawn_by_temperature_and_seed(tiny_config) -> None:
    model, params = make(tiny_config, "alibi")
    prompt = np.zeros((256, 2), np.int32)
    draw = functools.partial(generate, model, params, prompt, 2)
    drawn = np.asarray(draw(sample=Sampling(2.0)))
    np.testing.assert_array_equal(drawn, draw(sample=Sampling(2.0)))
    assert (drawn != np.asarray(draw(sample=Sampling(2.0), seed=256))).any(axis=0).all()
    np.testing.assert_array_equal(draw(sample=Sampling(1e-6)), draw())
    # Of 256 draws, how many are among the likelier half: what softmax says, within four standard
    # deviations.
    logits = (
        np.asarray(jax.jit(model.apply)({"params": params}, prompt[:1]), np.float64)[0, -1] / 2.0
    )
    expected = np.exp(logits) / np.exp(logits).sum()
    likely = np.argsort(expected)[VOCABULARY // 2 :]
    assert np.isin(drawn[:, 0], likely).mean() == pytest.approx(
        expected[likely].sum(), abs=4 * 0.5 / 16
    )


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.5}, {0}),  # the likeliest has as much
        ({"top_p": 0.51}, {0, 1}),
        ({"min_p": 0.1}, {0, 1, 2, 3}),  # from 0.05 on
        ({"top_p": 1e-9}, {0}),
        ({"temperature": 2.0, "min_p": 0.4}, {0, 1, 2}),  # by the square roots of probabilities
        ({"temperature": 0.0}, {0}),
    ],
)
def test_what_the_limits_of_sampling_leave(limits: dict, left: set[int]) -> None:
    logits = jnp.log(jnp.asarray([0.5, 0.3, 0.1, 0.06, 0.04]))
    keys = jax.vmap(jax.random.key)(jnp.arange(2000))
    assert set(np.asarray(Sampling(**limits)(jnp.tile(logits, (2000, 1)), keys)).tolist()) == left


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"temperature": -1.0}, r"temperature=-1\.0"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_k": -1}, "top_k=-1 must be 0"),
        ({"min_p": 2.0}, "min_p=2.0 must be from 0"),
    ],
)
def test_limits_out_of_their_range(limit: dict, message: str) -> None:
    assert_refused(message, Sampling, **limit)


def test_a_sequence_is_the_same_in_a_batch_and_alone(tiny_config) -> None:
    """With prompts that differ in length, and a user's own sampler."""
    model, params = make(tiny_config, "rotary")
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]

    def sample(logits, keys):
        return Sampling(1.5, top_k=9)(logits, keys)

    together = list(stream(model, params, prompts, 6, sample=sample, seeds=[4, 5, 6], each=4))
    tokens = np.concatenate([tokens for tokens, _ in together], axis=1)
    assert tokens.shape == (3, 6), "the last piece is shorter"
    for row, prompt in enumerate(prompts):
        alone = stream(model, params, [prompt], 6, sample=sample, seeds=[4 + row], total=11, each=2)
        got = np.concatenate([tokens for tokens, _ in alone], axis=1)
        np.testing.assert_array_equal(got[0], tokens[row])


def test_texts_are_continued_as_texts(tiny_config) -> None:
    model = build_model(tiny_config(position="alibi"), 256)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    # With a total all prompts share their programs.
    go_on = functools.partial(generate, model, params, new_tokens=5, total=16)
    by_ids = np.asarray(go_on(prompt=[list(b"a cold day")]))
    text = go_on(prompt="a cold day", tokenizer=ByteTokenizer())
    assert text == ByteTokenizer().decode(by_ids[0].tolist())
    texts = go_on(prompt=["a cold day", "it"], tokenizer=ByteTokenizer())
    assert (texts[0], len(texts)) == (text, 2)
    assert_refused("need tokenizer=", go_on, prompt="a cold day")
    begun = go_on(prompt="", tokenizer=ByteTokenizer())
    assert begun == go_on(prompt="\n", tokenizer=ByteTokenizer()), "the boundary"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"new_tokens": 0}, "new_tokens is 0 and must be at least 1"),
        ({"new_tokens": 1, "chunk": 0}, "chunk is 0"),
        ({"new_tokens": 4, "total": 6}, "total=6 must be at least the 7 tokens"),
        ({"new_tokens": 14}, "16 positions and got a sequence of 17"),
    ],
)
def test_what_generation_refuses(tiny_config, arguments: dict, message: str) -> None:
    model, params = make(tiny_config, "learned")
    assert_refused(message, generate, model, params, np.zeros((1, 3), np.int32), **arguments)


def test_a_prompt_that_cannot_be(tiny_config) -> None:
    """Ids beyond the vocabulary would be clamped to its last word, or count from its end."""
    model, params = make(tiny_config, "alibi")
    of_one = r"\(3,\) .* \[batch, length\]"
    beyond = "id {}, .* 0 to 39"
    for prompt, message in (
        (jnp.asarray([1, 2, 3]), of_one),
        ([1, 2, 3], of_one),
        (jnp.asarray([[VOCABULARY, 2, 3], [4, 5, 6]]), beyond.format(VOCABULARY)),
        (jnp.asarray([[-1, 2, 3], [4, 5, 6]]), beyond.format(-1)),
        (np.asarray([[1.0, 2.0]]), "the prompt has dtype"),
        (np.asarray([["a", "b"]]), "the prompt has dtype"),
    ):
        assert_refused(message, generate, model, params, prompt, 1)
    padded, positions = (
        np.asarray([[VOCABULARY, 2, 3], [4, 5, 6]]),
        np.asarray([[-1, 0, 1], [0, 1, 2]]),
    )
    padding = generate(model, params, padded, 1, positions=positions)
    assert padding.shape == (2, 1), "padding may be anything"
    assert generate(model, params, [[1, 2, 3], [4, 5]], 1).shape == (2, 1), "lists are taken too"
    traced = jax.jit(lambda prompt: generate(model, params, prompt, 1))
    assert traced(np.asarray([[1, 2]])).shape == (1, 1)


def test_decoding_goes_on_from_what_it_returns(tiny_config) -> None:
    model, params = make(tiny_config, "alibi")
    prompt, keys = np.asarray([[3, 1, 2]]), jax.vmap(jax.random.key)(jnp.asarray([5]))
    logits, cache = read(model, params, new_cache(model, 1, 12), prompt, last=1)
    sample, parts = Sampling(), []
    for first, count in ((0, 4), (4, 4)):
        tokens, nll, logits, cache = decode(
            model, params, cache, logits, keys, first, sample=sample, count=count
        )
        parts.append((tokens, nll))
    tokens, nll = (np.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    np.testing.assert_array_equal(tokens, generate(model, params, prompt, 8, sample=sample, seed=5))
    text = jnp.asarray(np.concatenate([prompt, tokens], axis=1))
    score = jax.jit(functools.partial(model.apply, method="token_nll"))
    of_model = score({"params": params}, text[:, :-1], text[:, 1:])
    np.testing.assert_allclose(nll, np.asarray(of_model)[:, 2:], atol=1e-5)
