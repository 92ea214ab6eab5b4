"""Log lines: fields, formats, and secrets that must not get out."""

import asyncio
import io
import json
import logging as stdlib_logging
import sys
import threading
from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from millrace.cli.log_files import RunLines
from millrace.errors import InvalidSpecError
from millrace.telemetry import logging
from millrace.telemetry.logging import MAX_CHARS, masked, redact, redacted_end, secrets_of


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = stdlib_logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    stdlib_logging.captureWarnings(False)


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def configure(*, json_lines: bool = False, level: str = "INFO", environ: dict[str, str] | None = None) -> io.StringIO:
    stream = io.StringIO()
    logging.setup("trainer", level=level, json_lines=json_lines, stream=stream, environ=environ or {})
    return stream


def test_plain_line_has_time_level_service_message_and_fields() -> None:
    stream = configure()
    with logging.bind(run="x"):
        stdlib_logging.getLogger("a.b").info(
            "step %d completed", 3, extra={"reward": 0.3125, "note": "two words", "empty": ""}
        )
    (line,) = lines(stream)
    time, rest = line.split(" ", 1)
    assert time.endswith("Z")
    assert rest == 'INFO trainer step 3 completed run=x reward=0.3125 note="two words" empty=""'


def test_json_line_is_one_object() -> None:
    stream = configure(json_lines=True)
    with logging.bind(run="x", step=1), logging.bind(step=2):
        stdlib_logging.getLogger("a.b").warning("slow", extra={"path": io.StringIO, "msg_like": 'a "b"', "ts": "mine"})
    (line,) = lines(stream)
    entry = json.loads(line)
    assert (entry["level"], entry["service"], entry["msg"], entry["logger"]) == ("WARNING", "trainer", "slow", "a.b")
    assert (entry["run"], entry["step"], entry["msg_like"], entry["field_ts"]) == ("x", 2, 'a "b"', "mine")
    assert entry["ts"].endswith("Z")


def test_a_file_has_the_lines_too_and_those_that_are_for_it_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(logging, "FILE_BYTES", 300)
    path = tmp_path / "trainer.log"
    stream = configure(environ={"MILLRACE_LOG_FILE": str(path), "MILLRACE_TOKEN": "abcdefgh12345678"})
    log = stdlib_logging.getLogger("a")
    log.info("both, with abcdefgh12345678")
    log.info("step completed", extra={"step": 1, logging.FILE_ONLY: True})
    assert len(lines(stream)) == 1
    both, alone = path.read_text().splitlines()
    assert both.endswith("INFO trainer both, with ***") and alone.endswith("INFO trainer step completed step=1")
    for number in range(20):
        log.info("line %d", number)
    assert path.stat().st_size <= 300 and {each.name for each in tmp_path.iterdir()} == {path.name, "trainer.log.1"}


def test_format_and_level_come_from_the_environment() -> None:
    stream = io.StringIO()
    logging.setup("s", stream=stream, environ={"MILLRACE_LOG_JSON": "1", "MILLRACE_LOG_LEVEL": "warning"})
    stdlib_logging.getLogger("x").info("not shown")
    stdlib_logging.getLogger("x").warning("shown")
    (line,) = lines(stream)
    assert json.loads(line)["msg"] == "shown"


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(InvalidSpecError, match=r"MILLRACE_LOG_LEVEL.*LOUD"):
        logging.setup("s", environ={"MILLRACE_LOG_LEVEL": "loud"})


def test_setup_twice_logs_once() -> None:
    configure()
    stream = configure()
    stdlib_logging.getLogger("x").info("once")
    assert len(lines(stream)) == 1


def test_a_message_with_newlines_stays_one_line() -> None:
    stream = configure()
    stdlib_logging.getLogger("x").info("a\nb", extra={"field": "c\nd"})
    assert len(lines(stream)) == 1


def test_libraries_are_quiet_below_warning() -> None:
    stream = configure(level="DEBUG")
    stdlib_logging.getLogger("botocore.auth").debug("signature")
    stdlib_logging.getLogger("botocore.auth").warning("shown")
    assert len(lines(stream)) == 1


async def test_bound_fields_belong_to_one_task() -> None:
    stream = configure()

    async def work(name: str) -> None:
        with logging.bind(task_name=name):
            await asyncio.sleep(0)
            stdlib_logging.getLogger("x").info("hello")

    async with asyncio.TaskGroup() as group:
        group.create_task(work("a"))
        group.create_task(work("b"))
    stdlib_logging.getLogger("x").info("outside")
    assert [line.partition("trainer ")[2] for line in lines(stream)] == [
        "hello task_name=a",
        "hello task_name=b",
        "outside",
    ]


SECRETS = {
    "AWS_SECRET_ACCESS_KEY": 'wJalr"XUtn/K7MDENG',
    "MILLRACE_REDIS_URL": "redis://user:p%40ssw0rd@h:1",
    "WANDB_API_KEY": "0123456789abcdef",
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "HF_TOKEN": "hf_abcdefghijk",
    "TOKENIZERS_PARALLELISM": "false-ish-value",
}


@pytest.mark.parametrize("json_lines", [False, True])
def test_no_secret_gets_out_by_message_argument_extra_bound_field_or_traceback(json_lines: bool) -> None:
    stream = configure(json_lines=json_lines, environ=SECRETS)
    key = SECRETS["AWS_SECRET_ACCESS_KEY"]
    log = stdlib_logging.getLogger("x")
    log.info(f"key {key}")
    log.info("key %s of %s", key, "redis://user:p@ss@h:6379/0")
    log.info("extra", extra={"url": "rediss://:longpassword@h:1", "nested": {"k": [key]}, "secret": SecretStr(key)})
    with logging.bind(api="0123456789abcdef"):
        log.info("bound; authorization: Bearer abcdefgh.ijkl-mnop")
    try:
        raise ValueError(f"cannot sign with {key} at redis://user:p%40ssw0rd@h:1")
    except ValueError:
        log.exception("failed; the decoded password is p@ssw0rd")
    text = stream.getvalue()
    forms = (key, json.dumps(key)[1:-1], "p@ss", "ssw0rd", "longpassword", "0123456789abcdef", "abcdefgh.ijkl")
    for form in forms:
        assert form not in text, form
    assert text.count("***") >= 8
    if json_lines:
        assert all(json.loads(line) for line in lines(stream))


def test_ordinary_text_is_left_alone() -> None:
    environ = {"MODE_TOKEN": "true", **SECRETS}
    secrets = secrets_of(environ)
    assert "false-ish-value" not in secrets
    assert "AKIDEXAMPLE" not in secrets
    plain = "true http://h:8000/v1 a@b.c tokens=12 num_tokens: 5 s3://b/x?endpoint=http://h:1 at 12:30:45 api_key_var=X"
    assert redact(plain, secrets=secrets) == plain


def test_a_masked_json_line_stays_json() -> None:
    stream = configure(json_lines=True)
    extra = {
        "url": "http://h:8000",
        "mail": "x@y",
        "pair": ["http://h:8", "a@b"],
        "text": '{"u":"http://h:8","m":"a@b"}',
    }
    stdlib_logging.getLogger("x").info("m", extra=extra)
    (line,) = lines(stream)
    assert {key: json.loads(line)[key] for key in extra} == extra


@pytest.mark.parametrize("name", ["X-API-Key", "api-key", "accessToken", "Authorization", "hf_token", "CLIENT_SECRET"])
def test_a_secret_is_known_by_its_name_however_it_is_written(name: str) -> None:
    assert masked({"a": {name: "plain", "b": [{name: ["one", "two"]}]}}, ()) == {
        "a": {name: "***", "b": [{name: ["***", "***"]}]}
    }


@pytest.mark.parametrize("name", ["num_tokens", "tokens", "api_key_var", "tokenizer", "keys", "author"])
def test_what_only_sounds_like_one_is_shown(name: str) -> None:
    assert masked({name: "plain"}, ()) == {name: "plain"}


def test_pairs_are_masked() -> None:
    text = redact('password=abc, "api_key": "k1", X-Amz-Signature=ff0&x=1', secrets=())
    assert text == 'password=***, "api_key": "***", X-Amz-Signature=***&x=1'


async def test_an_abandoned_stream_may_be_closed_by_another_task():
    async def stream():
        with logging.bind(request_id="x"):
            yield 1

    responses = stream()
    assert await asyncio.create_task(anext(responses)) == 1
    await asyncio.create_task(responses.aclose())
    assert logging.bound("request_id") is None


def test_a_message_that_comes_again_and_again_is_counted():
    now = [0.0]
    limit = logging.RateLimit(clock=lambda: now[0])

    def written(
        count: int, text: str = "rollout {} failed", level: int = stdlib_logging.WARNING
    ) -> list[tuple[int, int]]:
        """Return the numbers of the lines that pass, and what they say that was left out."""
        found = []
        for number in range(1, count + 1):
            record = stdlib_logging.LogRecord("env", level, "x", 1, text.format(number), (), None)
            if limit.filter(record):
                found.append((number, getattr(record, "left_out", 0)))
        return found

    assert written(1000) == [(n, 0) for n in range(1, 21)] + [(32, 11), (64, 31), (128, 63), (256, 127), (512, 255)]
    assert len(written(30, "another message")) == 20, "each message has its own lines"
    assert len(written(1000, level=stdlib_logging.INFO)) == 1000, "what is no warning is never left out"
    now[0] = 61.0
    assert written(1) == [(1, 488)], "the next minute's first line says how many were left out"


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "db_password", "X_AWS_SECRET_ACCESS_KEY"])
def test_pairs_are_masked_whatever_stands_before_the_name(name: str) -> None:
    assert redact(f"{name}=hunter2hunter2 x", secrets=()) == f"{name}=*** x"


def test_a_table_under_the_name_of_a_secret_is_masked() -> None:
    given = {"credentials": {"user": "ann", "value": "plain", "more": [{"x": "plain"}], "port": 1}}
    masks = {"user": "***", "value": "***", "more": [{"x": "***"}], "port": 1}
    assert masked(given, ()) == {"credentials": masks}


def test_a_secret_at_the_end_of_what_is_shown_leaves_no_beginning() -> None:
    secret = "s3cr3t-" + "0123456789" * 4
    text = "x " * ((MAX_CHARS - 20) // 2) + secret
    assert "s3cr3t" not in masked(text + " and more" * 100, (secret,))
    assert redacted_end(f"{secret} {'y' * 380}", 400, secrets=(secret,)).count("9") == 0


def test_a_number_that_json_does_not_have_does_not_break_a_line() -> None:
    stream = io.StringIO()
    logging.setup("trainer", json_lines=True, stream=stream, environ={})
    stdlib_logging.getLogger("x").info("step completed", extra={"run": "letters-1", "loss": float("nan")})
    (line,) = lines(stream)
    assert RunLines("01a2", "letters-1").has(line), "`millrace run logs --component` shows it"


def test_messages_of_many_threads_are_counted_without_an_error() -> None:
    limit, problems = logging.RateLimit(), []
    interval = sys.getswitchinterval()

    def write(thread: str) -> None:
        try:
            for number in range(4000):
                text = thread + "".join("abcdefghij"[int(digit)] for digit in str(number))
                limit.filter(stdlib_logging.LogRecord(thread, stdlib_logging.WARNING, "", 0, text, (), None))
        except (KeyError, RuntimeError, StopIteration) as error:
            problems.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcdef"]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not problems
