"""A folder of ALFWorld: games of two places and apples, with domain, grammar and problem in the form of its files."""

from __future__ import annotations

import json
from pathlib import Path

DOMAIN = """(define (domain small)
 (:requirements :adl :typing :action-costs)
 (:types agent location receptacle object)
 (:predicates
  (atLocation ?a - agent ?l - location)
  (receptacleAtLocation ?r - receptacle ?l - location)
  (inReceptacle ?o - object ?r - receptacle)
  (holds ?a - agent ?o - object)
 )
 (:functions (total-cost) - number)
 (:action GotoLocation
  :parameters (?a - agent ?lStart - location ?lEnd - location ?r - receptacle)
  :precondition (and (atLocation ?a ?lStart) (receptacleAtLocation ?r ?lEnd))
  :effect (and (not (atLocation ?a ?lStart)) (atLocation ?a ?lEnd) (increase (total-cost) 1))
 )
 (:action PickupObject
  :parameters (?a - agent ?l - location ?o - object ?r - receptacle)
  :precondition (and (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (inReceptacle ?o ?r))
  :effect (and (not (inReceptacle ?o ?r)) (holds ?a ?o) (increase (total-cost) 1))
 )
)"""

GRAMMAR = '''grammar :: """
    {
        "intro": [{"rhs": "You see [{r.name | receptacleatlocation(r:receptacle, l:location)}].\\n\\nTake an apple."}],
        "list_empty": [{"rhs": "nothing"}],
        "list_separator": [{"rhs": ", "}],
        "list_last_separator": [{"rhs": ", and "}]
    }
""";

action GotoLocation {
    template :: "go to [{r.name | receptacleatlocation(r:receptacle, lend:location)}]";
    feedback :: "#GotoLocation.feedback#";
    grammar :: """
        {
            "GotoLocation.feedback": [
                {"rhs": "On the {r.name}, you see [{o.name | inreceptacle(o:object, r:receptacle)}]."}
            ]
        }
    """;
}

action PickupObject {
    template :: "take {o} from {r}";
    feedback :: "#PickupObject.feedback#";
    grammar :: """
        { "PickupObject.feedback": [{"rhs": "You take the {o.name}."}] }
    """;
}
'''

PROBLEM = """(define (problem small_one)
 (:domain small)
 (:objects
  agent1 - agent
  start near far - location
  sink_bar_1_bar_sinkbasin table_bar_2 - receptacle
  apple_bar_3 apple_bar_4 - object
 )
 (:init
  (= (total-cost) 0)
  (atLocation agent1 start)
  (receptacleAtLocation table_bar_2 near)
  (receptacleAtLocation sink_bar_1_bar_sinkbasin far)
  (inReceptacle apple_bar_3 table_bar_2)
  (inReceptacle apple_bar_4 sink_bar_1_bar_sinkbasin)
 )
 (:goal (holds agent1 apple_bar_4))
 (:metric minimize (total-cost))
)"""


def write_game(folder: Path, side: str, task: str, *, solvable: bool = True) -> str:
    """Write one game; its file."""
    file = folder / "json_2.1.1" / side / task / "trial_1" / "game.tw-pddl"
    file.parent.mkdir(parents=True)
    game = {"pddl_domain": DOMAIN, "grammar": GRAMMAR, "pddl_problem": PROBLEM, "walkthrough": [], "solvable": solvable}
    file.write_text(json.dumps(game))
    return str(file)
