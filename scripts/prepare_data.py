"""Makes the token files of a config: python scripts/prepare_data.py --config=configs/NAME.py[:KEY=VALUE,...]

Training and evaluation make what is missing by themselves; this does it before,
for example on a machine with a network. Reads and writes in bounded memory; a
second run finds what the first one made. Any key can be overridden:
--config.data.cache_dir=DIR.
"""

import pathlib
import sys
import time

from absl import flags

# A clone works without being installed: python scripts/prepare_data.py has only scripts/ on its path.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from alibi import command_line

_CONFIG = command_line.define_config_flag()
_SPLITS = flags.DEFINE_list(
    "splits", ["train", "valid", "test"], "splits to prepare; those the config leaves empty are not"
)
_PROGRESS = flags.DEFINE_bool("progress", True, "show a progress bar on stderr")


def main() -> int:
    # Only now, so that a wrong flag is reported at once.
    from alibi.data.pieces import SPLITS
    from alibi.data.tokens import check_sources, prepare

    data = _CONFIG.value.data
    try:
        check_sources(data, [split for split in _SPLITS.value if split in SPLITS])
        for split in _SPLITS.value:
            if split in SPLITS and not data[split]:
                continue
            start = time.perf_counter()
            made = prepare(data, split, progress=_PROGRESS.value)
            print(_summary(made), f"in {time.perf_counter() - start:.1f} s", flush=True)
            print(f"  {made.directory}", flush=True)
    except KeyboardInterrupt:
        print("interrupted: nothing of the unfinished split was kept", file=sys.stderr)
        return 130
    return 0


def _summary(made) -> str:
    manifest = made.manifest
    unknown = f", {manifest.unknown_words:,} unknown" if manifest.tokenizer == "words" else ""
    return (
        f"{manifest.split}: {manifest.tokens:,} tokens ({manifest.tokenizer}, vocabulary {manifest.vocab_size:,}), "
        f"{manifest.words:,} words{unknown}, {manifest.bytes:,} bytes, {manifest.documents:,} documents"
    )


if __name__ == "__main__":
    command_line.run(main, required=("config",))
