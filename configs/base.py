"""Every configuration key once, with its unit and meaning.

A config file imports this one, changes what differs, and ends with
`return base.apply(config, arg)`, so that
`--config=configs/NAME.py:position=alibi,length=512` works for each of them.
"""

import ast
import difflib
from collections.abc import Iterable

import ml_collections

# Short names that the part of --config after the colon may use besides full keys.
SHORT_NAMES = {"length": "train_length"}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """A small decoder on the embedded books; every key that exists."""
    config = ml_collections.ConfigDict()
    config.seed = 0  # of initialization, dropout and the order of the training blocks
    config.train_length = 128  # tokens a training sequence has (the paper's L)
    config.position = "alibi"  # a name from alibi.positions.METHODS, or package.module:Class
    config.imported_from = ""  # SHA-256 of the checkpoint that scripts/import_fairseq.py made the run of
    config.init_from = ""  # work directory of a run whose latest parameters this one starts with; train.py --init_from
    # Options of the position method, by the names of its class's fields (alibi/positions).
    config.position_options = ml_collections.ConfigDict()

    config.model = ml_collections.ConfigDict()
    config.model.num_layers = 4
    config.model.width = 128  # features of the residual stream
    config.model.num_heads = 8  # must divide width
    config.model.feed_forward = 512  # hidden features of the feed-forward layers
    config.model.activation = "relu"  # relu (the paper's), gelu (by tanh), gelu_exact (by erf) or silu
    config.model.final_norm = True  # a layer norm after the last layer; the paper's models have none
    config.model.norm_epsilon = 1e-6  # added to the variance in layer norms; 1e-5 in the paper's code
    config.model.initialization = "xavier"  # xavier: all matrices, biases 0; paper: see alibi/model/initialization.py
    config.model.dropout = 0.0  # rate on embeddings and residual branches
    config.model.attention_dropout = 0.0  # rate on attention weights
    config.model.activation_dropout = 0.0  # rate inside the feed-forward layers
    # tied: one matrix for inputs and softmax. adaptive: bands of words by falling frequency, of
    # falling width, in inputs and softmax (Baevski & Auli 2019); the next four keys are only its.
    config.model.embedding = "tied"
    config.model.cutoffs = (20_000, 60_000)  # first id of each band but the first; 20000:60000 in --config
    config.model.adaptive_factor = 4  # each band is this many times narrower than the one before
    config.model.softmax_dropout = 0.0  # rate on the softmax's input, and again inside its tails
    # Whether training takes the second row of every band for padding, as the paper's code does
    # with ids 1, 20001 and 60001: zero at first, and no target of a tail.
    config.model.padding_rows = False
    config.model.dtype = "float32"  # of the products: float32 or bfloat16; parameters are float32
    # Layers run as a loop over their parameters: 24 compile in the time of one, while few gain nothing and a step takes
    # up to a fifth longer on CPUs (results/benchmarks/startup.md). A run may change; initial parameters are others.
    config.model.scan_layers = False
    config.model.products = "auto"  # auto, or plain: no platform's tricks in products, norms and attention
    config.model.remat = False  # recompute each layer in the backward pass: less memory, a third more time
    config.model.window = 0  # tokens each layer's attention reaches back, its own included (0: all)
    # Share of a row's attention that may be left out where the bias puts keys out of reach; 0: none that
    # float32 can tell. 1e-6 makes long sequences faster on CPUs.
    config.model.skip_epsilon = 0.0
    config.model.attention = "auto"  # auto, or a name from alibi.attention.backends.OF_SEQUENCES
    config.model.logits_chunk = 2048  # tokens per device whose logits exist at one time

    config.data = ml_collections.ConfigDict()
    config.data.corpus = "books"  # books (embedded), passkeys, text (files), hub (datasets) or tfds
    # Where each split comes from. books, passkeys: their own names; text: comma-separated files and globs;
    # hub and tfds: a split expression such as "validation" or "train[:10%]". Empty: there is none.
    config.data.train = "train"
    config.data.valid = "valid"
    config.data.test = ""
    # text: what ends a document: file, or blank_line, for files that hold many, such as CC100's.
    config.data.document_end = "file"
    config.data.passkey_distance = 0  # passkeys: bytes of text at most between a key and its question
    config.data.max_train_bytes = -1  # use at most this many UTF-8 bytes of text (-1: all)
    config.data.max_valid_bytes = -1  # the same, for valid and for test
    config.data.name = ""  # hub, tfds: the dataset's name, such as "Salesforce/wikitext"
    config.data.subset = ""  # hub, tfds: the dataset's config, such as "wikitext-103-v1"
    config.data.revision = ""  # hub: a full commit hash, or a tag; tfds: the version
    config.data.column = "text"  # hub, tfds: the feature that holds the text
    config.data.streaming = False  # hub: read over the network instead of downloading first
    config.data.tokenizer = "bytes"  # bytes, words (the paper's dictionary rule) or bpe
    config.data.tokenizer_file = ""  # words: a dict.txt; bpe: a tokenizer.json; empty: made from train
    config.data.bpe_vocab_size = 2048  # entries, when a BPE tokenizer is trained
    # bpe: bytes of the train text that it is trained on (-1: all), spread evenly over text files.
    config.data.tokenizer_train_bytes = -1
    config.data.cache_dir = ""  # of token files; empty: $ALIBI_CACHE, else ~/.cache/alibi

    config.train = ml_collections.ConfigDict()
    config.train.steps = 600  # updates
    config.train.batch_tokens = 2048  # tokens an update sees, whatever the length and the devices
    config.train.accumulation = 1  # micro-batches an update is made of
    # Tokens a device sees at one time; where it would be more, accumulation grows (0: no limit).
    config.train.max_device_tokens = 0

    config.optimizer = ml_collections.ConfigDict()
    config.optimizer.name = "adamw"  # adamw, or nag: SGD with Nesterov's momentum, no weight decay
    config.optimizer.learning_rate = 3e-3  # at the end of the warm-up
    config.optimizer.warmup_steps = 50  # updates, linear from warmup_init
    config.optimizer.warmup_init = 0.0  # learning rate of the first update, where there is a warm-up
    config.optimizer.schedule = "cosine"  # after the warm-up: cosine, to the run's end; or cosine_restarts
    config.optimizer.final_fraction = 0.1  # cosine: of learning_rate, where it ends
    config.optimizer.min_learning_rate = 0.0  # cosine_restarts: where the first cycle ends
    config.optimizer.period_steps = 1000  # cosine_restarts: updates of the first cycle
    config.optimizer.period_mult = 1.0  # cosine_restarts: each cycle is this many times as long as the one before
    config.optimizer.shrink = 1.0  # cosine_restarts: and its learning rates this many times as high
    config.optimizer.momentum = 0.99  # nag
    config.optimizer.b1 = 0.9  # adamw, like the next three
    config.optimizer.b2 = 0.99
    config.optimizer.eps = 1e-8
    config.optimizer.weight_decay = 0.1  # of matrices; biases, norms and position parameters have none
    config.optimizer.clip_norm = 1.0  # global norm of the gradient of the mean token NLL; 0: no clipping

    config.mesh = ml_collections.ConfigDict()  # devices along each axis; -1 (once): all that remain
    config.mesh.data = -1  # splits the batch
    config.mesh.fsdp = 1  # splits the batch, the parameters and the optimizer state
    config.mesh.tensor = 1  # splits heads, feed-forward features and the vocabulary

    config.eval = ml_collections.ConfigDict()
    config.eval.every_steps = 200  # updates between validations at train_length; 0: only at the end
    config.eval.max_tokens = 65_536  # of valid that a validation during training scores (-1: all)
    config.eval.batch_tokens = 16_384  # tokens per device in an evaluation batch
    # Of the products, whatever model.dtype was trained with: the paper trained in float16 and
    # evaluated in float32. bfloat16 takes less memory, and is less exact.
    config.eval.dtype = "float32"

    config.checkpoint = ml_collections.ConfigDict()
    # A checkpoint is saved at the end, after a validation better than all before, and
    config.checkpoint.every_steps = 200  # after this many updates (0: never)
    config.checkpoint.every_minutes = 10.0  # and after this much time (0: never)
    # Latest checkpoints kept, besides the best by validation NLL; one more where that is one of them, as a spare.
    config.checkpoint.keep = 1

    config.log = ml_collections.ConfigDict()
    config.log.every_steps = 10  # updates between rows of metrics.jsonl, which go to these places too:
    config.log.tensorboard = True  # TensorBoard's files in the work directory
    config.log.wandb = False  # Weights & Biases (pip install wandb); with WANDB_MODE=offline to files alone
    config.log.trackio = False  # Trackio (pip install trackio)
    config.log.project = ""  # of W&B and Trackio; empty: the directory of the sweep, or the one above the run's own
    return apply(config, arg)


def apply(config: ml_collections.ConfigDict, arg: str) -> ml_collections.ConfigDict:
    """Applies "key=value,key=value" to `config`; keys may be dotted or in `SHORT_NAMES`.

    What a config file derives from a key, it derives from `config.get_ref(key)`: so it follows whatever sets the key.

    Raises ValueError for a part without "=", an unknown key (the nearest is
    suggested) or a value of another type than the key's.
    """
    for part in filter(None, (part.strip() for part in (arg or "").split(","))):
        key, separator, text = part.partition("=")
        if not separator:
            raise ValueError(f"config argument {part!r} is not KEY=VALUE; write for example position=alibi,length=512")
        set_key(config, key, text)
    return config


def whole_sequences(tokens: int, config: ml_collections.ConfigDict) -> ml_collections.FieldReference:
    """`tokens` or what of them is a multiple of config.train_length, whatever that is set to; at least one sequence."""
    length = config.get_ref("train_length")
    sequences = tokens // length
    return (sequences + 1 // (sequences + 1)) * length  # references know no max(sequences, 1)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.0) -> str:
    """The one of `known` that is most like `word`, for messages; empty where none is, by `cutoff` from 0 to 1."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


def set_key(config: ml_collections.ConfigDict, key: str, value: object) -> None:
    """Sets one `key`, dotted or in `SHORT_NAMES`, reading a string `value` as the type that the key has."""
    key = SHORT_NAMES.get(key, key)
    *parents, leaf = key.split(".")
    if parents == ["position_options"]:
        with config.unlocked(), config.ignore_type():
            config.position_options[leaf] = _option(value)
        return
    known = [*leaf_keys(config), *SHORT_NAMES]
    if key not in known:
        raise ValueError(unknown(key, known))
    section = config
    for parent in parents:
        section = section[parent]
    section[leaf] = _convert(key, section[leaf], value)


def unknown(key: str, known: Iterable[str]) -> str:
    """What is said of a key that isn't among the `known` ones."""
    return f"unknown config key {key!r}; did you mean {nearest(key, sorted(known))!r}? configs/base.py lists every key"


def leaf_keys(config: ml_collections.ConfigDict, prefix: str = "") -> list[str]:
    """The dotted keys of a config, without evaluating what it derives from others."""
    keys = []
    for name, value in config.items(preserve_field_references=True):
        if isinstance(value, ml_collections.ConfigDict):
            keys += leaf_keys(value, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def _literal(value: object) -> object:
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        return value


def _option(value: object) -> object:
    """An option of a position method: None, a number, a name, or a tuple, as (0.5, 0.25), [0.5, 0.25] or 0.5:0.25."""
    parts = [_literal(part) for part in value.split(":")] if isinstance(value, str) else []
    if len(parts) > 1 and all(type(part) in (int, float) for part in parts):
        return tuple(parts)
    value = _literal(value)
    return tuple(value) if isinstance(value, list) else value


def _convert(key: str, old: object, value: object) -> object:
    needed = type(old)
    got = value if needed is str else _literal(value)
    if needed is tuple:
        got = _integers(got)
    if needed is bool and str(value).lower() in ("true", "false", "1", "0"):
        got = str(value).lower() in ("true", "1")
    if needed is float and (type(got) is int or got in ("inf", "nan")):
        got = float(str(got))
    if type(got) is not needed:
        kind, example = ("integers", "20000:60000") if needed is tuple else (needed.__name__, repr(old))
        raise ValueError(f"config key {key}={value!r} must be of type {kind}, such as {example}")
    return got


def _integers(value: object) -> object:
    """A sequence of integers, or "20000:60000" (a comma would end the value), as a tuple; all else as it is."""
    if isinstance(value, str):
        value = value.split(":")
    items = value if isinstance(value, list | tuple) else [value]
    numbers = tuple(_literal(item) for item in items)
    return numbers if all(type(number) is int for number in numbers) else items
