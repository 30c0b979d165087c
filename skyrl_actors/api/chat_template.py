"""Chat templates of base models: the text of a chat, and the variables that a caller may set.

Templates are Jinja with the additions of transformers: loop controls, `raise_exception`,
`strftime_now`, and tags around the assistant's turns.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skyrl_actors.messages.errors import InvalidRequest

# A template can fail in any way on tools and messages that its author did not expect.
RENDER_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RuntimeError)
# Tags around the assistant's turns, for masks. They add no text.
TURN_BEGINS = re.compile(r"\{%(-?)\s*generation\s*(-?)%\}")
TURN_ENDS = re.compile(r"\{%(-?)\s*endgeneration\s*(-?)%\}")
OWN = frozenset(
    (
        "messages",
        "add_generation_prompt",
        "tools",
        "documents",
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
    )
)
"""Variables that the service sets."""


def with_known_roles(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Return the messages with the role system for developer, if the template lacks that role.

    OpenAI's newer name of system: most templates leave out what they do not know.
    """
    if "developer" in template:
        return [dict(message) for message in messages]
    return [
        {**message, "role": "system"} if message.get("role") == "developer" else dict(message)
        for message in messages
    ]


def rendered(template: str, variables: Mapping[str, Any]) -> str:
    """Return the text. Raises TemplateError for a template or values that cannot be used."""
    return _environment().from_string(_plain(template)).render(dict(variables))


def variables_of(template: str) -> frozenset[str]:
    """Return the variables that the template reads and a caller may set."""
    environment = _environment()
    read = meta.find_undeclared_variables(environment.parse(_plain(template)))
    return frozenset(read) - OWN - environment.globals.keys()


def reads_tools(template: str) -> bool:
    """Return whether the template describes tools."""
    environment = _environment()
    return "tools" in meta.find_undeclared_variables(environment.parse(_plain(template)))


def check_kwargs(template: str, given: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a variable that the template does not read."""
    if not given:
        return
    known = variables_of(template)
    if unknown := sorted(set(given) - known):
        raise InvalidRequest(
            f"chat_template_kwargs {', '.join(unknown)}: the chat template does not read this; "
            f"it reads {', '.join(sorted(known)) or 'no variable that can be set'}"
        )


def _environment() -> Any:  # Any: Jinja's annotations know only its own filters and globals
    made = cast(
        Any,
        ImmutableSandboxedEnvironment(
            extensions=["jinja2.ext.loopcontrols"], trim_blocks=True, lstrip_blocks=True
        ),
    )
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = _now
    made.filters["tojson"] = _as_json
    return made


def _plain(template: str) -> str:
    """Return the template without the marks of turns, with the same trimming of whitespace."""
    return TURN_ENDS.sub(r"{%\1 endif \2%}", TURN_BEGINS.sub(r"{%\1 if true \2%}", template))


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _refuse(message: str) -> None:
    raise TemplateError(message)
