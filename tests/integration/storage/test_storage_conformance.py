"""One suite for every object store: the directory, moto's S3 server, a real server (MILLRACE_TEST_S3_URL)."""

import os
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from millrace.errors import CorruptObjectError, InvalidSpecError, NotFoundError
from millrace.storage import ObjectStore, open_store
from millrace.storage.s3 import S3Store

ODD_KEYS = [
    "sp ace",
    "pl+us",
    "ünï/ç",
    "pc%20t",
    "a=b&c",
    "quo'te\"",
    "日本/語",
    "tilde~/x",
    "colon:1",
    "hash#1",
    "q?x",
]


@pytest.fixture(params=["local", "moto", "real"])
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    match request.param:
        case "local":
            yield request.getfixturevalue("local_store")
        case "moto":
            yield request.getfixturevalue("s3_store")
        case _:
            url = os.environ.get("MILLRACE_TEST_S3_URL")
            if not url:
                pytest.skip("MILLRACE_TEST_S3_URL names no real S3 server (scripts/s3_server.sh starts one)")
            base, _, query = url.partition("?")
            real = open_store(f"{base.rstrip('/')}/t{secrets.token_hex(6)}?{query}")
            assert isinstance(real, S3Store)
            real.ensure_bucket()
            yield real


def test_put_get_head_delete(store):
    assert store.head("a/b") is None
    store.put("a/b", b"hello")
    assert store.get("a/b") == b"hello"
    store.put("a/b", b"again")
    assert store.get("a/b") == b"again"
    info = store.head("a/b")
    assert info is not None and (info.key, info.size_bytes) == ("a/b", 5)
    assert info.modified > 1_600_000_000
    store.delete("a/b")
    store.delete("a/b")
    assert store.head("a/b") is None


def test_absent_objects_are_not_found(store):
    with pytest.raises(NotFoundError, match="no object"):
        store.get("nope")
    with pytest.raises(NotFoundError):
        store.get_range("nope", 0, 1)
    store.put("dir/leaf", b"x")
    with pytest.raises(NotFoundError):
        store.get("dir")
    with pytest.raises(NotFoundError):
        store.get("dir/leaf/below")


def test_an_empty_object(store):
    store.put("empty", b"")
    assert store.get("empty") == b"" and store.get_range("empty", 0, 0) == b""


def test_ranges_are_exact_or_an_error(store):
    store.put("r", bytes(range(100)))
    assert store.get_range("r", 0, 1) == b"\0"
    assert store.get_range("r", 90, 10) == bytes(range(90, 100))
    for start, length in ((90, 11), (100, 1), (1000, 5)):
        with pytest.raises(CorruptObjectError, match="ends before"):
            store.get_range("r", start, length)


def test_create_is_create_only(store):
    assert store.create("c", b"first") is True
    assert store.create("c", b"second") is False
    assert store.create("c", b"first") is False
    assert store.get("c") == b"first"
    store.delete("c")
    assert store.create("c", b"third") is True


def test_sixteen_racing_creates_have_one_winner(store):
    for number in range(5):
        barrier, won = threading.Barrier(16), []

        def race(me: int, number: int = number, barrier=barrier, won=won) -> None:
            barrier.wait()
            if store.create(f"race/{number}", b"%d" % me * 5000):
                won.append(me)

        threads = [threading.Thread(target=race, args=(me,)) for me in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.get(f"race/{number}") == b"%d" % won[0] * 5000


@pytest.mark.parametrize("key", ODD_KEYS)
def test_odd_keys(store, key):
    assert store.create(key, key.encode()) is True
    assert store.create(key, b"other") is False
    assert store.get(key) == key.encode()
    assert [info.key for info in store.list("")] == [key]
    store.delete(key)
    assert list(store.list("")) == []


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a/.", "a\0b", "x" * 901, ".tmp/x"])
def test_illegal_keys_are_refused_before_anything_is_written(store, key):
    for call in (lambda: store.put(key, b""), lambda: store.create(key, b""), lambda: store.get(key)):
        with pytest.raises(InvalidSpecError, match="object key"):
            call()
    assert list(store.list("")) == []


def test_listing_is_in_key_order_and_by_prefix(store):
    keys = ["a!", "a/b", "a/c/d", "a0", "b", "é", "epochs/x/00000001", "epochs/x/00000010", "epochs/y/00000001"]
    for key in keys:
        store.put(key, key.encode())
    listed = [info.key for info in store.list("")]
    assert listed == sorted(keys, key=lambda key: key.encode())
    assert [info.key for info in store.list("a/")] == ["a/b", "a/c/d"]
    assert [info.key for info in store.list("epochs/x/0000000")] == ["epochs/x/00000001"]
    assert [info.key for info in store.list("zz")] == []
    assert {info.size_bytes for info in store.list("a/b")} == {3}


def test_listing_after_a_key(store):
    for number in range(5):
        store.put(f"l/{number:03d}", b"")
        store.put(f"l/{number:03d}.d/x", b"")
    assert [info.key for info in store.list("l/", start_after="l/003")] == ["l/003.d/x", "l/004", "l/004.d/x"]
    assert [info.key for info in store.list("l/", start_after="l/004.d/x")] == []
    assert len(list(store.list("l/", start_after="k"))) == 10


def test_listing_more_than_a_page(store, request):
    """Of a real server with as many objects as its pages cannot hold; moto, which is slow, is asked for small ones."""
    is_real = request.node.callspec.params["store"] == "real"
    count = 1100 if is_real else 110
    pages = []

    def asked(params, **_):
        pages.append(params)
        return params if is_real else params | {"MaxKeys": 40}

    if isinstance(store, S3Store):
        store.client.meta.events.register("provide-client-params.s3.ListObjectsV2", asked)
    keys = [f"many/{number:05d}" for number in range(count)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
    assert [info.key for info in store.list("many/")] == keys
    assert not isinstance(store, S3Store) or len(pages) == (2 if is_real else 3)
    assert len(list(store.list("many/", start_after="many/00049"))) == count - 50


def test_prefixes_directly_below(store):
    for key in ("p/a/1", "p/a/2", "p/b/c/d", "p/leaf", "q/x"):
        store.put(key, b"")
    assert list(store.list_prefixes("p/")) == ["p/a/", "p/b/"]
    assert list(store.list_prefixes("")) == ["p/", "q/"]
    assert list(store.list_prefixes("p/leaf/")) == []
    store.delete("p/b/c/d")
    assert list(store.list_prefixes("p/")) == ["p/a/"]
    with pytest.raises(ValueError, match="end in"):
        list(store.list_prefixes("p"))


def test_files(store, tmp_path):
    source, target = tmp_path / "source", tmp_path / "new" / "target"
    data = os.urandom(3_000_001)
    source.write_bytes(data)
    store.put_file("file", source)
    assert store.get("file") == data
    store.get_file("file", target)
    assert target.read_bytes() == data
    with pytest.raises(NotFoundError):
        store.get_file("nope", tmp_path / "nope")
    assert sorted(path.name for path in target.parent.iterdir()) == ["target"]
    assert not (tmp_path / "nope").exists()


def test_a_file_in_parts(store, tmp_path):
    data = os.urandom(1 << 20) * 70
    (tmp_path / "big").write_bytes(data)
    store.put_file("big", tmp_path / "big")
    store.get_file("big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data
    assert store.get_range("big", 66 << 20, 10) == data[66 << 20 : (66 << 20) + 10]


def test_readers_see_a_whole_object_or_none(store):
    """Overwrites are atomic: a reader gets one of the two contents, never a mixture."""
    contents = [b"a" * 200_000, b"b" * 300_000]
    store.put("o", contents[0])
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            store.put("o", contents[number % 2])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(50):
            assert store.get("o") in contents
    finally:
        stop.set()
        writer.join()


def test_uri_names_the_object(store):
    assert store.uri("a/b").endswith("/a/b")
    assert store.describe()


def test_what_is_larger_than_its_reader_takes_is_refused_before_it_is_read(store, monkeypatch):
    store.put("run/large", bytes(10_000))
    assert len(store.get("run/large", max_bytes=10_000)) == 10_000
    for reader in ("_receive", "_read"):  # of S3; the directory's is in its own test
        if hasattr(store, reader):
            monkeypatch.setattr(store, reader, lambda *_, **__: pytest.fail("the body was read"))
    with pytest.raises(CorruptObjectError, match=r"run/large has 10000 bytes, and at most 9999") as refused:
        store.get("run/large", max_bytes=9_999)
    assert refused.value.reason == "OBJECT_TOO_LARGE"
    assert refused.value.metadata["key"] == "run/large"
    with pytest.raises(NotFoundError):
        store.get("run/none", max_bytes=1)


def test_many_objects_are_deleted_at_once(store):
    keys = [f"many/{number:04d}" for number in range(30)] + [f"many/{key}" for key in ODD_KEYS]
    for key in keys:
        store.put(key, b"x")
    store.put("many-others", b"x")
    assert store.delete_many([*keys, "many/absent"]) == {}
    assert [info.key for info in store.list("many")] == ["many-others"]
    assert store.delete_many([]) == {} and store.delete_many(keys[:1]) == {}
