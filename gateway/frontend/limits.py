"""Every limit of the front doors, by name. docs/limits.md is the same table for readers;
a test keeps the two equal.

Limits that follow from the model (vocabulary, context length) or from flags
(max_num_seqs, ...) are not here. What is over a limit is refused with the
field, the value and the limit; nothing is cut in silence.
"""

from __future__ import annotations

from services.ranges import MAX_SEED as MAX_SEED
from services.rpc import INFERENCE_MAX_REQUEST_BYTES

MAX_BODY_BYTES = INFERENCE_MAX_REQUEST_BYTES
"""HTTP body, counted while it is read; the same as one gRPC request message."""

MAX_CONNECTIONS = 4096
"""HTTP connections that are open at a time, or 512 less than the process's open files where that
is less; the next one gets 429 and is closed. With TLS they count from the end of the handshake."""

MAX_TLS_HANDSHAKES = 256
"""TLS handshakes of HTTP connections at a time. The next connection waits for one to end, or
takes the place of one that has lasted a second, of the address that has most of them."""

HEAD_TIMEOUT_SECONDS = 20.0
"""From the start of a connection, or of a request on it, until the request's head is there; then
the connection is closed. A TLS handshake has as long, before that. What comes after an answer, be
it the rest of a body that nobody waits for or no request at all, has to end in this time too."""

MAX_HEAD_BYTES = 64 * 1024
"""Of a request line with its headers, and of a chunked body's trailers, which nobody reads."""

BODY_TIMEOUT_SECONDS = 30.0
"""A body that has not arrived by then is given up, so that slow senders hold nothing."""

SPARE_RPCS = 1024
"""gRPC calls that are answered at a time beyond the generations that may run and wait:
tokenizing, and answers that are still to be taken."""

MAX_PENDING_TOKENIZATIONS = 64
"""Long texts that wait for the tokenizer's thread; each may be a whole body."""

INLINE_TEXT_CHARS = 4096
"""Longer texts are tokenized in a thread of their own: about 1 ms on the event loop."""

MAX_TOKENIZE_CHARS = 2 * 1024 * 1024
"""Of a text, or of a conversation's texts together, for /tokenize and Tokenize. Prompts that
are continued have the context length as their limit."""

MAX_TOKEN_STRS = 256 * 1024
"""Ids that /tokenize and Tokenize give as text one by one."""

MAX_DETOKENIZE_IDS = 1024 * 1024
"""Ids of one /detokenize or Detokenize call."""

MAX_REQUEST_SECONDS = 3600.0
"""Deadline of a request whose client sets none, and the longest that one may ask for."""

MAX_REQUEST_ID_CHARS = 128
"""Of x-request-id and of gRPC's request_id; printable ASCII."""

MAX_N = 16
"""Choices for each prompt."""

MAX_PROMPTS_PER_REQUEST = 64
"""Prompts in one completions call."""

MAX_CHOICES_PER_REQUEST = 128
"""Prompts times n in one completions call."""

MAX_MESSAGES = 2048
"""Messages of one conversation."""

MAX_CONTENT_PARTS = 1024
"""Text parts of one message."""

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
"""Each generated piece is compared with each of them."""

MAX_STOP_TOKEN_IDS = 64

MAX_LOGPROBS = 20
"""logprobs of completions and top_logprobs of chat."""

MAX_LOGIT_BIAS_ENTRIES = 1024
LOGIT_BIAS_BOUND = 100.0
"""Each entry is within -100 and 100, OpenAI's range."""

MAX_TEMPERATURE = 2.0
PENALTY_BOUND = 2.0
"""presence_penalty and frequency_penalty are within -2 and 2."""

MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
"""Logits are divided by it: a value near 0 makes them infinite, and no token can be drawn."""

MAX_PRIORITY = 2**31 - 1
"""Between minus this and this: what the wire carries."""

MAX_CACHE_SALT_CHARS = 128

DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions where it is absent, as OpenAI has it. Chat and gRPC
take what the context leaves."""

RETRY_AFTER_SECONDS = 1.0
"""Told with 429 and 503 where nothing better is known."""
