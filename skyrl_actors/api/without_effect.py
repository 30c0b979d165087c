"""Fields of the Tinker protocol that are accepted and have no effect, each with the reason.

All other fields take effect or are refused.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldWithoutEffect:
    """A field of a body. `call` is the last part of the path, `body` the class or message."""

    call: str
    body: str
    field: str
    reason: str


SPANS = "only the loss `stable_reinforce` reads them, which is refused"
FIELDS = (
    FieldWithoutEffect(
        call="create_session",
        body="CreateSession",
        field="sdk_version",
        reason="all versions of the SDK are served alike",
    ),
    FieldWithoutEffect(
        call="forward_backward", body="Datum", field="model_input_spans", reason=SPANS
    ),
    FieldWithoutEffect(
        call="forward_backward", body="Datum", field="loss_fn_input_spans", reason=SPANS
    ),
    FieldWithoutEffect(
        call="create_custom_loss",
        body="CreateCustomLoss",
        field="custom_loss_seq_id",
        reason="the id of a loss is its content, so a repeated request gets the same id",
    ),
    FieldWithoutEffect(
        call="retrieve_future",
        body="RetrieveFuture",
        field="allow_metadata_only",
        reason="a permission to answer with the size first; every answer is the result itself",
    ),
    FieldWithoutEffect(
        call="retrieve_futures",
        body="RetrieveFutures",
        field="retrieved_request_ids",
        reason="a permission to delete answers early; they leave memory 30 s after they were read",
    ),
    FieldWithoutEffect(
        call="sessions/search",
        body="SearchSessions",
        field="owner",
        reason="only its caller can list a session, so `own` and `accessible` are the same",
    ),
)
