"""A wrong folder of the hub is told in one line, before work is lost."""

import functools
import json
import os
import pathlib
import pickle
import shutil
import socket
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from etils import epath
from safetensors.numpy import load_file, save_file

from alibi.config import Config, make_config, replaced
from alibi.convert import tensors as tensors_module
from alibi.convert.exporting import export_model, of_bytes
from alibi.convert.families import FAMILIES
from alibi.convert.folder import HubFolder, find_folder
from alibi.convert.importing import import_model, read_params
from alibi.convert.work_directory import write_run
from alibi.data.tokenizers import ByteTokenizer
from alibi.runs import RunDirectory, make_provenance
from alibi.runs.checkpoint import TrainState
from alibi.storage.claims import LOCK_FILE, Claim
from tests.convert.described import FAMILIES as DESCRIBED
from tests.convert.imported import of_description, save_tokenizer
from tests.refusals import assert_refused

CONFIG = DESCRIBED["mpt"].config(vocab=320, length=16, layers=1)


@pytest.fixture
def hub(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a random MPT of one layer."""
    folder = tmp_path / "hub"
    folder.mkdir()
    of_description("mpt", layers=1)(folder)
    save_tokenizer(folder)
    return folder


def refused(hub: pathlib.Path, message: str, **keys: Any) -> None:
    """The import is refused in one line, and leaves no work directory."""
    workdir = hub.parent / "run"
    assert_refused(message, import_model, str(hub), workdir, Config(), **keys)
    assert not workdir.exists()


def change(hub: pathlib.Path, **keys: Any) -> None:
    (hub / "config.json").write_text(json.dumps(CONFIG | keys))


def retensor(hub: pathlib.Path, **tensors: np.ndarray | None) -> None:
    """Writes the weights with other tensors; None leaves one out."""
    file = hub / "model.safetensors"
    content = load_file(file) | tensors
    save_file({name: array for name, array in content.items() if array is not None}, file)


def test_of_copies_the_index_decides(hub: pathlib.Path) -> None:
    """Two files have each tensor, the later one another copy; and a whole file is read first, as by
    transformers.
    """
    tensors = load_file(hub / "model.safetensors")
    (hub / "model.safetensors").rename(hub / "a.safetensors")
    save_file({name: x + 1 for name, x in tensors.items()}, hub / "b.safetensors")
    first, last = tensors.keys() & {"transformer.wte.weight"}, "transformer.norm_f.weight"
    places = dict.fromkeys(tensors, "a.safetensors") | {last: "b.safetensors"}
    index = hub / "model.safetensors.index.json"
    # a tensor of one file needs no index
    places["transformer.lost"] = places.pop(only := "transformer.blocks.0.norm_1.weight")
    save_file({name: x + 1 for name, x in tensors.items() if name != only}, hub / "b.safetensors")
    index.write_text(json.dumps({"weight_map": places}))
    read = HubFolder(hub)
    assert first <= read.tensors.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(read.tensors[name].read(), array + (name == last))
    places["transformer.lost too"] = places.pop(last)
    index.write_text(json.dumps({"weight_map": places}))
    refused(hub, r"lacks 1 tensor \(transformer\.norm_f\.weight\): its config\.json, its index")
    save_file({name: x + 2 for name, x in tensors.items()}, hub / "model.safetensors")
    np.testing.assert_array_equal(HubFolder(hub).tensors[last].read(), tensors[last] + 2)


def index(hub: pathlib.Path, named: Any, file: str = "model-1.safetensors") -> None:
    """Renames the weights, and writes an index with this weight_map beside them."""
    (hub / "model.safetensors").rename(hub / "model-1.safetensors")
    if named == "all":
        named = dict.fromkeys(load_file(hub / "model-1.safetensors"), file)
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))


def link(hub: pathlib.Path, name: str, target: str) -> None:
    """Replaces a file by a link, or by a FIFO without a target."""
    (hub.parent / "secret.txt").write_text("{}")
    (hub / name).unlink(missing_ok=True)
    if target:
        (hub / name).symlink_to(target)
    else:
        os.mkfifo(hub / name)


def write(hub: pathlib.Path, name: str, content: str | None) -> None:
    """Writes a file, or removes it."""
    (hub / name).unlink(missing_ok=True)
    if content is not None:
        (hub / name).write_text(content)


def cut(hub: pathlib.Path) -> None:
    file = hub / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def token(hub: pathlib.Path) -> None:
    """Gives the longest token an id of four billions."""
    content = json.loads((hub / "tokenizer.json").read_text())
    content["model"]["vocab"][max(content["model"]["vocab"], key=len)] = 4_000_000_000
    write(hub, "tokenizer.json", json.dumps(content))


def few_rows(hub: pathlib.Path) -> None:
    change(hub, vocab_size=100)
    retensor(hub, **{WTE: np.zeros((100, 64), np.float32)})


def tied(hub: pathlib.Path, more: float, **others: np.ndarray | None) -> None:
    """Adds the tied matrix, so much larger, once more."""
    retensor(hub, **{"lm_head.weight": load_file(hub / "model.safetensors")[WTE] + more}, **others)


def attention(**keys: Any) -> dict[str, Any]:
    return {"attn_config": CONFIG["attn_config"] | keys}


UP, WTE = "transformer.blocks.0.ffn.up_proj.weight", "transformer.wte.weight"
EXTRA = {"extra": np.zeros(3, np.float32)}
DEEP = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
ELSEWHERE = "is no regular file inside the folder"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n"
NAMES = r"config\.json has architectures="
QK = "qk_ln beside norm_type="
SHARDS = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
NONFINITE = [
    (functools.partial(retensor, **{UP: np.full((256, 64), bad, np.float32)}), dtype)
    for bad in (np.nan, -np.inf)
    for dtype in ("float32", "bfloat16", "float16")
]
KEYS: list[tuple[dict[str, Any], str]] = [
    ({"tie_word_embeddings": False}, r"lacks lm_head\.weight, .* that to transformer\.wte\.weight"),
    ({"n_layers": 10_000}, "10,000 layers, .* 8 tensors"),
    *(({"eos_token_id": ends}, "eos_token_id=") for ends in ("</s>", [1, None], 2.0, True)),
    (
        {"architectures": ["BlomForCausalLM"]},
        "'BlomForCausalLM', which is not known here; there are: Bloom",
    ),
    *(({"architectures": named}, NAMES) for named in ("MPTForCausalLM", [3], [["a"]])),
    ({"attn_config": 3}, "MPTForCausalLM"),
    ({"n_layers": "one"}, r"hub: model\.num_layers='one' must be of type int"),
    ({"d_model": None}, "no d_model"),
    (attention(prefix_lm=True), "prefix_lm=True"),
    (attention(qk_ln=True) | {"norm_type": "rmsnorm"}, QK),
    (attention(qk_ln=True) | {"norm_eps": 1e-2}, QK),
    (attention(novelty=3), r"attn_config\.novelty=3; .*--ignore=attn_config\.novelty"),
    ({"novelty": 3}, r"not known here: novelty=3; if they don't change .*--ignore=novelty"),
]
FAULTS: list[tuple[Any, str]] = [
    (lambda hub: index(hub, SHARDS), r"lacks model-2\.safetensors of its 2 files with weights"),
    *(
        (functools.partial(index, named=named), "no weight_map")
        for named in (None, {}, ["a"], {"a": 3})
    ),
    *(
        (functools.partial(index, named="all", file=file), ELSEWHERE)
        for file in ("../model-1.safetensors", "sub/../../x", "/model-1.safetensors")
    ),
    *(
        (functools.partial(link, name=name, target=target), rf"hub/{name} {ELSEWHERE}")
        for name in ("config.json", "model.safetensors", "tokenizer.json", "my_token.json")
        for target in ("../secret.txt", "/dev/zero", "")
    ),
    (
        lambda hub: write(hub, "config.json", DEEP),
        r"config\.json can't be read \((maximum|Stack)",
    ),
    (
        lambda hub: write(hub, "generation_config.json", DEEP),
        r"config\.json can't be read \((maximum|Stack)",
    ),
    (lambda hub: write(hub, "config.json", "{a: 1"), r"config\.json can't be read \(Expecting"),
    (lambda hub: write(hub, "config.json", "[1]"), r"config\.json holds no object"),
    (
        lambda hub: write(hub, "config.json", None),
        r"no config\.json",
    ),
    (cut, r"model\.safetensors is truncated, or no file of safetensors"),
    (
        lambda hub: write(hub, "model.safetensors", LFS),
        "git lfs pull",
    ),
    (lambda hub: write(hub, "model.safetensors", None), r"has no weights: neither model\.safetens"),
    (lambda hub: write(hub, "tokenizer.json", None), r"has no tokenizer\.json, .*; give"),
    (token, r"the tokenizer .* has 4,000,000,001 tokens and the model 320 rows"),
    (few_rows, r"the tokenizer .* has 3\d\d tokens and the model 100 rows"),
    (lambda hub: retensor(hub, **{UP: None}), rf"lacks 1 tensor \({UP}\): its config\.json, its"),
    (lambda hub: retensor(hub, **EXTRA), r"has no place for 1 tensor \(extra\)"),
    (
        lambda hub: retensor(hub, **{UP: np.zeros((3, 4), np.float32)}),
        r"has shape \[3, 4\], and config\.json needs \[256, 64\]",
    ),
    (
        lambda hub: retensor(hub, **{UP: np.zeros((256, 64), np.int8)}),
        "I8; .*float32",
    ),
    (
        lambda hub: tied(hub, 0, **EXTRA, **{UP: None}),
        r"lacks 1 .* no place for 2 tensors \(extra, lm_head\.weight\)",
    ),
    (lambda hub: tied(hub, 1), r"lm_head\.weight differs from transformer\.wte.*set tie_word_emb"),
    *((functools.partial(change, **keys), message) for keys, message in KEYS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "message"), FAULTS, ids=range(len(FAULTS)))
def test_a_wrong_folder_is_told_before_a_run_is_written(
    hub: pathlib.Path, damage: Any, message: str
) -> None:
    (hub / "sub").mkdir()
    damage(hub)
    refused(hub, message)


def test_numbers_that_are_not_finite_are_refused(hub: pathlib.Path) -> None:
    for damage, dtype in NONFINITE:
        damage(hub)
        refused(hub, r"layers_0/up/kernel has NaN or infinite numbers", dtype=dtype)


def test_keys_that_are_read(hub: pathlib.Path) -> None:
    (hub / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(CONFIG).encode())
    assert HubFolder(hub).config == CONFIG, "a byte order mark is no damage"
    mpt = FAMILIES["mpt"]
    assert mpt.settings(CONFIG | {"novelty": 3}, ("novelty",))["position"] == "alibi"
    # keys of llm-foundry of 2025 at the values that it writes
    tuning = {"attn_temperature_tuning": {"attn_scale": 0.0, "floor_scale": 8192}, "nope": False}
    new = {"attention_bias": False, "use_pad_tok_in_ffn": True, "final_logit_softcapping": None}
    assert mpt.settings(CONFIG | new | attention(**tuning)) == mpt.settings(CONFIG)


def test_pickles_run_nothing(hub: pathlib.Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = load_file(hub / "model.safetensors")
    (hub / "model.safetensors").unlink()
    marker = hub.parent / "ran"

    class Bad:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(marker),)

    file = hub / "pytorch_model.bin"
    for older in (False, True):  # than PyTorch 1.6
        torch.save({"a": Bad()}, file, _use_new_zipfile_serialization=not older)
        refused(hub, "no file of tensors alone")
    file.write_bytes(pickle.dumps({"a": Bad()}))
    refused(hub, "no file of tensors alone")
    assert not marker.exists()
    named, empty = {"model": {"a": torch.zeros(3)}}, torch.zeros(3, device="meta")
    for content in ([1, 2], torch.zeros(3), named, {1: torch.zeros(3)}, {"a": empty}):
        torch.save(content, file)
        refused(hub, r"holds no dense tensors by name")
    torch.save({"a": torch.eye(3).to_sparse()}, file)
    refused(hub, r"holds no dense tensors by name")
    given = {name: torch.nn.Parameter(torch.from_numpy(x)) for name, x in tensors.items()}
    torch.save(given, file, _use_new_zipfile_serialization=False)
    opened = HubFolder(hub)
    for name, array in tensors.items():
        np.testing.assert_array_equal(opened.tensors[name].read(), array)
    # parts of an array, in any order, and numbers that are marked as negative
    for dtype in (torch.float64, torch.bfloat16):
        whole = torch.randn(7, 9, dtype=dtype)
        views = {"part": whole[1::2, 2:6].t(), "negative": torch._neg_view(whole)}
        torch.save(views, file)
        for name, x in views.items():
            read = HubFolder(hub).tensors[name].read().astype(np.float64)
            np.testing.assert_array_equal(read, x.double().resolve_neg().numpy())
    narrow = torch.randn(3, 4).bfloat16()
    torch.save({"a": narrow}, file)
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(narrow.view(torch.int16).numpy().tobytes())] ^= 1
    for kept in (whole[:-100], whole[:300], b"", b"not found\n", flipped):
        file.write_bytes(kept)
        refused(
            hub, r"pytorch_model\.bin is (missing, truncated or damaged|no file of tensors alone)"
        )


def test_a_hub_that_cannot_be_reached_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under 5 s also where a server takes the connection and never answers."""
    silent = socket.create_server(("127.0.0.1", 0))
    address = f"http://user:word@127.0.0.1:{silent.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    told = r"http://\*\*\*@127.*hf download bigscience/none --local-dir FOLDER"
    begun = time.monotonic()
    assert_refused(told, find_folder, "bigscience/none")
    assert time.monotonic() - begun < 5
    for name in ("./nothing/here", "nowhere", "a/b/c", "a b/c"):
        assert_refused("no folder, nor", find_folder, name)
    assert_refused(
        r"^https://\*\*\*@huggingface.co/a/b is no folder",
        find_folder,
        "https://me:hf_abcdefgh@huggingface.co/a/b",
    )
    silent.close()


def test_a_copy_in_the_cache_needs_no_hub(
    tmp_path: pathlib.Path, hub: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    place, kept = tmp_path / "cache" / "models--bigscience--tiny", hub / "tokenizer_config.json"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc")
    (place / "snapshots").mkdir()
    hub.rename(place / "snapshots" / "abc")
    found = find_folder("bigscience/tiny")
    assert found == place / "snapshots" / "abc"
    (place / "blobs").mkdir()
    for number, file in enumerate(sorted(found.iterdir())):
        file.rename(place / "blobs" / str(number))
        file.symlink_to(f"../../blobs/{number}")
    assert found / kept.name in HubFolder(found).kept
    copied = shutil.copytree(found, tmp_path / "local", symlinks=True)
    for file in copied.iterdir():
        link = os.path.realpath(found / file.name)
        file.unlink()
        file.symlink_to(link)
    assert HubFolder(copied).tensors.keys() == HubFolder(found).tensors.keys()
    (found / kept.name).unlink()
    (found / kept.name).symlink_to("../../refs/main")
    assert_refused(r"tokenizer_config\.json.*regular file", HubFolder, found)
    assert_refused("HF_HUB_OFFLINE", find_folder, "bigscience/other")


def test_an_import_and_an_export_replace_nothing(
    hub: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the export has the tensors of the folder, in several files where one would be large."""
    run, file, out = tmp_path / ("run" * 20), tmp_path / "file", tmp_path / "out"
    file.touch()
    # see `made_whole`
    left, at_work = (tmp_path / f".{run.name[:40]}.{letter * 32}" for letter in "ab")
    for copy in (left, tmp_path / f".out.{'a' * 32}"):
        (copy / "checkpoints").mkdir(parents=True)
    claim, own = (
        Claim(epath.Path(at_work), "training"),
        left.with_name(left.name[:-32] + "mine" * 8),
    )
    own.mkdir()
    import_model(str(hub), run, Config())
    assert not left.exists(), "a killed import left a copy of the model"
    assert at_work.is_dir()
    assert own.is_dir()
    claim.release()
    assert_refused("not empty.* --workdir", import_model, str(hub), run, Config())
    assert_refused("/run can't be made.* --workdir", import_model, str(hub), file / "run", Config())
    hidden, link = tmp_path / "hidden", tmp_path / "link"
    (hidden / ".git").mkdir(parents=True)
    link.symlink_to(tmp_path / "nowhere")
    for place, message in (
        (hub, "not empty.* --output_dir"),
        (file, "not empty.* --output_dir"),
        (hidden, "not empty.* --output_dir"),
        (link, "a link or a disk .* --output_dir"),
        (file / "out", "/out can't be made .* not a directory"),
        (pathlib.Path("/proc/new"), "/proc/new can't be made .* --output_dir"),
    ):
        assert_refused(message, export_model, run, place)
    assert_refused("--family=lama.*'llama'", export_model, run, out, family="lama")
    assert_refused("GPT2LM.* position", export_model, run, out, family="gpt2")
    assert not out.exists()
    about = run / "hub" / "config.json"
    whole = about.read_text()
    for changed in (whole[:50], whole.replace('"d_model": 64', '"d_model": 65')):
        about.write_text(changed)
        assert_refused("not as the import wrote it", export_model, run, out)
    about.write_text(whole)
    monkeypatch.setattr(tensors_module, "FILE_BYTES", 50_000)
    export_model(run, out)
    assert len(list(out.glob("model-0*.safetensors"))) > 1
    assert not list(tmp_path.glob(".out.*"))
    assert not (out / LOCK_FILE).exists()
    modes = {file.stat().st_mode for file in out.iterdir()}
    assert modes == {(out / "config.json").stat().st_mode}, "who reads one may read all"
    written = HubFolder(out)
    tensors = load_file(hub / "model.safetensors")
    assert written.tensors.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(written.tensors[name].read(), array)


def test_folders_of_other_forms_have_the_same_parameters(hub: pathlib.Path) -> None:
    """Several .bin files, one of bfloat16, names without a prefix, and the tied matrix twice."""
    torch = pytest.importorskip("torch")
    tensors = load_file(hub / "model.safetensors")
    settings = FAMILIES["mpt"].settings(CONFIG) | {"model.scan_layers": False}
    config = replaced(make_config("data.tokenizer=bytes"), settings)
    needed = read(hub, config)
    (hub / "model.safetensors").unlink()

    def pickle_to(name: str, content: dict[str, np.ndarray], dtype: str) -> None:
        arrays = {key: torch.from_numpy(x).to(getattr(torch, dtype)) for key, x in content.items()}
        torch.save(arrays, hub / name)

    places = {name: f"part-{n % 2}.bin" for n, name in enumerate(tensors)}
    for part in ("part-0.bin", "part-1.bin"):
        pickle_to(
            part, {name: tensors[name] for name in tensors if places[name] == part}, "float32"
        )
    (hub / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    jax.tree.map(np.testing.assert_array_equal, read(hub, config), needed)
    pickle_to("pytorch_model.bin", tensors, "bfloat16")
    rounded = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), needed)
    jax.tree.map(np.testing.assert_array_equal, read(hub, config), rounded)
    bare = {name.removeprefix("transformer."): array for name, array in tensors.items()}
    for content in (bare, tensors):
        save_file(content | {"lm_head.weight": bare["wte.weight"]}, hub / "model.safetensors")
        jax.tree.map(np.testing.assert_array_equal, read(hub, config), needed)


def read(folder: pathlib.Path, config: Config) -> Any:
    return jax.tree.map(np.asarray, read_params(HubFolder(folder), FAMILIES["mpt"], config, 256))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("position=kerple_log", "position is 'kerple_log'"),
        (
            "position=alibi",
            r"MptFor.*: model\.activation .* 'gelu_exact'",
        ),
        (
            "model.embedding=adaptive,model.cutoffs=32:85",
            r"model\.embedding is 'adaptive'",
        ),
        ("objective=masked", r"Bert.*; model\.norms .* 'after'"),
    ],
)
def test_a_run_that_the_hub_cannot_say_is_refused(
    tmp_path: pathlib.Path, keys: str, message: str
) -> None:
    """The nearest family is named, with what differs, before parameters are read."""
    config = make_config(f"{QUICKSTART},{keys}")
    about = make_provenance(vocab_size=256, parameters=0, corpus={})
    state = TrainState(step=jnp.zeros((), jnp.int32), params={"a": jnp.zeros(1)}, opt_state=None)
    write_run(RunDirectory(tmp_path / "run"), config, ByteTokenizer(), state, about, "")
    assert_refused(message, export_model, tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# The quickstart's kind of model, smaller.
QUICKSTART = (
    "train_length=16,model.num_layers=1,model.width=32,model.num_heads=4,data.tokenizer=bytes"
)


def test_bytes_become_a_tokenizer_of_the_hub() -> None:
    """Every byte of UTF-8 is its own id, there and back."""
    text = "".join(map(chr, range(1, 600))) + "数\U0001f600 \n\t  end"
    tokenizer = of_bytes()
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
