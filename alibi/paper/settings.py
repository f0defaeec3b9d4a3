"""What a table's models are trained on, at the paper's scale and at that of two CPU cores."""

import dataclasses
import re
from collections.abc import Mapping

from alibi.data.corpus import SPLITS
from alibi.reporting.tables import Label, Length

SCALES = ("paper", "medium", "small")

# A length in a label or title: all of it, or what follows "L = ", "L_valid = " and "stride ".
_LENGTH = re.compile(r"(^\d+$|(?<== )\d+(?:,\d{3})*|(?<=stride )\d+)")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A corpus and a model at one scale."""

    name: str  # also the directory's of its runs
    scale: str  # of SCALES
    config: str  # its file, with an argument where that doesn't say it all
    files_config: str = ""  # the same for text files that the user names; "": the same file
    splits: tuple[str, ...] = ()  # of text files, that it needs; none where the config knows where its text is
    files_splits: tuple[str, ...] = SPLITS  # that it needs where the user names any file
    divisor: int = 1  # by which the paper's lengths are divided
    # Of the setting's own text, as published, tokens by split; without them they are counted.
    vocab_size: int | None = None
    tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def length(self, length: int) -> int:
        """A length of the paper's in tokens of this scale, at least 1."""
        return max(1, round(length / self.divisor))

    def label(self, text: str) -> Label:
        """A title or label of the paper, each length in it with the one of this scale."""
        label: list[str | Length] = []
        for number, part in enumerate(_LENGTH.split(text)):  # texts and lengths by turns
            length = int(part.replace(",", "")) if number % 2 else 0
            label.append(Length(part, length, self.length(length)) if length else part)
        return tuple(filter(None, label))

    def config_for(self, files: Mapping[str, str], overrides: str) -> str:
        """The config of all runs: with the user's `files` by split, if any, and `overrides`, KEY=VALUE,...

        A file that is needed and isn't given stands there as its split in capitals.

        Raises:
          ValueError: a comma in a file's name, which would end it.
        """
        for split, place in files.items():
            if "," in place:
                raise ValueError(f"--{split}_file={place} holds a comma; name one file or a glob of several")
        named = {split: split.upper() for split in self.splits} | dict(files)
        config = (named and self.files_config) or self.config
        keys = ["data.corpus=text", *(f"data.{split}={place}" for split, place in named.items())] if named else []
        argument = ",".join(filter(None, [*keys, overrides]))
        return config + ("," if ":" in config else ":") * bool(argument) + argument

    def check_files(self, files: Mapping[str, str]) -> None:
        """Raises ValueError where a text that the setting needs isn't named."""
        needed = self.splits or (self.files_splits if files else ())
        missing = [split for split in needed if split not in files]
        if missing:
            flags = ", ".join(f"--{split}_file" for split in missing)
            raise ValueError(f"the {self.name} setting at the {self.scale} scale needs {flags}: text files or globs")


# BPE and one tied matrix in place of words and bands, as the paper's book models.
_TIED_BPE = "model.embedding=tied,model.padding_rows=False,data.tokenizer=bpe"
_LONG_BOOKS_BPE = "configs/long_books.py:data.tokenizer=bpe,data.tokenizer_train_bytes=16777216"
_SMALL_1B3 = "configs/quickstart.py:data.tokenizer=bpe,data.max_valid_bytes=131072"

SETTINGS = (
    Setting(
        "wikitext103", "paper", "configs/wikitext103.py", vocab_size=267_744, tokens={"valid": 217_646, "test": 245_569}
    ),
    Setting("bookcorpus", "paper", "configs/bookcorpus.py", splits=SPLITS, vocab_size=29_000),
    Setting(
        "cc100",
        "paper",
        "configs/cc100_1b3.py",
        splits=("train", "valid"),
        vocab_size=50_264,
        tokens={"valid": 649_000},  # section 4.2
    ),
    Setting(
        "wikitext103",
        "medium",
        "configs/long_books.py",
        divisor=4,
        vocab_size=256,  # bytes, of which that config tests on this many
        tokens={"valid": 65_536, "test": 65_536},
    ),
    Setting("bookcorpus", "medium", _LONG_BOOKS_BPE, divisor=4, vocab_size=2_048),
    Setting("cc100", "medium", _LONG_BOOKS_BPE, files_splits=("train", "valid"), divisor=4, vocab_size=2_048),
    Setting("wikitext103", "small", "configs/books_tables.py", "configs/wikitext2.py", divisor=16),
    Setting(
        "bookcorpus", "small", f"configs/books_tables.py:{_TIED_BPE}", f"configs/wikitext2.py:{_TIED_BPE}", divisor=16
    ),
    Setting("cc100", "small", _SMALL_1B3, files_splits=("train", "valid"), divisor=16),
)


def find_setting(name: str, scale: str) -> Setting:
    """The setting `name` at `scale`; raises ValueError for an unknown scale."""
    if scale not in SCALES:
        raise ValueError(f"--scale={scale} is unknown; use one of {', '.join(SCALES)}")
    return next(setting for setting in SETTINGS if (setting.name, setting.scale) == (name, scale))
