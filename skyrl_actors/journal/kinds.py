"""The properties of kinds of requests by which the journal selects rows."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """Kinds by property. The controller's verbs state the properties (`controller/verbs`)."""

    creates: str  # creates a model
    ends: str  # removes a model
    settles: frozenset[str]  # with an effect: no earlier operation of the model is pending
    failure_matters: frozenset[str]  # a failure without an effect determines the model's state
    reads_files: frozenset[str]  # can read files outside of the journal
