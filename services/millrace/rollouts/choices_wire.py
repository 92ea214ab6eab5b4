"""Several completions of one prompt in one answer, each sent as soon as it has ended, as engines and env workers agree.

An engine that can do so says it by a header of its answers to chats and to texts. A request with `n` and the field
below is then answered by lines, one per choice in the order in which they end: `{"index": …, "status": …, "body": …}`,
where status and body are those of an answer to a request for this choice alone, whose own index is 0, but for its
log-probs. They are one list, in the order of its `token_ids`: to name every token in text costs more than all the rest.
"""

HEADER = "x-millrace-choices"
"""Of an answer: `lines` if the engine sends choices one by one."""
LINES = "lines"
FIELD = "stream_choices"
"""Of a request: it wants that."""
LOGPROBS = "token_logprobs"
"""Of a choice's `logprobs`: OpenAI's name for texts; for chats its API has `content`."""
CONTENT_TYPE = "application/x-ndjson"
MAX_CHOICES = 128
"""`n` of one request."""
