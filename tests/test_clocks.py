"""Setting the clock changes nothing: what waits, expires or is tried again goes by the monotonic clock."""

from __future__ import annotations

import re
from pathlib import Path

import octavo

SOURCE = Path(octavo.__file__).parent
WALL_CLOCK = re.compile(
    r"\btime\.(time|time_ns|localtime|gmtime|strftime|ctime)\b|\b(datetime|date)\.(now|utcnow|today)\b"
    r"|^from time import",
    re.MULTILINE,
)
TELL_THE_TIME = {
    "server/openai_api.py",  # when a model was created
    "server/answers/generation.py",  # when an answer was created
    "cluster/app.py",  # since when the router lists its models
    "engine/kv_events.py",  # when a batch was published, and the first number of a process
    "server/answers/responses.py",  # when it was completed
    "server/bodies/local_bodies.py",  # when an answer of Ollama's API was created
    "server/http/logs.py",
    "observe/tracing.py",  # when a span began
    "text/chat_template.py",  # strftime_now of templates
}


def test_only_what_tells_people_the_time_reads_a_clock_that_can_be_set() -> None:
    readers = {str(p.relative_to(SOURCE)) for p in SOURCE.rglob("*.py") if WALL_CLOCK.search(p.read_text())}
    assert readers == TELL_THE_TIME
