"""The published tables are those of the paper, byte for byte."""

import hashlib
import importlib.resources

import pytest

# Of the files that were checked against the text of the paper's PDF (arXiv 2108.12409 v2).
SHA256 = {
    1: "75ce586269757d83f00275c319b850b166477d0eed897de02c9d06130b107951",
    2: "d75adce4da905c86d160659088cc9f282727f71da935fda6c32a61a08cb8c441",
    3: "c4c82623ff9031fbf2386f405566e6d3f97404e7f92e4779dd7245bc7863236a",
    4: "4f1ebd854fb1a5349ec3983ff1a2be1e52e2669003cb181131d669af0cf749ba",
    5: "a66e56574824b7e99b8dc19a5d44b8946d2a8fac6ebb99ee1fe1da4e1eacb2fb",
    6: "90f321381a886932ca5872ad5029ed64a840448fd441a80f62d037ce5254e9cb",
    7: "29792206bb635efa60e760b1b3d0c737523f483561a489995bb315f51d557abe",
    8: "fdbee3768348f816042e1f2a916fd93ca279428c93698df2ad90b1c160892f14",
    9: "0d26159e94e8634d6f4a31e9569fe38f7dde44850e0c7469160fa3f281838c67",
    10: "1210e750207470fb9155af1d91a8e638dc27ea703a540421d1d4e3913e276742",
    11: "de92c0fc4ccf3404e5a5ee839304fca3b0be0c4d5ab238eb5ff6d1e3432348e3",
    12: "d3b0e37a65b392a7097b36cef2604423c8171483edd086341c6408f726e69aba",
    13: "ee0c194470bac3dffdd529162f421f18a8b53656f6756b758dfe012ca3990927",
    14: "a2e50ebee0ea0e1df897d5a2f0375a818397795e80709da37ad2410d07bebb72",
    15: "6b0a8ecb3902940c28be86a961c20728461b14ae3eac8fce127182e774d40e21",
}


@pytest.mark.parametrize("number", SHA256)
def test_checksums(number):
    file = importlib.resources.files("alibi") / "paper" / "tables" / f"table{number:02d}.csv"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == SHA256[number]
