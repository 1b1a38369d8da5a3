"""Tools, tool calls and other values of conversations' records, which may be given as JSON text."""

from __future__ import annotations

from typing import Any

from atoll.base.documents import parse_json
from atoll.base.errors import RecordError
from atoll.training.data import keys
from atoll.training.data.keys import ASSISTANT

NOT_A_CONVERSATION, BROKEN_MESSAGE, BROKEN_TOOLS = "not a conversation", "a broken message", "broken tools"
"""Kinds of faults."""


def tools_of(given: dict[str, Any], where: str) -> list[dict[str, Any]] | None:
    """Return the tools of a record as functions with their schemas, or None."""
    found: list[dict[str, Any]] = []
    for key in ("tools", "functions"):
        value = parsed(given.get(key), key, where)
        if value is None or is_empty(value):
            continue
        if not isinstance(value, list):
            raise RecordError(where, BROKEN_TOOLS, f"{key} is a {type(value).__name__}, not a list")
        found += [_tool(each, f"{where}, {key} {number}") for number, each in enumerate(value, start=1)]
    return found or None


def _tool(value: Any, where: str) -> dict[str, Any]:
    """Return a tool as `transformers` describes one: its kind, and the function. A function alone gets its kind."""
    if not isinstance(value, dict):
        raise RecordError(where, BROKEN_TOOLS, f"a {type(value).__name__}, not an object")
    kind = value.get("type", "function")
    if "function" not in value:
        value = {"type": kind, "function": {key: each for key, each in value.items() if key != "type"}}
    function = value["function"]
    if kind != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RecordError(where, BROKEN_TOOLS, 'not a function with a name: {"name": ..., "parameters": {...}}')
    return {"type": "function", **value}


def calls_of(value: Any, role: str, where: str) -> list[dict[str, Any]]:
    """Return tool calls. Arguments are an object, or the JSON text of one."""
    if role != ASSISTANT:
        raise RecordError(where, BROKEN_MESSAGE, f"the {role}'s message has tool_calls, which only the assistant makes")
    value = parsed(value, "tool_calls", where)
    found = []
    for number, call in enumerate(value if isinstance(value, list) else [value], start=1):
        at = f"{where}, tool call {number}"
        if not isinstance(call, dict):
            raise RecordError(at, BROKEN_MESSAGE, f"a {type(call).__name__}, not an object")
        function = call.get("function", {key: each for key, each in call.items() if key not in ("id", "type", "index")})
        unused = set(call) - {"function", "id", "type", "index"} if "function" in call else set()
        if isinstance(function, dict):
            unused |= set(function) - {"name", "arguments"}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or unused:
            raise RecordError(
                at, BROKEN_MESSAGE, f"not a call, which has the function's name and its arguments: {sorted(call)}"
            )
        arguments = function.get("arguments", {})
        if not isinstance(read := parsed(arguments, "arguments", at), dict):
            raise RecordError(at, BROKEN_MESSAGE, f"arguments are a {type(read).__name__}, not an object")
        names = {} if call.get("id") is None else {"id": text_of(call["id"], "id", at)}
        found.append({**names, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return found


def documents_of(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the documents of a record, for a template that writes them."""
    value = parsed(given.get("documents"), "documents", where)
    if value is None or is_empty(value):
        return {}
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise RecordError(where, NOT_A_CONVERSATION, "documents are not a list of objects")
    return {"documents": value}


def variables_of(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the template's own variables that a record sets."""
    value = parsed(given.get("chat_template_kwargs"), "chat_template_kwargs", where)
    if value is None or is_empty(value):
        return {}
    if not isinstance(value, dict) or not keys.SET_HERE.isdisjoint(value):
        own = ", ".join(sorted(keys.SET_HERE))
        raise RecordError(
            where, NOT_A_CONVERSATION, f"chat_template_kwargs are an object of the template's variables, without {own}"
        )
    return value


def parsed(value: Any, what: str, where: str) -> Any:
    """Return a value that may be given as JSON text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return parse_json(value)
    except ValueError as error:
        raise RecordError(where, BROKEN_MESSAGE, f"{what}: not JSON ({error})") from error


def is_empty(value: Any) -> bool:
    """Return True for null, and for a text, a list and an object without content."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def text_of(value: Any, what: str, where: str) -> str:
    """Return a text. Raises RecordError for any other value of `what`."""
    if not isinstance(value, str):
        raise RecordError(where, BROKEN_MESSAGE, f"{what} is a {type(value).__name__}, not text")
    return value.encode("utf-8", errors="replace").decode("utf-8")
