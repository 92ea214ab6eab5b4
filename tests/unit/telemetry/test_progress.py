"""Long work is a wait with figures, a line every few seconds, and a bar where there is a terminal."""

import io
import threading

import pytest
from rich.console import Console

from millrace.cli.view.live import bars, shown_work
from millrace.inference.vllm_server import stage_of
from millrace.storage.local import LocalStore
from millrace.telemetry import progress, waits
from millrace.telemetry.progress import Activity, counting_bar


def reasons():
    return [wait.reason for wait in waits.snapshot("me")]


def test_work_is_a_wait_with_figures_while_it_lasts():
    with progress.work(Activity.LOAD, "the model", total=8_000_000_000, deadline_s=60) as work:
        assert reasons() == ["the model to be loaded: 0.0 of 8.0 GB (0 %)"]
        work.add(3_100_000_000)
        assert str(work) == "loading the model: 3.1 of 8.0 GB (39 %)"
        assert reasons() == ["the model to be loaded: 3.1 of 8.0 GB (39 %)"]
        work.turn_to(Activity.APPLY, "policy 3", waits_on="")
        assert reasons() == ["policy 3 to be applied"]
    assert reasons() == [] and progress.active() == []


@pytest.mark.parametrize(
    ("unit", "done", "total", "said"),
    [
        ("tensors", 120, 290, "120 of 290 tensors (41 %)"),
        ("tensors", 3, 0, "3 tensors"),
        (progress.BYTES, 999, 0, "999 bytes"),
        (progress.BYTES, 1500, 0, "1.5 kB"),
        (progress.BYTES, 20, 10, "20 of 10 bytes (100 %)"),
        (progress.BYTES, 0, 0, ""),
    ],
)
def test_amounts_are_said_in_their_unit(unit, done, total, said):
    with progress.work(Activity.SAVE, "it", unit=unit) as work:
        work.at(done, total=total)
        assert work.amount == said


def test_a_line_comes_every_few_seconds_and_at_the_end(monkeypatch):
    monkeypatch.setattr(progress, "SAY_EVERY_S", 0.01)
    lines, is_there = [], threading.Event()

    def say(line):
        lines.append(line)
        if len(lines) > 1:
            is_there.set()

    with progress.send_lines_to(say), progress.work(Activity.LOAD, "environment letters") as work:
        work.detail("its data set")
        assert is_there.wait(30)
    assert lines[1].startswith("loading environment letters: its data set, ")
    assert lines[-1].startswith("loading environment letters: its data set: done in ")


def test_what_is_short_is_not_said():
    lines = []
    with progress.send_lines_to(lines.append), progress.work(Activity.LOAD, "it"):
        pass
    assert lines == []


def test_what_a_store_copies_counts_for_its_caller(tmp_path):
    store, path = LocalStore(tmp_path / "store"), tmp_path / "file"
    path.write_bytes(b"x" * 1000)
    with progress.work(Activity.SAVE, "checkpoint 3", total=2000) as work:
        store.put_file("a/b", path)
        assert work.amount == "1.0 of 2.0 kB (50 %)"
        store.get_file("a/b", tmp_path / "again")
        assert work.share == 1.0


def test_what_is_tried_again_is_not_counted_twice():
    with progress.work(Activity.DOWNLOAD, "it", total=10) as work:
        with pytest.raises(OSError), progress.tried() as count:
            count(7)
            raise OSError
        assert work.share == 0.0
        with progress.tried() as count:
            threading.Thread(target=count, args=(10,)).run()
        assert work.share == 1.0


def test_counting_from_threads_loses_nothing():
    with progress.work(Activity.DOWNLOAD, "it", total=8000) as work:
        threads = [threading.Thread(target=lambda: [work.add(1) for _ in range(1000)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert work.amount == "8.0 of 8.0 kB (100 %)"


def test_a_download_from_the_hub_counts_its_bytes():
    """As `snapshot_download` uses its bars: totals grow while files are found, and one bar is of what is written."""
    with progress.work(Activity.DOWNLOAD, "model m") as work:
        bar = counting_bar(work)
        written = bar(name="huggingface_hub.snapshot_download", total=0, initial=0, unit="B", disable=False)
        received = bar(name="huggingface_hub.snapshot_download.transfer", total=0, initial=0, unit="B")
        written.total = (written.total or 0) + 4000
        written.refresh()
        received.update(3000)
        written.update(1000)
        assert work.amount == "1.0 of 4.0 kB (25 %)"
        written.set_description("done")
        written.close()


def test_a_terminal_gets_bars():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with shown_work(console), progress.work(Activity.DOWNLOAD, "version 3", total=4000) as work:
        work.add(1000)
        console.print(bars())
    assert "downloading version 3" in out.getvalue() and "1.0 of 4.0 kB (25 %)" in out.getvalue()


def test_a_pipe_gets_lines(monkeypatch):
    monkeypatch.setattr(progress, "SAY_EVERY_S", 0.01)
    is_there = threading.Event()

    class Pipe(io.StringIO):
        def write(self, text):
            is_there.set()
            return super().write(text)

    out = Pipe()
    with shown_work(Console(file=out)), progress.work(Activity.DOWNLOAD, "version 3", total=4000) as work:
        work.add(1000)
        is_there.clear()
        assert is_there.wait(30)
    assert "downloading version 3: 1.0 of 4.0 kB (25 %), " in out.getvalue()
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        ("\rLoading safetensors checkpoint shards:  50% Completed | 2/4 [00:03", "loading weights, 2 of 4 files"),
        ("Capturing CUDA graphs (PIECEWISE):  40%|███ | 27/67 [00:01", "capturing CUDA graphs, 27 of 67"),
        ("a: 1/9\rCapturing CUDA graphs:  3%|  | 2/67", "capturing CUDA graphs, 2 of 67"),
        ("INFO [backends.py:559] Dynamo bytecode transform time: 5.20 s", "compiling"),
        ("INFO [gpu_model_runner.py:1] Starting to load model m...", "loading weights"),
        ("INFO [kv_cache_utils.py] GPU KV cache size: 1,000 tokens", "measuring memory for the KV cache"),
        ("INFO Started server process", ""),
    ],
)  # fmt: skip
def test_what_vllm_does_is_read_from_its_output(line, stage):
    assert stage_of(line) == stage
