from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.workloads.http import EventLines, PostUrl, ProtocolError, body_pieces, parse_head


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def body_of(pieces: list[bytes], headers: dict[str, str]) -> list[bytes]:
    """Read a body that arrives in these pieces, until the connection ends."""

    async def read() -> list[bytes]:
        reader = asyncio.StreamReader()
        for piece in pieces:
            reader.feed_data(piece)
        reader.feed_eof()
        return [piece async for piece in body_pieces(reader, headers)]

    return asyncio.run(read())


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(0, 500), max_size=20))
def test_a_chunked_body_is_the_same_however_it_was_cut(chunks: list[bytes], places: list[int]) -> None:
    framed = b"".join(f"{len(chunk):X};ext=1\r\n".encode() + chunk + b"\r\n" for chunk in chunks) + b"0\r\n\r\n"
    assert body_of(cut(framed, places), {"transfer-encoding": "chunked"}) == chunks


def test_a_body_of_given_length_ends_there() -> None:
    assert body_of([b"ab", b"cd"], {"content-length": "3"}) == [b"abc"]


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    assert b"".join(body_of([b"ab", b"c"], {})) == b"abc"


def test_a_chunk_without_a_size_is_an_error() -> None:
    with pytest.raises(ProtocolError):
        body_of([b"zz\r\nabc"], {"transfer-encoding": "chunked"})


@given(st.lists(st.integers(0, 200), max_size=20), st.sampled_from(["\n", "\r\n"]))
def test_events_are_the_same_however_the_stream_was_cut(places: list[int], newline: str) -> None:
    text = 'data: {"a": 1}~~: a comment~event: x~data:{"b": "é"}~~data: [DONE]~~'.replace("~", newline)
    events = EventLines()
    found = [payload for piece in cut(text.encode(), places) for payload in events.feed(piece)]
    assert found == [b'{"a": 1}', '{"b": "é"}'.encode(), b"[DONE]"]


def test_urls_are_read_with_their_defaults() -> None:
    assert PostUrl.parse("http://localhost/v1") == PostUrl("localhost", 80, "/v1")
    assert PostUrl.parse("https://host:8443") == PostUrl("host", 8443, "/", tls=True)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not an http URL"):
        PostUrl.parse(url)


def test_a_head_gives_status_and_headers() -> None:
    assert parse_head(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX: a:b") == (200, {"content-length": "5", "x": "a:b"})


@pytest.mark.parametrize("head", [b"SSH-2.0-x", b"HTTP/1.1", b"HTTP/1.1 abc"])
def test_what_is_not_http_is_refused(head: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_head(head)
