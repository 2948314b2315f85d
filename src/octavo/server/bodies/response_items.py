"""The items of responses: their ids, references to stored ones, and pages of them.

An id tells which response an item belongs to, so that a reference to it leads to the stored response:

    resp_4f1c…        a response
    msg_4f1c…0002     the third item of its output; rs_ and fc_ are reasoning and calls
    msg_4f1c…i0002    the third item of its input; fco_ is the output of a call
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from octavo.errors import RequestError, shortened, shown
from octavo.server.errors import ApiError

Item = dict[str, Any]

MAX_ID_LENGTH = 256
# The number of items of a page: by default, and at most; as in OpenAI's API.
PAGE, LARGEST_PAGE = 20, 100
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_ID = re.compile(r"[a-z]+_([0-9a-f]{32})i?[0-9a-f]{4}")


class ItemMissingError(ApiError):
    """A request refers to an item that is not stored, or not for this tenant."""

    def __init__(self, item_id: str, param: str) -> None:
        super().__init__(
            HTTPStatus.NOT_FOUND,
            f"There is no item `{shortened(item_id)}`; its response may not have been stored (store: false), may have "
            "made room for newer ones (--max-stored-responses, --max-stored-tenant-responses), or been lost with a "
            "restart.",
            param=param,
            code="item_not_found",
        )


def response_id_of(request_id: str) -> str:
    """Return a response's id in OpenAI's form: "resp-4f1c…" -> "resp_4f1c…"."""
    return request_id.replace("-", "_", 1)


def output_id(prefix: str, response_id: str, index: int) -> str:
    """Return the id of an item of a response's output."""
    return f"{prefix}_{response_id.partition('_')[2]}{index:04x}"


def response_of(item_id: str) -> str:
    """Return the id of the response that an item belongs to; "" if the id is none of this server's."""
    found = _ID.fullmatch(item_id)
    return f"resp_{found[1]}" if found else ""


def references(items: list[Item]) -> dict[int, str]:
    """Return the ids of the items that are referred to, by position; raise `RequestError` for one without an id."""
    found = {}
    for place, item in enumerate(items):
        # OpenAI's reference makes the type of a reference optional.
        if item.get("type") == "item_reference" or item.keys() == {"id"}:
            item_id = item.get("id")
            if not isinstance(item_id, str):
                raise RequestError(
                    f"input[{place}] must have the id of an item, got {shown(item_id)}", param=f"input[{place}]"
                )
            found[place] = item_id
    return found


def resolved(items: list[Item], stored: Iterable[Item]) -> list[Item]:
    """Return the items with the stored ones in place of references to them; raise `ItemMissingError`."""
    if not (wanted := references(items)):
        return items
    by_id = {item["id"]: item for item in stored}
    for place, item_id in wanted.items():
        if item_id not in by_id:
            raise ItemMissingError(item_id, f"input[{place}]")
    return [by_id[wanted[place]] if place in wanted else item for place, item in enumerate(items)]


def with_ids(items: list[Item], response_id: str, earlier: Iterable[Item]) -> list[Item]:
    """Return a response's new input items with ids; those that clients give are kept if they are unique."""
    known = {item["id"] for item in earlier}
    result = []
    for index, item in enumerate(items):
        item_id = item.get("id")
        if not isinstance(item_id, str) or not 0 < len(item_id) <= MAX_ID_LENGTH or item_id in known:
            # A type that is not a string is refused later; it may not even be hashable.
            kind = str(item.get("type", "message"))
            item_id = output_id(_PREFIXES.get(kind, "item"), f"{response_id}i", index)
        known.add(item_id)
        result.append({**item, "id": item_id})
    return result


def page(items: list[Item], query: dict[str, str]) -> dict[str, Any]:
    """Return a page of input items as OpenAI's list; raise `RequestError` for an invalid query."""
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise RequestError(f'order must be "asc" or "desc", got {shown(order)}', param="order")
    limit = query.get("limit", str(PAGE))
    if not re.fullmatch("[0-9]{1,9}", limit) or not 1 <= int(limit) <= LARGEST_PAGE:
        raise RequestError(f"limit must be between 1 and {LARGEST_PAGE}, got {shown(limit)}", param="limit")
    listed = items if order == "asc" else items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise ItemMissingError(after, "after")
        listed = listed[places[0] + 1 :]
    shown_items = [_listed(item) for item in listed[: int(limit)]]
    return {
        "object": "list",
        "data": shown_items,
        "first_id": shown_items[0]["id"] if shown_items else None,
        "last_id": shown_items[-1]["id"] if shown_items else None,
        "has_more": len(listed) > len(shown_items),
    }


def _listed(item: Item) -> Item:
    """Return an item as it is listed: with a type and a status, and a message's text as a part."""
    told = {"type": "message", "status": "completed", **item}
    if told["type"] == "message" and isinstance(text := item.get("content"), str):
        kind = {"type": "output_text", "annotations": []} if item["role"] == "assistant" else {"type": "input_text"}
        told["content"] = [{**kind, "text": text}]
    return told
