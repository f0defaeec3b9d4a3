"""The corpora and models of the tables, at the paper's scale and at two scales for CPUs."""

import dataclasses
import re
from collections.abc import Mapping

from alibi.data.corpus import SPLITS

SCALES = ("paper", "medium", "small")

# A length in a label or title: a bare number, or a number after "L = ", "L_valid = " or "stride ".
_LENGTH = re.compile(r"(^\d+$|(?<== )\d+(?:,\d{3})*|(?<=stride )\d+)")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A corpus and a model at a scale."""

    name: str  # the paper's corpus
    scale: str  # one in SCALES
    config: str  # its file, with an argument if needed
    files_config: str = ""  # its file for the user's text files, which defaults to the same
    # splits for which the user must name files; none if the config has a text
    splits: tuple[str, ...] = ()
    files_splits: tuple[str, ...] = SPLITS  # splits that need files if the user names any
    divisor: int = 1  # the paper's lengths by ours
    # published, for the setting's own text; a text without it is counted
    vocab_size: int | None = None

    @property
    def folder(self) -> str:
        """The name for its runs' directory, which says so if the text is not the paper's."""
        return self.name if self.scale == "paper" else f"{self.name}-stand-in"

    def length(self, length: int) -> int:
        """Returns a length from the paper in tokens at this scale, at least 1."""
        return max(1, round(length / self.divisor))

    def label(self, text: str) -> str:
        """Returns a title or label from the paper, with this scale's length in brackets behind each length
        that differs.
        """

        def with_ours(match: re.Match[str]) -> str:
            length = int(match[0].replace(",", ""))
            ours = self.length(length)
            return match[0] if ours == length else f"{match[0]} ({ours})"

        return _LENGTH.sub(with_ours, text)

    def config_for(self, files: Mapping[str, str], overrides: str) -> str:
        """Returns the config for all runs, with the user's `files` for splits and `overrides`, KEY=VALUE,...

        In place of a missing file stands its split in capitals.

        Raises:
          ValueError: a comma in a file's name, where a key would end.
        """
        for split, file in files.items():
            if "," in file:
                raise ValueError(
                    f"--{split}_file={file} holds a comma; name one file or a glob of several"
                )
        named = {split: split.upper() for split in self.splits} | dict(files)
        config = (named and self.files_config) or self.config
        keys = (
            ["data.corpus=text", *(f"data.{split}={file}" for split, file in named.items())]
            if named
            else []
        )
        argument = ",".join(filter(None, [*keys, overrides]))
        return config + ("," if ":" in config else ":") * bool(argument) + argument

    def check_files(self, files: Mapping[str, str]) -> None:
        """Raises ValueError if a needed file is not named."""
        needed = self.splits or (self.files_splits if files else ())
        missing = [split for split in needed if split not in files]
        if missing:
            flags = ", ".join(f"--{split}_file" for split in missing)
            raise ValueError(
                f"the {self.folder} setting at the {self.scale} scale needs {flags}: text files or globs"
            )


# BPE and a single tied matrix in place of words and bands, as in the paper's book models.
_TIED_BPE = "model.embedding=tied,model.padding_rows=False,data.tokenizer=bpe"
_LONG_BOOKS_BPE = "configs/long_books.py:data.tokenizer=bpe,data.tokenizer_train_bytes=16777216"
_SMALL_1B3 = "configs/quickstart.py:data.tokenizer=bpe,data.max_valid_bytes=131072"

SETTINGS = (
    Setting(
        "wikitext103",
        "paper",
        "configs/wikitext103.py",
        vocab_size=267_744,
    ),
    Setting("bookcorpus", "paper", "configs/bookcorpus.py", splits=SPLITS, vocab_size=29_000),
    Setting(
        "cc100",
        "paper",
        "configs/cc100_1b3.py",
        splits=("train", "valid"),
        vocab_size=50_264,
    ),
    Setting(
        "wikitext103",
        "medium",
        "configs/long_books.py",
        divisor=4,
        vocab_size=256,  # bytes; the config tests on this many
    ),
    Setting("bookcorpus", "medium", _LONG_BOOKS_BPE, divisor=4, vocab_size=2_048),
    Setting(
        "cc100",
        "medium",
        _LONG_BOOKS_BPE,
        files_splits=("train", "valid"),
        divisor=4,
        vocab_size=2_048,
    ),
    Setting("wikitext103", "small", "configs/books_tables.py", "configs/wikitext2.py", divisor=16),
    Setting(
        "bookcorpus",
        "small",
        f"configs/books_tables.py:{_TIED_BPE}",
        f"configs/wikitext2.py:{_TIED_BPE}",
        divisor=16,
    ),
    Setting("cc100", "small", _SMALL_1B3, files_splits=("train", "valid"), divisor=16),
)


def find_setting(name: str, scale: str) -> Setting:
    """Returns the setting `name` at `scale`, one of `SCALES`."""
    return next(setting for setting in SETTINGS if (setting.name, setting.scale) == (name, scale))
