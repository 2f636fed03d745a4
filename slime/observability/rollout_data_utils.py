"""Upstream's later path of the checks, the conversion and the dump of a rollout."""

from slime.data import structure, tensorize
from slime.files import rollout_dump
from slime.utils.doors import open_door

open_door(__name__, structure, tensorize, rollout_dump)
