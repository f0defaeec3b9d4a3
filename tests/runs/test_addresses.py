"""Runs and rows at gs://, on an emulator of Cloud Storage on this machine."""

import contextlib
import logging
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from alibi.evaluation.dumps import find_dumps
from alibi.evaluation.evaluate import evaluate_runs
from alibi.reporting.recorded import find_rows
from alibi.reporting.report import training_curve
from alibi.runs import RunDirectory
from alibi.runs.trained import TrainedRun
from alibi.storage.claims import CLAIMS, Claim, LostError, is_held
from alibi.storage.files import (
    append_row,
    drop_rows,
    listed,
    read_log,
    resolve,
)
from alibi.training import loop
from tests.evaluation.runs import options_of
from tests.refusals import assert_refused
from tests.training.runs import stop_at

pytestmark = pytest.mark.slow

server = pytest.importorskip(
    "gcp_storage_emulator.server", reason="install it by bash scripts/setup.sh --test"
)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The address of an empty bucket."""
    # it logs requests for missing objects
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    with server.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket") as emulator:
        # clients hang up when they have read enough
        emulator._api._httpd.handle_error = lambda *_: None
        url = "http://{}:{}".format(*emulator._api._httpd.server_address)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
                patch.setenv(name, url)
            patch.setenv("FSSPEC_GCS_TOKEN", "anon")
            # Otherwise gcsfs asks for the kind of the bucket by gRPC, which the emulator does not
            # know.
            patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
            download = server.objects.download

            def download_with_generation(request, response, storage) -> None:
                """Sends the generation, as Cloud Storage does; TensorStore needs it to write."""
                with contextlib.suppress(server.objects.NotFound):
                    name = request.params["bucket_name"], request.params["object_id"]
                    response["X-Goog-Generation"] = storage.get_file_obj(*name)["generation"]
                download(request, response, storage)

            patch.setattr(server.objects, "download", download_with_generation)
            yield "gs://bucket"


def test_rows_and_claims(bucket: str) -> None:
    place = resolve(f"{bucket}/deep/place")
    assert listed(place) == []
    log = place / "metrics.jsonl"
    rows = [{"step": step, "value": value} for step, value in ((5, 0.5), (5, 0.25), (10, 1.0))]
    for row in rows:
        append_row(log, row)
    assert read_log(log) == rows
    drop_rows(log, 5)
    assert read_log(log) == rows[:2]
    assert [path.name for path in listed(place)] == ["metrics"]

    older = Claim(place, "training")
    assert is_held(place) is None
    newer = Claim(place, "training")
    newer.check()
    assert_refused("started later .* gs://bucket/deep/place", older.check, raised=LostError)
    newer.release()
    assert listed(place / CLAIMS) == []


def test_a_run_stops_resumes_and_is_evaluated(
    bucket: str, tiny_config, tmp_path, monkeypatch
) -> None:
    """With the parameters, metrics and rows of a run in a directory."""
    config = tiny_config(log__tensorboard=True, checkpoint__every_steps=3)
    here, there = RunDirectory(tmp_path / "run"), RunDirectory(f"{bucket}/deep/run")
    loop.train(config, str(here))

    def fail() -> None:
        raise RuntimeError("as by a kill")

    with monkeypatch.context() as patch:
        stop_at(patch, 4, fail)
        with pytest.raises(RuntimeError, match="as by a kill"):
            loop.train(config, str(there))
    assert there.status()["state"] == "failed"
    assert loop.train(config, str(there))["state"] == "finished"
    assert there.status()["step"] in there.saved_steps()

    runs = [TrainedRun(run) for run in (here.path, there.path)]
    jax.tree.map(np.testing.assert_array_equal, *(run.params for run in runs))
    assert training_curve(here.path) == training_curve(there.path)
    assert not listed(there.path / "tensorboard")
    found = {}
    for run, output in ((here, tmp_path / "out"), (there, resolve(f"{bucket}/deep/out"))):
        for _ in range(2):  # the second one finds all done
            assert (
                evaluate_runs(
                    [run.path], options_of(output_dir=output, lengths=(16,), dump_nll=True)
                )
                == []
            )
        (row,) = find_rows(output)
        (dump,) = find_dumps([f"{output}/nll/*.npz"])
        found[run] = row.results["nll_nats"], dump.nll_nats.tolist()
    assert found[here] == found[there]
    names = [path.name for path in listed(resolve(f"{bucket}/deep/out"))]
    assert names == ["nll", "results.jsonl", "rows"]
