"""Keys of conversations' records and messages: what is read, what is harmless, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping

SYSTEM, DEVELOPER, USER, ASSISTANT, TOOL = "system", "developer", "user", "assistant", "tool"

ROLES: Mapping[str, str] = {
    SYSTEM: SYSTEM,
    DEVELOPER: DEVELOPER,
    USER: USER,
    ASSISTANT: ASSISTANT,
    TOOL: TOOL,
    "human": USER,
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "model": ASSISTANT,
    "function": TOOL,
    "observation": TOOL,
    "tool_response": TOOL,
    "function_call": ASSISTANT,
    "tool_call": ASSISTANT,
}
"""Names of roles: those of chat templates, of ShareGPT, and of OpenAI's deprecated functions."""

CALLS = frozenset({"function_call", "tool_call"})
"""Roles of messages whose content is a tool call in JSON."""

CONVERSATIONS = ("messages", "conversations", "conversation")
"""Keys of a record that hold its messages."""

ALIASES: Mapping[str, str] = {"from": "role", "value": "content"}
"""Keys of ShareGPT's messages."""

OPTIONS = frozenset({"tools", "functions", "documents", "chat_template_kwargs"})
"""Keys of a record that are given to the template beside the messages."""

SET_HERE = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Variables of a template that `chat_template_kwargs` cannot set."""

WEIGHT_KEYS = ("weight", "train", "training")
"""Keys of a message that say whether its labels count: OpenAI's, and two that axolotl's configs name."""

REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})
"""Names of an answer's thoughts. `transformers` gives them to a template under the name that it reads."""

TEXTS = REASONING | {"tool_call_id", "name"}
"""Further keys of messages whose values are text."""

TAKE_ANOTHER = "take a template that does (data.chat_template), or remove it"

_ORIGIN, _ABOUT, _MEASURE = "says where a record is from", "describes a record", "measures a record"
_NAME = "names a record or a message"
HARMLESS: Mapping[str, str] = {
    **dict.fromkeys(("id", "_id", "idx", "index", "uuid", "uid", "hash", "key"), _NAME),
    **dict.fromkeys(
        ("conversation_id", "conversation_hash", "prompt_id", "message_id", "sample_id", "example_id"), _NAME
    ),
    **dict.fromkeys(("source", "dataset", "origin", "url", "license", "author", "created_by", "generator"), _ORIGIN),
    **dict.fromkeys(("model", "model_name", "timestamp", "created_at", "date", "version", "split", "subset"), _ORIGIN),
    **dict.fromkeys(("metadata", "meta", "category", "categories", "tags", "topic", "task", "task_type"), _ABOUT),
    **dict.fromkeys(("language", "lang", "domain", "difficulty", "title", "name", "avatarUrl", "avatar"), _ABOUT),
    **dict.fromkeys(("score", "quality", "rating", "toxic", "redacted", "num_turns", "turn", "turns"), _MEASURE),
    **dict.fromkeys(("num_tokens", "n_tokens", "token_count", "tokens", "length", "turn_identifier"), _MEASURE),
    "parallel_tool_calls": "is an option of a request to OpenAI; no template writes it",
    "text": "is the same record as its authors rendered it",
}
"""Keys that may be left out, with the reason. Those of a message are given to a template that reads them."""

HARMLESS_IN_MESSAGES: Mapping[str, str] = {
    "tool_call_id": "names the call of a result; in templates that do not write it, the order does",
}
"""Further keys of messages that may be left out."""

PREFERENCE, NOT_TEXT = "a preference", "not text"
"""Kinds of faults."""

_PREFERENCES = "it is a preference, and preferences are not trained on; keep the answer to be learned, as a completion"
_LABEL = "it may say that the answer is a bad one; keep the good ones, and name it in data.ignored_keys"
_TEXT_ONLY = "only text is learned; remove the record or the key"
_ENCODED = 'it is encoded already; give the conversation, or its text with data.format = "text"'
REFUSED: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("chosen", "rejected"), (PREFERENCE, _PREFERENCES)),
    **dict.fromkeys(("label", "kto_tag"), (PREFERENCE, _LABEL)),
    **dict.fromkeys(("preferred_output", "non_preferred_output"), (PREFERENCE, _PREFERENCES)),
    **dict.fromkeys(("preferred_completion", "non_preferred_completion"), (PREFERENCE, _PREFERENCES)),
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), (NOT_TEXT, _TEXT_ONLY)),
    **dict.fromkeys(("input_ids", "labels", "attention_mask"), (NOT_TEXT, _ENCODED)),
}
"""Keys that change what a record means: the kind of fault, and the reason."""
