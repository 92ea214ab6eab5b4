"""The catalogue of what a run stores: keys that read back, decoders that exist, and what follows from a declaration."""

import pytest

from millrace.errors import CorruptObjectError
from millrace.runlog import catalogue
from millrace.runlog.catalogue import KINDS, is_place, kind_at, table
from millrace.runlog.names import Names
from millrace_testing.repository import REPOSITORY

NAMES = Names("mill", "u1")
FIELDS = {
    **dict.fromkeys(("number", "step", "version", "lineage", "epoch", "index"), 7),
    **dict.fromkeys(("first", "first_place", "last", "last_place"), 123_456_789),
    **dict.fromkeys(("role", "nonce", "digest", "file", "key", "sha256"), "ab"),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_key_reads_back(kind):
    key = kind.path(**FIELDS)
    assert kind_at(key) is kind
    fields = kind.parse(key)
    assert fields is not None
    assert kind.path(**fields) == key
    assert kind.parse(f"{key}\n") is None or key.endswith("ab")
    assert kind.parse(f"x/{key}") is None
    assert is_place(key)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.codec], ids=lambda kind: kind.name)
def test_every_codec_refuses_what_it_does_not_read(kind):
    with pytest.raises(CorruptObjectError):
        kind.decode(b"\xff\xff", where="here")


@pytest.mark.parametrize(
    "key",
    [
        "batches/0000007.pb",  # too few digits
        "batches/000000007.pb",  # another name of 00000007.pb
        "batches/00000007.r0.pb",
        "batches/00000007.r01.pb",
        "batches/00000007.r10000.pb",  # more revisions than there are
        "batches/\N{ARABIC-INDIC DIGIT SEVEN}0000000.pb",
        "batches/00000007.pb.tmp",
        "batches/x/00000007.pb",
        f"batches/{'1' * 19}.pb",
        "intents/00000001.r1.json",  # has no revisions
        "run.json2",
        "epochs/00000001",
        "elsewhere/a",
    ],
)
def test_what_is_no_key(key):
    assert kind_at(key) is None


def test_revisions_and_numbers_beyond_their_digits():
    assert catalogue.BATCH_HEADER.parse("batches/123456789.r12.pb") == {"step": 123_456_789, "revision": 12}
    assert catalogue.BATCH_HEADER.parse(NAMES.batch_header(3).removeprefix(NAMES.root)) == {"step": 3, "revision": 0}


def test_the_document_has_the_table():
    assert table() in (REPOSITORY / "docs" / "reliability.md").read_text()
