"""The corpora by name."""

from alibi.config import DataConfig
from alibi.data.embedded import Books
from alibi.data.hosted import Hub, Tfds
from alibi.data.passkeys import PassKeys
from alibi.data.pieces import Corpus
from alibi.data.textfiles import TextFiles

_KINDS: dict[str, type[Corpus]] = {kind.name: kind for kind in (Books, PassKeys, TextFiles, Hub, Tfds)}


def make_corpus(data: DataConfig) -> Corpus:
    """The corpus that the config section `data` describes; nothing is read yet.

    Raises ValueError for an unknown `data.corpus`, or a key that it doesn't have.
    """
    if data.corpus != "text" and data.document_end != "file":
        raise ValueError(
            f"data.document_end={data.document_end} is of corpus=text only: rows of other corpora are documents; "
            "set it to file"
        )
    if data.corpus == "tfds" and data.streaming:
        raise ValueError("data.streaming=True is of corpus=hub only: tfds prepares a dataset first; set it to False")
    return _KINDS[data.corpus](data)
