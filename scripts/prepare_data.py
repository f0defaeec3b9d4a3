"""Makes a config's token files: python scripts/prepare_data.py
--config=configs/NAME.py[:KEY=VALUE,...]

Training and evaluation make missing token files themselves. This script makes them before, for
example on a machine with a network, in bounded memory. A second run finds the files from the first.
After a kill it continues at the shard (64 MiB of text) that was not whole. Any key can be overridden:
--config.data.cache_dir=DIR. With --workers=8 eight processes make the same tokens. Each reads a packed
file or a dataset whole, and plain text files only at its own shards.
"""

import time

import clone  # noqa: F401, it sets the path of imports
from absl import flags

from alibi.cli import command_line

_CONFIG = command_line.define_config_flag()
_WORKERS = flags.DEFINE_integer("workers", 1, "processes that make shards", lower_bound=1)
_PROGRESS = flags.DEFINE_bool("progress", True, "show a progress bar on stderr")
command_line.own_flags(__name__)


def main() -> None:
    # Imported here, so that a wrong flag is reported at once.
    from alibi.data.corpus import SPLITS
    from alibi.data.tokens import check_sources, prepare

    data = _CONFIG.value.data
    splits = [split for split in SPLITS if data[split]]
    check_sources(data, splits)
    for split in splits:
        start = time.perf_counter()
        made = prepare(data, split, progress=_PROGRESS.value, workers=_WORKERS.value)
        manifest = made.manifest
        unknown = (
            f", {manifest.unknown_words:,} unknown"
            if manifest.unknown_words or manifest.tokenizer == "words"
            else ""
        )
        print(
            f"{manifest.split}: {manifest.tokens:,} tokens ({manifest.tokenizer}, vocabulary {manifest.vocab_size:,}), "
            f"{manifest.words:,} words{unknown}, {manifest.bytes:,} bytes, {manifest.documents:,} documents "
            f"in {time.perf_counter() - start:.1f} s\n  {made.directory}",
            flush=True,
        )


if __name__ == "__main__":
    command_line.run(
        main,
        required=("config",),
        resumes="whole shards are kept, and the same command continues after them",
        absent={
            "workdir": "token files belong to no run, so they are made in --config.data.cache_dir",
            "output_dir": "token files are made in --config.data.cache_dir",
        },
    )
