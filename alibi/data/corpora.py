"""The corpora by name."""

from alibi.config import DataConfig
from alibi.data.books import Books, PassKeys
from alibi.data.corpus import Corpus
from alibi.data.hosted import Hub, Tfds
from alibi.data.textfiles import TextFiles

_KINDS: dict[str, type[Corpus]] = {kind.name: kind for kind in (Books, PassKeys, TextFiles, Hub, Tfds)}


def make_corpus(data: DataConfig) -> Corpus:
    """Returns the corpus of the config section `data`; reads nothing yet.

    Raises ValueError for a key of another corpus.
    """
    if data.corpus != "text" and data.document_end != "file":
        raise ValueError(
            f"data.document_end={data.document_end} needs corpus=text: other corpora have a document a row; "
            "set it to file"
        )
    if data.corpus == "tfds" and data.streaming:
        raise ValueError("data.streaming=True needs corpus=hub: tfds prepares a dataset first; set it to False")
    return _KINDS[data.corpus](data)
