"""Errors of remote calls name their cause."""

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.remote import ActorDied, cause_of_death, merged

CONSTRUCTOR = """The actor died because of an error raised in its creation task, \
\x1b[36mray::s:controller:ControllerActor.__init__()\x1b[39m (pid=1, ip=10.0.0.2)
  File "controller.py", line 67, in __init__
    self.controller = self.build()
AttributeError: 'ControllerActor' object has no attribute 'parts'
"""
NODE_LOST = """The actor died unexpectedly before finishing this task.
\tclass_name: Rank
\tactor_id: 5
"""


def test_an_actor_that_fails_in_its_constructor_is_explained_by_the_exception():
    assert cause_of_death(CONSTRUCTOR) == (
        "AttributeError: 'ControllerActor' object has no attribute 'parts'"
    )


def test_an_actor_that_dies_later_is_explained_by_the_first_line():
    assert cause_of_death(NODE_LOST) == "The actor died unexpectedly before finishing this task."


def test_refusals_of_different_rows_are_the_clients_fault():
    one, two = InvalidRequest("datum 0 is not finite"), InvalidRequest("datum 5 is not finite")
    assert merged({"rank 0": one, "rank 1": two}, "policy") is one
    assert type(merged({"rank 0": one, "rank 1": ActorDied("died")}, "policy")) is ActorDied
