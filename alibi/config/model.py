"""The model's keys: its architecture, and how it is computed."""

import dataclasses
from typing import Any

from alibi.config.fields import (
    ADAPTIVE,
    CHANGED,
    COMPUTED,
    INT32,
    TRAINED,
    Section,
    as_text,
    choice,
    number,
    setting,
)

DTYPES = ("float32", "bfloat16")
NO_DTYPES = {
    "float16": "float16 overflows above 65,504 and needs a loss scale; bfloat16 needs none"
}


def by_layer(key: str, value: Any, num_layers: int) -> tuple[Any, ...]:
    """Returns a key's value in each layer. A list is repeated, and too long a list a ValueError."""
    values = value if isinstance(value, tuple) else (value,)
    if not 0 < len(values) <= num_layers:
        raise ValueError(
            f"{key}={as_text(value)} lists {len(values)} values for model.num_layers={num_layers} "
            f"layers; give 1 to {num_layers}"
        )
    return tuple(values[layer % len(values)] for layer in range(num_layers))


@dataclasses.dataclass(frozen=True)
class ModelConfig(Section):
    """The decoder, without its position method and vocabulary."""

    num_layers: int = number(4, at_least=1, at_most=10_000)
    width: int = number(128, at_least=1, at_most=2**20)  # features of the residual stream
    num_heads: int = number(8, at_least=1, at_most=2**16)
    # features in a head; 0 means width / num_heads
    head_size: int = number(0, at_least=0, at_most=2**16)
    # Heads of keys and values, each for as many heads of queries (grouped-query attention, arXiv
    # 2305.13245); must divide num_heads. 0 means num_heads.
    num_kv_heads: int = number(0, at_least=0, at_most=2**16)
    # hidden features of the feed-forward layers
    feed_forward: int = number(512, at_least=1, at_most=2**24)
    # relu is the paper's; gelu is the tanh form, gelu_exact the erf form.
    activation: str = choice("relu", ("relu", "gelu", "gelu_exact", "silu"))
    # The hidden features are activation(gate x) * (up x) (Shazeer 2020, arXiv 2002.05202).
    gated: bool = False
    # Attention and feed-forward layer read the layer's input, and both are added to it (GPT-J).
    parallel: bool = False
    # Where norms stand. before: in front of attention and of the feed-forward layer, which share one
    # if they are parallel. before_each: parallel ones have one each (GPT-NeoX). behind: each result
    # is normed, then added to its input (OLMo 2). after: behind the sum of each with its input
    # (BERT). after_twice: as after, but attention's normed sum is added to the input and normed
    # again (jina-embeddings-v2's second layout).
    norms: str = choice("before", ("before", "before_each", "behind", "after", "after_twice"))
    # layer: with scale and bias; layer_no_bias: with scale; rms: RMS norm (arXiv 1910.07467);
    # rms_one: its scale is 1 plus the parameter (Gemma)
    norm: str = choice("layer", ("layer", "layer_no_bias", "rms", "rms_one"))
    embedding_norm: bool = False  # a norm after the embedding (BLOOM)
    final_norm: bool = True  # a norm after the last layer; the paper's models have none
    # added to the variance in norms; 1e-5 in the paper's code
    norm_epsilon: float = number(1e-6, above=0.0)
    qkv_bias: bool = True  # biases in queries, keys and values
    out_bias: bool = True  # bias in attention's output projection
    feed_forward_bias: bool = True
    # with feed_forward_bias: also in front of the activation, where MosaicBERT has none
    up_bias: bool = True
    # xavier: all matrices, biases 0; paper: as alibi/model/initialization.py says
    initialization: str = choice("xavier", ("xavier", "paper"), role=TRAINED)
    # rate on embeddings and residual branches
    dropout: float = number(0.0, at_least=0.0, below=1.0, role=TRAINED)
    attention_dropout: float = number(
        0.0, at_least=0.0, below=1.0, role=TRAINED
    )  # rate on attention weights
    # rate inside the feed-forward layers
    activation_dropout: float = number(0.0, at_least=0.0, below=1.0, role=TRAINED)
    # The matrices of inputs and softmax. tied: the same (Press and Wolf 2017); untied: two;
    # normalised: two, with the softmax's rows divided by their norm (Baichuan 2). adaptive: bands
    # of words by falling frequency, of falling width, in both (Baevski & Auli 2019).
    embedding: str = choice("tied", ("tied", "untied", "normalised", "adaptive"))
    embedding_scale: float = number(0.0, at_least=0.0)  # multiplies the inputs; 0 means sqrt(width)
    logits_scale: float = number(
        1.0, above=0.0
    )  # multiplies the softmax's logits; not for adaptive
    # rows that the tokens' types add to the embeddings (BERT's first and second text); 0 means none
    token_types: int = number(0, at_least=0, at_most=2**16)
    # A dense layer, the activation and a norm in front of the softmax, and a bias for each word in
    # it (BERT); not for adaptive
    masked_head: bool = setting(False, CHANGED)
    # Rows of both matrices, if more than the vocabulary has; not for adaptive
    vocab_rows: int = number(0, at_least=0, at_most=INT32)
    # only adaptive uses the next four keys
    # first id of each band but the first; 20000:60000 in --config
    cutoffs: tuple[int, ...] = setting((20_000, 60_000), ADAPTIVE)
    # each band is so many times narrower than the last
    adaptive_factor: int = number(4, at_least=1, at_most=2**20, role=ADAPTIVE)
    # rate on the softmax's input, again in its tails
    softmax_dropout: float = number(0.0, at_least=0.0, below=1.0, role=TRAINED)
    # Training takes the second row of every band for padding, as the paper's code does with ids 1,
    # 20001 and 60001: zero at first, and no target of a tail.
    padding_rows: bool = setting(False, TRAINED)
    dtype: str = choice("float32", DTYPES, **NO_DTYPES, role=TRAINED)  # the products' dtype
    # the parameters' dtype; training takes float32 alone, imported runs may keep their own
    param_dtype: str = choice("float32", ("float32", "bfloat16", "float16"), role=TRAINED)
    # Layers run as a loop over their parameters: 24 compile as fast as one, few gain nothing and a
    # step takes up to a fifth longer on CPUs (results/benchmarks/startup.md). A run may change it;
    # initial parameters differ. Layers that differ run as a loop over their pattern.
    scan_layers: bool = setting(False, COMPUTED)
    # plain: no platform's tricks in products, norms and attention
    products: str = choice("auto", ("auto", "plain"), role=COMPUTED)
    # computes each layer again in the backward pass: less memory, a third more time
    remat: bool = setting(False, COMPUTED)
    # What remat keeps of a layer beside its input and the norms' sums, for less time and more memory
    # (results/benchmarks/compiled.md). up: the feed-forward layer's wide products. attention: the
    # result of attention, for long sequences; only the backends `fused` and `blocked` keep it.
    remat_keeps: str = choice(
        "nothing", ("nothing", "up", "attention", "up_attention"), role=COMPUTED
    )
    # Logits of attention times a function of the number n of keys that the query sees. Whole
    # logits, with their bias: log_n: ln n / ln L; ssmax: s ln n, s learned by each head of each
    # layer. Products alone, to which the bias is added: log_n_beyond: max(1, ln n / ln L);
    # ssmax_queries: s ln n; llama4: 1 + 0.1 ln(floor(n / L) + 1). Defaults to logits as they are. A
    # list such as log_n,ssmax is repeated over the layers. In a layer at most one of this,
    # max_position and window is set.
    logit_scale: str | tuple[str, ...] = choice(
        "", ("", "log_n", "log_n_beyond", "ssmax", "ssmax_queries", "llama4"), role=CHANGED
    )
    # Training draws sorted positions below this number, evaluation spreads them evenly. 0 means
    # positions 0, 1, 2, ...
    max_position: int = number(0, at_least=0, at_most=2**24, role=CHANGED)
    # The next three keys change these draws alone. Each layer draws its own positions. Otherwise all
    # layers share them.
    layer_draws: bool = setting(False, CHANGED)
    # All sequences of a batch share their positions. With train.accumulation each part draws its own.
    batch_draws: bool = setting(False, CHANGED)
    # Evaluation draws positions with this number as the seed. All sequences share them, so that no
    # result depends on the batch. 0 means that it spreads them evenly.
    test_draws: int = number(0, at_least=0, at_most=INT32, role=CHANGED)
    # Tokens that attention reaches back, its own included; 0 means all. A list such as 32,0 is repeated
    # over the layers.
    window: int | tuple[int, ...] = number(0, at_least=0, at_most=INT32, role=CHANGED)
    # Share of a row's attention that may be left out if the bias puts keys out of reach; 0 means none
    # that float32 can tell. 1e-6 makes long sequences faster on CPUs.
    skip_epsilon: float = number(0.0, at_least=0.0, below=1.0, role=TRAINED)
    # Attention's. sink: the denominator has one more term exp(b), b learned by each head of each
    # layer (gpt-oss); softmax1: the same with b = 0.
    normalizer: str = choice("softmax", ("softmax", "softmax1", "sink"))
    # c, by which a scaled logit z of attention becomes c tanh(z / c) before its bias; 0 means no cap
    logit_cap: float = number(0.0, at_least=0.0)
    qk_norm: bool = False  # RMS norms of each head's queries and keys, before position enters
    # The norms are the model's, over the features of all heads together (MPT); with qk_norm alone.
    qk_norm_joint: bool = False
    # clips queries, keys and values on both sides, before these norms (MPT); 0 means no clip
    clip_qkv: float = number(0.0, at_least=0.0)
    # multiplies products of queries and keys; 0 means 1 / sqrt(head size)
    attention_scale: float = number(0.0, at_least=0.0)
    attention_gate: bool = False  # multiplies attention's output by the sigmoid of a projection
    attention: str = choice(
        "auto", ("auto", "reference", "saved", "blocked", "augmented", "fused"), role=COMPUTED
    )
    logits_chunk: int = number(
        2048, at_least=1, role=COMPUTED
    )  # tokens per device whose logits exist at a time

    def __post_init__(self) -> None:
        super().__post_init__()
        # One way of saying it, so that equal models compare as equal.
        if self.num_kv_heads == self.num_heads:
            object.__setattr__(self, "num_kv_heads", 0)
        if self.head_size * self.num_heads == self.width:
            object.__setattr__(self, "head_size", 0)
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}; use a "
                "divisor, or 0 for as many"
            )
        if self.qk_norm_joint and not self.qk_norm:
            raise ValueError(
                "model.qk_norm_joint=True changes the norms of queries and keys; set model.qk_norm=True too"
            )
        for key in ("layer_draws", "batch_draws", "test_draws"):
            if getattr(self, key) and not self.max_position:
                raise ValueError(
                    f"model.{key}={getattr(self, key)} draws positions below model.max_position=0; set both, or neither"
                )
        if self.embedding == "adaptive" and (
            self.vocab_rows or self.logits_scale != 1 or self.masked_head
        ):
            raise ValueError(
                f"model.embedding=adaptive has no model.vocab_rows={self.vocab_rows}, "
                f"model.logits_scale={self.logits_scale} or model.masked_head={self.masked_head}; use "
                "model.embedding=tied, or leave them out"
            )
        if self.norms != "before" and self.parallel != (self.norms == "before_each"):
            raise ValueError(
                f"model.norms={self.norms} doesn't go with model.parallel={self.parallel}: parallel layers have before "
                "or before_each, others all but before_each; use model.norms=before"
            )
        if not self.head_size and self.width % self.num_heads:
            divisors = [n for n in range(1, self.width + 1) if self.width % n == 0]
            fitting = sorted(sorted(divisors, key=lambda n: abs(n - self.num_heads))[:3])
            raise ValueError(
                f"model.num_heads={self.num_heads} does not divide model.width={self.width}; "
                f"use {', '.join(map(str, fitting))}, or set model.head_size"
            )
        # A scale needs positions that count the visible keys, a window positions that count tokens.
        exclusive = "logit_scale", "max_position", "window"
        for layer, values in enumerate(zip(*map(self.by_layer, exclusive), strict=True)):
            keys = [key for key, value in zip(exclusive, values, strict=True) if value]
            if len(keys) > 1:
                listed = ", ".join(f"model.{key}={as_text(self[key])}" for key in keys)
                raise ValueError(
                    f"{listed} exclude each other in layer {layer}; set at most one there"
                )

    def by_layer(self, key: str) -> tuple[Any, ...]:
        """Returns the value of a key in each layer."""
        return by_layer(f"model.{key}", self[key], self.num_layers)

    @property
    def head_dim(self) -> int:
        """The features of a head."""
        return self.head_size or self.width // self.num_heads

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the results that remat keeps, as `checkpoint_name` has them."""
        return tuple(name for name in ("up", "attention") if name in self.remat_keeps)

    @property
    def kv_heads(self) -> int:
        """The heads of keys and values."""
        return self.num_kv_heads or self.num_heads
