"""Checkpoints are read in both layouts of layers, and refused if they differ from the saved ones."""

import dataclasses
import functools
import pathlib
import re
import shutil
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from alibi.config import make_config
from alibi.errors import UserError
from alibi.model.decoder import build_model
from alibi.model.layers import stacked
from alibi.optimizers import make_optimizer
from alibi.parallel.sharding import AXES, batch_sharding, make_mesh
from alibi.runs.checkpoint import Checkpoints, TrainState
from alibi.runs.checksums import check_replicas, checksums
from alibi.training.step import abstract_state, initial_state
from tests.refusals import assert_refused

VOCABULARY = 48


def test_a_checkpoint_of_the_other_layout_is_read(tiny_config, tmp_path: pathlib.Path) -> None:
    """Parameters and Adam's moments, split over devices, for a method with parameters by layer, from
    each layout into the other.
    """
    config = tiny_config(
        position="fox", mesh__data=1, mesh__fsdp=2, mesh__tensor=2, model__num_layers=2
    )
    mesh = make_mesh(config.mesh, jax.devices()[:4])
    model = build_model(config, VOCABULARY, sharding=batch_sharding(mesh))
    scan = model.clone(config=dataclasses.replace(model.config, scan_layers=True))
    optimizer, _ = make_optimizer(config.optimizer, 10)
    shapes = [abstract_state(one, optimizer, mesh) for one in (model, scan)]
    shardings = [jax.tree.map(lambda leaf: leaf.sharding, of) for of in shapes]

    @functools.partial(jax.jit, out_shardings=shardings)
    def both(state: TrainState) -> list[TrainState]:
        # Adam's moments are zeros at first, and the same zeros in each layer.
        state = jax.tree.map(
            lambda x: x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), state
        )
        params, moments = stacked(state.params), stacked(state.opt_state)
        return [state, dataclasses.replace(state, params=params, opt_state=moments)]

    states = both(initial_state(model, optimizer, mesh, seed=0))
    for step, saved in enumerate(states):
        expected, abstract, split = (pair[1 - step] for pair in (states, shapes, shardings))
        with Checkpoints(tmp_path / str(step)) as checkpoints:
            checkpoints.save(saved, 1, {})
            checkpoints.wait()
            restored = checkpoints.restore(1, abstract)
            params = checkpoints.restore_params(1, abstract.params)
        assert jax.tree.map(lambda leaf: leaf.sharding, restored) == split
        jax.tree.map(np.testing.assert_array_equal, restored.opt_state, expected.opt_state)
        for found in (restored.params, params):
            jax.tree.map(np.testing.assert_array_equal, found, expected.params)


def test_stacked_parameters_are_split_as_those_of_one_layer(tiny_config) -> None:
    config = tiny_config(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, model__scan_layers=True)
    model, optimizer = build_model(config, VOCABULARY), make_optimizer(config.optimizer, 10)[0]
    layers = abstract_state(model, optimizer, make_mesh(config.mesh)).params["layers"]
    assert layers["attention"]["query"]["kernel"].sharding.spec == jax.P(
        None, "fsdp", "tensor", None
    )
    assert layers["down"]["kernel"].sharding.spec == jax.P(None, "tensor", "fsdp")


@pytest.fixture(scope="module")
def states(tiny_config) -> tuple[TrainState, list[TrainState]]:
    """Shapes, and two states of different seeds, on a single device."""
    config = tiny_config(model__num_layers=1)
    model, optimizer = build_model(config, VOCABULARY), make_optimizer(config.optimizer, 10)[0]
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    return abstract_state(model, optimizer, mesh), [
        initial_state(model, optimizer, mesh, seed) for seed in (1, 2)
    ]


@pytest.fixture(scope="module")
def both_saved(states, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Checkpoints with both states; the second has the lower loss. Not to be changed."""
    folder = tmp_path_factory.mktemp("both")
    with Checkpoints(folder, keep=2) as checkpoints:
        for step, state in enumerate(states[1], start=1):
            checkpoints.save(state, step, {}, valid_nll=3.0 - step)
    return folder


def test_parameters_are_read_without_an_optimizer(
    states, both_saved, tmp_path: pathlib.Path
) -> None:
    """An evaluation needs the parameters alone; whatever became of the rest."""
    folder = shutil.copytree(both_saved, tmp_path / "run")
    (folder / "1" / "optimizer" / "_METADATA").write_text("damaged")
    with Checkpoints(folder, read_only=True) as checkpoints:
        params = checkpoints.restore_params(1, states[0].params)
    jax.tree.map(np.testing.assert_array_equal, params, states[1][0].params)


def test_a_folder_of_any_name_holds_checkpoints(states, tmp_path: pathlib.Path) -> None:
    abstract, (state, _) = states
    folder = tmp_path / "s3:" / "a?" / "[!b]*{c}" / "%s #'\"$~" / "é 🙂"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(state, 3, {})
    with Checkpoints(folder, read_only=True) as checkpoints:
        params = checkpoints.restore_params(3, abstract.params)
    jax.tree.map(np.testing.assert_array_equal, params, state.params)


def flip_a_bit(file: pathlib.Path) -> None:
    """Flips a bit near the front, where Orbax's files hold arrays; the middle may hold an index
    without use.
    """
    content = bytearray(file.read_bytes())
    content[len(content) // 8] ^= 4
    file.write_bytes(content)


def cut_short(file: pathlib.Path) -> None:
    """Keeps an eighth of a file."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 8])


def empty(folder: pathlib.Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("damage", "part", "message"),
    [
        (
            flip_a_bit,
            "params/ocdbt.process_0/d/*",
            r"arrays differ from the saved ones, first params/",
        ),
        (flip_a_bit, "about/metadata", r"about (differs from the saved one|can't be read)"),
        (cut_short, "params/ocdbt.process_0/d/*", "its params can't be read"),
        (cut_short, "optimizer/manifest.ocdbt", "its optimizer can't be read"),
        (empty, "", "its about can't be read"),
        (pathlib.Path.unlink, "about/metadata", "its about can't be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    states,
    both_saved,
    tmp_path: pathlib.Path,
    capsys,
    damage: Callable[[pathlib.Path], None],
    part: str,
    message: str,
) -> None:
    abstract, saved = states
    # A name is no reason to think that a network failed.
    folder = shutil.copytree(both_saved, tmp_path / "connection-timeout")
    for found in (folder / "2").glob(part) if part else [folder / "2"]:
        # the others hold no elements
        if found.is_dir() or found.stat().st_size > 500 or "*" not in part:
            damage(found)
    with Checkpoints(folder, keep=2) as checkpoints:
        restored = checkpoints.restore_newest(abstract)
        assert (checkpoints.latest, checkpoints.best) == (1, (1, 2.0))
        checkpoints.save(saved[1], 2, {})  # its place is free
    assert int(restored.step) == 1
    jax.tree.map(np.testing.assert_array_equal, restored.params, saved[0].params)
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1, error
    assert re.search(rf"checkpoint .*/2 is damaged.*{message}.*that of step 1 is taken", error), (
        error
    )


def test_there_is_a_spare_where_the_latest_is_the_best(states, tmp_path: pathlib.Path) -> None:
    """If a run improves all the time, the latest is always the best; without validation none is the
    best.
    """
    _, (state, _) = states
    kept = []
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step, nll in enumerate([None, None, None, 3.0, 2.0, 4.0, 5.0], start=1):
            checkpoints.save(state, step, {}, valid_nll=nll)
            checkpoints.wait()
            kept.append(
                sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal())
            )
    assert kept == [[1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [5, 7]]


def test_milestones_stay_whatever_improves_after_them(states, tmp_path: pathlib.Path) -> None:
    """Each validation here is the best so far, so the newest and the spare are always others."""
    _, (state, _) = states
    with Checkpoints(tmp_path, keep=1, keep_every=3) as checkpoints:
        for step in range(1, 9):
            checkpoints.save(state, step, {}, valid_nll=9.0 - step)
        checkpoints.wait()
    kept = sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal())
    assert kept == [3, 6, 7, 8]


def test_hosts_that_are_preempted_again_save_again(
    states, tmp_path: pathlib.Path, monkeypatch
) -> None:
    """Orbax asks by itself whether JAX told of a preemption, and then for the time of the
    checkpoint before.
    """
    _, (first, second) = states
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: True)
    for step, state in ((1, first), (2, second)):  # each in a start of its own
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(state, step, {})
            checkpoints.wait()
            assert checkpoints.latest == step


def test_a_checkpoint_that_is_deleted_meanwhile_is_missing_and_not_damaged(
    states, tmp_path: pathlib.Path
) -> None:
    """Training may delete it during an evaluation, which then takes a newer checkpoint."""
    abstract, saved = states
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(saved[0], 1, {})
        checkpoints.wait()
        assert_refused("step 2; there are: 1", checkpoints.restore, 2, abstract)
        (tmp_path / "1").rename(tmp_path / "elsewhere")
        assert_refused("has no checkpoint of step 1", checkpoints.restore_newest, abstract)


def test_without_a_whole_checkpoint_nothing_is_touched(states, tmp_path: pathlib.Path) -> None:
    abstract, saved = states
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(saved[0], 1, {})
    flip_a_bit(tmp_path / "1" / "about" / "metadata")
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match="/1 is damaged"),
    ):
        checkpoints.restore_newest(abstract)
    assert (tmp_path / "1").is_dir()


def test_replicas_that_differ_in_a_bit_are_found() -> None:
    """A matrix split by fsdp in two has each part on four of eight devices. A vector split by all axes
    has each part on one, and differs without harm.
    """
    mesh = make_mesh(make_config("mesh.data=2,mesh.fsdp=2,mesh.tensor=2").mesh)

    def placed(spec: jax.P, changed: int | None) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        parts = [
            jax.device_put(
                np.ones(sharding.shard_shape((8, 8)))
                * np.float32(1 + 2**-23 * (number == changed)),
                device,
            )
            for number, device in enumerate(mesh.devices.flat)
        ]
        return jax.make_array_from_single_device_arrays((8, 8), sharding, parts)

    def check(in_two: int | None, in_eight: int | None) -> None:
        params = {"a": placed(jax.P("fsdp"), in_two), "b": placed(jax.P(AXES), in_eight)}
        check_replicas(TrainState(step=placed(jax.P(), None), params=params, opt_state=()), "here")

    check(None, None)
    check(None, 5)
    assert_refused(
        "here, process 0 and process 0 hold different parameters", check, 5, None, raised=UserError
    )


def test_checksums_know_each_bit_and_place_but_not_the_devices() -> None:
    array = jax.random.normal(jax.random.key(0), (8, 6))
    known = checksums(array)
    sharded = jax.device_put(
        array, jax.NamedSharding(jax.make_mesh((4, 2), ("a", "b")), jax.P("a", "b"))
    )
    assert checksums(sharded) == known
    bits = np.asarray(array).view(np.uint32)
    changed = [bits[::-1].copy(), bits.copy(), bits.copy()]
    changed[1][0] ^= 2**31  # all signs of a row
    changed[2][:, 1] = 0
    for place in range(bits.size):
        changed.append(bits.copy())
        changed[-1].flat[place] ^= 1 << place % 32
    changed = [other.view(np.float32) for other in changed]
    sums = {*known.values(), *(one for other in changed for one in checksums(other).values())}
    assert len(sums) == 1 + len(changed)
    halves = array.astype(jnp.bfloat16)
    assert checksums(halves) != checksums(-halves) != checksums(jnp.isfinite(halves))


@pytest.mark.parametrize(
    "error",
    [
        OSError(116, "Stale file handle"),
        OSError(24, "Too many open files"),
        jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4 bytes"
        ),
        ValueError("UNAVAILABLE: error reading gs://bucket/run: connection reset"),
        TimeoutError("The read operation took too long"),
        ConnectionResetError("Connection lost"),
        OSError("HTTPSConnectionPool: Read timed out"),  # as `requests` raises it, without an errno
        RuntimeError("Server disconnected"),
        ValueError("INTERNAL: CURL error[6] Could not resolve hostname"),
    ],
)
def test_what_the_machine_failed_at_is_no_damage(states, both_saved, monkeypatch, error) -> None:
    """A whole checkpoint stays where it is, and the user is told of the error, not to delete the
    run.
    """

    def fail(*_: object, **__: object) -> None:
        raise error

    with Checkpoints(both_saved, keep=2) as checkpoints, monkeypatch.context() as patch:
        patch.setattr(ocp.StandardCheckpointHandler, "restore", fail)
        assert_refused(
            str(error.args[-1])[:20], checkpoints.restore_newest, states[0], raised=type(error)
        )
    with Checkpoints(both_saved, read_only=True) as checkpoints:
        assert (checkpoints.best, checkpoints.latest) == ((2, 1.0), 2)
